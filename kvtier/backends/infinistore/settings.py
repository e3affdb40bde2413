"""Settings of a tier of type ``infinistore``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvtier.settings import TierSettings
from kvtier.units import Integer

SCHEME = "infinistore"
_FORM = f"use for example {SCHEME}://cache:12345"


class InfiniStoreSettings(TierSettings):
    """Settings of a tier of type ``infinistore``. The capacity of the pool is configured on the server."""

    url: str = Field(
        description=(
            "URL of the server: `infinistore://HOST:PORT`, with its service port. `?device=NAME` at the end "
            "sets `device`."
        ),
        examples=["infinistore://cache:12345"],
    )
    connection: Literal["tcp", "rdma"] = Field(
        default="tcp",
        description=(
            "Transport of chunks. `rdma` requires an RDMA device on both sides, and transfers chunks from "
            "and to the first tier without this host's CPU."
        ),
        examples=["rdma"],
    )
    device: str = Field(
        default="mlx5_0", min_length=1, description="RDMA device of this host.", examples=["mlx5_1"]
    )
    link_type: Literal["IB", "Ethernet"] = Field(
        default="IB",
        description="Link layer of the RDMA device: `Ethernet` for RoCE.",
        examples=["Ethernet"],
    )
    gid_index: int | None = Field(
        default=None,
        ge=0,
        description="GID index of the RDMA device. If omitted, the client library chooses.",
        examples=[3],
    )
    connections: Integer = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "Maximum TCP connections for chunks. One more is reserved for lookups, so that they do not wait "
            "for chunks."
        ),
        examples=[8],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="Prefix of all keys on the server.",
        examples=["production:"],
    )

    @model_validator(mode="before")
    @classmethod
    def _take_device_from_url(cls, values: Any) -> Any:  # noqa: ANN401 - what pydantic was given
        if not isinstance(values, Mapping) or not isinstance(values.get("url"), str):
            return values
        url, _, query = values["url"].partition("?")
        named = parse_qs(query, keep_blank_values=True)
        if set(named) != {"device"} or "device" in values or len(named["device"]) != 1:
            return values  # The validator of `url` reports the error, if any.
        return {**values, "url": url.removesuffix("/"), "device": named["device"][0]}

    @field_validator("url")
    @classmethod
    def _validate_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != SCHEME:
            raise ValueError(f"{url!r} is not a valid InfiniStore URL: {_FORM}")
        if parts.query or parts.fragment or parts.username is not None or parts.path not in ("", "/"):
            raise ValueError(f"only ?device=NAME may follow the port, unless `device` is set: {_FORM}")
        return url

    @field_validator("gid_index")
    @classmethod
    def _require_rdma(cls, gid_index: int | None, info: ValidationInfo) -> int | None:
        if gid_index is not None and info.data.get("connection") == "tcp":
            raise ValueError("it requires RDMA: set connection: rdma, or omit it")
        return gid_index

    @property
    def host(self) -> str:
        """The server's host in ``url``."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The server's port in ``url``."""
        return urlsplit(self.url).port or 0
