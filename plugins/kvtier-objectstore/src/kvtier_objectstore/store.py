"""The blocking half: one object a chunk, through obstore. Any thread may call it, several at once.

obstore's blocking calls let go of the GIL. None of them is given the caller's memory: a request that is out
of time may hold on to its body for a moment after the call has ended.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore import Bytes
from obstore.exceptions import PermissionDeniedError, PreconditionError
from obstore.store import LocalStore, MemoryStore, from_url

from kvtier import TierError
from kvtier.backends.base import GetItem, Outcome, PutItem
from kvtier.backends.logs import RareWarning
from kvtier.keys import ChunkKey
from kvtier_objectstore.faults import Refused, StoreError, explain, is_full, is_refused, is_shorter
from kvtier_objectstore.settings import ObjectStoreSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("kvtier")

COPY_BYTES = 1 << 20
"""Copied at once. The GIL is held for so long, some 100 microseconds, and given way in between."""

RETRIES = 3
FIRST_BACKOFF = timedelta(milliseconds=50)


class Part(NamedTuple):
    """A part of a value, and the version of the value that it must be of."""

    key: ChunkKey
    start: int
    view: memoryview
    version: str | None


class ChunkStore:
    """Chunks as objects whose names are their keys.

    A request takes at most ``request_seconds``, or twice that where a retry begins late. Raises
    :class:`TierError` where obstore does not take the settings.
    """

    def __init__(self, settings: ObjectStoreSettings, request_seconds: float) -> None:
        self._settings = settings
        self._warn = RareWarning(logger)
        try:
            self._store = _make_store(settings, timedelta(seconds=request_seconds))
        except OSError as error:
            raise TierError(f"tier {settings.name!r}: url: {error}: write that of a folder") from error
        except Exception as error:
            # Neither quoted nor chained: it may repeat a key that it cannot read.
            raise TierError(
                f"tier {settings.name!r}: obstore does not take this url with these credentials and options "
                f"({type(error).__name__}): compare them with its documentation"
            ) from None

    def holds(self, key: ChunkKey) -> bool | StoreError:
        """Whether there is an object of this key, or why the store does not say."""
        try:
            obstore.head(self._store, key.hex())
        except FileNotFoundError:
            return False
        except Exception as error:
            return self._error(error)
        return True

    def write(self, item: PutItem, latest: float) -> Outcome:
        """Put one value in the place of the old one, whole; in parts where it is long.

        No part of it is begun after ``latest`` (``time.monotonic``). What was sent of a value that then
        fails is taken back.
        """
        key, view = item
        size = self._settings.part_size
        try:
            if len(view) <= size:
                obstore.put(self._store, key.hex(), _copy(view), use_multipart=False)
            else:
                parts = _parts(view, size, latest)
                at_once = self._settings.upload_parts
                obstore.put(self._store, key.hex(), parts, chunk_size=size, max_concurrency=at_once)
        except Exception as error:
            return self._outcome(error, missing=Outcome.FAILED)
        return Outcome.OK

    def begin(self, item: GetItem) -> tuple[Outcome, str | None]:
        """Fill the view, or the first part of a long one, from a value of its length; the value's version."""
        key, view = item
        part = view[: self._settings.part_size]
        options: Any = {} if len(part) == len(view) else {"range": (0, len(part))}
        try:
            found = obstore.get(self._store, key.hex(), options=options)
            if found.meta["size"] != len(view):
                return Outcome.MISS, None
            _fill(part, found.bytes())
        except Exception as error:
            return self._outcome(error), None
        return Outcome.OK, found.meta["e_tag"]

    def rest(self, item: GetItem, version: str | None) -> Iterator[Part]:
        """The parts of a long value that :meth:`begin` leaves to :meth:`read`."""
        key, view = item
        size = self._settings.part_size
        for start in range(size, len(view), size):
            yield Part(key, start, view[start : start + size], version)

    def read(self, part: Part) -> Outcome:
        """Fill one part. ``MISS`` where the value is another by now."""
        options: Any = {"range": (part.start, part.start + len(part.view)), "if_match": part.version}
        try:
            _fill(part.view, obstore.get(self._store, part.key.hex(), options=options).bytes())
        except Exception as error:
            return self._outcome(error)
        return Outcome.OK

    def remove(self, key: ChunkKey) -> StoreError | None:
        """Delete one object; one that is not there is no error. Why not, where it could not be done."""
        try:
            obstore.delete(self._store, key.hex())
        except FileNotFoundError:
            return None
        except Exception as error:
            return self._error(error)
        return None

    def warn(self, error: StoreError) -> None:
        """Say in the log what is wrong, once in a while."""
        self._warn("tier %r: %s", self._settings.name, error)

    def check(self) -> str:
        """Write, read and delete an object, and ask for one that is not there. Raises :class:`TierError`."""
        name = f".kvtier-check-{secrets.token_hex(8)}"
        began = time.monotonic()
        try:
            obstore.put(self._store, name, b"kvtier")
            obstore.get(self._store, name).bytes()
            obstore.delete(self._store, name)
        except Exception as error:
            raise TierError(str(self._error(error))) from None
        milliseconds = (time.monotonic() - began) * 1000
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return f"{self._place}: an object was written, read and deleted in {milliseconds:.0f} ms"
        except PermissionDeniedError:
            problem = "refuses to say that an object is missing: allow listing too (s3:ListBucket)"
        except Exception as error:
            problem = explain(error)
        else:
            problem = "still has an object that was deleted: choose a store without that delay"
        raise TierError(f"{self._place} {problem}")

    @property
    def _place(self) -> str:
        endpoint = self._settings.endpoint
        return self._settings.url + (f" at {endpoint}" if endpoint else "")

    def _outcome(self, error: Exception, *, missing: Outcome = Outcome.MISS) -> Outcome:
        """What an error means for its key; a warning where it is one of the store."""
        if missing is Outcome.MISS and (
            isinstance(error, FileNotFoundError | PreconditionError) or is_shorter(error)
        ):
            return Outcome.MISS
        self.warn(self._error(error))
        return Outcome.FULL if is_full(error) else Outcome.FAILED

    def _error(self, error: Exception) -> StoreError:
        kind = Refused if is_refused(error) else StoreError
        return kind(f"{self._place} {explain(error)}")


