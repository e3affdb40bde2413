"""Hostile bytes, messages and floods, sent in a process of its own, as an engine or client would be."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect as connect_websocket

from abuse import engine
from kvtier.bridge import protocol as bridge
from kvtier.errors import KVTierError
from kvtier.fleet.member import protocol as agent
from kvtier.memory.keys import join_keys
from kvtier.peers import protocol as peers
from kvtier.rpc.frames import LENGTH, MAX_FRAME_BYTES, Message, encode
from kvtier.rpc.handshake import Handshake

SECONDS = 2.0
"""How long a socket may block: a connection that is not read is closed then."""
ANSWER_SECONDS = 0.1
CONNECTIONS, MESSAGES = 100, 12
"""Of a round, and at most on each connection."""
FLOOD = 150
HOLD_SECONDS = 1.0
INTEGERS = [0, 1, 2, 3, 64, 255, 4096, -1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
FLOATS = [0.0, -1.0, 0.5, 60.0, 1e-9, 1e308, math.inf, math.nan]
TEXTS = ["", "engine", "instance-0", "ram", "ssd", "a" * 300, "\0", "☃" * 999, "127.0.0.1:1", "../../x"]
LENGTHS = [0, 1, 16, 31, 32, 33, 64, 320, 4096, 200_000]
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "\x00", "G" * 9000]
SUFFIXES = ["", "/", "?limit=-1", "?wait=nan", "?wait=1e9", "/../../etc/passwd", "/%00", "?" + "a" * 90_000]


class Addresses(NamedTuple):
    """Where to send to."""

    engines: Path
    peers: int
    secret: bytes
    controller: int
    proxy: int
    metrics: int


def draw(kind: Any, generator: random.Random, *, known: bool = True) -> Any:  # noqa: ANN401 - of the type
    """Return what encodes to a value of one of msgspec's types: mostly an extreme one, or of another type.

    ``known``: whether keys may be those of chunks that good engines store.
    """
    inspect, choice = msgspec.inspect, generator.choice
    if generator.random() < 0.01:
        return choice([None, -1, "text", [], {}, [[[]]] * 9])
    match kind:
        case inspect.StructType():
            # An engine is trusted with the bytes of what it stores, so it must store other keys.
            known = known and kind.cls is not bridge.Reserve
            required = sum(field.required for field in kind.fields)
            fields = kind.fields[: generator.randint(required, len(kind.fields))]
            values = [draw(field.type, generator, known=known) for field in fields]
            return values if kind.tag is None else [kind.tag, *values]
        case inspect.UnionType():
            return draw(choice(kind.types), generator, known=known)
        case inspect.ListType() | inspect.VarTupleType():
            return [draw(kind.item_type, generator, known=known) for _ in range(choice([0, 1, 2, 9, 100]))]
        case inspect.TupleType():
            return [draw(item, generator, known=known) for item in kind.item_types]
        case inspect.IntType():
            return choice([*INTEGERS, generator.randrange(300)])
        case inspect.FloatType():
            return choice(FLOATS)
        case inspect.StrType():
            return choice(TEXTS)
        case inspect.BytesType():
            keys = join_keys(engine.prompt(generator.randrange(20))) if known else generator.randbytes(320)
            return choice([keys, keys[:32], engine.NAMESPACE, generator.randbytes(choice(LENGTHS))])
        case inspect.BoolType():
            return generator.random() < 0.5
        case inspect.LiteralType():
            return choice(kind.values)
    return None


def frames(messages: Any, hello: Message | None, generator: random.Random) -> Iterator[bytes]:  # noqa: ANN401
    """Yield frames of a union of messages: well-formed, damaged and made up, after the greeting if any."""
    kinds = msgspec.inspect.type_info(messages)
    if hello is not None:
        yield encode(hello)
    for _ in range(generator.randint(1, MESSAGES)):
        body = bytearray(msgspec.msgpack.encode(draw(kinds, generator)))
        length, how = len(body), generator.random()
        if how < 0.1:
            body[generator.randrange(length)] ^= 1 << generator.randrange(8)
        elif how < 0.2:
            body[:] = generator.randbytes(length)
        elif how < 0.23:
            length = MAX_FRAME_BYTES + generator.randrange(1 << 31)
        elif how < 0.26:
            length += 1
        yield LENGTH.pack(length) + body


def request(paths: Sequence[str], generator: random.Random) -> bytes:
    """Return an HTTP request, most of them invalid in one way or another."""
    choice = generator.choice
    ids = [draw(msgspec.inspect.IntType(), generator) for _ in range(9)]
    fields = {
        "tokens": choice([ids, list(range(640)), "text", [[]], None]),
        "prompt": choice(["a" * 9000, 5, None]),
        "model": choice(TEXTS),
        "instance": choice(["instance-0", *TEXTS]),
        "tier": choice(["ram", "ssd", None, 7]),
        "old_position": choice([["instance-0", "ram"], ["instance-0"], 3]),
        "new_position": choice([["instance-1", "ssd"], [None, None]]),
        "messages": choice([[], [{"role": "user", "content": 3}], "text"]),
        "stream": choice([True, "yes"]),
        "max_tokens": choice(ids),
    }
    names = generator.sample(sorted(fields), generator.randint(0, len(fields)))
    body = choice(
        [
            json.dumps({name: fields[name] for name in names}).encode(),
            b'{"tokens": [' + b"1," * 20_000 + b"1]}",
            b"[" * 50_000,
            json.dumps({"a" * 9: "b" * 100_000}).encode(),
            generator.randbytes(500),
            b"",
        ]
    )
    length = choice([len(body)] * 6 + [len(body) + 9, 0, -1, 1 << 62, "1e3"])
    headers = [f"Content-Length: {length}", "Host: x", "Content-Type: application/json"]
    if generator.random() < 0.2:
        headers[0] = "Transfer-Encoding: chunked"
        body = choice([b"ffffffffffffffff\r\n", b"-1\r\n", b"5;a=b\r\nhello\r\n0\r\n\r\n", b"x"]) + body
    if generator.random() < 0.1:
        headers += choice([["X: " + "y" * 90_000], [f"X{n}: y" for n in range(3000)], ["Upgrade: websocket"]])
    path = choice(paths) + choice([""] * 6 + SUFFIXES)
    lines = [f"{choice(['GET', 'POST', 'POST', 'POST', *METHODS])} {path} HTTP/1.1", *headers]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return generator.randbytes(200) if generator.random() < 0.05 else head + body


CONTROLLER = ["/lookup", "/move", "/prefetch", "/pin", "/unpin", "/clear", "/events", "/instances", "/stream"]
CONTROLLER += ["/pins", "/metrics", "/healthz", "/connect", "/instances/instance-0/whatif", "/"]
PROXY = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/stats", "/metrics", "/health"]
METRICS = ["/metrics", "/healthz"]
Stream = Callable[[Addresses, random.Random], Iterator[bytes]]


def dial(address: Path | int) -> socket.socket:
    """Connect a socket that blocks for :data:`SECONDS` at most."""
    connected = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
    connected.settimeout(SECONDS)
    connected.connect(str(address) if isinstance(address, Path) else ("127.0.0.1", address))
    return connected


def dial_peer(addresses: Addresses) -> socket.socket:
    """Connect to the port for peers, and authenticate."""
    connected = dial(addresses.peers)
    handshake = Handshake("client", addresses.secret, peers.VERSION)
    connected.sendall(handshake.opening)
    while handshake.needed:
        received = b""
        while len(received) < handshake.needed:
            if not (more := connected.recv(handshake.needed - len(received))):
                raise ConnectionError("closed during the handshake")
            received += more
        connected.sendall(handshake.feed(received))
    return connected


def _engine_hello(generator: random.Random) -> bridge.Hello:
    role = generator.choice(typing.get_args(bridge.Role))
    name = f"hostile-{os.getpid()}-{generator.randrange(3)}"
    return bridge.Hello(bridge.VERSION, name, role, 0, engine.LAYOUT, engine.NAMESPACE)


def _peer_hello(generator: random.Random) -> peers.Hello:
    return peers.Hello(peers.VERSION, "hostile", generator.choice(typing.get_args(peers.Purpose)))


def _instance_hello(generator: random.Random) -> agent.Hello:
    tiers = [agent.TierDescription("ram", "cpu", 1 << 30, shared=False)]
    name = generator.choice(["hostile", "hostile", "instance-0"])
    return agent.Hello(agent.VERSION, name, 1, "0", "host", 1, "127.0.0.1:1", "tcp", tiers)


def _send(connected: socket.socket, pieces: Iterator[bytes], generator: random.Random) -> int:
    """Send all, and read some of the answers or none of them."""
    sent = 0
    with connected, suppress(OSError):
        for piece in pieces:
            connected.sendall(piece)
            sent += 1
        connected.settimeout(ANSWER_SECONDS)
        for _ in range(generator.randrange(3)):
            connected.recv(1 << 16)
    return sent


def send_hostile(target: str, addresses: Addresses, generator: random.Random) -> int:
    """Send hostile bytes and messages on one connection to a target; return the number of messages."""
    greets = generator.random() < 0.8
    hello: Message | None
    match target:
        case "engine socket":
            hello = _engine_hello(generator) if greets else None
            return _send(dial(addresses.engines), frames(bridge.FromEngine, hello, generator), generator)
        case "peer port":
            return _send(dial(addresses.peers), frames(peers.FromClient, None, generator), generator)
        case "authenticated peer":
            hello = _peer_hello(generator) if greets else None
            union = bridge.FromEngine if generator.random() < 0.2 else peers.FromClient
            return _send(dial_peer(addresses), frames(union, hello, generator), generator)
        case "controller's WebSocket":
            hello = _instance_hello(generator) if greets else None
            url, sent = f"ws://127.0.0.1:{addresses.controller}{agent.CONNECT_PATH}", 0
            with suppress(WebSocketException), connect_websocket(url, close_timeout=1, proxy=None) as socket_:
                for frame in frames(agent.FromInstance, hello, generator):
                    socket_.send(frame[LENGTH.size :])
                    sent += 1
            return sent
    port, paths = {
        "controller": (addresses.controller, CONTROLLER),
        "proxy": (addresses.proxy, PROXY),
        "metrics": (addresses.metrics, METRICS),
    }[target]
    requests = (request(paths, generator) for _ in range(generator.randint(1, 4)))
    return _send(dial(port), requests, generator)


TARGETS = [
    "engine socket",
    "peer port",
    "authenticated peer",
    "controller's WebSocket",
    "controller",
    "proxy",
    "metrics",
]


def hostile(target: str, addresses: Addresses, generator: random.Random) -> int:
    """Open several connections, one after the other; return the number of messages."""
    sent = 0
    for _ in range(CONNECTIONS):
        with suppress(OSError, KVTierError):  # Refused, or closed.
            sent += send_hostile(target, addresses, generator)
    return sent


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _dials(addresses: Addresses) -> list[Callable[[], socket.socket]]:
    plain = [addresses.engines, addresses.peers, addresses.controller, addresses.proxy, addresses.metrics]
    return [*(lambda address=address: dial(address) for address in plain), lambda: dial_peer(addresses)]


def _large(addresses: Addresses, generator: random.Random) -> list[tuple[socket.socket, bytes]]:
    """Return a connection to each process, and what is large but allowed to send on it."""
    keys = generator.randbytes(32 * 30_000)
    tokens = json.dumps({"tokens": [1000] * 1_000_000}).encode()
    prompt = json.dumps({"model": "m", "prompt": "word " * 1_600_000}).encode()
    lookup = bridge.Lookup(1, keys, 30_000 * engine.CHUNK_TOKENS)
    contains = peers.Contains(1, keys)
    return [
        (dial(addresses.engines), encode(_scheduler()) + encode(lookup) * 4),
        (
            dial_peer(addresses),
            encode(peers.Hello(peers.VERSION, "hostile", "control")) + encode(contains) * 4,
        ),
        (dial(addresses.controller), _post("/lookup", tokens)),
        (dial(addresses.proxy), _post("/v1/completions", prompt)),
    ]


def _scheduler() -> bridge.Hello:
    name = f"hostile-{os.getpid()}"
    return bridge.Hello(bridge.VERSION, name, "scheduler", 0, engine.LAYOUT, engine.NAMESPACE)


def flood(kind: str, addresses: Addresses, generator: random.Random) -> int:
    """Flood all sockets at once; return the number of connections."""
    with ExitStack() as stack:
        opened: list[socket.socket] = []

        def add(open_: Callable[[], socket.socket]) -> None:
            with suppress(OSError, KVTierError):
                opened.append(stack.enter_context(open_()))

        match kind:
            case "connections":
                for open_ in _dials(addresses):
                    for _ in range(FLOOD):
                        add(open_)
            case "slow readers":
                status = encode(bridge.Hello(bridge.VERSION, "observer", "observer", 0, engine.LAYOUT, b""))
                status += encode(bridge.Status(1)) * 3000
                contains = encode(peers.Hello(peers.VERSION, "hostile", "control"))
                contains += encode(peers.Contains(1, generator.randbytes(32 * 1000))) * 50
                get = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500
                for open_, data in zip(
                    _dials(addresses), [status, b"", get, get, get, contains], strict=True
                ):
                    for _ in range(5):
                        add(open_)
                        with suppress(OSError):
                            opened[-1].sendall(data)
            case "tiny pieces":
                for open_ in _dials(addresses):
                    add(open_)
                data = (
                    b"POST /lookup HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                    + b"1\r\n1\r\n" * 3000
                )
                for at in range(0, len(data), 3):
                    for connected in opened:
                        with suppress(OSError):
                            connected.sendall(data[at : at + 3])
            case "large bodies":
                for _ in range(4):
                    with suppress(OSError, KVTierError):
                        for connected, data in _large(addresses, generator):
                            opened.append(stack.enter_context(connected))
                            with suppress(OSError):
                                connected.sendall(data)
        time.sleep(HOLD_SECONDS)
        return len(opened)


FLOODS = ["connections", "slow readers", "tiny pieces", "large bodies"]
