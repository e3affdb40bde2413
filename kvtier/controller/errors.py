"""What the controller raises on purpose.

::

    ControllerError
    ├── UnknownName          what was named does not exist; ``known`` lists what does
    │   ├── UnknownInstance
    │   ├── UnknownTier
    │   ├── UnknownModel
    │   └── UnknownEvent
    ├── AmbiguousModel       no model was named, and there are several; ``known`` lists them
    ├── TooManyOperations    more would be under way than the controller keeps in mind
    ├── TooManyPins          more chunks would be pinned than the controller remembers
    ├── WrongPrompt          what should be token ids are none
    ├── WrongRequest         what was asked for makes no sense, or no instance can do it
    ├── RefusedInstance      an instance cannot be registered: its id is taken, or what it says is wrong
    ├── MemberGone           the connection of an instance ended before a command was answered
    └── CommandFailed        an instance could not carry out a command; says why
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import ControllerError

MOST_NAMED = 20
"""Names in one message. What knows of more says how many more there are."""


class UnknownName(ControllerError):
    """There is nothing of this name. ``known`` has the names that there are."""

    def __init__(self, what: str, known: Iterable[str]) -> None:
        self.known = sorted(known)
        super().__init__(f"there is no {what}{_listed(self.known)}")


class UnknownInstance(UnknownName):
    """No instance of this name is connected."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"instance {name!r}", known)


class UnknownTier(UnknownName):
    """The instance has no tier of this name, nor a single one of this type."""

    def __init__(self, instance: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"tier {name!r} in instance {instance!r}", known)


class UnknownModel(UnknownName):
    """No instance has ever said that it serves a model of this name."""

    def __init__(self, name: str | None, known: Iterable[str]) -> None:
        super().__init__("model" if name is None else f"model {name!r}", known)
        if not self.known:
            self.args = ("there is no model yet: no engine has said to an instance here which one it serves",)


class UnknownEvent(UnknownName):
    """No operation has this number, or it ended so long ago that it is forgotten."""

    def __init__(self, number: str, known: Iterable[str]) -> None:
        super().__init__(f"event {number!r}", known)


class AmbiguousModel(ControllerError):
    """No model was named where there are several. ``known`` has their names."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = sorted(known)
        super().__init__(f"there are several models, name one of them{_listed(self.known)}")


class TooManyOperations(ControllerError):
    """More would be under way than the controller keeps in mind: try again when some have ended."""


class TooManyPins(ControllerError):
    """More chunks would be pinned than the controller remembers."""


class WrongPrompt(ControllerError):
    """Token ids are whole numbers from 0 to 4,294,967,295; these are not."""


class WrongRequest(ControllerError):
    """What was asked for makes no sense, or no instance can do it; says what to ask for instead."""


class RefusedInstance(ControllerError):
    """An instance that cannot be registered; the message is for whoever started it."""


class MemberGone(ControllerError):
    """The connection of an instance has ended: nobody knows how far it came."""


class CommandFailed(ControllerError):
    """An instance has not carried out a command; the message says why, in its words."""


def _listed(names: list[str]) -> str:
    if not names:
        return ", nor any other"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"; known: {', '.join(names[:MOST_NAMED])}{more}"
