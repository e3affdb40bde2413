"""Fork processes from a parent that has imported vLLM: they start fast enough for one per test."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

from tests import forks as any_forks

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
    "PYTHONPATH": any_forks.PYTHONPATH,
}


def forks() -> ForkServerContext:
    """Return the context that forks the processes. Starts the parent, which takes a while."""
    return any_forks.forks(["torch", "tests.vllm.imported_once"], ENVIRONMENT)
