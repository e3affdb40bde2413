"""What is refused of the settings of a hand-over, and what they are where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.errors import SettingsError
from kvtier.settings import load_settings


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"role": "prefiller"}, r"role .*'both', 'prefill' or 'decode'"),
        ({"hand_over": {"device": "tpu"}}, r"hand_over\.device"),
        ({"hand_over": {"patience": 0}}, r"hand_over\.patience"),
        ({"hand_over": {"reserve": "1h"}}, r"hand_over\.reserve"),
        ({"hand_over": {"buffer": 1}}, r"hand_over\.buffer"),
        ({"hand_over": {"bufer": 1}}, r"hand_over\.bufer"),
    ],
)
def test_what_is_wrong_is_named(written: Mapping[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(written)


def test_what_is_given_counts_and_is_told_from_what_is_not() -> None:
    settings = load_settings({"hand_over": {"patience": "500ms", "buffer": "1GiB"}})
    assert (settings.hand_over.patience, settings.hand_over.buffer) == (0.5, 1 << 30)
    assert (settings.role, settings.origin("role").kind) == ("both", "default")
    given = load_settings({"role": "decode"})
    assert (given.role, given.origin("role").kind) == ("decode", "override")
