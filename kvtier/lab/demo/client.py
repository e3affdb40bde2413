"""HTTP client for a vLLM server or a proxy: timed completions, with vLLM's cache metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvtier.lab.demo.server import DemoFailed

RESET_SECONDS = 20.0
ANSWER_SECONDS = 600.0
_SOURCE = re.compile(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Completion:
    """One response. ``sources`` counts cached prompt tokens by vLLM's name for their source."""

    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]
    ttft: float
    """Seconds from sending the request to the first token."""
    sources: dict[str, int]
    gaps: list[float] = field(default_factory=list)
    """Inter-token latencies, in seconds."""


class Client:
    """Client of one server. All methods except :meth:`stream` block.

    They raise ``httpx.HTTPError`` or :class:`DemoFailed`.
    """

    def __init__(self, port: int, model: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._model = model
        # Loopback is not reached through the proxy of the environment.
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_SECONDS, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def healthy(self) -> bool:
        """Whether the server responds to its health check."""
        try:
            return self._http.get("/health", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON response of a GET request."""
        return self._http.get(path).raise_for_status().json()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        answer = self._http.post("/tokenize", json={"model": self._model, "prompt": text}).raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def reset_prefix_cache(self) -> bool:
        """Reset vLLM's prefix cache, and return whether that succeeded. Waits for blocks still in use."""
        deadline = time.monotonic() + RESET_SECONDS
        while time.monotonic() < deadline:
            if self._http.post("/reset_prefix_cache").raise_for_status().json()["success"]:
                return True
            time.sleep(0.1)
        return False

    def complete(self, prompt: Sequence[int], new_tokens: int, *, salt: str | None = None) -> Completion:
        """Complete ``prompt`` greedily by exactly ``new_tokens`` tokens.

        Requests with different ``salt`` do not share cached prefixes.
        """
        before, reader = self.sources(), StreamReader()
        request = self.request(prompt, new_tokens, salt)
        with self._http.stream("POST", "/v1/completions", json=request) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            for line in response.iter_lines():
                reader.add(line)
        after = self.sources()
        return reader.completion({name: count - before.get(name, 0) for name, count in after.items()})

    async def stream(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        salt: str | None = None,
        on_token: Callable[[int], object] = lambda count: None,
    ) -> Completion:
        """Like :meth:`complete`, but asynchronous, for concurrent requests; without ``sources``.

        ``on_token`` is called after each event with the number of tokens so far.
        """
        reader = StreamReader()
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=ANSWER_SECONDS, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=self.request(prompt, new_tokens, salt)) as response,
        ):
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                reader.add(line)
                on_token(len(reader.tokens))
        return reader.completion({})

    def request(self, prompt: Sequence[int], new_tokens: int, salt: str | None = None) -> dict[str, Any]:
        """Return the body of the request that :meth:`complete` sends. ``salt``: as there. Does not block."""
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({} if salt is None else {"cache_salt": salt}),
        }

    def sources(self) -> dict[str, int]:
        """Return the tokens of prompts that were found, since vLLM started, by its name for where."""
        found = _SOURCE.findall(self._http.get("/metrics").raise_for_status().text)
        return {source: int(float(count)) for source, count in found}


class StreamReader:
    """Parses one streaming response. Create it when the request is sent: it measures TTFT."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._times: list[float] = []

    def add(self, line: str) -> None:
        """Parse one line of the event stream. Raises :class:`DemoFailed` if it reports an error."""
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise DemoFailed(f"vLLM answered {event['error']}")
        now = time.perf_counter()
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            self.tokens += tokens
            self._times += [now] * len(tokens)
        self._usage = event.get("usage") or self._usage

    def completion(self, sources: dict[str, int]) -> Completion:
        """Return the completion after the last line. Raises :class:`DemoFailed` if lines are missing."""
        if not self._times or not self._usage:
            raise DemoFailed("the response stream is incomplete")
        return Completion(
            prompt_tokens=self._usage["prompt_tokens"],
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            tokens=self.tokens,
            ttft=self._times[0] - self._started,
            sources=sources,
            gaps=[later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)],
        )
