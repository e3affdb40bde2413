"""Interface of codecs, which store the payloads of a tier in another form, usually a smaller one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field

from kvtier.memory.header import IDENTITY, ChunkHeader
from kvtier.memory.layout import ChunkLayout
from kvtier.settings.values import SettingsModel


class CodecSettings(SettingsModel):
    """Settings of a codec. Subclass it for more; they are written next to ``type``."""

    type: str = Field(description="Name of the codec.", examples=["identity"])


class Codec(ABC):
    """Encodes the payloads of chunks. Provided through the hook ``kvtier_codecs``.

    ``encode`` and ``decode`` are called in worker threads, concurrently. They should release the GIL
    for most of their work. What ``encode`` has written must be enough for ``decode``: the settings may have
    changed since. ``chunk`` is the header of the chunk. ``layout`` describes the payload; it is ``None`` if
    no engine of the chunk's model has connected to this cache process yet.
    """

    code: ClassVar[int]
    """Identifies the format in headers of chunks: 1 to 65,535, different from all other codecs. Never reuse
    it for another format."""
    settings_type: ClassVar[type[CodecSettings]] = CodecSettings
    usual_ratio: ClassVar[float] = 1.0
    """How many times fewer bytes KV of bfloat16 usually takes: what simulations assume."""
    lossy: ClassVar[bool] = False
    """Whether what it decodes is not exactly what it has encoded. It encodes only chunks of engines with the
    setting ``accept_lossy``, whose ``layout`` has ``values``."""

    denser: ClassVar[int | None] = None
    """The code of a codec that makes payloads smaller than this one, and takes longer. A full tier encodes
    chunks with it that are not in memory, while the machine is idle."""

    def __init__(self, settings: CodecSettings) -> None:  # noqa: B027 - has a default on purpose
        """Take validated settings of ``settings_type``."""

    @abstractmethod
    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the upper bound of the encoded size of a payload."""

    @abstractmethod
    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Encode a payload into ``target``, which has ``max_encoded_bytes``. Return the length written.

        Does not change ``source``. Raises any exception if it cannot encode: the chunk is stored as it is.
        """

    @abstractmethod
    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Decode into ``target``, which has exactly the length of the payload.

        Raises any exception if ``source`` is not what ``encode`` has written: the chunk is a miss.
        """


class IdentityCodec(Codec):
    """Payloads as they are, the default. Chunks are then transferred from and to the arena without a copy."""

    code = IDENTITY

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the length of the payload."""
        return chunk.payload_bytes

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Copy the payload."""
        target[: len(source)] = source
        return len(source)

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Copy the payload."""
        target[:] = source
