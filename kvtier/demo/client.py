"""The demo's view of a vLLM server: one completion at a time, timed, with what vLLM says of its caches."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from kvtier.demo.server import DemoFailed

RESET_SECONDS = 20.0
_SOURCE = re.compile(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Completion:
    """One answer. ``sources`` counts the prompt tokens that were cached, by vLLM's name for where."""

    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]
    text: str
    ttft: float
    """Seconds from sending the request to its first token."""
    sources: dict[str, int]


class Client:
    """Talks to one vLLM server. All calls block; they raise ``httpx.HTTPError`` or :class:`DemoFailed`."""

    def __init__(self, port: int, model: str) -> None:
        self._model = model
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            return self._http.get("/health", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    def tokenize(self, text: str) -> list[int]:
        """The model's tokens of a text."""
        answer = self._http.post("/tokenize", json={"model": self._model, "prompt": text}).raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's own cache, waiting for blocks that are just being freed. Whether it could."""
        deadline = time.monotonic() + RESET_SECONDS
        while time.monotonic() < deadline:
            if self._http.post("/reset_prefix_cache").raise_for_status().json()["success"]:
                return True
            time.sleep(0.1)
        return False

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """Complete ``prompt`` greedily by exactly ``new_tokens`` tokens."""
        request = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        before = self._sources()
        tokens: list[int] = []
        text = ""
        ttft = 0.0
        usage: dict[str, Any] = {}
        started = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=request) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            for event in _events(response):
                for choice in event["choices"]:
                    if not tokens and choice.get("token_ids"):
                        ttft = time.perf_counter() - started
                    tokens += choice.get("token_ids") or []
                    text += choice["text"]
                usage = event.get("usage") or usage
        after = self._sources()
        return Completion(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            tokens=tokens,
            text=text,
            ttft=ttft,
            sources={name: count - before.get(name, 0) for name, count in after.items()},
        )

    def _sources(self) -> dict[str, int]:
        metrics = self._http.get("/metrics").raise_for_status().text
        return {source: int(float(count)) for source, count in _SOURCE.findall(metrics)}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent stream."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoFailed(f"vLLM answered {event['error']}")
            yield event
