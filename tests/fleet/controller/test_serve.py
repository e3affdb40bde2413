"""``kvtier controller``: settings, start, errors and shutdown."""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from kvtier.cli import main
from kvtier.errors import ChannelError, ControllerError, SettingsError
from kvtier.fleet.controller.registry import MAX_MEMBERS
from kvtier.fleet.controller.serve import run_controller, serve
from kvtier.fleet.controller.settings import ServiceSettings, default_state
from kvtier.fleet.controller.stream import MAX_READERS
from tests.rigs.certificates import Authority
from tests.rigs.running_controller import TIMEOUT_SECONDS

TOKEN = "an unguessable token"


# Settings


def test_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    settings = ServiceSettings.of(listen=None, token=None)
    assert settings == ServiceSettings()
    assert (settings.listen, settings.heartbeat, settings.instance_timeout) == ("127.0.0.1:9000", 2.0, 10.0)
    assert (settings.keep_events, settings.token) == (3600.0, None)
    assert settings.state == "/var/state/kvtier/controller.sqlite"
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", nothing)
        assert default_state() == Path.home() / ".local/state/kvtier/controller.sqlite"


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        ("127.0.0.1:9000", True),
        ("127.3.2.1:9000", True),
        ("localhost:9000", True),
        ("[::1]:9000", True),
        ("0.0.0.0:9000", False),
        ("[::]:9000", False),
        ("10.0.0.1:9000", False),
        ("controller:9000", False),
    ],
)
def test_listening_for_other_hosts_requires_a_token(listen: str, local: bool) -> None:
    assert ServiceSettings.of(listen=listen, token=TOKEN).is_local == local
    if local:
        ServiceSettings.of(listen=listen)
    else:
        with pytest.raises(SettingsError, match="set --token-file to the file of a token"):
            ServiceSettings.of(listen=listen)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"listen": "9000"}, "--listen: .*use HOST:PORT"),
        ({"instance_timeout": "3s"}, "--instance-timeout: .*at least twice"),
        ({"heartbeat": "never"}, "--heartbeat: 'never' is not a duration"),
        ({"heartbeat": "0s"}, "--heartbeat: "),
        ({"token": "short"}, "--token: it has fewer than 16 characters"),
        ({"tls_key": "key.pem"}, "--tls-certificate and --tls-key"),
        ({"state": "redis://:hunter2@host"}, "--state: .*use --state-password-file"),
        ({"state": "redis://host:port"}, "--state: .*'port'"),
        ({"state": "valkey:///1"}, "--state: .*redis://HOST:PORT/DATABASE"),
        ({"state": "s3://bucket"}, "--state: .*s3://bucket"),
        ({"advertise": "host:9000"}, "--advertise: .*does not begin with http"),
    ],
)
def test_invalid_settings_are_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        ServiceSettings.of(**wrong)
    assert wrong.get("token", "?") not in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:9000"),
        ({"listen": "0.0.0.0:9000", "token": TOKEN}, f"http://{socket.gethostname()}:9000"),
        ({"advertise": "https://controller-1:9000/"}, "https://controller-1:9000"),
        ({"tls_certificate": "c.pem", "tls_key": "k.pem"}, "https://127.0.0.1:9000"),
    ],
)
def test_others_reach_it_at_its_address(settings: dict[str, str], url: str) -> None:
    assert ServiceSettings.of(**settings).reached_at(9000) == url


def test_shared_state_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.fleet.controller.shared_state", None)
    with pytest.raises(SettingsError, match=r'requires pip install "kvtier\[redis\]"'):
        anyio.run(serve, ServiceSettings.of(state="redis://127.0.0.1:9"))


# In this process


@pytest.mark.anyio
async def test_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServiceSettings.of(listen=f"127.0.0.1:{port}", state=tmp_path / "state")
        with pytest.raises(ChannelError, match=rf"127.0.0.1:{port}: Address already in use.*--listen"):
            async with run_controller(settings):
                pass


