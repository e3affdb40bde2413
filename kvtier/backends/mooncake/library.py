"""Mooncake's client library: import, timeouts and error codes.

The library takes its timeouts from environment variables only: those of calls to the master whenever a
client is created, those of transfers with the first client. Variables set by the user take precedence.

Names and codes: https://kvcache-ai.github.io/Mooncake, ``mooncake-store/include/types.h`` of Mooncake 0.3.13.
"""

from __future__ import annotations

import importlib
import os
from enum import IntEnum
from typing import Any

from kvtier.errors import TierError

TIMEOUT_SHARE = 0.9
"""The library's timeout as a share of the tier's deadline, so that its error arrives in time."""

LANES = "16"
"""Maximum connections of the library to one peer. A hanging transfer occupies one."""


class Code(IntEnum):
    """Error codes that the library returns instead of success or a length."""

    NO_ROOM = -200
    BAD_ARGUMENTS = -600
    """Includes a buffer that is too small."""
    TAKEN_OVER = -601
    """Another client has started to replace the value that this one was writing."""
    BEING_WRITTEN = -703
    NOT_HELD = -704
    TRANSFER_FAILED = -800
    MASTER_LOST = -900
    MASTER_LATE = -901


UNREACHED = frozenset({Code.TRANSFER_FAILED, Code.MASTER_LOST, Code.MASTER_LATE})
"""Codes that mean that the pool is unreachable, and do not concern the key."""

_set_here: dict[str, str] = {}


def load_library() -> Any:  # noqa: ANN401 - a module without types
    """Import ``mooncake.store``. Blocks. Raises :class:`TierError` if that fails."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise TierError("the Mooncake client is missing", "pip install 'kvtier[mooncake]'") from error
    except ImportError as error:
        raise TierError(
            f"the Mooncake client cannot be loaded ({error})",
            "install its system libraries, on Debian libibverbs1, librdmacm1 and libnuma1",
        ) from error


def set_timeouts(deadline: float) -> None:
    """Make clients that are created later time out within ``deadline`` seconds, and log errors only.

    If two tiers have different deadlines, the last one set applies to both, for values that the library
    reads only once.
    """
    seconds = str(max(1, int(TIMEOUT_SHARE * deadline)))
    milliseconds = str(max(1, int(1000 * TIMEOUT_SHARE * deadline)))
    values = {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
        "MC_TCP_LANES_PER_PEER": LANES,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    for name, value in values.items():
        if os.environ.get(name) == _set_here.get(name) != value:
            os.environ[name] = _set_here[name] = value
