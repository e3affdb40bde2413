"""Random operations in any order: retrieved bytes are correct, no tier overflows, nothing leaks."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from anyio.from_thread import start_blocking_portal
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier import Settings, TieredCache

from .conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows

RAM_CHUNKS, SSD_CHUNKS = 6, 10

# Branching prompts: equal first chunks, different ends.
prompts = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 4)).map(
    lambda branch: [branch[0]] * CHUNK_TOKENS + [branch[1]] * CHUNK_TOKENS * (branch[2] - 1)
)
routes = st.sampled_from([("ram", "ssd"), ("ssd", "ram")])


class CacheMachine(RuleBasedStateMachine):
    """The rules are user operations. The bytes of a prompt depend only on its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal())
        self.open()

    def open(self) -> None:
        settings = Settings(
            chunk_tokens=CHUNK_TOKENS,
            tiers=[
                {"name": "ram", "type": "cpu", "capacity": RAM_CHUNKS * CHUNK_OBJECT_BYTES},
                {
                    "name": "ssd",
                    "type": "disk",
                    "path": str(self.folder),
                    "capacity": SSD_CHUNKS * CHUNK_OBJECT_BYTES,
                },
            ],
        )
        self.opened = self.portal.wrap_async_context_manager(TieredCache.open(settings))
        self.cache = self.opened.__enter__()
        self.model = self.portal.call(lambda: self.cache.model("llama", token_bytes=TOKEN_BYTES))

    @rule(tokens=prompts)
    def store(self, tokens: list[int]) -> None:
        held = self.portal.call(self.model.store, tokens, rows(tokens))
        assert 0 <= held <= len(tokens)

    @rule(tokens=prompts)
    def retrieve(self, tokens: list[int]) -> None:
        out = bytearray(len(tokens) * TOKEN_BYTES)
        hit = self.portal.call(self.model.retrieve, tokens, out)
        assert out[: hit * TOKEN_BYTES] == rows(tokens)[: hit * TOKEN_BYTES]

    @rule(tokens=prompts, route=routes, copy=st.booleans())
    def move(self, tokens: list[int], route: tuple[str, str], copy: bool) -> None:
        self.portal.call(lambda: self.model.move(tokens, *route, copy=copy))

    @rule(tokens=prompts)
    def prefetch(self, tokens: list[int]) -> None:
        self.portal.call(self.model.prefetch, tokens)

    @rule(tokens=prompts)
    def clear(self, tokens: list[int]) -> None:
        self.portal.call(self.model.clear, tokens)
        assert self.portal.call(self.model.held_tokens, tokens) == 0

    @rule(tokens=prompts)
    def pin_and_unpin(self, tokens: list[int]) -> None:
        self.portal.call(self.model.pin, tokens, 0.001)

    @rule()
    def restart(self) -> None:
        self.opened.__exit__(None, None, None)
        self.open()

    @invariant()
    def fits(self) -> None:
        assert self.cache.arena.used <= RAM_CHUNKS * CHUNK_OBJECT_BYTES
        assert self.bytes_on_disk() <= SSD_CHUNKS * CHUNK_OBJECT_BYTES

    def bytes_on_disk(self) -> int:
        """Return the size of all chunk files. Ignores files that disappear meanwhile."""
        total = 0
        for file in self.folder.glob("*/*.kv"):
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def teardown(self) -> None:
        try:
            assert self.portal.call(self.cache.drain, 10)
            catalog = self.cache.catalog
            # Chunks cleared during a write are deleted in the background.
            deadline = time.monotonic() + 60
            while self.bytes_on_disk() != catalog.used(1) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert self.bytes_on_disk() == catalog.used(1)
        finally:
            self.opened.__exit__(None, None, None)
            self.stack.close()
            shutil.rmtree(self.folder)


TestCache = CacheMachine.TestCase
TestCache.settings = hypothesis_settings(max_examples=25, stateful_step_count=30, deadline=None)