@pytest.mark.anyio
async def test_state_is_not_shared_by_two_controllers(tmp_path: Path) -> None:
    settings = ServiceSettings.of(listen="127.0.0.1:0", state=tmp_path / "state")
    async with run_controller(settings):
        with pytest.raises(ControllerError, match="another controller uses"):
            await serve(settings)
    async with run_controller(settings):
        pass


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    return Authority(tmp_path, "authority").sign("controller")


@pytest.mark.anyio
async def test_serves_over_tls(tmp_path: Path, certificates: dict[str, str]) -> None:
    certificate, key = certificates["certificate"], certificates["key"]
    settings = ServiceSettings.of(
        listen="127.0.0.1:0", state=tmp_path / "state", tls_certificate=certificate, tls_key=key
    )
    context = ssl.create_default_context(cafile=certificates["authority"])
    context.check_hostname = False
    async with run_controller(settings) as controller:
        host, port = controller.address
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            answer = await client.get(f"https://{host}:{port}/healthz")
            assert answer.json()["status"] == "ok"
    broken = settings.model_copy(update={"tls_key": certificate})
    with pytest.raises(SettingsError, match="cannot be used"):
        async with run_controller(broken):
            pass


# As a process


@contextmanager
def start_command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command, and kill it at the end if it is still running."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    with subprocess.Popen(
        [sys.executable, "-m", "kvtier", "controller", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=inherited | environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    """Return the address that the command logs once it listens."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "controller listening on " in line, line
    return line.partition("controller listening on ")[2].partition(",")[0]


def test_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """The usual one, 1,024, is not enough for a thousand instances."""
    script = 'ulimit -S -n 256 && exec "$@"'
    command = ["bash", "-c", script, "-", sys.executable, "-m", "kvtier", "controller"]
    command += ["--listen", "127.0.0.1:0", "--state", str(tmp_path / "state.sqlite")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address_of(process)
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft >= min(MAX_MEMBERS + MAX_READERS, hard) > 256
        finally:
            process.kill()


def test_command_starts_answers_and_exits(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    state = tmp_path / "folder" / "state.sqlite"
    with start_command(
        "--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token"), "--state", str(state)
    ) as process:  # fmt: skip
        url = address_of(process)
        with httpx.Client(base_url=url, trust_env=False, verify=False) as client:
            assert client.get("/healthz").json()["instances"] == 0
            assert client.get("/instances").status_code == 401
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            assert client.get("/instances").json() == {"instances": [], "gone": []}
            with client.stream("GET", "/stream") as stream:
                assert next(stream.iter_lines()) == "event: instances"
                process.send_signal(signal.SIGTERM)
                # An open stream does not delay the exit.
                assert process.wait(TIMEOUT_SECONDS) == 0
        assert process.stderr is not None
        rest = process.stderr.read()
        assert "SIGTERM: shutting down" in rest
        assert "Traceback" not in rest
        assert TOKEN not in rest
    assert state.exists()


def test_token_comes_from_the_settings_of_clients(tmp_path: Path) -> None:
    with start_command(
        "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state"), KVTIER_CONTROLLER__TOKEN=TOKEN
    ) as process:  # fmt: skip
        assert httpx.get(address_of(process) + "/events", trust_env=False).status_code == 401


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["--listen", "0.0.0.0:0"], "set --token-file", 1),
        (["--token-file", "/nowhere/at/all"], "/nowhere/at/all", 1),
        (["--log-level", "loud"], "loud", 2),
    ],
)
def test_start_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    status: int,
) -> None:
    monkeypatch.setattr("kvtier.cli.services.set_up_logging", lambda _: None)
    with pytest.raises(SystemExit) as exited:
        main(["controller", "--state", str(tmp_path / "state"), *arguments])
    assert exited.value.code == status
    assert message in capsys.readouterr().err.replace("\n", " ")