def _make_store(settings: ObjectStoreSettings, seconds: timedelta) -> ObjectStore:
    place = urlsplit(settings.url)
    if place.scheme == "memory":
        return MemoryStore()
    if place.scheme == "file":
        folder = Path(unquote(place.path))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(folder)
    # One request a key says what became of each, and every server knows it. S3's bulk call is neither.
    config: Any = {"disable_bulk_delete": "true"} if place.scheme == "s3" else {}
    config |= settings.options
    config |= {name: secret.get_secret_value() for name, secret in settings.credentials.items()}
    if settings.endpoint is not None:
        config["base_url" if place.scheme == "gs" else "endpoint"] = settings.endpoint
    if settings.region is not None:
        config["region"] = settings.region
    allow_http = settings.endpoint is not None and settings.endpoint.startswith("http://")
    return from_url(
        settings.url,
        config=config,
        client_options={"allow_http": allow_http, "connect_timeout": seconds, "timeout": seconds},
        retry_config={
            "max_retries": RETRIES,
            "retry_timeout": seconds,
            "backoff": {"init_backoff": FIRST_BACKOFF, "max_backoff": seconds},
        },
    )


def _parts(view: memoryview, size: int, latest: float) -> Iterator[bytearray]:
    """Copies, each made when there is room to send it. An upload whose parts stop by an error is aborted."""
    for start in range(0, len(view), size):
        if time.monotonic() > latest:
            raise TimeoutError("deadline has elapsed")
        yield _copy(view[start : start + size])


def _copy(view: memoryview) -> bytearray:
    copied = bytearray(len(view))
    _fill(memoryview(copied), view)
    return copied


def _fill(target: memoryview, source: memoryview | Bytes) -> None:
    view = memoryview(source)
    for start in range(0, len(target), COPY_BYTES):
        target[start : start + COPY_BYTES] = view[start : start + COPY_BYTES]
