"""Turn pydantic validation errors into one line per key, with the source of the value and a remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier.settings.sources import suggestion

MAX_LINES = 20
MAX_CHARACTERS = 800


def explain(
    error: ValidationError, model: type[BaseModel], at: Callable[[str], str], prefix: str = ""
) -> str:
    """Return one line per invalid key of ``model``, of the first ones if there are many.

    ``prefix`` is prepended to each key (``tiers[1].``). ``at`` returns a key and where it was set.
    """
    found = error.errors(include_url=False)
    lines = []
    for details in found[:MAX_LINES]:
        key = (prefix + _dotted(details)).removesuffix(".")  # Of an error of the whole, the prefix.
        lines.append(f"{at(key)} {_shorten(_describe(details, model, prefix))}")
    if len(found) > MAX_LINES:
        lines.append(f"and {len(found) - MAX_LINES} more")
    return "\n".join(lines)


def _shorten(text: str) -> str:
    """Return a text that may contain a value of any length, without its middle."""
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def _dotted(details: ErrorDetails) -> str:
    key = ""
    for part in details["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _describe(details: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    owner, field = _find(details, model)
    if details["type"] == "extra_forbidden":
        outer = prefix + _dotted(details).rpartition(".")[0]
        outer += "." if outer and not outer.endswith(".") else ""
        known = [outer + name for name in owner.model_fields]
        return f"is not a setting: {suggestion(prefix + _dotted(details), known)}"
    example = f", for example {field.examples[0]}" if field is not None and field.examples else ""
    if details["type"] == "missing":
        return f"is required{example}"
    if details["type"] == "value_error":
        return f"is invalid: {details['ctx']['error']}"
    remedy = details["msg"].replace("Input should be", "it should be")
    secret = field is not None and _is_secret(field.annotation)
    # Unlike repr(), it bounds depth and length.
    value = "invalid" if secret else reprlib.repr(details["input"])
    return f"is {value}: {remedy[0].lower()}{remedy[1:]}{example}"


def _find(details: ErrorDetails, model: type[BaseModel]) -> tuple[type[BaseModel], FieldInfo | None]:
    """Return the model that the key of the error belongs to, and its field."""
    field: FieldInfo | None = None
    for part in details["loc"]:
        named = _model_by_name(field)
        if named is not None:  # This part of the key is a name of the user's choice.
            model, field = named, None
            continue
        model = _nested_model(field) or model
        field = model.model_fields.get(part, field) if isinstance(part, str) else field
    return model, field


def _nested_model(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of a nested setting, also of one that may be omitted."""
    annotation = None if field is None else field.annotation
    models = (annotation, *get_args(annotation))
    return next((each for each in models if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _model_by_name(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of each value of a mapping such as ``tenants``, or ``None``."""
    if field is None or get_origin(field.annotation) is not dict:
        return None
    model = get_args(field.annotation)[1]
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _is_secret(annotation: object) -> bool:
    return annotation is SecretStr or any(_is_secret(argument) for argument in get_args(annotation))
