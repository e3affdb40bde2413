"""Object storage backend: one object per chunk, in S3, Google Cloud Storage or Azure."""

from kvtier.backends.s3.backend import S3Backend
from kvtier.backends.s3.settings import S3Settings

__all__ = ["S3Backend", "S3Settings"]
