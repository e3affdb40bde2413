"""Settings of a service that is configured on the command line, such as the controller and the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, ValidationError

from kvtier.errors import SettingsError
from kvtier.settings.values import SettingsModel

MIN_TOKEN_CHARACTERS = 16


def option(
    default: object,
    metavar: str,
    text: str,
    panel: str | None = None,
    *,
    shown: str = "",
    **limits: Any,  # noqa: ANN401 - as Field
) -> Any:  # noqa: ANN401 - as Field
    """Return a field that is an option of the command, with a default value or a function that makes it.

    ``shown`` is the default as shown in the help, unless that is formatted from the value. The option of a
    secret is ``--NAME-file``.
    """
    given: Any = {"default_factory" if callable(default) else "default": default}
    extra: Any = {"metavar": metavar, "panel": panel, "shown": shown}
    return Field(**given, description=text, json_schema_extra=extra, **limits)


def _check_token(token: SecretStr) -> SecretStr:
    if len(token.get_secret_value()) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"it has fewer than {MIN_TOKEN_CHARACTERS} characters: create one with `openssl rand -hex 32`"
        )
    return token


Token = Annotated[SecretStr, AfterValidator(_check_token)]


class CommandSettings(SettingsModel):
    """Base class. Each field is made by :func:`option`."""

    model_config = ConfigDict(hide_input_in_errors=True)

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
