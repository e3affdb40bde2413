"""What the connector says of a vLLM it was not made for, and what it counts. See ``test_with_vllm.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm import connector, metrics, register
from kvtier.integrations.vllm.metadata import Job, StepMetadata

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_another_minor_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(UnsupportedEngine, match=r'0\.99\.1.*pip install "vllm==0\.32\.\*"'):
        connector._check_version()


class Worker:
    """Counts how often it may rest."""

    def __init__(self) -> None:
        self.rests = 0

    def load(self, jobs: Sequence[Job]) -> None:
        pass

    def rest(self) -> None:
        self.rests += 1


@pytest.mark.parametrize(
    ("spins", "computes", "rests"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_ranks_that_spin_rest_in_steps_that_compute_nothing(spins: bool, computes: bool, rests: int) -> None:
    made, worker, nothing = object.__new__(connector.KVTierConnector), Worker(), cast("Any", None)
    made._worker, made._spins = cast("Any", worker), spins
    made.bind_connector_metadata(StepMetadata(computes=computes))
    made.start_load_kv(nothing)
    assert worker.rests == rests


def test_the_plugin_makes_the_short_name_known() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is connector.KVTierConnector


def test_every_counter_is_documented() -> None:
    names = list(metrics.COUNTERS)
    text = DOCUMENT.read_text()
    assert names
    assert not [name for name in names if f"`kvtier_{name}_total" not in text]
