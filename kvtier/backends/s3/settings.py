"""Settings of a tier of type ``s3``."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvtier.settings import TierSettings
from kvtier.settings.values import Secret
from kvtier.units import MIB, Integer, Size


class S3Settings(TierSettings):
    """Settings of a tier of type ``s3``."""

    url: str = Field(
        description="Where the chunks are: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.",
        examples=["s3://bucket/kvtier"],
    )
    endpoint: str | None = Field(
        default=None,
        description="URL of the server, if it is not the cloud's own. `http://` disables TLS.",
        examples=["https://s3.example.com"],
    )
    region: str | None = Field(default=None, description="Region of the bucket.", examples=["eu-central-1"])
    credentials: dict[str, Secret] = Field(
        default_factory=dict,
        description=(
            "Credentials with obstore's names: `access_key_id` and `secret_access_key` for S3, "
            "`service_account_key` for Google, `account_key` for Azure. If omitted, those of the environment "
            "or of the machine's role."
        ),
        examples=[{"access_key_id": "kvtier", "secret_access_key": {"env": "KVTIER_S3_KEY"}}],
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Other options of obstore for this kind of store.",
        examples=[{"account_name": "example"}, {"virtual_hosted_style_request": "true"}],
    )
    capacity: Size | None = Field(
        default=None,
        ge=MIB,
        description=(
            "Maximum size of the chunks under `url`; the oldest are deleted. Each host lists all of them "
            "whenever it has written a sixteenth of this. If omitted, only a lifecycle rule deletes chunks."
        ),
        examples=["10TiB"],
    )
    part_size: Size = Field(
        default=8 * MIB,
        ge=5 * MIB,
        le=1024 * MIB,
        description="Larger chunks are written and read in parts of this size. S3's minimum is 5MiB.",
        examples=["16MiB"],
    )
    requests: Integer = Field(
        default=16,
        ge=1,
        le=256,
        description=(
            "Maximum number of chunks to write, or parts of chunks to read, in flight. Lookups have as many "
            "of their own, so that they do not wait for chunks."
        ),
        examples=[32],
    )

    @field_validator("url", "endpoint")
    @classmethod
    def _refuse_secrets(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("it must not contain user names, keys or queries: set them under credentials")
        return url

    @field_validator("url")
    @classmethod
    def _validate_url(cls, url: str) -> str:
        scheme, bucket, *_ = urlsplit(url)
        if scheme not in ("s3", "gs", "az"):
            raise ValueError("it must start with s3://, gs:// or az://: write for example s3://bucket/kvtier")
        if not bucket:
            raise ValueError(f"it has no bucket: write {scheme}://bucket/prefix")
        return url

    @field_validator("endpoint")
    @classmethod
    def _validate_endpoint(cls, url: str | None) -> str | None:
        if url is not None and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
            raise ValueError("it is not an HTTP URL: write one such as https://s3.example.com")
        return url
