"""The commands that query a controller: their requests, output and error handling."""

from __future__ import annotations

import io
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from kvtier.cli import controller_api, controller_output
from kvtier.testing.servers import free_port
from tests.rigs.controller_stub import EVENT, Raw, Stub

from .conftest import Kvtier, spawn

FOUND = {"model": "m", "num_tokens": 12, "instances": {"b": {"ssd": 12}, "a": {"ram": 12, "ssd": 4}}}
ACCEPTED = {"event_id": "e1", "num_tokens": 12}
TIER = {
    "name": "ram",
    "type": "cpu",
    "capacity": 4 << 20,
    "used": 1 << 20,
    "chunks": 8,
    "available": True,
    "shared": False,
    "found": 3,
    "outages": 0,
    "corrupt": 0,
    "hit_rate": 0.2,
}
POOL = {**TIER, "name": "pool", "type": "redis", "capacity": None, "shared": True, "hit_rate": 0.1}
INSTANCE: dict[str, Any] = {
    "instance": "a",
    "state": "connected",
    "version": "0.1.0",
    "host": "here",
    "process": 7,
    "peer": None,
    "transport": None,
    "registered_at": 1.7e9,
    "last_heartbeat": 1.7e9,
    "up_to_date": True,
    "models": ["m"],
    "engines": ["vllm"],
    "tiers": [TIER, POOL],
    "looked_up_tokens": 10,
    "hit_rate": 0.3,
    "outages": 0,
    "corrupt": 0,
    "failed": 0,
    "peers": 0,
    "peers_down": 0,
    "pinned": 0,
    "what_if_at": None,
}
COMMANDS = [
    ["lookup", "--tokens", "[1]"],
    ["move", "a/ram", "b/ram", "--tokens", "[1]"],
    ["prefetch", "a/ram", "--tokens", "[1]"],
    ["pin", "a/ram", "--tokens", "[1]"],
    ["unpin", "a/ram", "--tokens", "[1]"],
    ["clear", "a", "--yes"],
    ["instances"],
    ["events"],
]
by_name = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    with stub.serving():
        for path in ("move", "prefetch", "pin", "unpin", "clear"):
            stub.respond(f"POST /{path}", ACCEPTED)
        stub.respond("POST /lookup", FOUND)
        stub.respond("GET /events/e1", EVENT)
        stub.respond("GET /events", {"events": [EVENT]})
        stub.respond("GET /instances", {"instances": [INSTANCE]})
        stub.respond(
            "GET /instances/a", {**INSTANCE, "history": [{"time": 1.7e9, "hit_rate": 0.5, "tiers": []}]}
        )
        yield stub


