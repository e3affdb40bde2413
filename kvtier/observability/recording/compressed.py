"""Files that may be compressed with gzip or xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from typing import BinaryIO

CORRUPT = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a corrupt file raises. One that was cut off raises ``EOFError``."""

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\0"


def expanded(raw: BinaryIO) -> BinaryIO:
    """Return a stream of what a file contains, decompressed. ``raw`` must be at its start."""
    start = raw.read(len(_XZ))
    raw.seek(0)
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if start == _XZ:
        return lzma.LZMAFile(raw)  # type: ignore[return-value]
    return raw
