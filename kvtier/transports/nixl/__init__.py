"""The transport ``nixl``: NVIDIA's NIXL, over RDMA if available, else over what UCX selects."""

from kvtier.transports.nixl.link import NixlLink
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.nixl.transport import NixlTransport

__all__ = ["NixlLink", "NixlSettings", "NixlTransport"]
