"""Identity of LoRA adapters: the content that the engine has loaded.

vLLM loads an adapter from its folder when the API requests it, and again whenever it is used after it was
evicted from the workers' memory. Its scheduler does not know when. So there are two checks:

- The scheduler's side reads the folder, and again what its files look like at each lookup. A request uses the
  chunks of that content. If it has changed since the adapter was loaded, the workers may have either: then
  nothing is loaded or stored until the adapter is loaded again through the API.
- Workers remember what they have loaded, and store nothing of a request that expects other content.

What remains: if files are replaced between a lookup and the moment at which vLLM loads them for that request,
its answer may continue KV of the earlier adapter. Nothing of it is stored.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.concurrency.threads import run_in_background
from kvtier.integrations.vllm.compat import is_empty
from kvtier.integrations.vllm.identity import is_adapter
from kvtier.integrations.vllm.patches import wrap
from kvtier.logs import RateLimitedLogs
from kvtier.memory.fingerprint import Signature, fingerprint, signature

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kvtier.bridge.client import SchedulerBridge

logger = logging.getLogger("vllm.kvtier")

WHOLE_BYTES = 256 << 20
"""An adapter with no more bytes is hashed whole."""
FRESH_SECONDS = 0.1
"""How long an adapter's files are taken to be as they were."""
TIMEOUT_SECONDS = 1.0
"""How long a request waits for the identity of its adapter. Then it is computed without the cache."""
MAX_ADAPTERS = 16384
"""Of the least recently used ones beyond that, nothing is remembered."""


def files_of(path: str) -> tuple[Path, Signature]:
    """Return the folder from which vLLM loads an adapter, and the states of its files.

    An adapter of a hub must have been downloaded. Raises ``OSError`` or ``ValueError`` if it has no files.
    """
    folder = Path(path).expanduser()
    if not folder.is_absolute() and not folder.exists():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, local_files_only=True))
    return folder, signature(folder, is_adapter)


def format_of(lora: LoRARequest) -> str:
    """Return how vLLM reads the weights of an adapter, if not as usual, which its files do not state."""
    return "3d" if getattr(lora, "is_3d_lora_weight", False) else ""


@dataclass(slots=True, eq=False)
class Adapter:
    """What vLLM loads by one number."""

    name: str
    path: str
    format: str = ""
    files: Signature = ()
    identity: str = ""
    changed: bool = False
    """Whether its files are others than those that vLLM has loaded, or will load."""
    replaced: bool = False
    """Whether vLLM has loaded another content since: what requests have computed with this one is mixed."""
    error: str = ""
    checked: float = 0.0
    """When the last check ended (:func:`time.monotonic`)."""
    is_slow: bool = False
    """Whether the last check took longer than a request waits."""
    ended: threading.Event | None = None
    """Set at the end of the check in flight."""

    def is_of(self, lora: LoRARequest) -> bool:
        """Return whether a request means this one."""
        wanted = (lora.lora_name, lora.lora_path, format_of(lora))
        return (self.name, self.path, self.format) == wanted

    def check(self) -> None:
        """Start to compare the files, unless a check is in flight."""
        if self.ended is None or self.ended.is_set():
            ended = self.ended = threading.Event()
            try:
                run_in_background(functools.partial(self._check, ended))
            except RuntimeError as error:
                self.error, self.checked = str(error), time.monotonic()
                ended.set()

    def is_fresh(self, wait: float) -> bool:
        """Return whether its files have just been compared. Blocks up to ``wait`` seconds for that."""
        if time.monotonic() - self.checked <= FRESH_SECONDS:
            return True
        self.check()
        assert self.ended is not None
        return self.ended.wait(wait)

    def _check(self, ended: threading.Event) -> None:
        started = time.monotonic()
        try:
            folder, files = files_of(self.path)
            if files != self.files:
                identity = fingerprint(folder, files, WHOLE_BYTES) + self.format
                if self.identity in ("", identity):  # It may have been copied again.
                    self.identity, self.files = identity, files
                else:
                    self.changed = True
        except Exception as error:  # Without its files, vLLM has what it has loaded.
            self.error = f"{type(error).__name__}: {error}"
        self.checked = time.monotonic()
        self.is_slow = self.checked - started > TIMEOUT_SECONDS
        ended.set()


