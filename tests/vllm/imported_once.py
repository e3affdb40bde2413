"""What every engine's process would import by itself: its parent does, so that each of them has it at once.

Starting and ending an engine, vLLM looks over all that lives for garbage, time and again. What was imported
is most of that, so that it is taken out of the search: three seconds an engine become less than one.
"""

from __future__ import annotations

import atexit
import gc

import transformers
import vllm.entrypoints.llm
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker

from kvtier.integrations.vllm import connector

__all__ = ["connector", "transformers", "vllm"]

# The parent ends as any process does, or libraries tell of what is left; its children end without this.
atexit.register(gc.unfreeze)
gc.collect()
gc.freeze()
# vLLM would put it all back in order to look it over once more while it ends.
gc.unfreeze = lambda: None
