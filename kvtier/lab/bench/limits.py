"""Choose the limit to compare a tier with: minimal code that moves the same bytes over the same medium."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.backends.base import Backend
from kvtier.backends.disk.backend import DiskSettings
from kvtier.backends.infinistore.settings import InfiniStoreSettings
from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.backends.redis.settings import RedisSettings
from kvtier.lab.bench.libraries import InfiniStoreLibrary, MooncakeLibrary
from kvtier.lab.bench.memory import Memcpy
from kvtier.lab.bench.raw_files import RawFiles
from kvtier.lab.bench.raw_resp import LogIn, RawRESP
from kvtier.lab.bench.sides import Side
from kvtier.lab.bench.timing import filled
from kvtier.memory.arena import Arena
from kvtier.settings import TierSettings

RAW_FOLDER = "raw"


def limit_of(tier: TierSettings, backend: Backend, arena: Arena, length: int) -> Side | None:
    """Return the limit, with room for ``length`` bytes at once; ``None`` if it is unknown.

    Third-party backends have no limit, nor do pools over TLS, through sentinels, as a cluster, or over RDMA,
    which the limits do not support. Blocks. Raises ``OSError``, :class:`kvtier.errors.KVTierError`, and the
    client library's errors.
    """
    if backend.capabilities().arena is not None:
        return Memcpy(filled(length))
    if isinstance(tier, DiskSettings):
        return _raw_files(tier)
    if isinstance(tier, RedisSettings):
        return _raw_resp(tier)
    if isinstance(tier, InfiniStoreSettings) and tier.connection == "tcp":
        return InfiniStoreLibrary((tier.host, tier.port), tier.connections)
    if isinstance(tier, MooncakeSettings) and tier.protocol == "tcp":
        return MooncakeLibrary(tier.master, arena)
    return None


def _raw_files(tier: DiskSettings) -> Side | None:
    folder = tier.path / RAW_FOLDER
    folder.mkdir(mode=0o700, parents=True)
    return RawFiles(folder, tier.concurrency) if _has_direct(folder) else None


def _has_direct(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def _raw_resp(tier: RedisSettings) -> Side | None:
    place = tier.pool_url
    if place.kind != "single" or place.tls:
        return None
    (endpoint,) = place.endpoints
    address = endpoint.host if endpoint.port is None else (endpoint.host, endpoint.port)
    password = tier.password.get_secret_value() if tier.password is not None else None
    log_in = LogIn(tier.user, password, place.database)
    return RawRESP(address, tier.connections, log_in, timeout=tier.deadline)
