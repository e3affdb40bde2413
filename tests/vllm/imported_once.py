"""What processes with vLLM import, done once in their parent, before ``tests.imported_once``.

pytest would rewrite and compile each module of hypothesis again, in the process of every ``*_side.py``.

vLLM runs full garbage collections while an engine starts and shuts down. Imported modules are most of the
live objects, so they are frozen out of the collections: three seconds per engine become less than one.
"""

from __future__ import annotations

import atexit
import gc

import anyio._backends._asyncio
import hypothesis.strategies
import pytest
import transformers
import vllm.entrypoints.llm
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
import xdist.scheduler

from kvtier.integrations.vllm import connector

__all__ = ["anyio", "connector", "hypothesis", "pytest", "transformers", "vllm", "xdist"]

# The parent must exit like any process, or libraries report leaks. Its children skip atexit handlers.
atexit.register(gc.unfreeze)
gc.collect()
gc.freeze()
# vLLM would unfreeze everything for one more collection while it shuts down.
gc.unfreeze = lambda: None
