"""Variables of LMCache are named, without their values."""

from __future__ import annotations

import logging
import os

import pytest

from kvtier.settings.lmcache import warn_of_variables


def test_variables_are_named_once_and_without_values(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    logger = logging.getLogger("kvtier")
    warn_of_variables(logger)
    assert caplog.messages == []
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://:a secret@cache:6379")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    warn_of_variables(logger)
    assert caplog.messages == [
        "no effect on kvtier: LMCACHE_CHUNK_SIZE, LMCACHE_REMOTE_URL; "
        "`kvtier config from-lmcache --env` translates them"
    ]
