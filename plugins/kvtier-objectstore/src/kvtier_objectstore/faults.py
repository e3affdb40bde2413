"""What an error of the object store means, in words that repeat nothing of it but public codes.

An error's own text may hold a whole signed URL, and with it a secret: nothing here quotes it.
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
    """Why a store did not do what it was asked, in words that may be logged."""


class Refused(StoreError):
    """It was reached, and these credentials may not do that."""


def is_full(error: Exception) -> bool:
    """Whether the store has no room."""
    return _NO_ROOM.search(str(error)) is not None


def is_shorter(error: Exception) -> bool:
    """Whether the value ends before the range that was asked for begins."""
    return _BAD_RANGE.search(str(error)) is not None


def is_refused(error: Exception) -> bool:
    """Whether the store was reached and these credentials may not do that."""
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


def explain(error: Exception) -> str:
    """What is wrong and which setting mends it, as the end of a sentence about the store."""
    text = str(error)
    if _NO_BUCKET.search(text):
        return "has no such bucket: make it, or write another in url"
    if is_refused(error):
        return f"refuses these credentials ({_codes(text)}): see credentials, and what they may do there"
    if is_full(error):
        return f"is full ({_codes(text)}): make room in it"
    if _TIMED_OUT.search(text):
        return "does not answer in time: see url, endpoint and deadline"
    if _UNREACHABLE.search(text):
        return "cannot be reached: see url and endpoint, and whether it runs"
    return f"failed ({_codes(text) or type(error).__name__})"


def _codes(text: str) -> str:
    found = [match[1] for match in (_STATUS.search(text), _CODE.search(text)) if match]
    return ", ".join(found)
