"""The blocking part: one object per chunk, through obstore. Thread-safe.

obstore's blocking calls release the GIL. They never get the caller's memory: a request that has timed out may
keep its body for a moment after the call has returned.
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
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier_objectstore.faults import Refused, StoreError, explain, is_full, is_refused, is_shorter
from kvtier_objectstore.settings import ObjectStoreSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("kvtier")

COPY_BYTES = 1 << 20
"""Size of one copy. The GIL is held for one copy, about 100 microseconds, and released in between."""

RETRIES = 3
FIRST_BACKOFF = timedelta(milliseconds=50)


class Part(NamedTuple):
    """A part of a value, and the version that the value must have."""

    key: ChunkKey
    start: int
    view: memoryview
    version: str | None


class ChunkStore:
    """A store of chunks as objects named by their keys.

    A request takes at most ``request_seconds``, or twice that if a retry starts late. Raises
    :class:`TierError` if obstore rejects the settings.
    """

    def __init__(self, settings: ObjectStoreSettings, request_seconds: float) -> None:
        self._settings = settings
        self._warn = RateLimitedLog(logger)
        try:
            self._store = _make_store(settings, timedelta(seconds=request_seconds))
        except OSError as error:
            raise TierError(f"tier {settings.name!r}: url: {error}: set it to a folder") from error
        except Exception as error:
            # Neither quoted nor chained: the text may contain an invalid secret key.
            raise TierError(
                f"tier {settings.name!r}: obstore rejects this url with these credentials and options "
                f"({type(error).__name__}): compare them with its documentation"
            ) from None

    def exists(self, key: ChunkKey) -> bool | StoreError:
        """Return whether the key has an object, or the error."""
        try:
            obstore.head(self._store, key.hex())
        except FileNotFoundError:
            return False
        except Exception as error:
            return self._error(error)
        return True

    def write(self, item: PutItem, latest: float) -> Outcome:
        """Write a value, replacing the old one atomically. Large values are uploaded in parts.

        No part is started after ``latest`` (``time.monotonic``). A failed upload is aborted.
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

    def read_first(self, item: GetItem) -> tuple[Outcome, str | None]:
        """Read the value, or the first part of a large one, into the view. Return its version as well.

        ``MISS`` if the value's length is not that of the view.
        """
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
        """Yield the remaining parts of a large value, for :meth:`read`."""
        key, view = item
        size = self._settings.part_size
        for start in range(size, len(view), size):
            yield Part(key, start, view[start : start + size], version)

    def read(self, part: Part) -> Outcome:
        """Read one part. ``MISS`` if the value was replaced since."""
        options: Any = {"range": (part.start, part.start + len(part.view)), "if_match": part.version}
        try:
            _fill(part.view, obstore.get(self._store, part.key.hex(), options=options).bytes())
        except Exception as error:
            return self._outcome(error)
        return Outcome.OK

    def remove(self, key: ChunkKey) -> StoreError | None:
        """Delete one object, and return the error, if any. A missing object is not an error."""
        try:
            obstore.delete(self._store, key.hex())
        except FileNotFoundError:
            return None
        except Exception as error:
            return self._error(error)
        return None

    def warn(self, error: StoreError) -> None:
        """Log the error, rate-limited."""
        self._warn("tier %r: %s", self._settings.name, error)

    def check(self) -> str:
        """Write, read and delete an object, and look up a missing one. Raises :class:`TierError`."""
        name = f".kvtier-check-{secrets.token_hex(8)}"
        began = time.monotonic()
        try:
            obstore.put(self._store, name, b"kvtier")
            obstore.get(self._store, name).bytes()
            obstore.delete(self._store, name)
        except Exception as error:
            raise self._tier_error(explain(error)) from None
        milliseconds = (time.monotonic() - began) * 1000
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return f"{self._location}: an object was written, read and deleted in {milliseconds:.0f} ms"
        except PermissionDeniedError:
            problem = "denies access to missing objects: allow listing as well (s3:ListBucket)"
        except Exception as error:
            problem = explain(error)
        else:
            problem = "returns an object after its deletion: use a store with strong consistency"
        raise self._tier_error(problem)

    def _tier_error(self, problem: str) -> TierError:
        found, _, remedy = problem.partition(": ")
        return TierError(f"{self._location} {found}", remedy)

    @property
    def _location(self) -> str:
        endpoint = self._settings.endpoint
        return self._settings.url + (f" at {endpoint}" if endpoint else "")

    def _outcome(self, error: Exception, *, missing: Outcome = Outcome.MISS) -> Outcome:
        """Return the outcome for the key, and log a warning unless it is a miss."""
        if missing is Outcome.MISS and (
            isinstance(error, FileNotFoundError | PreconditionError) or is_shorter(error)
        ):
            return Outcome.MISS
        self.warn(self._error(error))
        return Outcome.FULL if is_full(error) else Outcome.FAILED

    def _error(self, error: Exception) -> StoreError:
        kind = Refused if is_refused(error) else StoreError
        return kind(f"{self._location} {explain(error)}")


def _make_store(settings: ObjectStoreSettings, seconds: timedelta) -> ObjectStore:
    location = urlsplit(settings.url)
    if location.scheme == "memory":
        return MemoryStore()
    if location.scheme == "file":
        folder = Path(unquote(location.path))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(folder)
    # One request per key returns a result per key, and all servers support it, unlike S3's bulk delete.
    config: Any = {"disable_bulk_delete": "true"} if location.scheme == "s3" else {}
    config |= settings.options
    config |= {name: secret.get_secret_value() for name, secret in settings.credentials.items()}
    if settings.endpoint is not None:
        config["base_url" if location.scheme == "gs" else "endpoint"] = settings.endpoint
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
    """Yield copies of the parts, on demand. If this raises, obstore aborts the upload."""
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
