"""What the connector says of a vLLM that it was not made for, and what it counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def run(code: str) -> str:
    """In a process of its own: importing vLLM changes the interpreter it is imported into."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_another_minor_version_is_refused_by_name() -> None:
    told = run(
        "import vllm\n"
        "from kvtier.integrations.vllm import connector\n"
        "vllm.__version__ = '0.99.1'\n"
        "try:\n"
        "    connector._check_version()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert told.startswith("UnsupportedEngine")
    assert "0.99.1" in told
    assert 'pip install "vllm==0.32.*"' in told


def test_the_plugin_makes_the_short_name_known() -> None:
    told = run(
        "from kvtier.integrations.vllm import register\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "register(); register()\n"
        "print(KVConnectorFactory.get_connector_class_by_name('KVTierConnector').__name__)\n"
    )
    assert told.strip() == "KVTierConnector"


def test_every_counter_is_documented() -> None:
    names = run("from kvtier.integrations.vllm.metrics import COUNTERS; print(*COUNTERS)").split()
    text = DOCUMENT.read_text()
    assert names
    assert not [name for name in names if f"`kvtier_{name}_total" not in text]
