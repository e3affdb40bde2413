"""Settings of KV transfers: errors and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.errors import SettingsError
from kvtier.settings import load_settings


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"role": "prefiller"}, r"role .*'both', 'prefill' or 'decode'"),
        ({"kv_transfer": {"device": "tpu"}}, r"kv_transfer\.device"),
        ({"kv_transfer": {"timeout": 0}}, r"kv_transfer\.timeout"),
        ({"kv_transfer": {"reserve": "1h"}}, r"kv_transfer\.reserve"),
        ({"kv_transfer": {"buffer": 1}}, r"kv_transfer\.buffer"),
        ({"kv_transfer": {"bufer": 1}}, r"kv_transfer\.bufer"),
    ],
)
def test_invalid_setting_is_named(written: Mapping[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(written)


def test_given_values_and_defaults_have_their_origin() -> None:
    settings = load_settings({"kv_transfer": {"timeout": "500ms", "buffer": "1GiB"}})
    assert (settings.kv_transfer.timeout, settings.kv_transfer.buffer) == (0.5, 1 << 30)
    assert (settings.role, settings.origin("role").kind) == ("both", "default")
    given = load_settings({"role": "decode"})
    assert (given.role, given.origin("role").kind) == ("decode", "override")
