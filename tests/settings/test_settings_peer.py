"""Settings of peers and KV transfers: errors, addresses, secrets and defaults."""

from __future__ import annotations

import secrets
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import SettingsError
from kvtier.settings import Settings, load_settings
from kvtier.settings.peer import PeerSettings, split_address
from kvtier.settings.values import REVEALED

SECRET = "sixteen or more characters"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"peer": {"listen": "0.0.0.0:8200"}}, "peers must authenticate: set peer.secret"),
        ({"peer": {"others": ["a:1"]}}, "peers must authenticate: set peer.secret"),
        ({"peer": {"secret": "short"}}, r"peer\.secret .*fewer than 16 characters.*openssl rand"),
        ({"peer": {"listen": "8200", "secret": SECRET}}, r"peer\.listen .*use HOST:PORT"),
        ({"peer": {"listen": "a:99999", "secret": SECRET}}, r"peer\.listen .*use HOST:PORT"),
        ({"peer": {"others": ["::1:8200"], "secret": SECRET}}, r"peer\.others.*in brackets"),
        ({"peer": {"transport": {"connections": 1}}}, r"peer\.transport .*has no type"),
        ({"peer": {"transport": "{"}}, r"peer\.transport"),
        ({"peer": {"tls": {"certificate": "a"}}}, r"peer\.tls\.key"),
        ({"peer": {"share": 1.5}}, r"peer\.share"),
        ({"peer": {"lsten": "a:1"}}, r"peer\.lsten"),
        ({"role": "prefiller"}, r"role .*'both', 'prefill' or 'decode'"),
        ({"kv_transfer": {"device": "tpu"}}, r"kv_transfer\.device"),
        ({"kv_transfer": {"timeout": 0}}, r"kv_transfer\.timeout"),
        ({"kv_transfer": {"reserve": "1h"}}, r"kv_transfer\.reserve"),
        ({"kv_transfer": {"buffer": 1}}, r"kv_transfer\.buffer"),
        ({"kv_transfer": {"bufer": 1}}, r"kv_transfer\.bufer"),
    ],
)
def test_invalid_setting_is_named(written: Mapping[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        load_settings(written)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("10.0.0.2:8200", ("10.0.0.2", 8200)), ("[::1]:0", ("::1", 0))],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("length", [16, 24, 32])
def test_secrets_of_less_than_32_random_bytes_are_guessable(length: int) -> None:
    random = secrets.token_bytes(length)
    base64 = [encode(random).decode() for encode in (b64encode, urlsafe_b64encode)]
    forms = [random.hex(), random.hex().upper(), *base64]
    assert {PeerSettings(secret=form).guessable for form in forms} == {length < 32}


@pytest.mark.parametrize("secret", [SECRET, "1234567890" * 7, "correct horse battery staple"])
def test_other_secrets_are_guessable_by_their_length(secret: str) -> None:
    assert PeerSettings(secret=secret).guessable
    tls = {"certificate": "/a.pem", "key": "/a.key", "authority": "/b.pem"}
    assert not PeerSettings.model_validate({"secret": secret, "tls": tls}).guessable


def test_secret_is_revealed_only_to_child_processes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    settings = load_settings({"peer": {"listen": "localhost:0", "secret": {"file": str(file)}}})
    assert SECRET not in settings.model_dump_json()
    assert SECRET not in repr(settings)
    copied = Settings.model_validate_json(settings.model_dump_json(context=REVEALED))
    assert copied.peer == settings.peer
