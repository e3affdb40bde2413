"""The peer of ``benchmarks.codec_links``: holds KV until its standard input ends.

Reads a line of JSON, ``[settings, tokens, bytes of each]``, and the KV. Writes a line once it serves that.
"""

from __future__ import annotations

import json
import sys

import anyio

from benchmarks.peers_process import opened


async def main() -> None:
    settings, tokens, token_bytes = json.loads(sys.stdin.buffer.readline())
    async with opened(settings) as instance:
        model = instance.cache.model("llama", token_bytes=token_bytes)
        kv = await anyio.to_thread.run_sync(sys.stdin.buffer.read, tokens * token_bytes)
        assert await model.store(list(range(tokens)), kv) == tokens
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.buffer.read)


if __name__ == "__main__":
    anyio.run(main)
