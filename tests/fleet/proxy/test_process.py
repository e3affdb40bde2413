"""``kvtier proxy`` and its engines in their own processes, paused and killed."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli import main, terminal

from .conftest import LONG
from .proxy_process import Start, start

__all__ = ["start"]  # A fixture.


def test_serves_and_prints_prefill_statistics(start: Start) -> None:
    proxy, _, _ = start(1, 1, fork=False)
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
    printed = proxy.wait()
    number = r"\d+\.\d+"
    assert re.fullmatch(
        "={31}\nNum requests: 4\nPrefill node TTFT stats:\n"
        f"- Average \\(ms\\): {number}\n- Median \\(ms\\): {number}\n"
        f"- 99th Percentile \\(ms\\): {number}\n={{31}}\n",
        printed,
    )
    log = proxy.log.read_text()
    assert "SIGTERM: shutting down" in log
    assert "sk-of-a-client" not in log
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.parametrize("again", [False, True])
def test_streams_finish_after_one_sigterm_but_not_after_two(start: Start, again: bool) -> None:
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
                proxy.wait_until(lambda: proxy.client.get("/health").status_code == 503)
                if again:
                    proxy.process.send_signal(signal.SIGTERM)
    assert events[-1] == "[DONE]"
    if again:
        assert "this proxy is shutting down" in json.loads(events[-2])["error"]["message"]
        assert len(events) < count
    else:
        assert len(events) == count + 1
    assert "Num requests: 0" in proxy.wait()


def test_decoder_is_killed_and_restarted(start: Start) -> None:
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
    assert proxy.complete().status_code == 503
    proxy.wait_until(lambda: proxy.states()[decoder.url] == "down")
    decoder.start()
    proxy.wait_until(lambda: proxy.states()[decoder.url] == "up")
    assert proxy.complete().status_code == 200


def test_proxy_continues_without_a_paused_or_killed_prefiller(start: Start) -> None:
    proxy, (prefiller,), _ = start(1, 1)
    prefiller.process.send_signal(signal.SIGSTOP)
    assert proxy.complete().status_code == 200
    prefiller.process.send_signal(signal.SIGCONT)
    proxy.wait_until(lambda: proxy.states()[prefiller.url] == "up")
    prefiller.kill()
    assert proxy.complete(cache_salt="other").status_code == 200
    prefiller.start()
    proxy.wait_until(lambda: proxy.states()[prefiller.url] == "up")
    assert proxy.complete(cache_salt="third").status_code == 200
    assert proxy.client.get("/stats").json()["prefills"]["transferred"] == 1


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a failing command in this process, and return its error output."""
    monkeypatch.setattr(terminal.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("kvtier"), "level", logging.WARNING)

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exited:
            main(["proxy", *map(str, arguments)])
        assert exited.value.code in {1, 2}
        return capsys.readouterr().err

    return run


def test_invalid_options_are_one_message(run_command: Callable[..., str], tmp_path: Path) -> None:
    assert "no decode instance" in run_command("--prefill", "http://localhost:1")
    errors = run_command("--decode", "localhost:8200")
    assert len(errors.splitlines()) == 1
    assert "write one like http://10.0.0.1:8100" in errors
    decode = ("--decode", "http://localhost:1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        errors = run_command(*decode, "--listen", address)
    assert f"cannot listen on {address}: Address already in use: set another" in errors
    assert "--listen" in errors
    assert "--token-file: cannot read the file" in run_command(*decode, "--token-file", tmp_path / "none")
    assert "is not DEBUG" in run_command(*decode, "--log-level", "loud")
