"""What pydantic found wrong, said as one sentence that names the key and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier.settings_sources import nearest, nested_model


def explain(
    error: ValidationError, model: type[BaseModel], place: Callable[[str], str], prefix: str = ""
) -> str:
    """One line for each wrong key of ``model``.

    ``prefix`` stands before each key (``tiers[1].``); ``place`` tells where a key was written, as a
    phrase to follow its name.
    """
    lines = []
    for details in error.errors(include_url=False):
        key = prefix + _dotted(details)
        lines.append(f"{key}{place(key)} {_sentence(details, model, prefix)}")
    return "\n".join(lines)


def _dotted(details: ErrorDetails) -> str:
    key = ""
    for part in details["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key


def _sentence(details: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    owner, field = _find(details, model)
    if details["type"] == "extra_forbidden":
        outer = prefix + _dotted(details).rpartition(".")[0]
        outer += "." if outer and not outer.endswith(".") else ""
        known = [outer + name for name in owner.model_fields]
        return f"is not a setting: {nearest(prefix + _dotted(details), known)}"
    example = f", for example {field.examples[0]}" if field is not None and field.examples else ""
    if details["type"] == "missing":
        return f"is missing: write it{example}"
    if details["type"] == "value_error":
        return f"is wrong: {details['ctx']['error']}"
    remedy = details["msg"].replace("Input should be", "it should be")
    value = "wrong" if field is not None and _is_secret(field.annotation) else repr(details["input"])
    return f"is {value}: {remedy[0].lower()}{remedy[1:]}{example}"


def _find(details: ErrorDetails, model: type[BaseModel]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that the error's key is, or should be, in, and its field there."""
    field: FieldInfo | None = None
    for part in details["loc"]:
        nested = nested_model(field) if field is not None else None
        model = nested or model
        field = model.model_fields.get(part, field) if isinstance(part, str) else field
    return model, field


def _is_secret(annotation: object) -> bool:
    return annotation is SecretStr or any(_is_secret(argument) for argument in get_args(annotation))
