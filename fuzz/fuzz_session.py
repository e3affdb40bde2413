"""Any sequence of messages, whole, damaged and made up, to a session over a real cache.

Each is a conversation of its own with the same cache; afterwards nothing may be promised or leased.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import atheris

with atheris.instrument_imports(include=["kvtier.rpc", "kvtier.peers"]):
    from kvtier.memory.keys import join_keys
    from kvtier.peers.protocol import Await, Contains, Hello, Lookup, Release
    from kvtier.rpc.frames import Ping, encode
    from tests.rigs.peer_session import HELD, ClientMessage, SessionHarness

MAX_MESSAGES = 12


def _message(provider: atheris.FuzzedDataProvider) -> ClientMessage:
    kind = provider.ConsumeIntInRange(0, 8)
    ticket = provider.ConsumeIntInRange(-(1 << 63), (1 << 64) - 1)
    if kind in (0, 1):
        keys = [
            HELD[provider.ConsumeIntInRange(0, len(HELD) - 1)]
            for _ in range(provider.ConsumeIntInRange(0, 6))
        ]
        joined = join_keys(keys) + provider.ConsumeBytes(provider.ConsumeIntInRange(0, 40))
        return Lookup(ticket, joined, provider.ConsumeBool()) if kind else Contains(ticket, joined)
    if kind in (2, 3):
        type_ = Await if kind == 2 else Release
        chunks = [provider.ConsumeIntInRange(-2, 8) for _ in range(provider.ConsumeIntInRange(0, 5))]
        if provider.ConsumeBool():
            return lambda latest: type_(ticket, latest, chunks)
        return type_(ticket, provider.ConsumeIntInRange(-5, (1 << 64) - 1), chunks)
    if kind == 4:
        return Ping(ticket)
    if kind == 5:
        return Hello(provider.ConsumeIntInRange(0, 5), provider.ConsumeUnicodeNoSurrogates(10), "control")
    raw: bytes = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 60))
    if kind == 6:
        return raw
    if kind == 7:
        return len(raw).to_bytes(4, "little") + raw
    damaged = bytearray(encode(Lookup(ticket, HELD[0], True)))
    for byte in raw:
        damaged[4 + byte % (len(damaged) - 4)] ^= byte
    return bytes(damaged)


def main() -> None:
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    opened = SessionHarness.open()
    harness = loop.run_until_complete(opened.__aenter__())

    def one_input(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        messages = [_message(provider) for _ in range(provider.ConsumeIntInRange(1, MAX_MESSAGES))]
        loop.run_until_complete(harness.run(*messages))

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
