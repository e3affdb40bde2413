"""InfiniStore backend: chunks in the memory of a server, over TCP or RDMA."""

from kvtier.backends.infinistore.backend import InfiniStoreBackend
from kvtier.backends.infinistore.settings import InfiniStoreSettings

__all__ = ["InfiniStoreBackend", "InfiniStoreSettings"]
