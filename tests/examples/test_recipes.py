"""docs/recipes.md and examples/kubernetes: engines find the cache process of their node, as its user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.settings import load_settings

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)
SNIPPETS = [yaml.safe_load(block) for block in BLOCKS]
SETTINGS, DAEMONS = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "cache.yaml").read_text())
POD = DAEMONS["spec"]["template"]["spec"]
(CACHE,) = POD["containers"]
CONNECTOR = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}


def engine(snippet: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the container of an engine, as Kubernetes has it, and the volumes of its pod."""
    if "servingEngineSpec" in snippet:
        spec = snippet["servingEngineSpec"]
        (model,) = spec["modelSpec"]
        context, arguments = spec["containerSecurityContext"], model["vllmConfig"]["extraArgs"]
        container = {"env": model["env"], "volumeMounts": model["extraVolumeMounts"], "args": arguments}
        return container | {"securityContext": context}, model["extraVolumes"]
    template = snippet["spec"]["template"]
    pod = template.get("spec", template)
    (container,) = pod["containers"]
    return container, pod["volumes"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


ENGINES = [engine(snippet) for snippet in SNIPPETS if "engine_kwargs" not in snippet]


def test_settings_of_the_cache_process_are_valid() -> None:
    assert load_settings(yaml.safe_load(SETTINGS["data"]["kvtier.yaml"])).tiers
    assert len(ENGINES) == 3


@pytest.mark.parametrize(("container", "volumes"), ENGINES)
def test_engine_uses_the_socket_of_its_node(container: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    socket = environment(container)["KVTIER_SOCKET"]
    assert socket == environment(CACHE)["KVTIER_SOCKET"]
    (mount,) = container["volumeMounts"]
    (volume,) = volumes
    assert mount == {"name": volume["name"], "mountPath": str(Path(socket).parent)}
    paths = {volume["hostPath"]["path"] for volume in POD["volumes"] if "hostPath" in volume}
    assert paths == {volume["hostPath"]["path"]}
    assert container["securityContext"] == CACHE["securityContext"]


@pytest.mark.parametrize(("container", "volumes"), ENGINES)
def test_engine_has_the_connector(container: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    words = container.get("args") or environment(container)["VLLM_ADDITIONAL_ARGS"].split()
    if "--kv-transfer-config" in words:
        assert json.loads(words[words.index("--kv-transfer-config") + 1]) == CONNECTOR
    else:
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert options == {f"--kv-transfer-config.{name}": value for name, value in CONNECTOR.items()}


def test_ray_has_the_connector() -> None:
    (ray,) = [snippet for snippet in SNIPPETS if "engine_kwargs" in snippet]
    example = yaml.safe_load((ROOT / "examples" / "ray" / "serve.yaml").read_text())
    (model,) = example["applications"][0]["args"]["llm_configs"]
    assert ray["engine_kwargs"]["kv_transfer_config"] == model["engine_kwargs"]["kv_transfer_config"]
