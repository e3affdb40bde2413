"""Processes that have imported vLLM already: they are there in no time, so that every test has its own."""

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
    # A small model gains nothing from threads that spin, and loses much where cores are few.
    "OMP_NUM_THREADS": "1",
    # Workers of one engine would each claim a NUMA node otherwise.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # For the parent, which would silently do without what it cannot import.
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


@cache
def forks() -> ForkServerContext:
    """Makes processes of a parent that has imported vLLM, and starts that parent, which takes a while."""
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
