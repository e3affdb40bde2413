"""``/v1/models``: forward the request to a decode engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import httpx

from kvtier.fleet.proxy.checks import read_body
from kvtier.fleet.proxy.client import Client
from kvtier.fleet.proxy.engine import Engine, EngineLost, Role
from kvtier.fleet.proxy.errors import BUSY, Refused
from kvtier.fleet.proxy.headers import to_client, to_engine

if TYPE_CHECKING:
    from kvtier.fleet.proxy.proxy import Proxy
    from kvtier.http import Message, Receive, Send

logger = logging.getLogger("kvtier.proxy")

MODELS_SECONDS = 5.0


class Models:
    """ASGI application that tries the decode engines until one responds."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = Client(scope, receive, send)
        tried: list[Engine] = []
        while engine := self._proxy.fleet.choose(Role.DECODE, lambda _: 0, tried):
            tried.append(engine)
            try:
                with engine.reserved(), engine.awaiting_response(), anyio.move_on_after(MODELS_SECONDS):
                    await self._forward(client, engine)
                    return
            except EngineLost as lost:
                logger.warning("%s", lost)
        await client.refuse(Refused(503, "no decode engine can be reached: try again later", BUSY))

    async def _forward(self, client: Client, engine: Engine) -> None:
        request = httpx.Request("GET", engine.endpoint("/v1/models"), headers=to_engine(client.headers))
        async with engine.connections.exchange(request, MODELS_SECONDS) as response:
            content = await read_body(response) or b""
        await client.start(response.status_code, to_client(response.headers.raw, len(content)))
        await client.end(content)
