"""Bytes between hosts with NVIDIA's NIXL: over RDMA where there is some, else over what UCX finds."""

from kvtier.transports.nixl.link import NixlLink
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.nixl.transport import NixlTransport

__all__ = ["NixlLink", "NixlSettings", "NixlTransport"]
