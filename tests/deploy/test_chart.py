"""The chart of deploy/helm: what it renders is valid and fits together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.settings import Settings, load_settings
from tests.rigs.chart import (
    CASES,
    CHART,
    HELM,
    RELEASE,
    Object,
    helm,
    of_kind,
    render,
    settings,
    values,
    workloads,
)
from tests.rigs.container import USER
from tests.rigs.supervisor import DEPLOY

pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm is not installed: make test")

ROOT = DEPLOY.parent
VERSIONS = ("1.25", "1.37")
"""Of Kubernetes: the oldest that the chart accepts, and the newest whose schemas are installed."""
OPERATOR = json.loads((Path(__file__).parent / "prometheus_operator.json").read_text())
EVERYTHING = [
    "--set=controller.enabled=true,podDisruptionBudget.enabled=true",
    "--set=monitoring.serviceMonitor=true,monitoring.rules=true,monitoring.dashboard=true",
]
RENDERED = [(case, *options) for case in CASES for options in ([], EVERYTHING)]
ALL = pytest.mark.parametrize(
    "rendered", RENDERED, ids=lambda rendered: "-".join(rendered[:1] + rendered[3:])
)


@pytest.fixture
def objects(rendered: tuple[str, ...]) -> tuple[Object, ...]:
    case, *options = rendered
    return render(*values(case), *options)


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def pods(objects: tuple[Object, ...]) -> dict[str, dict[str, Any]]:
    return {name: each["spec"]["template"]["spec"] for name, each in workloads(objects).items()}


def labels(objects: tuple[Object, ...]) -> dict[str, dict[str, str]]:
    """Return the labels of each workload's pods."""
    found = workloads(objects).items()
    return {name: each["spec"]["template"]["metadata"]["labels"] for name, each in found}


def selected(objects: tuple[Object, ...], selector: dict[str, str]) -> list[str]:
    """Return the workloads whose pods a selector selects."""
    return [name for name, found in labels(objects).items() if selector.items() <= found.items()]


