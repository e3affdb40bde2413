"""A shared pool of KV cache chunks for kvtier in S3, Google Cloud Storage, Azure or a folder."""

from __future__ import annotations

from kvtier import hookimpl
from kvtier.backends.base import Backend


@hookimpl
def kvtier_backends() -> dict[str, type[Backend]]:
    """Return the tier type ``objectstore``. The client library is imported when such a tier is opened."""
    from kvtier_objectstore.backend import ObjectStoreBackend

    return {"objectstore": ObjectStoreBackend}
