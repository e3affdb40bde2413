"""Tiers and their parts. The built-in codec registers through the same hook as those of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.hookmarkers import hookimpl

if TYPE_CHECKING:
    from kvtier.tiers.codec import Codec


@hookimpl
def kvtier_codecs() -> dict[str, type[Codec]]:
    """Return the built-in codec. Imports it lazily."""
    from kvtier.tiers.codec import IdentityCodec

    return {"identity": IdentityCodec}
