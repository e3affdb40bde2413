"""Render the chart of deploy/helm, and run the containers that it describes as processes of this machine."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvtier.lab.demo.server import Server
from kvtier.testing.servers import free_port
from tests.rigs import container

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvtier"
HELM = Path(sys.prefix) / "bin" / "helm"
RELEASE = "r"
CASES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))

Object = dict[str, Any]


def helm(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *command.split(), *arguments], capture_output=True, text=True, check=False)


def values(case: str) -> list[str]:
    """Return the options that select the values of a case."""
    return ["--values", str(CHART / "ci" / f"{case}.yaml")]


@cache
def render(*options: str) -> tuple[Object, ...]:
    """Return the objects that the chart makes of some values."""
    result = helm("template", RELEASE, str(CHART), *options)
    assert result.returncode == 0, result.stderr
    return tuple(each for each in yaml.safe_load_all(result.stdout) if each)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> dict[str, Object]:
    """Return the objects of some kinds, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def workloads(objects: tuple[Object, ...]) -> dict[str, Object]:
    return of_kind(objects, "DaemonSet", "Deployment", "StatefulSet")


def settings(objects: tuple[Object, ...]) -> dict[str, str]:
    """Return each kvtier.yaml, by the name of its ConfigMap."""
    maps = of_kind(objects, "ConfigMap")
    return {name: each["data"]["kvtier.yaml"] for name, each in maps.items() if "kvtier.yaml" in each["data"]}


class Node:
    """Runs containers of a release here. Names, ports and paths of pods become those of this machine."""

    def __init__(self, objects: tuple[Object, ...], folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._ports: dict[tuple[str, str], int] = {}
        self._socket = ""
        (secret,) = of_kind(objects, "Secret").values()
        self.secret = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        secrets = folder / "secrets"
        secrets.mkdir()
        for key, value in self.secret.items():
            (secrets / key).write_text(value)

    def port(self, component: str, number: str) -> int:
        """Return the port here of a port of a component."""
        return self._ports.setdefault((component, number), free_port())

    def log(self, component: str) -> Path:
        return self._folder / f"{component}.log"

    def start(self, component: str) -> Server:
        """Start the container of a component."""
        spec = self._container(component)
        words = [self._local(component, each) for each in [*spec["command"], *spec.get("args", ())]]
        line = self._command(*words)
        return Server(component, line, self._environment(component), self.log(component))

    def start_contained(self, component: str) -> Server:
        """Start the container of a component in namespaces, with a read-only root, as its user."""
        folder = self._write_settings(component)
        line = container.command(folder, *self._command(*self._container(component)["command"]))
        variables = {
            **self._environment(component),
            "KVTIER_CONFIG_FILE": str(container.SETTINGS / "kvtier.yaml"),
            "KVTIER_SOCKET": self._variables(component)["KVTIER_SOCKET"],
            "HOME": "/tmp",
        }
        return Server(component, line, variables, self.log(component))

    def share_socket(self, server: Server, seconds: float) -> Path:
        """Let engines find the socket of a contained cache process, as in the directory of the node.

        Blocks until the cache process serves.
        """
        pid = server._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")

        def serves() -> bool:
            (inside,) = children.read_text().split() or [pid]
            self._socket = f"/proc/{inside}/root{self._variables('cache')['KVTIER_SOCKET']}"
            return Path(self._socket).exists()

        server.wait_until(serves, seconds)
        return Path(self._socket)

    def _container(self, component: str) -> dict[str, Any]:
        workload = workloads(self._objects)[f"{RELEASE}-{component}"]
        (spec,) = workload["spec"]["template"]["spec"]["containers"]
        assert isinstance(spec, dict)
        return spec

    def _command(self, program: str, *arguments: str) -> list[str]:
        if program == "kvtier":
            return [sys.executable, "-m", "kvtier", *arguments]
        # The command `vllm serve` does not start with the packages of vLLM for CPUs.
        serve, model, *options = arguments
        assert (program, serve) == ("vllm", "serve")
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]

    def _variables(self, component: str) -> dict[str, str]:
        """Return the variables of the container."""
        return dict(self._each_variable(component))

    def _each_variable(self, component: str) -> Iterator[tuple[str, str]]:
        for each in self._container(component).get("env", ()):
            if "value" in each:
                yield each["name"], each["value"]
            elif "fieldRef" in each["valueFrom"]:
                yield each["name"], f"{RELEASE}-{component}-0"  # metadata.name
            else:
                reference = each["valueFrom"]["secretKeyRef"]
                if reference["key"] in self.secret or not reference.get("optional"):
                    yield each["name"], self.secret[reference["key"]]

    def _environment(self, component: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        variables = self._variables(component)
        if "KVTIER_CONFIG_FILE" in variables:
            variables["KVTIER_CONFIG_FILE"] = str(self._write_settings(component) / "kvtier.yaml")
            variables["KVTIER_SOCKET"] = variables["KVTIER_SOCKET"] and self._socket
        return inherited | variables

    def _write_settings(self, component: str) -> Path:
        """Write the mounted ConfigMap into a folder."""
        pod = workloads(self._objects)[f"{RELEASE}-{component}"]["spec"]["template"]["spec"]
        (name,) = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "settings"]
        folder = self._folder / f"settings-{component}"
        folder.mkdir(exist_ok=True)
        (folder / "kvtier.yaml").write_text(self._local(component, settings(self._objects)[name]))
        return folder

    def _local(self, component: str, text: str) -> str:
        """Replace references to variables, addresses and paths."""
        text = re.sub(r"\$\((\w+)\)", lambda found: self._variables(component)[found[1]], text)

        def port(owner: str, number: str) -> str:
            return f"127.0.0.1:{self.port(owner, number)}"

        text = re.sub(
            rf"(?<=//){RELEASE}-([a-z]+)[-.\w]*:(\d+)", lambda found: port(found[1], found[2]), text
        )
        text = re.sub(r"\b0\.0\.0\.0:(\d+)", lambda found: port(component, found[1]), text)
        text = re.sub(r"^--port=(\d+)$", lambda found: f"--port={self.port(component, found[1])}", text)
        text = text.replace("/run/secrets/kvtier", str(self._folder / "secrets"))
        return text.replace("/var/lib/kvtier", str(self._folder))
