"""Commands to the controller: chunks are moved, pinned and cleared while they are used."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from soak.oracle import Oracle
from soak.schedule import ADAPTED_SHARE

ANSWER_SECONDS = 5.0
PIN_TTL = "20s"
"""A pin that cannot be removed, because an instance or the controller does not answer, ends by itself."""
LOOKUPS = 30
"""Prompts to look up until one is held."""
INSTANCES = ("instance-0", "instance-1")
TIERS = ("ram", "ssd")


class Commands:
    """Sends commands to a controller."""

    def __init__(self, url: str, oracle: Oracle, count: Callable[[str, int], None]) -> None:
        """``count`` receives the number of chunks that each kind of command has processed."""
        self._url = url
        self._oracle = oracle
        self._count = count

    def move(self, amount: int) -> str:
        """Have a conversation's chunks copied or moved from one instance to the other."""
        tokens = self._oracle.question(amount % self._oracle.conversations, 0).tokens
        source = amount // 1000 % 2
        body = {
            "old_position": [INSTANCES[source], "ram"],
            "new_position": [INSTANCES[1 - source], "ram"],
            "tokens": tokens,
            "copy": bool(amount // 2000 % 2),
        }
        try:
            answer = httpx.post(f"{self._url}/move", json=body, timeout=ANSWER_SECONDS, trust_env=False)
        except httpx.HTTPError as error:
            return f"the controller does not answer: {error!r}"
        return f"status {answer.status_code}"

    def operate(self, generator: random.Random) -> int:
        """Pin, clear and move the same chunks, all at once; unpin them. Return how many were processed."""
        places = [{"instance": instance, "tier": tier} for instance in INSTANCES for tier in TIERS]
        positions = [[place["instance"], place["tier"]] for place in places]
        commands: list[tuple[str, Mapping[str, Any]]] = [
            *(("pin", {**place, "ttl": PIN_TTL}) for place in places),
            *(("clear", place) for place in places),
            *(
                ("move", {"old_position": old, "new_position": new, "copy": generator.random() < 0.5})
                for old in positions
                for new in positions
                if old != new
            ),
        ]
        generator.shuffle(commands)
        unpin = [("unpin", {"instance": instance, "tier": TIERS[0]}) for instance in INSTANCES]
        # Its certificates, which it needs none of, would take longer to load than everything else.
        client = httpx.Client(base_url=self._url, timeout=2 * ANSWER_SECONDS, trust_env=False, verify=False)  # noqa: S501
        with client, ThreadPoolExecutor(len(commands)) as threads:
            tokens = self._find_held(client, generator)

            def run(command: tuple[str, Mapping[str, Any]]) -> int:
                return self._run(client, command[0], {**command[1], "tokens": tokens})

            processed = sum(threads.map(run, commands))
            return processed + sum(threads.map(run, unpin))

    def _find_held(self, client: httpx.Client, generator: random.Random) -> list[int]:
        """Return a prompt of which an instance has chunks in memory, if one is soon found."""
        plain = [number for number in range(self._oracle.conversations) if number % ADAPTED_SHARE]
        tokens: list[int] = []
        for number in generator.sample(plain, min(LOOKUPS, len(plain))):
            tokens = self._oracle.question(number, 0).tokens
            try:
                found = client.post("/lookup", json={"tokens": tokens}).raise_for_status().json()
            except httpx.HTTPError:
                break
            if any(tiers.get(TIERS[0]) for tiers in found["instances"].values()):
                break
        return tokens

    def _run(self, client: httpx.Client, command: str, body: Mapping[str, Any]) -> int:
        """Send a command, and wait for its end; return how many chunks it has processed."""
        try:
            answer = client.post(f"/{command}", json=body).raise_for_status()
            event = client.get(f"/events/{answer.json()['event_id']}", params={"wait": ANSWER_SECONDS})
            chunks: int = event.raise_for_status().json()["result"]["chunks"]
        except httpx.HTTPError:  # Nothing is held, or the controller was killed with its events.
            return 0
        self._count(f"chunks of {command}", chunks)
        return chunks
