"""The blocking part: one object per chunk, through obstore. Thread-safe.

obstore's blocking calls release the GIL. They never get the caller's memory: a request that has timed out may
keep its body for a moment after the call has returned.
"""

from __future__ import annotations

import heapq
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

from obstore.store import from_url

from kvtier.backends.base import GetItem, PutItem
from kvtier.backends.s3.errors import is_shorter
from kvtier.backends.s3.settings import S3Settings
from kvtier.concurrency.threads import let_others_run
from kvtier.errors import TierError
from kvtier.memory.keys import KEY_BYTES, ChunkKey

PIECE_BYTES = 1 << 20
"""Size of one copy. The GIL is held for one, about 100 microseconds, and released in between."""
UPLOADED_PARTS = 4
"""Parts of one chunk that are written at once."""
RETRIES = 3
LISTED = 1000
"""Objects of one answer to a listing: the most that S3 returns."""
MAX_DELETED = 250_000
"""Chunks to delete after one listing, which takes some 200 bytes of memory for each."""

_CHUNK = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


class Part(NamedTuple):
    """A part of a chunk to read."""

    item: int
    """The chunk's place in the batch."""
    key: ChunkKey
    start: int
    view: memoryview
    length: int
    """Length of the chunk."""


class ChunkStore:
    """A store of chunks as objects named by their keys.

    A request takes at most ``request_seconds``, or twice that if a retry starts late. The methods raise
    obstore's exceptions, whose text may contain secrets. Raises :class:`TierError` if obstore rejects the
    settings.
    """

    def __init__(self, settings: S3Settings, request_seconds: float) -> None:
        self._part_size = settings.part_size
        self.closing = False
        """Set it to make :meth:`trim` return early."""
        try:
            self._store = make_store(settings, timedelta(seconds=request_seconds))
        except Exception as error:
            # Neither quoted nor chained: the text may contain an invalid secret key.
            found = f"obstore rejects this url with these credentials and options ({type(error).__name__})"
            remedy = "compare them with its documentation"
            raise TierError(f"tier {settings.name!r}: {found}", remedy) from None

    def length(self, key: ChunkKey) -> int:
        """Return the length of the key's object; 0 without one."""
        try:
            size: int = self._store.head(key.hex())["size"]
        except FileNotFoundError:
            return 0
        return size

    def remove(self, key: ChunkKey) -> None:
        """Delete the key's object, which may be missing."""
        with suppress(FileNotFoundError):
            self._store.delete(key.hex())

    def write(self, item: PutItem, latest: float) -> None:
        """Write a chunk, replacing the old one atomically. Large ones are uploaded in parts.

        Reads nothing from the view after ``latest`` (``time.monotonic``). A failed upload is aborted.
        """
        key, view = item
        pieces, size = _pieces(view, latest), self._part_size
        if len(view) <= size:
            self._store.put(key.hex(), pieces, use_multipart=False)
        else:
            self._store.put(key.hex(), pieces, chunk_size=size, max_concurrency=UPLOADED_PARTS)

    def parts_of(self, place: int, item: GetItem) -> list[Part]:
        """Return what to :meth:`read` for an item of a batch: the whole chunk, or its parts."""
        key, view = item
        size = self._part_size
        starts = range(0, max(len(view), 1), size)
        return [Part(place, key, start, view[start : start + size], len(view)) for start in starts]

    def read(self, part: Part) -> str | None:
        """Read one part into its view, and return the object's version.

        ``None`` if there is no object, or one of another length than the chunk.
        """
        length = len(part.view)
        options: Any = {} if length == part.length else {"range": (part.start, part.start + length)}
        try:
            found = self._store.get(part.key.hex(), options=options)
        except Exception as error:
            if isinstance(error, FileNotFoundError) or is_shorter(error):
                return None
            raise
        if found.meta["size"] != part.length:
            return None
        filled = 0
        for piece in found.stream(PIECE_BYTES):
            part.view[filled : filled + len(piece)] = memoryview(piece)
            filled += len(piece)
        return found.meta["e_tag"] or "" if filled == length else None

    def trim(self, capacity: int) -> None:
        """Delete the chunks that were written first, until the others take at most ``capacity``."""
        while not self.closing and self._delete_oldest(capacity):
            pass

    def _delete_oldest(self, capacity: int) -> bool:
        """Return whether there is more to delete."""
        total = 0

        def listed() -> Iterator[tuple[float, int, str]]:
            nonlocal total
            for batch in self._store.list(chunk_size=LISTED):
                let_others_run()
                for found in batch:
                    # Anything else with this prefix belongs to others.
                    if _CHUNK.fullmatch(found["path"]):
                        total += found["size"]
                        yield found["last_modified"].timestamp(), found["size"], found["path"]

        names: list[str] = []
        for _, size, name in heapq.nsmallest(MAX_DELETED, listed()):
            if total <= capacity:
                break
            total -= size
            names.append(name)
        for start in range(0, len(names), LISTED):
            self._store.delete(names[start : start + LISTED])
        return total > capacity

    def check(self) -> str:
        """Try what kvtier needs permissions for, and return how long that took."""
        name = f".kvtier-check-{secrets.token_hex(8)}"
        began = time.monotonic()
        # Without the permission to list, a missing object is a refusal.
        list(islice(self._store.list(chunk_size=1), 1))
        self._store.put(name, b"kvtier")
        self._store.get(name).bytes()
        self._store.delete(name)
        return f"an object was written, read and deleted in {(time.monotonic() - began) * 1000:.0f} ms"


def make_store(settings: S3Settings, seconds: timedelta) -> Any:  # noqa: ANN401 - mypy does not read obstore
    """Return a client of obstore whose requests time out after ``seconds``. Raises what obstore raises."""
    scheme = settings.url.partition(":")[0]
    # One request per key returns a result per key, and all servers support it, unlike S3's bulk delete.
    config: Any = {"disable_bulk_delete": "true"} if scheme == "s3" else {}
    config |= settings.options
    config |= {name: secret.get_secret_value() for name, secret in settings.credentials.items()}
    if settings.endpoint is not None:
        config["base_url" if scheme == "gs" else "endpoint"] = settings.endpoint
    if settings.region is not None:
        config["region"] = settings.region
    allow_http = settings.endpoint is not None and settings.endpoint.startswith("http://")
    return from_url(
        settings.url,
        config=config,
        client_options={"allow_http": allow_http, "connect_timeout": seconds, "timeout": seconds},
        retry_config={"max_retries": RETRIES, "retry_timeout": seconds},
    )


def _pieces(view: memoryview, latest: float) -> Iterator[bytes]:
    """Yield copies, on demand. If this raises, obstore aborts the upload."""
    for start in range(0, len(view), PIECE_BYTES):
        if time.monotonic() > latest:
            raise TimeoutError("deadline has elapsed")
        yield bytes(view[start : start + PIECE_BYTES])
