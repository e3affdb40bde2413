"""What is refused of the settings of peers, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import SettingsError
from kvtier.settings import Settings, load_settings
from kvtier.settings_peer import split_address
from kvtier.settings_secret import REVEALED

SECRET = "sixteen or more characters"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"listen": "0.0.0.0:8200"}, "peers must prove who they are: write peer.secret"),
        ({"others": ["a:1"]}, "peers must prove who they are: write peer.secret"),
        ({"secret": "short"}, r"peer\.secret .*fewer than 16 characters.*openssl rand"),
        ({"listen": "8200", "secret": SECRET}, r"peer\.listen .*write HOST:PORT"),
        ({"listen": "a:99999", "secret": SECRET}, r"peer\.listen .*write HOST:PORT"),
        ({"others": ["::1:8200"], "secret": SECRET}, r"peer\.others.*in brackets"),
        ({"transport": {"connections": 1}}, r"peer\.transport .*names no transport"),
        ({"transport": "{"}, r"peer\.transport"),
        ({"tls": {"certificate": "a"}}, r"peer\.tls\.key"),
        ({"share": 1.5}, r"peer\.share"),
        ({"lsten": "a:1"}, r"peer\.lsten"),
    ],
)
def test_what_is_wrong_is_named(written: Mapping[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        load_settings({"peer": written})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("10.0.0.2:8200", ("10.0.0.2", 8200)), ("[::1]:0", ("::1", 0))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


def test_a_secret_is_shown_to_a_process_of_ours_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    settings = load_settings({"peer": {"listen": "localhost:0", "secret": {"file": str(file)}}})
    assert SECRET not in settings.model_dump_json()
    assert SECRET not in repr(settings)
    copied = Settings.model_validate_json(settings.model_dump_json(context=REVEALED))
    assert copied.peer == settings.peer
