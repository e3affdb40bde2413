"""The ways in which bytes move between hosts. Those that come with kvtier register as a plugin's would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvtier.transports.base import Transport

# Not from kvtier.hookspecs, which imports this package's base module and so would find itself half made.
hookimpl = pluggy.HookimplMarker("kvtier")


@hookimpl
def kvtier_transports() -> dict[str, type[Transport]]:
    """The built-in transports, imported when they are asked for."""
    from kvtier.transports.nixl import NixlTransport
    from kvtier.transports.tcp import TcpTransport

    return {"tcp": TcpTransport, "nixl": NixlTransport}
