"""Fork processes from a parent that has imported vLLM: they start fast enough for one per test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # Spinning threads gain nothing with a small model, and cost much on a machine with few cores.
    "OMP_NUM_THREADS": "1",
    # Otherwise each worker of an engine would claim a NUMA node.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # For the parent, which silently skips modules that it cannot import. Another vLLM may be in front.
    "PYTHONPATH": os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    ),
}


@cache
def forks() -> ForkServerContext:
    """Return the context that forks the processes. Starts the parent, which takes a while."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm.imported_once"])
    with _environment(ENVIRONMENT):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
