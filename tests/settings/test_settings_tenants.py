"""Settings of tenants: what is valid, and what the errors say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier.catalog.tenants import tenant_of_salt
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings, load_settings
from kvtier.settings.tenants import tenants_of_tier
from kvtier.settings.values import REVEALED
from kvtier.tiers.tenants import configured_tenants

RAM = {"name": "ram", "type": "cpu", "capacity": "1GiB"}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([])


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        (
            {"a": {"share": 0.7}, "b": {"share": 0.4}},
            "tenants* is invalid: the shares are 0.7 + 0.4 = 1.1: use at",
        ),
        (
            {"a": {"share": 0.5, "max": 0.4}},
            "tenants.a* is invalid: the share 0.5 is above the max 0.4: use at",
        ),
        ({"a": {"share": 2}}, "tenants.a.share* is 2: it should be less than or equal to 1"),
        ({"a": {"max": 0}}, "tenants.a.max* is 0: it should be greater than 0"),
        ({"a": {"weight": True}}, "tenants.a.weight* is"),
        ({"a": {"shar": 0.5}}, "tenants.a.shar* is not a setting: did you mean tenants.a.share?"),
        ({"a b": {}}, "tenants* is invalid: 'a b' is not a name of a tenant: use up to 64 letters"),
        ({"a": {"salt": "x"}, "b": {"salt": "x"}}, "tenants* is invalid: b.salt is also that of a"),
        ({"other": {"salt": "x"}}, "tenants* is invalid: other.salt is not possible"),
        ({"a": {"salt": {"env": "NOT_SET"}}}, "tenants.a.salt* is invalid: the environment variable NOT_SET"),
        ({str(number): {} for number in range(65)}, "tenants* is invalid: 65 tenants: configure at most 64"),
    ],
)
def test_invalid_tenants(tenants: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"tenants": tenants})
    key, _, rest = message.partition("*")
    assert str(caught.value).startswith(f"{key} (set on the command line, in code")
    assert f"){rest}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("of_tier", "message"),
    [
        (
            {"b": {}},
            "tiers[0].tenants* is invalid: b is not one of the tenants (a, c): add it to the setting tenants",
        ),
        (
            {"a": {"max": 0.1}},
            "tiers[0].tenants* is invalid: a has the share 0.3 and the max 0.1 in this tier",
        ),
        ({"a": {"share": 0.6}}, "tiers[0].tenants* is invalid: the shares are 0.6 + 0.5 = 1.1"),
        ({"a": {"share": -1}}, "tiers[0].tenants.a.share* is -1: it should be greater than or equal to 0"),
        ({"a": {"salt": "x"}}, "tiers[0].tenants.a.salt* is not a setting"),
    ],
)
def test_invalid_tenants_of_a_tier(plugins: Plugins, of_tier: dict[str, Any], message: str) -> None:
    tenants = {"a": {"share": 0.3}, "c": {"share": 0.5}}
    settings = load_settings({"tenants": tenants, "tiers": [{**RAM, "tenants": of_tier}]})
    with pytest.raises(SettingsError) as caught:
        plugins.tier_settings(settings)
    key, _, rest = message.partition("*")
    assert str(caught.value).startswith(f"{key} (set on the command line, in code")
    assert f"){rest}" in str(caught.value)


def test_tier_overrides_part_of_it(plugins: Plugins) -> None:
    tiers = [{**RAM, "tenants": {"a": {"share": 0.1, "weight": 5}}}]
    settings = load_settings(
        {"tenants": {"a": {"share": 0.3, "max": 0.5}, "b": {"share": 0.6}}, "tiers": tiers}
    )
    [tier] = plugins.tier_settings(settings)
    merged = tenants_of_tier(settings.tenants, tier.tenants)  # type: ignore[attr-defined]
    assert (merged["a"].share, merged["a"].max, merged["a"].weight) == (0.1, 0.5, 5)
    assert merged["b"] == settings.tenants["b"]


def test_salts_are_secret_and_name_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_SALT", "very secret")
    monkeypatch.setenv("KVTIER_TENANTS", '{"a": {"salt": {"env": "TEAM_SALT"}}, "other": {"max": 0.5}}')
    settings = load_settings()
    assert "very secret" not in repr(settings) + settings.model_dump_json()
    copied = Settings(**json.loads(settings.model_dump_json(context=REVEALED)))
    assert copied.tenants == settings.tenants
    tenants = configured_tenants(settings)
    assert tenants is not None
    assert tenants.names == ["other", "a"]
    assert configured_tenants(Settings()) is None
    assert tenant_of_salt("very secret") not in repr(settings)