@pytest.fixture(autouse=True)
def _use_the_stub(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONTROLLER__URL", stub.url)


def test_lookup(kvtier: Kvtier, stub: Stub) -> None:
    result = kvtier("lookup", "--tokens", "[1, 2, 3]", "--model", "m", "--salt", "s")
    assert [line.split() for line in result.output.splitlines()[1:]] == [
        ["a", "ram", "12", "100%"],
        ["b", "ssd", "12", "100%"],
        ["a", "ssd", "4", "33%"],
    ]
    assert stub.requests[0].body == {"tokens": [1, 2, 3], "model": "m", "salt": "s"}
    assert json.loads(kvtier("lookup", "--tokens", "[1]", "--json").output) == FOUND


def test_lookup_without_a_hit(kvtier: Kvtier, stub: Stub) -> None:
    stub.respond("POST /lookup", {**FOUND, "instances": {"a": {}}})
    result = kvtier("lookup", "--prompt", "Why?")
    message = "No instance holds a prefix of this prompt (12 tokens, model m).\n"
    assert (result.status, result.output) == (0, message)
    assert stub.requests[0].body == {"prompt": "Why?"}


def test_sources_of_a_prompt(
    kvtier: Kvtier, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, ids, answer = tmp_path / "p.txt", tmp_path / "t.json", tmp_path / "a.json"
    text.write_text("Wörter\n")
    ids.write_text("[4, 5]")
    answer.write_text(json.dumps({"count": 2, "max_model_len": 64, "tokens": [6, 7], "token_strs": None}))
    kvtier("lookup", "--prompt-file", text)
    kvtier("lookup", "--tokens-file", ids)
    kvtier("lookup", "--tokens-file", answer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[8]")))
    kvtier("lookup", "--tokens-file", "-")
    assert [request.body for request in stub.requests] == [
        {"prompt": "Wörter\n"},
        {"tokens": [4, 5]},
        {"tokens": [6, 7]},
        {"tokens": [8]},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt: use --prompt, --prompt-file, --messages, --tokens or --tokens-file"),
        (["--model", "m"], "--model and --salt require a prompt"),
        (["--prompt", "x", "--tokens", "[1]"], "--prompt and --tokens exclude each other"),
        (["--tokens", "[1, -1]"], "invalid token ids"),
        (["--tokens", "[1.5]"], "invalid token ids"),
        (["--token-ids", "1, x"], "invalid token ids"),
        (["--tokens", '{"words": []}'], "invalid token ids"),
        (["--prompt-file", "/nowhere"], "/nowhere cannot be read: No such file or directory"),
        (["--tokens-file", "/dev/zero"], "/dev/zero is longer than 64MiB"),
    ],
)
def test_invalid_prompt_options(kvtier: Kvtier, stub: Stub, options: list[str], message: str) -> None:
    result = kvtier("lookup", *options)
    assert result.status == 2
    assert message in result.message
    assert not stub.requests


@pytest.mark.parametrize("places", [["a", "b/ram"], ["a/ram", "b/"], ["/ram", "b/ram"], ["a/b/c", "b/ram"]])
def test_invalid_places(kvtier: Kvtier, stub: Stub, places: list[str]) -> None:
    result = kvtier("move", *places, "--tokens", "[1]")
    assert result.status == 2
    assert "use INSTANCE/TIER, as in decode-1/ram" in result.message
    assert not stub.requests


def test_move(kvtier: Kvtier, stub: Stub) -> None:
    running = {**EVENT, "state": "running", "chunks_done": 1, "ended_at": None}
    stub.respond("GET /events/e1", {**running, "state": "queued"}, running, running, EVENT)
    result = kvtier("move", "a/ram", "b/ram", "--tokens", "[1]", "--copy")
    assert result.output == "12 tokens moved (a/ram -> b/ram): 4 of 4 chunks, 4KiB in 2s (2KiB/s).\n"
    move, *polls = stub.requests
    assert (move.call, move.body) == (
        "POST /move",
        {"old_position": ["a", "ram"], "new_position": ["b", "ram"], "tokens": [1], "copy": True},
    )
    assert [poll.query for poll in polls] == ["wait=0.5"] * 4


def test_move_shows_progress_on_a_terminal(
    kvtier: Kvtier, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")  # A "dumb" terminal shows no progress.
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(controller_output, "messages", lambda: console)
    running = {**EVENT, "state": "running", "chunks_done": 1, "bytes_done": 1024, "ended_at": None}
    stub.respond("GET /events/e1", running, running, EVENT)
    kvtier("move", "a/ram", "b/ram", "--tokens", "[1]")
    shown = Text.from_ansi(screen.getvalue()).plain
    assert "move running" in shown
    assert "1 of 4 chunks 1KiB" in shown


def test_move_without_waiting(kvtier: Kvtier, stub: Stub) -> None:
    arguments = ["move", "a/ram", "b/ram", "--tokens", "[1]", "--no-wait"]
    assert kvtier(*arguments).output == "e1\n"
    assert json.loads(kvtier(*arguments, "--json").output) == ACCEPTED
    assert {request.call for request in stub.requests} == {"POST /move"}


def test_failed_move(kvtier: Kvtier, stub: Stub) -> None:
    stub.respond("GET /events/e1", {**EVENT, "state": "failed", "error": "b is gone"})
    result = kvtier("move", "a/ram", "b/ram", "--tokens", "[1]")
    assert (result.status, result.output) == (1, "")
    assert result.errors == "error: move e1 failed: b is gone\n"
    shown = kvtier("move", "a/ram", "b/ram", "--tokens", "[1]", "--json")
    assert shown.status == 1
    assert json.loads(shown.output)["error"] == "b is gone"


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        (
            {"chunks": 0, "num_tokens": 0},
            "No chunk of it is held there: none was moved (a/ram -> b/ram).\n",
        ),
        (
            {
                "chunks_done": 3,
                "result": {**EVENT["result"], "tokens": 9, "chunks": 3, "reason": "b/ram is full"},
            },
            "9 tokens moved (a/ram -> b/ram): 3 of 4 chunks, 4KiB in 2s (2KiB/s). b/ram is full\n",
        ),
    ],
    ids=["nothing", "a part"],
)
def test_incomplete_move(kvtier: Kvtier, stub: Stub, changes: dict[str, Any], output: str) -> None:
    stub.respond("GET /events/e1", EVENT | changes)
    assert kvtier("move", "a/ram", "b/ram", "--tokens", "[1]") == (0, output, "")


def test_ctrl_c_does_not_end_the_operation(stub: Stub) -> None:
    polled = threading.Event()
    original = stub.answer

    def answer(request: Any) -> tuple[int, Any]:
        if request.call == "GET /events/e1":
            polled.set()
        return original(request)

    stub.answer = answer  # type: ignore[method-assign]
    stub.respond("GET /events/e1", {**EVENT, "state": "running"})
    process = spawn("move", "a/ram", "b/ram", "--tokens", "[1]")
    try:
        assert polled.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "The operation continues. Follow it with: kvtier events e1 --follow\n"


def test_controller_lost_during_a_move(kvtier: Kvtier, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_api, "TIMEOUT_SECONDS", 0.0)
    stub.respond("GET /events/e1", {**EVENT, "state": "running"}, None)
    result = kvtier("move", "a/ram", "b/ram", "--tokens", "[1]")
    assert (result.status, result.output) == (1, "")
    assert "disconnected before it responded" in result.errors
    assert result.errors.endswith("; check it later with: kvtier events e1\n")


def test_prefetch_pin_and_unpin(kvtier: Kvtier, stub: Stub) -> None:
    kvtier("prefetch", "a/ram", "--tokens", "[1]", "--deadline", "250ms", "--no-wait")
    kvtier("pin", "a/ram", "--tokens", "[1]", "--ttl", "1h", "--no-wait")
    kvtier("pin", "a/ram", "--prompt", "x", "--no-wait")
    kvtier("unpin", "a/ram", "--tokens", "[1]", "--no-wait")
    at = {"instance": "a", "tier": "ram"}
    assert [(request.call, request.body) for request in stub.requests] == [
        ("POST /prefetch", {**at, "tokens": [1], "deadline": 0.25}),
        ("POST /pin", {**at, "tokens": [1], "ttl": 3600}),
        ("POST /pin", {**at, "prompt": "x"}),
        ("POST /unpin", {**at, "tokens": [1]}),
    ]
    result = kvtier("pin", "a/ram", "--tokens", "[1]", "--ttl", "soon")
    assert result.status == 2
    assert "'soon' is not a duration" in result.message


def test_clear_asks_for_confirmation(kvtier: Kvtier, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(answer: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))

    enter("n\n")
    result = kvtier("clear", "a")
    assert result.status == 1
    assert "Remove 8 chunks, 1MiB, from ram; 8 chunks, 1MiB, from pool of a? [y/N]" in result.errors
    enter("\n")
    result = kvtier("clear", "a/ram", "--tokens", "[1]")
    assert "Remove, of 12 tokens, 12 from ram of a? [y/N]" in result.errors
    assert "POST /clear" not in [request.call for request in stub.requests]
    enter("y\n")
    stub.respond("GET /events/e1", {**EVENT, "kind": "clear", "source": None, "target": ["a", None]})
    assert kvtier("clear", "a/ram", "--tokens", "[1]").output.strip() == "4 chunks removed (a), 4KiB freed."
    kvtier("clear", "a", "--yes")
    bodies = [request.body for request in stub.requests if request.call == "POST /clear"]
    assert bodies == [{"instance": "a", "tier": "ram", "tokens": [1]}, {"instance": "a"}]


def test_instances(kvtier: Kvtier, stub: Stub) -> None:
    lines = [line.split() for line in kvtier("instances").output.splitlines()]
    assert lines[1][:9] == ["a", "ram", "cpu", "1MiB", "(25%)", "4MiB", "8", "20%", "m"]
    assert lines[2][:7] == ["a", "pool", "redis", "-", "shared", "8", "10%"]
    assert json.loads(kvtier("instances", "--json").output) == {"instances": [INSTANCE], "gone": []}
    details = kvtier("instances", "a").output
    assert "none: peer.listen is not set" in details
    assert "30% of 10 tokens looked up in the last 5 min" in details
    assert json.loads(kvtier("instances", "a", "--json").output)["history"]
    stub.respond("GET /instances", {"instances": []})
    assert kvtier("instances").output.startswith("No instance is registered: set controller.url")


def test_any_of_several_controllers_answers(kvtier: Kvtier, stub: Stub) -> None:
    urls = f"http://127.0.0.1:{free_port()},{stub.url}"
    assert json.loads(kvtier("events", "--json", "--url", urls).output) == {"events": [EVENT]}


def test_events(kvtier: Kvtier, stub: Stub) -> None:
    listed = kvtier("events", "--limit", "5").output.splitlines()
    assert stub.requests[-1].query == "limit=5"
    assert listed[1].split()[:6] == ["e1", "move", "done", "a/ram", "->", "b/ram"]
    assert json.loads(kvtier("events", "--json").output) == {"events": [EVENT]}
    assert "4 of 4 chunks, 4KiB" in kvtier("events", "e1").output
    assert json.loads(kvtier("events", "e1", "--json").output) == EVENT
    stub.respond("GET /events", {"events": []})
    assert kvtier("events").output == "No events.\n"


def test_event_is_followed(kvtier: Kvtier, stub: Stub) -> None:
    assert kvtier("events", "e1", "--follow").output.startswith("12 tokens moved")
    stub.respond("GET /events/e1", {**EVENT, "state": "failed", "error": "b is gone"})
    assert kvtier("events", "e1", "--follow").status == 1


def test_all_events_are_followed(kvtier: Kvtier, stub: Stub) -> None:
    running = {**EVENT, "state": "running", "chunks_done": 1, "bytes_done": 0}
    parts = [
        ": a comment",
        f"event: instances\ndata: {json.dumps({'instances': [INSTANCE]})}",
        f"event: event\ndata: {json.dumps(running)}",
        f"event: event\ndata: {json.dumps(EVENT)}",
    ]
    stub.respond("GET /stream", Raw("".join(f"{part}\n\n" for part in parts).encode(), "text/event-stream"))
    result = kvtier("events", "--follow")
    assert result.output.splitlines() == [
        "e1 move a/ram -> b/ram running 1 of 4 chunks",
        "e1 move a/ram -> b/ram done 12 tokens moved (a/ram -> b/ram): 4 of 4 chunks, 4KiB in 2s (2KiB/s).",
    ]
    assert "has ended the stream of events" in result.errors
    lines = kvtier("events", "--follow", "--json").output.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["running", "done"]


@by_name
def test_unreachable_controller(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(controller_api, "TIMEOUT_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    result = kvtier(*command, "--url", url)
    assert (result.status, result.output) == (1, "")
    assert len(result.errors.splitlines()) == 1
    assert f"no controller answers at {url}" in result.errors
    assert "`kvtier controller`" in result.errors
    assert "--url or controller.url" in result.errors


@by_name
def test_controller_requires_a_token(kvtier: Kvtier, stub: Stub, tmp_path: Path, command: list[str]) -> None:
    for call in {f"{method} /{name}" for name in [command[0]] for method in ("GET", "POST")}:
        stub.respond(call, {"detail": "a token is needed"}, status=401)
    result = kvtier(*command)
    assert result.status == 1
    assert "requires a token: set --token-file to the file of its token" in result.errors
    token = tmp_path / "token"
    token.write_text("wrong-token\n")
    result = kvtier(*command, "--token-file", token)
    assert stub.requests[-1].authorization == "Bearer wrong-token"
    assert "rejects this token" in result.errors
    assert "wrong-token" not in result.errors


def test_sources_of_url_and_token(
    kvtier: Kvtier, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-option")
    (tmp_path / "other").write_text("of-the-file")
    config = tmp_path / "kvtier.yaml"
    config.write_text(
        json.dumps({"controller": {"url": stub.url, "token": {"file": str(tmp_path / "other")}}})
    )
    monkeypatch.delenv("KVTIER_CONTROLLER__URL")
    kvtier("instances", "--config", config)
    kvtier("instances", "--config", config, "--token-file", tmp_path / "token")
    monkeypatch.setenv("KVTIER_CONTROLLER__TOKEN", "of-the-variable")
    kvtier("instances", "--url", stub.url + "/")
    tokens = [request.authorization for request in stub.requests]
    assert tokens == ["Bearer of-the-file", "Bearer of-the-option", "Bearer of-the-variable"]
    assert "controller.url" in kvtier("instances", "--url", "nowhere").errors
    missing = kvtier("instances", "--token-file", tmp_path / "none")
    assert (missing.status, "--token-file" in missing.errors) == (1, True)


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, {"detail": "no instance is called x", "known": ["i-1", "i-2"]}, "x (known: i-1, i-2)"),
        (
            404,
            {"detail": "no instance is called x: known: i-1, i-2", "known": ["i-1", "i-2"]},
            "x: known: i-1, i-2\n",
        ),
        (422, {"detail": [{"loc": ["body", "tokens"], "msg": "too long"}]}, "body.tokens: too long"),
        (502, Raw(b"<html>"), "at {url} responded 502 Bad Gateway and is not a controller"),
        (200, Raw(b"<html>"), "is not a controller that kvtier"),
        (200, {"num_tokens": "many"}, "is not a controller that kvtier"),
    ],
)
def test_error_and_invalid_responses(
    kvtier: Kvtier, stub: Stub, status: int, answer: Any, message: str
) -> None:
    stub.respond("POST /lookup", answer, status=status)
    result = kvtier("lookup", "--tokens", "[1]")
    assert (result.status, result.output) == (1, "")
    assert message.format(url=stub.url) in result.errors


def test_connection_is_retried_while_the_controller_starts(
    kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    slept: list[float] = []
    with ExitStack() as stack:

        def sleep(pause: float) -> None:
            """Start the server at the second retry, instead of sleeping."""
            slept.append(pause)
            if len(slept) == 2:
                late = stack.enter_context(Stub(port).serving())
                late.respond("POST /move", ACCEPTED)

        monkeypatch.setattr(controller_api.time, "sleep", sleep)
        move = ["move", "a/ram", "b/ram", "--tokens", "[1]", "--no-wait"]
        result = kvtier(*move, "--url", f"http://127.0.0.1:{port}")
    assert (result.output, len(slept)) == ("e1\n", 2)


def test_lost_responses_are_retried_for_reads_only(kvtier: Kvtier, stub: Stub) -> None:
    stub.respond("GET /events/e1", None, None, EVENT)
    assert kvtier("move", "a/ram", "b/ram", "--tokens", "[1]").status == 0
    stub.requests.clear()
    stub.respond("POST /move", None)
    result = kvtier("move", "a/ram", "b/ram", "--tokens", "[1]")
    assert result.status == 1
    assert "disconnected before it responded" in result.errors
    assert "`kvtier events` shows it" in result.errors
    assert len(stub.requests) == 1


@by_name
def test_help_has_examples(kvtier: Kvtier, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = kvtier(command[0], "--help").output
    assert f"  kvtier {command[0]} " in shown.partition("Examples:")[2]
