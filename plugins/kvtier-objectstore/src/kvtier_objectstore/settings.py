"""Settings of a tier of type ``objectstore``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from kvtier.settings import TierSettings
from kvtier.settings.values import Secret
from kvtier.units import MIB, Integer, Size

SCHEMES = ("s3", "gs", "az", "file", "memory")


def _validate_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"it must start with one of {known}: write for example s3://bucket/kvtier")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("it must not contain user names, keys or queries: set them under credentials")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ValueError("it has no absolute path: write three slashes, such as file:///mnt/kvtier")
    if parts.scheme in ("s3", "gs", "az") and not parts.netloc:
        raise ValueError(f"it has no bucket: write {parts.scheme}://bucket/prefix")
    return url


def _validate_endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is not an HTTP URL: write one such as https://s3.example.com")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("it must not contain user names, keys or queries: set them under credentials")
    return url


class ObjectStoreSettings(TierSettings):
    """Settings of a tier of type ``objectstore``: a shared pool, without a ``capacity``."""

    url: Annotated[str, AfterValidator(_validate_url)] = Field(
        description=(
            "Location of the chunks: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, "
            "`file:///path`, or `memory://` for testing."
        ),
        examples=["s3://bucket/kvtier"],
    )
    endpoint: Annotated[str, AfterValidator(_validate_endpoint)] | None = Field(
        default=None,
        description="The server's URL, unless it is the cloud's own. `http://` disables TLS.",
        examples=["https://s3.example.com"],
    )
    region: str | None = Field(default=None, description="The bucket's region.", examples=["eu-central-1"])
    credentials: dict[str, Secret] = Field(
        default_factory=dict,
        description=(
            "Credentials with obstore's names: `access_key_id` and `secret_access_key` for S3, "
            "`service_account_key` for Google, `account_key` for Azure. Default: from the environment or the "
            "machine's role."
        ),
        examples=[{"access_key_id": "kvtier", "secret_access_key": {"env": "KVTIER_S3_KEY"}}],
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Other options of obstore for this kind of store.",
        examples=[{"account_name": "example"}, {"virtual_hosted_style_request": "true"}],
    )
    part_size: Size = Field(
        default=8 * MIB,
        ge=5 * MIB,
        le=1024 * MIB,
        description="Larger values are written and read in parts of this size. S3's minimum is 5MiB.",
        examples=["8MiB"],
    )
    upload_parts: Integer = Field(
        default=4, ge=1, le=64, description="Maximum number of parallel part uploads per value.", examples=[4]
    )
    requests: Integer = Field(
        default=16,
        ge=1,
        le=256,
        description="Maximum number of values, or parts of values to read, in flight.",
        examples=[16],
    )
