"""The transport ``nixl``: NVIDIA's NIXL, over RDMA if available, else over what UCX selects.

This imports nothing, because a NIXL process (:mod:`kvtier.transports.nixl.worker`) loads it.
"""