@dataclass(slots=True)
class Adapters:
    """The adapters of one engine, in its scheduler. Not thread-safe. Blocks as long as it is asked to."""

    _bridge: SchedulerBridge
    _adapters: dict[int, Adapter] = field(default_factory=dict)
    _names: dict[str, str | None] = field(default_factory=dict)
    """By name, of which identity vLLM's own cache may have KV: its keys have names and paths only. ``None``:
    of several."""
    _forgets: bool = False
    """Whether it may have KV of any other name as well."""
    _pending: dict[str, float] = field(default_factory=dict)
    """Until when unfinished requests wait for the identity of their adapter, by request id."""
    _pool: BlockPool | None = None
    _warn: RateLimitedLogs = field(default_factory=lambda: RateLimitedLogs(logger))

    def bind(self, pool: BlockPool) -> None:
        """Set vLLM's block pool, to know when it has no KV of earlier contents."""
        self._pool = pool

    def is_pending(self, request_id: str) -> bool:
        """Return whether a request waits for the identity of its adapter."""
        return request_id in self._pending

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._pending.pop(request_id, None)

    def loads(self, lora: LoRARequest) -> None:
        """Note that vLLM loads an adapter, at the request of its API: its files may have changed."""
        known = self._adapters.get(lora.lora_int_id)
        if known is None or lora.load_inplace or not known.is_of(lora):
            self._new(lora)

    def removes(self, number: int) -> None:
        """Note that vLLM has removed an adapter, and loads it again if it is used."""
        if (adapter := self._adapters.pop(number, None)) is not None:
            adapter.replaced = True

    def admit(self, request: Request, local_tokens: int, wait: float) -> Adapter | None:
        """Return a request's adapter; ``None`` if it has none, or the request can neither load nor store.

        If that is not known yet, it :meth:`is_pending`, for up to :data:`TIMEOUT_SECONDS`. ``local_tokens``:
        the tokens that vLLM's own cache has. Blocks up to ``wait`` seconds.
        """
        if self._names and self._pool is not None and is_empty(self._pool):
            self._names.clear()
            self._forgets = False
        lora: LoRARequest | None = request.lora_request
        if lora is None:
            return None
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None or (adapter.changed and lora.load_inplace):  # vLLM loads such in each step.
            adapter = self._new(lora)
        self._adapters[lora.lora_int_id] = self._adapters.pop(lora.lora_int_id)  # The most recently used.
        started = time.monotonic()
        fresh = adapter.is_fresh(wait)
        self._bridge.waited += time.monotonic() - started
        if not fresh and not adapter.is_slow:
            if started < self._pending.setdefault(request.request_id, started + TIMEOUT_SECONDS):
                return None
            adapter.is_slow = True
        self._pending.pop(request.request_id, None)
        usable = self._is_usable(adapter, lora, fresh=fresh)
        identity = adapter.identity if usable else ""
        is_mixed = self._mixes(lora.lora_name, identity)
        return adapter if usable and not (local_tokens and is_mixed) else None

    def _mixes(self, name: str, identity: str) -> bool:
        """Note a request. Return whether vLLM's own cache may have KV of other contents with this name."""
        before = self._names.pop(name, None if self._forgets else identity)
        self._names[name] = identity if before == identity else None
        if len(self._names) > MAX_ADAPTERS:
            del self._names[next(iter(self._names))]
            self._forgets = True
        return before != identity

    def _is_usable(self, adapter: Adapter, lora: LoRARequest, *, fresh: bool) -> bool:
        if not adapter.is_of(lora):
            self._warn(
                "number",
                "adapter %s: lora_int_id %d is that of %s as well, so its KV is not cached: use another",
                lora.lora_name,
                lora.lora_int_id,
                adapter.name,
            )
        elif adapter.changed:
            self._warn(
                "changed",
                "adapter %s: the files in %s have changed since they were loaded, so its KV is not cached: "
                "load it again (POST /v1/load_lora_adapter with load_inplace)",
                adapter.name,
                adapter.path,
            )
        elif not adapter.identity or not fresh:
            slow = f"it takes more than {TIMEOUT_SECONDS:g} s to check the files in {adapter.path}"
            error = adapter.error if fresh else slow
            self._warn("unread", "adapter %s: its KV is not cached: %s", adapter.name, error)
        else:
            return True
        return False

    def _new(self, lora: LoRARequest) -> Adapter:
        self.removes(lora.lora_int_id)
        adapter = Adapter(lora.lora_name, lora.lora_path, format_of(lora))
        self._adapters[lora.lora_int_id] = adapter
        if len(self._adapters) > MAX_ADAPTERS:
            self.removes(next(iter(self._adapters)))
        adapter.check()
        return adapter


_loaded: dict[int, str] = {}
"""In a worker: what it has loaded, by vLLM's number of the adapter; empty if that is not known."""


def is_loaded(number: int, identity: str) -> bool:
    """Return whether this worker has loaded an adapter with this content."""
    return _loaded.get(number) == identity


def follow_loads() -> None:
    """Have vLLM's workers of this process remember what they load. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    # No method of vLLM's interface: a version without it stores nothing of adapters.
    if not hasattr(WorkerLoRAManager, "_load_adapter"):
        logger.warning(
            "the KV of LoRA adapters is not stored: this vLLM has no WorkerLoRAManager._load_adapter"
        )
        return

    def load(original: Callable[..., Any], manager: Any, lora: LoRARequest) -> Any:
        before = _files_or_none(lora.lora_path)
        _loaded.pop(lora.lora_int_id, None)
        loaded = original(manager, lora)
        after = _files_or_none(lora.lora_path)
        # An adapter of a hub is there once it has been downloaded.
        if after is not None and before in (None, after):
            try:
                _loaded[lora.lora_int_id] = _fingerprint(*after) + format_of(lora)
            except OSError:
                logger.warning("adapter %s has changed while it was loaded", lora.lora_name)
        return loaded

    wrap(WorkerLoRAManager, "_load_adapter", load)


def _files_or_none(path: str) -> tuple[Path, Signature] | None:
    try:
        return files_of(path)
    except Exception:  # The engine decides what is an error.
        return None


@functools.lru_cache(maxsize=1024)
def _fingerprint(folder: Path, files: Signature) -> str:
    """Return the fingerprint of an adapter's files, which a worker reads again after it was evicted."""
    return fingerprint(folder, files, WHOLE_BYTES)
