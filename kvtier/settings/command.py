"""Settings of a service that is configured on the command line, such as the controller and the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError

from kvtier.errors import SettingsError

MIN_TOKEN_CHARACTERS = 16


@dataclass(frozen=True)
class Option:
    """The command line option of a setting. An annotation of the model's field."""

    metavar: str
    help: str
    panel: str | None = None
    kind: Any = str
    """The type that the command line checks. ``SecretStr``: the option is ``--NAME-file``."""
    shown: str | None = None
    """The default as shown in the help, unless it is formatted from the field's."""


def _check_token(token: SecretStr) -> SecretStr:
    if len(token.get_secret_value()) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"it has fewer than {MIN_TOKEN_CHARACTERS} characters: create one with `openssl rand -hex 32`"
        )
    return token


Token = Annotated[SecretStr, AfterValidator(_check_token)]


class CommandSettings(BaseModel):
    """Base class. Each field has an annotation of type :class:`Option`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def of(cls, **values: object) -> Self:
        """Return settings with these values. ``None`` stands for the default.

        Raises: SettingsError: one line per invalid value.
        """
        try:
            return cls.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            lines = (_describe(issue) for issue in error.errors(include_url=False))
            raise SettingsError("\n".join(lines)) from None


def _describe(issue: Mapping[str, Any]) -> str:
    message = issue["msg"].removeprefix("Value error, ")
    return f"--{str(issue['loc'][0]).replace('_', '-')}: {message}" if issue["loc"] else f"--{message}"
