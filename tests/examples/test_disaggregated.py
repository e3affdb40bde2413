"""The files of examples/disaggregated are consistent with each other, the commands and Kubernetes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
KUBERNETES = HERE / "kubernetes"
PLACES = [HERE, HERE / "hosts", KUBERNETES / "settings"]
HTTP_PORTS = {"prefill": 8100, "decode": 8200}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ENGINES = {"prefiller": "prefill", "decoder": "decode"}
KINDS = {
    "Namespace": ("v1",),
    "Service": ("v1", "spec.selector", "spec.ports"),
    "StatefulSet": (
        "apps/v1",
        "spec.serviceName",
        "spec.selector.matchLabels",
        "spec.template.spec.containers",
    ),
    "Deployment": ("apps/v1", "spec.replicas", "spec.selector.matchLabels", "spec.template.spec.containers"),
    "NetworkPolicy": ("networking.k8s.io/v1", "spec.podSelector", "spec.policyTypes", "spec.ingress"),
}
"""The API version of each kind, and the fields that it must have besides its name."""


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
        if proxy.controller is not None:
            (controller,) = {role.controller.url for role in settings(HERE / "hosts").values()}
            assert proxy.controller == controller
            assert any(f":{httpx.URL(controller).port} " in line for line in commands(text, "controller"))


# Kubernetes.


class Workload(NamedTuple):
    """A StatefulSet or a Deployment."""

    name: str
    kind: str
    spec: dict[str, Any]

    @property
    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.spec["template"]["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def manifests() -> Iterator[dict[str, Any]]:
    for name in kustomization()["resources"]:
        yield from yaml.safe_load_all((KUBERNETES / name).read_text())


def kustomization() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return found


def workloads() -> dict[str, Workload]:
    found = [manifest for manifest in manifests() if manifest["kind"] in ("StatefulSet", "Deployment")]
    return {
        manifest["metadata"]["name"]: Workload(
            manifest["metadata"]["name"], manifest["kind"], manifest["spec"]
        )
        for manifest in found
    }


def services() -> dict[str, dict[str, Any]]:
    return {
        manifest["metadata"]["name"]: manifest["spec"]
        for manifest in manifests()
        if manifest["kind"] == "Service"
    }


def test_manifests_have_the_required_fields() -> None:
    names = [path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml"]
    assert sorted(names) == sorted(kustomization()["resources"])
    for manifest in manifests():
        version, *fields = KINDS[manifest["kind"]]
        assert manifest["apiVersion"] == version
        assert re.fullmatch("[a-z][a-z0-9-]{0,62}", manifest["metadata"]["name"])
        for field in fields:
            value: Any = manifest
            for name in field.split("."):
                assert name in value, f"{manifest['kind']} {manifest['metadata']['name']}: {field}"
                value = value[name]


def test_kustomization_is_consistent_with_the_manifests() -> None:
    content = kustomization()
    replicas = {entry["name"]: entry["count"] for entry in content["replicas"]}
    stateful = {workload.name for workload in workloads().values() if workload.kind == "StatefulSet"}
    assert replicas.keys() == stateful
    (image,) = content["images"]
    assert {workload.container["image"] for workload in workloads().values()} == {image["name"]}
    assert f"{image['newName']}:{image['newTag']}" in (KUBERNETES / "Dockerfile").read_text()
    for config in content["configMapGenerator"]:
        (file,) = config["files"]
        key, _, path = file.partition("=")
        workload = workloads()[config["name"]]
        assert (KUBERNETES / path).is_file()
        assert {"name": "settings", "configMap": {"name": config["name"]}} in workload.pod["volumes"]
        (mount,) = [each for each in workload.container["volumeMounts"] if each["name"] == "settings"]
        variables = {variable["name"]: variable.get("value") for variable in workload.container["env"]}
        assert variables["KVTIER_CONFIG_FILE"] == f"{mount['mountPath']}/{key}"


def test_services_select_their_pods() -> None:
    assert services().keys() == workloads().keys() == {"prefiller", "decoder", "proxy", "controller"}
    for name, service in services().items():
        workload = workloads()[name]
        labels = workload.spec["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert workload.spec["selector"]["matchLabels"].items() <= labels.items()
        assert {port["name"]: port["port"] for port in service["ports"]} == workload.ports
        # Each engine has its own DNS name.
        assert (service.get("clusterIP") == "None") == (workload.kind == "StatefulSet")
        assert workload.spec.get("serviceName", name) == name


def test_pods_have_probes_limits_and_mounted_volumes() -> None:
    for workload in workloads().values():
        container = workload.container
        path = "/healthz" if workload.name == "controller" else "/health"
        assert container["readinessProbe"]["httpGet"] == {"path": path, "port": "http"}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            assert probe.get("httpGet", probe.get("tcpSocket", {})).get("port", "http") in workload.ports
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        volumes = {volume["name"] for volume in workload.pod["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}
        # A Service called kvtier would otherwise set variables that look like settings.
        assert workload.pod["enableServiceLinks"] is False


def test_every_secret_is_created_by_the_documented_command() -> None:
    (command,) = commands(README, "secret")
    (name,) = re.findall(r"create secret generic (\S+)", command)
    created = set(re.findall(r"--from-literal=([a-z-]+)=", command))
    used = set()
    for workload in workloads().values():
        for variable in workload.container.get("env", ()):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert reference["name"] == name
                used.add(reference["key"])
        for volume in workload.pod["volumes"]:
            if secret := volume.get("secret"):
                assert secret["secretName"] == name
                used |= {item["key"] for item in secret["items"]}
    assert used == created
    assert kustomization()["namespace"] in command


@pytest.mark.parametrize("name", ENGINES)
def test_engine_ports_match_their_settings(name: str) -> None:
    role, workload = ENGINES[name], workloads()[name]
    own = settings(KUBERNETES / "settings")[role]
    arguments = workload.container["args"]
    assert workload.ports == {"http": HTTP_PORTS[role], "peer": port_of(own.peer.listen)}
    assert f"--port={HTTP_PORTS[role]}" in arguments
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer == {"kv_connector": "KVTierConnector", "kv_role": KV_ROLES[role]}
    controller = httpx.URL(str(own.controller.url))
    assert controller.port in workloads()[controller.host].ports.values()
    variables = {variable["name"] for variable in workload.container["env"]}
    text = (KUBERNETES / "settings" / f"{name}.yaml").read_text()
    assert set(re.findall(r"\{env: (\w+)\}", text)) <= variables


def test_proxy_names_every_engine_by_its_service() -> None:
    workload = workloads()["proxy"]
    command = " ".join([*workload.container["command"], *workload.container["args"]])
    proxy = proxy_of(command)
    replicas = {entry["name"]: entry["count"] for entry in kustomization()["replicas"]}
    for name, urls in (("prefiller", proxy.prefill), ("decoder", proxy.decode)):
        port = workloads()[name].ports["http"]
        assert list(urls) == [f"http://{name}-{number}.{name}:{port}" for number in range(replicas[name])]
    controller = httpx.URL(str(proxy.controller))
    assert controller.port in workloads()[controller.host].ports.values()
    assert workload.ports == {"http": port_of(proxy.listen)}
    assert workload.pod["terminationGracePeriodSeconds"] > proxy.drain
    (mounted,) = [volume["secret"]["items"] for volume in workload.pod["volumes"]]
    (mount,) = workload.container["volumeMounts"]
    files = {f"{mount['mountPath']}/{item['path']}" for item in mounted}
    options = options_of(command)
    assert {str(options["token_file"]), str(options["controller_token_file"])} == files


def test_controller_listens_on_the_port_of_its_service() -> None:
    workload = workloads()["controller"]
    arguments = dict(argument.removeprefix("--").split("=") for argument in workload.container["args"])
    assert workload.ports == {"http": port_of(arguments["listen"])}
    mounts = {mount["name"]: mount["mountPath"] for mount in workload.container["volumeMounts"]}
    assert arguments["state"].startswith(mounts["state"])
    assert arguments["token-file"] == f"{mounts['secrets']}/controller-token"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_manifests() -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=True
    ).stdout
    found = list(yaml.safe_load_all(rendered))
    assert len(found) == len(list(manifests())) + len(kustomization()["configMapGenerator"])
    replicas = {
        manifest["metadata"]["name"]: manifest["spec"].get("replicas")
        for manifest in found
        if "spec" in manifest
    }
    assert (replicas["prefiller"], replicas["decoder"]) == (2, 2)
