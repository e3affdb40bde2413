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
    from kvtier.tiers.lossless import LosslessCodec

    return {"identity": IdentityCodec, "lossless": LosslessCodec}
