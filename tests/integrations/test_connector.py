"""What the connector says of a vLLM that it was not made for, and what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


CODE = """
import json
import vllm
from kvtier.integrations.vllm import connector, metrics, register
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

register()
register()
told = {"named": KVConnectorFactory.get_connector_class_by_name("KVTierConnector").__name__}
told["counters"] = list(metrics.COUNTERS)
vllm.__version__ = "0.99.1"
try:
    connector._check_version()
except Exception as error:
    told["refused"] = f"{type(error).__name__} {error}"
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What all tests ask of it, in one process of its own: importing vLLM changes the interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answers


def test_another_minor_version_is_refused_by_name(told: dict[str, Any]) -> None:
    assert told["refused"].startswith("UnsupportedEngine")
    assert "0.99.1" in told["refused"]
    assert 'pip install "vllm==0.32.*"' in told["refused"]


def test_the_plugin_makes_the_short_name_known(told: dict[str, Any]) -> None:
    assert told["named"] == "KVTierConnector"


def test_every_counter_is_documented(told: dict[str, Any]) -> None:
    names = told["counters"]
    text = DOCUMENT.read_text()
    assert names
    assert not [name for name in names if f"`kvtier_{name}_total" not in text]
