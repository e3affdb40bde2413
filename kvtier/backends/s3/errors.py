"""Describe errors of the object store, without quoting them except for public codes.

The text of an error may contain a signed URL, and with it a secret.
"""

from __future__ import annotations

import re

from kvtier.errors import TierError

_REFUSED = r"^(?:PermissionDenied|Unauthenticated)Error |status code: 40[13]\b"
_FULL = r"os error (?:28|122)\b|\b507 Insufficient|<Code>\w*(?:StorageFull|QuotaExceeded|OutOfCapacity)\w*<"
_REASONS = {
    # Paths of the metadata services of machines, where obstore looks last. First, as these may refuse, too.
    "/latest/(?:api/token|meta-data)|/metadata/identity|computeMetadata": (
        "needs credentials, and there are none",
        "set credentials, or variables such as AWS_ACCESS_KEY_ID",
    ),
    _REFUSED: ("refuses these credentials ({codes})", "check credentials and their permissions"),
    _FULL: ("is full ({codes})", "free some space"),
    "NoSuchBucket|ContainerNotFound|specified bucket does not exist": (
        "has no such bucket",
        "create it, or set url to another",
    ),
    "configured region|AuthorizationHeaderMalformed|PermanentRedirect": ("is elsewhere", "set region"),
    "TimedOut|operation timed out|deadline has elapsed": (
        "does not answer in time",
        "check url, endpoint and deadline",
    ),
    r"error sending request|dns error|[Cc]onnection (?:refused|reset)|\bConnect\b": (
        "cannot be reached",
        "check url and endpoint, and that it is running",
    ),
}
"""By a pattern of type and text of an error: what is wrong with the store, and the remedy."""
_CODES = (re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)"), re.compile(r"<Code>(\w{1,64})</Code>"))
_SHORTER = re.compile(r"(?i)\binvalid range\b|\brange was invalid\b|status code: 416\b")


class StoreError(TierError):
    """A failed request. What was found, and the remedy, contain no secrets and may be logged."""

    def __init__(self, found: str, remedy: str, *, refused: bool = False, full: bool = False) -> None:
        super().__init__(found, remedy)
        self.refused = refused
        """Whether the store denies the request to these credentials."""
        self.full = full
        """Whether the store is out of space."""


def explain(place: str, error: Exception) -> StoreError:
    """Describe an exception of obstore, for the store of that URL."""
    text = f"{type(error).__name__} {error}"
    codes = ", ".join(match[1] for pattern in _CODES if (match := pattern.search(text)))
    reason = next((pattern for pattern in _REASONS if re.search(pattern, text)), None)
    found, remedy = _REASONS[reason] if reason else ("failed ({codes})", "see the server's log")
    found = f"{place} {found.format(codes=codes or type(error).__name__)}"
    return StoreError(found, remedy, refused=reason == _REFUSED, full=reason == _FULL)


def is_shorter(error: Exception) -> bool:
    """Return whether the requested range starts beyond the end of the object."""
    return _SHORTER.search(str(error)) is not None
