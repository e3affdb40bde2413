"""What a tier of type ``infinistore`` can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvtier.settings import TierSettings

SCHEME = "infinistore"
_FORM = f"write it like {SCHEME}://cache:12345"


class InfiniStoreSettings(TierSettings):
    """Settings of a tier of type ``infinistore``. How much the pool holds is told to its server."""

    url: str = Field(
        description=(
            "Where the server is: `infinistore://HOST:PORT`, its service port. `?device=NAME` behind it is "
            "the same as `device`."
        ),
        examples=["infinistore://cache:12345"],
    )
    connection: Literal["tcp", "rdma"] = Field(
        default="tcp",
        description=(
            "How chunks travel. `rdma` takes an RDMA device on both sides, and moves them from and to the "
            "first tier without this host's processor."
        ),
        examples=["rdma"],
    )
    device: str = Field(
        default="mlx5_0", min_length=1, description="The RDMA device of this host.", examples=["mlx5_1"]
    )
    link_type: Literal["IB", "Ethernet"] = Field(
        default="IB",
        description="What the RDMA device is linked by: `Ethernet` for RoCE.",
        examples=["Ethernet"],
    )
    gid_index: int | None = Field(
        default=None,
        ge=0,
        description="Which of the RDMA device's GIDs to use. Left out: the client library chooses.",
        examples=[3],
    )
    connections: int = Field(
        default=4,
        ge=1,
        le=64,
        description=(
            "How many TCP connections carry chunks at once. One more is kept for look-ups, which so wait for "
            "no chunk."
        ),
        examples=[8],
    )
    prefix: str = Field(
        default="kvtier:",
        max_length=256,
        description="What the name of each chunk on the server begins with.",
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
            return values  # The validator of `url` says what is wrong, if anything is.
        return {**values, "url": url.removesuffix("/"), "device": named["device"][0]}

    @field_validator("url")
    @classmethod
    def _is_a_place(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != SCHEME:
            raise ValueError(f"{url!r} is no host and port: {_FORM}")
        if parts.query or parts.fragment or parts.username is not None or parts.path not in ("", "/"):
            raise ValueError(f"only ?device=NAME may stand behind the port, unless `device` does: {_FORM}")
        return url

    @field_validator("gid_index")
    @classmethod
    def _is_for_rdma(cls, gid_index: int | None, info: ValidationInfo) -> int | None:
        if gid_index is not None and info.data.get("connection") == "tcp":
            raise ValueError("it is for RDMA: write connection: rdma, or leave it out")
        return gid_index

    @property
    def host(self) -> str:
        """The server's host in ``url``."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The server's port in ``url``."""
        return urlsplit(self.url).port or 0
