"""Transports move bytes between hosts. The built-in ones register through the same hook as a plugin's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.hookmarkers import hookimpl

if TYPE_CHECKING:
    from kvtier.transports.base import Transport


@hookimpl
def kvtier_transports() -> dict[str, type[Transport]]:
    """Return the built-in transports, imported lazily."""
    from kvtier.transports.nixl.transport import NixlTransport
    from kvtier.transports.tcp import TcpTransport

    return {"tcp": TcpTransport, "nixl": NixlTransport}