def load(text: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Load settings as an instance does."""
    monkeypatch.delenv("KVTIER_CONFIG_FILE", raising=False)
    for name in ("PEER_SECRET", "CONTROLLER_TOKEN"):
        monkeypatch.setenv(name, "sixteen or more characters")
    return load_settings(yaml.safe_load(text))


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing(case: str) -> None:
    result = helm("lint --strict", str(CHART), *values(case))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[WARNING]" not in result.stdout


@ALL
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(objects: tuple[Object, ...], version: str) -> None:
    for each in objects:
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            jsonschema.validate(each, {**OPERATOR, "$ref": f"#/$defs/{each['kind']}"})
        else:
            kubernetes_validate.validate(each, version, strict=True)


@ALL
def test_names_are_unique(objects: tuple[Object, ...]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


@ALL
def test_selectors_select_their_pods(objects: tuple[Object, ...]) -> None:
    for name, each in workloads(objects).items():
        assert selected(objects, each["spec"]["selector"]["matchLabels"]) == [name]
    for each in of_kind(objects, "Service").values():
        (name,) = selected(objects, each["spec"]["selector"])
        ports = {port["name"] for port in pods(objects)[name]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
    for each in of_kind(objects, "StatefulSet").values():
        service = of_kind(objects, "Service")[each["spec"]["serviceName"]]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"] == each["spec"]["selector"]["matchLabels"]
    for each in of_kind(objects, "PodDisruptionBudget").values():
        assert len(selected(objects, each["spec"]["selector"]["matchLabels"])) == 1
    for each in of_kind(objects, "ServiceMonitor").values():
        services = of_kind(objects, "Service").values()
        chosen = each["spec"]["selector"]["matchLabels"].items()
        monitored = [service for service in services if chosen <= service["metadata"]["labels"].items()]
        offered = {port["name"] for service in monitored for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in each["spec"]["endpoints"]} == offered - {"peer"}


@ALL
def test_volumes_and_what_they_need_exist(objects: tuple[Object, ...]) -> None:
    claims = {"models", "controller"}
    secrets = set(of_kind(objects, "Secret")) or {"tokens"}
    for pod in pods(objects).values():
        mounted = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            assert volume.get("configMap", {}).get("name", f"{RELEASE}-dashboard") in {
                *of_kind(objects, "ConfigMap"),
                f"{RELEASE}-dashboard",
            }
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        for each in containers(pod):
            references = [
                variable["valueFrom"]["secretKeyRef"]
                for variable in each.get("env", ())
                if "secretKeyRef" in variable.get("valueFrom", ())
            ]
            assert {reference["name"] for reference in references} <= secrets
            for reference in references:
                keys = of_kind(objects, "Secret").get(reference["name"], {}).get("data")
                assert keys is None or reference.get("optional") or reference["key"] in keys


@ALL
def test_settings_are_valid(objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(objects)
    assert found
    for text in found.values():
        loaded = load(text, monkeypatch)
        variables = set(re.findall(r"env: (\w+)", text))
        for name, pod in pods(objects).items():
            main = pod["containers"][0]
            mapped = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
            if any(found[each] == text for each in mapped):
                assert variables <= {variable["name"] for variable in main["env"]}, name
                assert pod["terminationGracePeriodSeconds"] > loaded.drain_timeout + 10, name
                ports = {port["name"]: str(port["containerPort"]) for port in main["ports"]}
                if "metrics" in ports:  # Not in an engine that uses the cache process of its node.
                    assert loaded.metrics.listen == f"0.0.0.0:{ports['metrics']}"
                    assert loaded.peer.listen in (None, f"0.0.0.0:{ports['peer']}")
                else:
                    assert "socket" in str(main["volumeMounts"])


def test_settings_of_both_roles_are_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(render(*values("disaggregated")))
    prefill, decode = (load(found[f"{RELEASE}-{name}"], monkeypatch) for name in ("prefiller", "decoder"))
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.chunk_tokens, prefill.peer) == (decode.chunk_tokens, decode.peer)
    assert prefill.peer.transport is not None
    assert prefill.controller == decode.controller
    assert decode.kv_transfer.buffer is not None
    capacity = 32 << 30
    assert decode.kv_transfer.buffer <= capacity * decode.peer.share


def test_values_count_more_than_what_the_chart_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--set=settings.checksum=true,decoder.settings.checksum=false,settings.metrics.listen=127.0.0.1:1"
    ]
    found = settings(render(*values("disaggregated"), *options))
    loaded = {name: load(text, monkeypatch) for name, text in found.items()}
    assert {name: each.checksum for name, each in loaded.items()} == {"r-prefiller": True, "r-decoder": False}
    assert {each.metrics.listen for each in loaded.values()} == {"127.0.0.1:1"}


@pytest.mark.parametrize("case", CASES)
def test_pods_are_replaced_when_settings_change(case: str) -> None:
    def sums(*options: str) -> dict[str, str]:
        found = workloads(render(*values(case), *options)).items()
        templates = {name: each["spec"]["template"]["metadata"] for name, each in found}
        return {
            name: each["annotations"]["checksum/settings"]
            for name, each in templates.items()
            if "annotations" in each
        }

    before, same, after = sums(), sums("--set=model=another"), sums("--set=settings.linger=20s")
    with_settings = {name for name, pod in pods(render(*values(case))).items() if "configMap" in str(pod)}
    assert before.keys() == with_settings
    assert before == same
    assert all(after[name] != before[name] for name in before)


@ALL
def test_containers_may_do_no_more_than_they_need(objects: tuple[Object, ...]) -> None:
    for pod in pods(objects).values():
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, USER)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostIPC"} & pod.keys()
        for each in containers(pod):
            own = each["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in own
            assert own.get("readOnlyRootFilesystem", False) == (each["command"][0] != "vllm")
            assert (own.get("runAsUser") == 0) == (own["capabilities"].get("add") == ["CHOWN"])
            assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
            assert "memory" in each["resources"]["limits"]
        for each in pod["containers"]:
            assert "readinessProbe" in each
            assert not {"runAsUser", "add"} & {
                *each["securityContext"],
                *each["securityContext"]["capabilities"],
            }


def test_engines_share_the_cache_process_of_their_node() -> None:
    found = pods(render(*values("shared")))
    cache, engine = found["r-cache"], found["r-engine"]
    for name in ("nodeSelector", "tolerations", "hostPID", "securityContext"):
        assert cache[name] == engine[name], name
    sockets = [
        next(volume for volume in pod["volumes"] if volume["name"] == "socket") for pod in (cache, engine)
    ]
    assert sockets[0] == sockets[1]
    for pod in (cache, engine):
        (main,) = pod["containers"]
        variables = {variable["name"]: variable.get("value") for variable in main["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in main["volumeMounts"]}
        assert Path(variables["KVTIER_SOCKET"]).parent == Path(mounts["socket"])
        assert Path(variables["KVTIER_CONFIG_FILE"]).parent == Path(mounts["settings"])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["settings"]["configMap"]["name"] == "r-cache"
    assert cache["containers"][0]["readinessProbe"]["exec"]["command"] == ["kvtier", "status"]
    assert engine["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("case", sorted({*CASES} - {"shared"}))
def test_other_engines_start_their_own_cache_process(case: str) -> None:
    for pod in pods(render(*values(case))).values():
        for variable in pod["containers"][0].get("env", ()):
            # The image may set it.
            assert variable["name"] != "KVTIER_SOCKET" or variable["value"] == ""


@ALL
def test_engines_have_a_large_dev_shm(objects: tuple[Object, ...]) -> None:
    for pod in pods(objects).values():
        (main,) = pod["containers"]
        if main["command"][0] == "vllm":
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in main["volumeMounts"]}
            assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


def test_several_controllers_share_a_state_and_are_all_registered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = render(*values("disaggregated"))
    (container,) = pods(objects)["r-controller"]["containers"]
    options = [each for each in container["args"] if each.startswith(("--state", "--advertise"))]
    assert options == [
        "--state=redis://redis:6379/1",
        "--advertise=http://$(POD_NAME).r-controller:9000",
        "--state-password-file=/run/secrets/kvtier/state-password",
    ]
    urls = [f"http://r-controller-{number}.r-controller:9000" for number in range(3)]
    for text in settings(objects).values():
        assert load(text, monkeypatch).controller.urls == urls
    budget = of_kind(objects, "PodDisruptionBudget")["r-controller"]["spec"]
    assert (budget["maxUnavailable"], selected(objects, budget["selector"]["matchLabels"])) == (
        1,
        ["r-controller"],
    )
    wrong = helm("template", RELEASE, str(CHART), "--set", "controller.enabled=true,controller.replicas=2")
    assert "set controller.state to the URL of a Redis" in wrong.stderr


def test_proxy_names_every_engine_and_controller() -> None:
    objects = render(*values("disaggregated"))
    found = pods(objects)["r-proxy"]
    options = dict(each.removeprefix("--").split("=") for each in found["containers"][0]["args"])
    stateful = of_kind(objects, "StatefulSet")
    names = (
        ("prefill", "r-prefiller", 8000),
        ("decode", "r-decoder", 8000),
        ("controller", "r-controller", 9000),
    )
    for option, name, number in names:
        urls = [
            each.partition("=")[2]
            for each in found["containers"][0]["args"]
            if each.startswith(f"--{option}=")
        ]
        replicas = range(stateful[name]["spec"]["replicas"])
        assert urls == [f"http://{name}-{index}.{name}:{number}" for index in replicas]
    assert found["terminationGracePeriodSeconds"] > ProxySettings.of().drain
    (port,) = of_kind(objects, "Service")["r-controller"]["spec"]["ports"]
    assert port["port"] == 9000
    mounts = {mount["name"]: mount["mountPath"] for mount in found["containers"][0]["volumeMounts"]}
    (secret,) = [volume["secret"] for volume in found["volumes"] if volume["name"] == "secrets"]
    files = {f"{mounts['secrets']}/{item['path']}" for item in secret["items"]}
    assert files == {options["token-file"], options["controller-token-file"]}


def test_rules_and_dashboard_are_those_of_the_documentation() -> None:
    objects = render(*values("shared"))
    rules = of_kind(objects, "PrometheusRule")[RELEASE]["spec"]
    assert rules == yaml.safe_load((ROOT / "docs" / "grafana" / "alerts.yml").read_text())
    dashboard = of_kind(objects, "ConfigMap")["r-dashboard"]["data"]["kvtier.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "docs" / "grafana" / "kvtier.json").read_text())
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    jobs = {
        endpoint["port"]: endpoint.get("relabelings", [{}])[0].get("replacement")
        for endpoint in monitor["spec"]["endpoints"]
    }
    # The rule that tells that an instance is down asks for this job.
    assert jobs["metrics"] == "kvtier"
    assert 'up{job="kvtier"}' in rules["groups"][0]["rules"][0]["expr"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@ALL
def test_clients_and_prometheus_reach_the_ports_they_need(objects: tuple[Object, ...]) -> None:
    within, clients = (of_kind(objects, "NetworkPolicy")[name]["spec"] for name in ("r", "r-clients"))
    assert sorted(selected(objects, within["podSelector"]["matchLabels"])) == sorted(workloads(objects))
    (target,) = selected(objects, clients["podSelector"]["matchLabels"])
    service = of_kind(objects, "Service")[RELEASE]["spec"]
    assert selected(objects, service["selector"]) == [target]
    assert clients["ingress"] == [{"ports": [{"port": "http"}]}]


def test_secret_is_that_of_the_values() -> None:
    (made,) = of_kind(render(*values("shared")), "Secret").values()
    assert made["data"].keys() == {"peer-secret", "controller-token", "proxy-token"}
    assert len(set(made["data"].values())) == 3
    assert not of_kind(render(*values("disaggregated")), "Secret")
    (gated,) = of_kind(render(*values("shared"), "--set=secrets.hfToken=hf_x"), "Secret").values()
    assert gated["data"]["hf-token"] == "aGZfeA=="


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("mode=cluster", "/mode"),
        ("engine.replicas=two", "/engine/replicas"),
        ("engine.replicas=0", "/engine/replicas"),
        ("engine.replica=2", "replica"),
        ("cache.socketDirectory=kvtier", "/cache/socketDirectory"),
        ("engine.sharedMemory=4GiB", "/engine/sharedMemory"),
        ("engine.resources.limit.cpu=1", "limit"),
        ("decoder.setting.linger=1s", "setting"),
        ("monitoring.rules=yes", "/monitoring/rules"),
        ("settings.tiers=null", "tiers"),
        ("prefillers.replicas=2", "prefillers"),
    ],
)
def test_wrong_values_are_named(value: str, named: str) -> None:
    result = helm("template", RELEASE, str(CHART), "--set", value)
    assert result.returncode != 0
    assert re.search(rf"- at '.*'.*{re.escape(named)}|{re.escape(named)}'", result.stderr), result.stderr


def test_every_value_is_described_and_checked() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(value: dict[str, Any], described: dict[str, Any], path: str) -> None:
        described = (
            schema["$defs"][described["$ref"].rpartition("/")[2]] if "$ref" in described else described
        )
        known = described.get("properties")
        if known is None or described.get("additionalProperties") is not False:
            return
        assert value.keys() | {"global"} == known.keys() | {"global"}, path
        for name, inner in value.items():
            if isinstance(inner, dict):
                check(inner, known[name], f"{path}.{name}")

    check(yaml.safe_load(text), schema, "values")
    for name in yaml.safe_load(text):
        assert re.search(rf"(?m)^(# .*\n{name}:|{name}:.*\n(  .*\n)*?  # |prefiller|decoder)", text), name


def test_versions_are_those_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    images = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    assert {images[name].rpartition(":")[2] for name in ("kvtier", "engine")} == {version}
    assert VERSIONS[0] in chart["kubeVersion"]
