"""Send a vLLM server the same long prompt twice, and print the time to first token of each request.

python query_twice.py man-bash.txt [http://localhost:8000]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import httpx

CONTEXT_CHARACTERS = 70_000
QUESTION = "Summarize bash in 2 sentences."


def time_to_first_token(client: httpx.Client, model: str, prompt: str) -> float:
    """Stream a completion to the terminal. Return the seconds until its first text."""
    request = {"model": model, "prompt": prompt, "stream": True, "max_tokens": 64, "temperature": 0}
    started = time.perf_counter()
    first = 0.0
    with client.stream("POST", "/v1/completions", json=request) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                first = first or time.perf_counter() - started
                print(text, end="", flush=True)
    print()
    return first


def main() -> None:
    context = Path(sys.argv[1]).read_text(errors="replace")[:CONTEXT_CHARACTERS]
    server = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8000"
    with httpx.Client(base_url=server, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        cold = time_to_first_token(client, model, f"{context}\n\n{QUESTION}")
        warm = time_to_first_token(client, model, f"{context}\n\n{QUESTION}")
    print(f"cold {cold:.3f} s, warm {warm:.3f} s: {cold / warm:.1f} times faster")


if __name__ == "__main__":
    main()
