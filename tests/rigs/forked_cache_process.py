"""Cache processes that are forked like the engines: they start at once, where an interpreter takes seconds.

That ``kvtier serve`` starts as a command is tested in ``tests/bridge`` and ``tests/lab/demo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.rigs.cache_process import CacheProcess, Process
from tests.rigs.forks import Forked, forks_with_vllm


class ForkedCacheProcess(CacheProcess):
    """A cache process of a test with an engine."""

    def _run(self, environment: dict[str, str], fault: Sequence[str]) -> Process:
        forks_with_vllm()  # Now, with vLLM: tests start engines next.
        with self.log.open("ab") as log:
            arguments = (str(self._hold), list(fault))
            return Forked(serve, arguments, environment=environment, stdout=log, stderr=log)


def serve(hold: str, fault: Sequence[str]) -> None:
    """Run ``kvtier serve``. The process's main function."""
    from tests.rigs import faulty_serve

    faulty_serve.serve(Path(hold), fault)
