"""What processes with vLLM import, done once in their parent, before ``tests.rigs.imported_once``.

vLLM runs full garbage collections while an engine starts and shuts down. Imported modules are most of the
live objects, so they are frozen out of the collections: three seconds per engine become less than one.
"""

from __future__ import annotations

import atexit
import gc

import anyio._backends._asyncio
import transformers
import vllm.entrypoints.llm
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker

from kvtier.integrations.vllm import connector
from tests.rigs.vllm import instruction_set

instruction_set.limit()

__all__ = ["anyio", "connector", "transformers", "vllm"]

# The parent must exit like any process, or libraries report leaks. Its children skip atexit handlers.
atexit.register(gc.unfreeze)
gc.collect()
gc.freeze()
# vLLM would unfreeze everything for one more collection while it shuts down.
gc.unfreeze = lambda: None
