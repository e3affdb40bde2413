"""Tiers and their parts. The built-in codecs register through the same hook as those of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.hookmarkers import hookimpl

if TYPE_CHECKING:
    from kvtier.tiers.codec import Codec


@hookimpl
def kvtier_codecs() -> dict[str, type[Codec]]:
    """Return the built-in codecs. Imports them lazily."""
    from kvtier.tiers.codec import IdentityCodec
    from kvtier.tiers.lossless import DenseCodec, LosslessCodec
    from kvtier.tiers.lossy import Fp8Codec, Int4Codec, Int8Codec

    return {
        "identity": IdentityCodec,
        "lossless": LosslessCodec,
        "dense": DenseCodec,
        "fp8": Fp8Codec,
        "int8": Int8Codec,
        "int4": Int4Codec,
    }
