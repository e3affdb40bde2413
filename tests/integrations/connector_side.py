"""What the connector says of a vLLM it was not made for, and what it counts. See ``test_with_vllm.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm import connector, metrics, register

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_another_minor_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(UnsupportedEngine, match=r'0\.99\.1.*pip install "vllm==0\.32\.\*"'):
        connector._check_version()


def test_the_plugin_makes_the_short_name_known() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is connector.KVTierConnector


def test_every_counter_is_documented() -> None:
    names = list(metrics.COUNTERS)
    text = DOCUMENT.read_text()
    assert names
    assert not [name for name in names if f"`kvtier_{name}_total" not in text]
