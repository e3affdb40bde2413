"""Classify and describe errors of the object store, without quoting them except for public codes.

The text of an error may contain a signed URL, and with it a secret.
"""

from __future__ import annotations

import re

_NO_ROOM = re.compile(
    r"os error (?:28|122)\b|\b507 Insufficient|<Code>\w*(?:StorageFull|QuotaExceeded|OutOfCapacity)\w*</Code>"
)
_BAD_RANGE = re.compile(r"(?i)\binvalid range\b|\brange was invalid\b|status code: 416\b")
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_UNREACHABLE = re.compile(r"error sending request|dns error|[Cc]onnection (?:refused|reset)|\bConnect\b")
_TIMED_OUT = re.compile(r"TimedOut|operation timed out|deadline has elapsed")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")


class StoreError(Exception):
    """A failed request. The message contains no secrets and may be logged."""


class Refused(StoreError):
    """The store denies this request to these credentials."""


def is_full(error: Exception) -> bool:
    """Return whether the store is out of space."""
    return _NO_ROOM.search(str(error)) is not None


def is_shorter(error: Exception) -> bool:
    """Return whether the requested range starts beyond the end of the value."""
    return _BAD_RANGE.search(str(error)) is not None


def is_refused(error: Exception) -> bool:
    """Return whether the store denies the request to these credentials."""
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


def explain(error: Exception) -> str:
    """Describe the error and its remedy, as the predicate of a sentence about the store."""
    text = str(error)
    if _NO_BUCKET.search(text):
        return "has no such bucket: create it, or set url to another"
    if is_refused(error):
        return f"refuses these credentials ({_codes(text)}): check credentials and their permissions"
    if is_full(error):
        return f"is full ({_codes(text)}): free some space"
    if _TIMED_OUT.search(text):
        return "does not answer in time: check url, endpoint and deadline"
    if _UNREACHABLE.search(text):
        return "cannot be reached: check url and endpoint, and that it is running"
    return f"failed ({_codes(text) or type(error).__name__})"


def _codes(text: str) -> str:
    found = [match[1] for match in (_STATUS.search(text), _CODE.search(text)) if match]
    return ", ".join(found)
