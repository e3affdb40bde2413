"""Mooncake's client library: found, told to give up in time, and its error codes.

The library takes its time-outs from the environment alone: those of calls to the master whenever a client is
made, those of transfers with its first one. What the user has set there is left as it is.

Names and codes: https://kvcache-ai.github.io/Mooncake, ``mooncake-store/include/types.h`` of Mooncake 0.3.13.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from kvtier.errors import TierError

GIVE_UP_AT = 0.9
"""The share of a tier's deadline after which the library gives up, so that its answer comes in time."""

LANES = "16"
"""The most connections to one peer that the library makes; a transfer that hangs has one for itself."""


class Code(IntEnum):
    """What the library answers in the place of success or a length."""

    NO_ROOM = -200
    BAD_ARGUMENTS = -600
    """Also where the buffer is too small."""
    TAKEN_OVER = -601
    """Another client has begun to replace what this one was writing."""
    BEING_WRITTEN = -703
    NOT_HELD = -704
    TRANSFER_FAILED = -800
    MASTER_LOST = -900
    MASTER_LATE = -901


UNREACHED = frozenset({Code.TRANSFER_FAILED, Code.MASTER_LOST, Code.MASTER_LATE})
"""The codes that say nothing of the key, but that the pool was not reached."""

_set_here: dict[str, str] = {}


def load_library() -> Any:  # noqa: ANN401 - a module without types
    """Load the module ``mooncake.store``, which blocks. Raises :class:`TierError` where it cannot be."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise TierError(
            "the Mooncake client is missing: install it: pip install 'kvtier[mooncake]'"
        ) from error
    except ImportError as error:
        raise TierError(
            f"the Mooncake client cannot be loaded ({error}): install what it needs of the system, on Debian "
            "libibverbs1, librdmacm1 and libnuma1"
        ) from error


def limit_waits(deadline: float) -> None:
    """Have clients that are made from now on give up within ``deadline`` seconds, and log errors only.

    Of two tiers whose deadlines differ, the later one's is taken for both where the library reads it once.
    """
    _set_defaults(
        {
            "MC_RPC_TIMEOUT_MS": str(max(1, int(1000 * GIVE_UP_AT * deadline))),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, int(1000 * GIVE_UP_AT * deadline))),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, int(GIVE_UP_AT * deadline))),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(max(1, int(GIVE_UP_AT * deadline))),
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, int(GIVE_UP_AT * deadline))),
            "MC_TCP_LANES_PER_PEER": LANES,
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_LOG_LEVEL": "ERROR",
        }
    )


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        if os.environ.get(name) == _set_here.get(name) != value:
            os.environ[name] = _set_here[name] = value
