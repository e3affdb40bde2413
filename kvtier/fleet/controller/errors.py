"""Errors of the controller."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import ControllerError, ProtocolError

MAX_NAMED = 20
"""Names listed in one message. The rest is only counted."""


class UnknownName(ControllerError):
    """The name does not exist. ``known`` lists the names that do."""

    def __init__(self, what: str, known: Iterable[str]) -> None:
        self.known = sorted(known)
        super().__init__(f"there is no {what}{_list_names(self.known)}")


class UnknownModel(UnknownName):
    """No instance has ever served a model with this name."""

    def __init__(self, name: str | None, known: Iterable[str]) -> None:
        super().__init__("model" if name is None else f"model {name!r}", known)
        if not self.known:
            self.args = ("no model is known yet: no engine has connected to a registered instance",)


class AmbiguousModel(ControllerError):
    """No model was named, and there are several. ``known`` lists their names."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = sorted(known)
        super().__init__(f"there are several models: name one of them{_list_names(self.known)}")


class TooManyOperations(ControllerError):
    """Too many operations are in flight. Retry when some have finished."""


class TooManyPins(ControllerError):
    """The limit on pinned chunks would be exceeded."""


class WrongPrompt(ControllerError):
    """A token id is not an integer from 0 to 4,294,967,295."""


class WrongRequest(ControllerError):
    """The request is invalid, or no instance can execute it. The message suggests an alternative."""


class RefusedInstance(ControllerError, ProtocolError):
    """The id of an instance is in use, or one of its messages is invalid. The error is for its operator."""


class MemberGone(ControllerError):
    """The connection of an instance closed before it answered a command, whose progress is unknown."""


class CommandFailed(ControllerError):
    """An instance could not execute a command. The message contains the instance's reason."""


def _list_names(names: list[str]) -> str:
    if not names:
        return "; known: none"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"; known: {', '.join(names[:MAX_NAMED])}{more}"
