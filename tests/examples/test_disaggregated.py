"""The files of examples/disaggregated are consistent with each other and the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from kvtier.cli import make_app
from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings, load_settings

HERE = Path(__file__).parents[2] / "examples" / "disaggregated"
README = (HERE / "README.md").read_text()
PAGE = (HERE.parents[1] / "docs" / "disaggregated.md").read_text()
PLACES = [HERE, HERE / "hosts"]
HTTP_PORTS = {"prefill": 8100, "decode": 8200}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ENGINES = {"prefiller": "prefill", "decoder": "decode"}


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEER_SECRET", "CONTROLLER_TOKEN"):
        monkeypatch.setenv(name, "sixteen or more characters")


def settings(place: Path) -> dict[str, Settings]:
    """Load the settings of both roles, by role."""
    both = [load_settings(yaml.safe_load((place / f"{name}.yaml").read_text())) for name in ENGINES]
    return {loaded.role: loaded for loaded in both}


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


# Settings and commands.


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_settings_of_both_roles_are_consistent(place: Path) -> None:
    both = settings(place)
    assert set(both) == {"prefill", "decode"}
    prefill, decode = both["prefill"], both["decode"]
    assert prefill.chunk_tokens == decode.chunk_tokens
    assert prefill.peer.transport == decode.peer.transport
    assert prefill.peer.secret == decode.peer.secret
    assert (port_of(prefill.peer.listen), port_of(decode.peer.listen)) == (8101, 8201)
    assert prefill.controller.url == decode.controller.url
    assert (prefill.kv_transfer.device, decode.kv_transfer.device) == ("cpu", "cpu")
    first = Plugins.load([]).tier_settings(decode)[0]
    assert isinstance(first, LocalTierSettings)
    # The reserved bytes must fit into the share for peers.
    assert decode.kv_transfer.buffer is not None
    assert decode.kv_transfer.buffer <= first.capacity * decode.peer.share


def commands(text: str, name: str) -> list[str]:
    """Return the commands of a page that contain ``name``, one line each."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.search(rf"(^|\s){name}(\s|$)", line) and "`" not in line]


@pytest.mark.parametrize("text", [README, PAGE], ids=["README", "page"])
def test_engine_commands_use_their_settings_role_and_port(text: str) -> None:
    served = commands(text, "vllm serve")
    assert len(served) >= 2
    for command in served:
        (name,) = re.findall(r"KVTIER_CONFIG_FILE=(\S+)", command)
        role = settings((HERE / name).parent).keys() & {ENGINES[Path(name).stem]}
        (role_name,) = role
        (port,) = re.findall(r"--port (\d+)", command)
        (transfer,) = re.findall(r"--kv-transfer-config\s+'(\{.*?\})'", command)
        assert int(port) == HTTP_PORTS[role_name]
        assert json.loads(transfer) == {"kv_connector": "KVTierConnector", "kv_role": KV_ROLES[role_name]}


def options_of(command: str) -> dict[str, Any]:
    """Return the options that a ``kvtier proxy`` command line sets. Raises for an unknown option."""
    group = typer.main.get_command(make_app())
    words = command.split("kvtier proxy", 1)[1].removesuffix("&").split()
    known = group.commands["proxy"]  # type: ignore[attr-defined]
    return {name: value for name, value in known.make_context("proxy", words).params.items() if value}


def proxy_of(command: str) -> ProxySettings:
    """Return the proxy settings of a command line, without options that name files."""
    options = options_of(command)
    return ProxySettings.of(**{name: value for name, value in options.items() if name in NON_FILE_OPTIONS})


NON_FILE_OPTIONS = ("prefill", "decode", "listen", "controller")


@pytest.mark.parametrize("text", [README, PAGE], ids=["README", "page"])
def test_proxy_commands_name_the_engines(text: str) -> None:
    found = commands(text, "kvtier proxy")
    assert found
    for command in found:
        proxy = proxy_of(command)
        assert {httpx.URL(url).port for url in proxy.prefill} == {HTTP_PORTS["prefill"]}
        assert {httpx.URL(url).port for url in proxy.decode} == {HTTP_PORTS["decode"]}
        assert port_of(proxy.listen) == 9000
        if proxy.controller:
            (controller,) = {role.controller.url for role in settings(HERE / "hosts").values()}
            assert list(proxy.controller) == [controller]
            assert any(f":{httpx.URL(controller).port} " in line for line in commands(text, "controller"))
