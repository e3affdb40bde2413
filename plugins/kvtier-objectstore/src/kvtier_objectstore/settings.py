"""What a tier of type ``objectstore`` is told."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from kvtier.settings import TierSettings
from kvtier.settings_secret import Secret
from kvtier.units import MIB, Size

SCHEMES = ("s3", "gs", "az", "file", "memory")


def _is_a_place(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"it begins with none of {known}: write one such as s3://bucket/kvtier")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("it holds more than a place: write user names and keys under credentials")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ValueError("it names no absolute path: write three slashes, such as file:///mnt/kvtier")
    if parts.scheme in ("s3", "gs", "az") and not parts.netloc:
        raise ValueError(f"it names no bucket: write {parts.scheme}://bucket/prefix")
    return url


def _is_a_server(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is no URL of a server: write one such as https://s3.example.com")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("it holds more than a server: write user names and keys under credentials")
    return url


class ObjectStoreSettings(TierSettings):
    """Settings of a tier of type ``objectstore``. A shared pool: how much it holds is its own business."""

    url: Annotated[str, AfterValidator(_is_a_place)] = Field(
        description=(
            "Where the chunks are: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, "
            "`file:///path`, or `memory://` for trying things out."
        ),
        examples=["s3://bucket/kvtier"],
    )
    endpoint: Annotated[str, AfterValidator(_is_a_server)] | None = Field(
        default=None,
        description="The server's URL, where it is not the cloud's own. `http://` leaves out TLS.",
        examples=["https://s3.example.com"],
    )
    region: str | None = Field(default=None, description="The bucket's region.", examples=["eu-central-1"])
    credentials: dict[str, Secret] = Field(
        default_factory=dict,
        description=(
            "By obstore's names: `access_key_id` and `secret_access_key` for S3, `service_account_key` for "
            "Google, `account_key` for Azure. Left out: what the environment or the machine provides."
        ),
        examples=[{"access_key_id": "kvtier", "secret_access_key": {"env": "KVTIER_S3_KEY"}}],
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Whatever else obstore knows of this kind of store, by its names.",
        examples=[{"account_name": "example"}, {"virtual_hosted_style_request": "true"}],
    )
    part_size: Size = Field(
        default=8 * MIB,
        ge=5 * MIB,
        le=1024 * MIB,
        description="Longer values are written and read in parts of this size. S3 takes none below 5MiB.",
        examples=["8MiB"],
    )
    upload_parts: int = Field(
        default=4, ge=1, le=64, description="How many parts of one value are written at once.", examples=[4]
    )
    requests: int = Field(
        default=16,
        ge=1,
        le=256,
        description="How many values, or parts of values to be read, may be under way at once.",
        examples=[16],
    )
