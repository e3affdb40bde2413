"""``kvtier proxy`` and its engines, each in a process of its own, stopped and killed for real."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.cli import main, terminal
from tests.hosts import ROOT

PATIENCE = 60
LONG = "word " * 2000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Engine:
    """A stub engine that can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.proxy.stub_process", str(self.port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class ProxyProcess:
    """``kvtier proxy`` with the shortest checks, and a client of it."""

    def __init__(self, prefillers: list[Engine], decoders: list[Engine], log: Path) -> None:
        named = ["--listen", "127.0.0.1:0", "--check", "100ms"]
        named += [part for engine in prefillers for part in ("--prefill", engine.url)]
        named += [part for engine in decoders for part in ("--decode", engine.url)]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvtier",
                    "proxy",
                    *named,
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.until(lambda: "the proxy is at" in log.read_text())
        found = re.search(r"the proxy is at (\S+),", log.read_text())
        assert found
        self.client = httpx.Client(base_url=found[1], trust_env=False, timeout=PATIENCE)
        self.until(lambda: set(self.states().values()) == {"up"})

    def states(self) -> dict[str, str]:
        return {engine["url"]: engine["state"] for engine in self.client.get("/engines").json()}

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def ask(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "m", "prompt": LONG, **fields})

    def end(self) -> str:
        """What it has printed, when it has ended by itself."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, self.log.read_text()
        return output

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


Start = Callable[[int, int], tuple[ProxyProcess, list[Engine], list[Engine]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(prefillers: int, decoders: int) -> tuple[ProxyProcess, list[Engine], list[Engine]]:
            engines = []
            for _ in range(prefillers + decoders):
                engines.append(Engine())
                stack.callback(engines[-1].kill)
            proxy = ProxyProcess(engines[:prefillers], engines[prefillers:], tmp_path / "log")
            stack.callback(proxy.close)
            return proxy, engines[:prefillers], engines[prefillers:]

        yield begin


def test_it_serves_and_prints_how_long_prefills_took(start: Start) -> None:
    proxy, _, _ = start(1, 1)
    headers = {"Authorization": "Bearer sk-of-a-client"}
    for number in range(3):
        body = {"model": "m", "prompt": f"{number} {LONG}"}
        answer = proxy.client.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["text"] == " hello"
        assert "kv_transfer_params" not in answer.json()
    chat = {"model": "m", "messages": [{"role": "user", "content": LONG}], "stream": True, "max_tokens": 5}
    assert proxy.client.post("/v1/chat/completions", json=chat).text.count("data: ") == 6
    assert proxy.client.get("/v1/models").json()["data"][0]["id"] == "m"
    stats = proxy.client.get("/stats").json()["prefill_ttft"]
    assert stats["count"] == 4
    assert 0 < stats["median_ms"] <= stats["p99_ms"]
    proxy.process.send_signal(signal.SIGTERM)
    printed = proxy.end()
    number = r"\d+\.\d+"
    assert re.fullmatch(
        "={31}\nNum requests: 4\nPrefill node TTFT stats:\n"
        f"- Average \\(ms\\): {number}\n- Median \\(ms\\): {number}\n"
        f"- 99th Percentile \\(ms\\): {number}\n={{31}}\n",
        printed,
    )
    log = proxy.log.read_text()
    assert "SIGTERM: leaving" in log
    assert "sk-of-a-client" not in log
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.parametrize("again", [False, True])
def test_streams_finish_after_sigterm_but_not_after_two(start: Start, again: bool) -> None:
    proxy, _, _ = start(0, 1)
    count = 1000 if again else 40
    body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": count, "pause": 0.05}
    events = []
    with proxy.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 1 and line:
                proxy.process.send_signal(signal.SIGTERM)
                proxy.until(lambda: proxy.client.get("/health").status_code == 503)
                if again:
                    proxy.process.send_signal(signal.SIGTERM)
    assert events[-1] == "[DONE]"
    if again:
        assert "this proxy ends" in json.loads(events[-2])["error"]["message"]
        assert len(events) < count
    else:
        assert len(events) == count + 1
    assert "Num requests: 0" in proxy.end()


def test_a_decoder_that_is_killed_and_comes_back(start: Start) -> None:
    proxy, _, (decoder,) = start(1, 1)
    body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 1000, "pause": 0.05}
    lines = []
    with proxy.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not lines:
                decoder.kill()
            lines.append(line)
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == 502
    assert proxy.ask().status_code == 503
    proxy.until(lambda: proxy.states()[decoder.url] == "down")
    decoder.start()
    proxy.until(lambda: proxy.states()[decoder.url] == "up")
    assert proxy.ask().status_code == 200


def test_a_prefiller_that_is_stopped_or_killed_is_done_without(start: Start) -> None:
    proxy, (prefiller,), _ = start(1, 1)
    prefiller.process.send_signal(signal.SIGSTOP)
    assert proxy.ask().status_code == 200
    prefiller.process.send_signal(signal.SIGCONT)
    proxy.until(lambda: proxy.states()[prefiller.url] == "up")
    prefiller.kill()
    assert proxy.ask(cache_salt="other").status_code == 200
    prefiller.start()
    proxy.until(lambda: proxy.states()[prefiller.url] == "up")
    assert proxy.ask(cache_salt="third").status_code == 200
    assert proxy.client.get("/stats").json()["prefills"]["handed_over"] == 1


def test_a_decoder_that_is_stopped_is_replaced(start: Start) -> None:
    proxy, _, decoders = start(0, 2)
    decoders[0].process.send_signal(signal.SIGSTOP)
    for _ in range(4):
        assert proxy.ask(prompt="x").status_code == 200
    decoders[0].process.send_signal(signal.SIGCONT)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the command says in this process, which is over soon."""
    monkeypatch.setattr(terminal.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("kvtier"), "level", logging.WARNING)

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["proxy", *map(str, arguments)])
        assert ended.value.code in {1, 2}
        return capsys.readouterr().err

    return run


def test_what_is_wrong_is_said_in_one_message(says: Callable[..., str], tmp_path: Path) -> None:
    assert "which engine answers?" in says("--prefill", "http://localhost:1")
    said = says("--decode", "localhost:8200")
    assert len(said.splitlines()) == 1
    assert "write one like http://10.0.0.1:8100" in said
    decode = ("--decode", "http://localhost:1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        said = says(*decode, "--listen", address)
    assert f"cannot listen on {address}: Address already in use: write another" in said
    assert "--listen" in said
    assert "--token-file: the file" in says(*decode, "--token-file", tmp_path / "none")
    assert "none of DEBUG" in says(*decode, "--log-level", "loud")
