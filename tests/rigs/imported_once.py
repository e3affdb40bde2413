"""The imports of all forked processes, done once in their parent: of commands, instances and stub engines.

Objects that exist now are frozen out of the garbage collections of the processes, which would copy them.
"""

from __future__ import annotations

import contextlib
import gc

import anyio._backends._asyncio
import pytest
import uvicorn.lifespan.on
import uvicorn.loops.auto

import kvtier.bridge.serve
import kvtier.cli
import kvtier.fleet.controller.serve
import kvtier.fleet.member.controller_client
import kvtier.fleet.proxy.serve
import kvtier.peers.server
from kvtier.errors import KVTierError
from kvtier.plugins import Plugins

__all__ = ["anyio", "kvtier", "pytest", "uvicorn"]

# A process that loads a broken plugin reports it.
with contextlib.suppress(KVTierError):
    Plugins.load()
gc.collect()
gc.freeze()
