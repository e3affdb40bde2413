from __future__ import annotations

import anyio
import pytest

from kvtier.errors import ChannelClosed, ProtocolError, Rejected
from kvtier.rpc.frames import Message, Refused, check_hello
from tests.rpc.endpoints import Hello, Note, Welcome, sides

pytestmark = pytest.mark.anyio


async def exchange(reply: Message) -> Welcome:
    ours, theirs = sides()
    result: list[Welcome] = []

    async def answer() -> None:
        hello = check_hello(await theirs.endpoint.receive(5.0), Hello, 3)
        assert hello == Hello(3)
        theirs.endpoint.send(reply)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        result.append(await ours.endpoint.greet(Hello(3), Welcome, 3, 5.0))
    return result[0]


async def test_welcome() -> None:
    assert await exchange(Welcome(3)) == Welcome(3)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Welcome(4), ProtocolError, "the client speaks protocol version 3 and the server version 4: install"),
        (Note(b""), ProtocolError, "first message is Note, not Welcome"),
        (Refused("not today"), Rejected, "not today"),
    ],
    ids=["version", "message", "refused"],
)
async def test_other_greetings(reply: Message, error: type[Exception], text: str) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await exchange(reply)
    assert isinstance(raised.value.exceptions[0], error)
    assert text in str(raised.value.exceptions[0])


async def test_server_that_does_not_answer() -> None:
    ours, _ = sides()
    with pytest.raises(ChannelClosed, match=r"no message within 0\.01 s"):
        await ours.endpoint.greet(Hello(3), Welcome, 3, 0.01)
