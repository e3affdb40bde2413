"""Settings for recordings of the traffic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kvtier.settings.paths import LocalPath
from kvtier.units import MIB, Integer, Size

MAX_FILES = 100


class RecordingSettings(BaseModel):
    """Where the lookups of this host's engines are recorded. By default they are not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: LocalPath | None = Field(
        default=None,
        description=(
            "File to record the lookups of this host's engines in, without tokens and keys. If omitted, "
            "nothing is recorded. Its folder must exist. Like `kvtier serve --record`."
        ),
        examples=["/var/log/kvtier/traffic.rec"],
    )
    max_bytes: Size = Field(
        default=256 * MIB,
        ge=MIB,
        description=(
            "Maximum size of a file of a recording. When it is reached, the file gets the suffix `.1`, those "
            "before it `.2`, `.3` and so on, and a new one is begun."
        ),
        examples=["256MiB"],
    )
    files: Integer = Field(
        default=4,
        ge=1,
        le=MAX_FILES,
        description="Maximum number of files of a recording. The oldest one is deleted.",
        examples=[4],
    )
