"""Each invalid setting gives one message with the key, its source and a valid value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator

from kvtier import hookimpl
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.settings.errors import explain
from kvtier.testing.faults import WrapperBackend

WriteFile = Callable[[str], Path]
RAM = {"name": "ram", "type": "cpu", "capacity": "1GiB"}
SSD = {"name": "ssd", "type": "disk", "capacity": "1GiB", "path": "/var/cache/kvtier"}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([])


def load_error(overrides: Mapping[str, Any] | None = None, *, file: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides, file=file)
    return str(caught.value)


def tier_error(plugins: Plugins, *tiers: Mapping[str, Any]) -> str:
    settings = load_settings({"tiers": list(tiers)})
    with pytest.raises(SettingsError) as caught:
        plugins.tier_settings(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unknown_setting_in_the_file(write_file: WriteFile) -> None:
    path = write_file("chunk_token: 256")
    assert (
        load_error(file=path)
        == f"chunk_token (in {path}, line 1) is not a setting: did you mean chunk_tokens?"
    )


def test_unknown_nested_setting(write_file: WriteFile) -> None:
    message = load_error(file=write_file("prefetch: {polcy: wait}"))
    assert message.startswith("prefetch.polcy (in ")
    assert message.endswith("is not a setting: did you mean prefetch.policy?")


def test_unknown_setting_in_one_that_may_be_omitted(write_file: WriteFile) -> None:
    message = load_error(file=write_file("peer: {tls: {certificat: /x}}"))
    assert "is not a setting: did you mean peer.tls.certificate?" in message


def test_empty_path_is_rejected(plugins: Plugins) -> None:
    """An unset shell variable expands to an empty path, which must not mean the current folder."""
    assert "the path is empty" in load_error({"socket": ""})
    assert "the path is empty" in tier_error(plugins, RAM, SSD | {"path": ""})


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("file:///data", "'file:///data' is a URL, not a path: use /data"),
        ("FILE:/data", "use /data"),
        ("unix:///run/kvtier.sock", "use /run/kvtier.sock"),
        (Path("unix:///run/kvtier.sock"), "use /run/kvtier.sock"),
        ("s3://bucket/chunks", "is a URL, not a path: use a path on this host"),
    ],
)
def test_url_in_the_place_of_a_path(plugins: Plugins, path: str | Path, remedy: str) -> None:
    """A path would be relative: a folder named ``file:`` in the current one."""
    assert remedy in tier_error(plugins, RAM, SSD | {"path": path})
    assert remedy in load_error({"socket": path})
    assert remedy in load_error({"recording": {"path": path}})


def test_path_with_a_colon(plugins: Plugins) -> None:
    tiers = plugins.tier_settings(load_settings({"tiers": [RAM, SSD | {"path": "/mnt/a://b:/c"}]}))
    assert getattr(tiers[1], "path", None) == Path("/mnt/a:/b:/c")


def test_unknown_setting_from_code() -> None:
    message = load_error({"entirely_made_up": 1})
    assert message.startswith(
        "entirely_made_up (set on the command line, in code or in kv_connector_extra_config)"
    )
    assert "use one of chunk_tokens, partial_chunks" in message


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("KVTIER_CHUNK_TOKEN", "KVTIER_CHUNK_TOKENS"),
        ("KVTIER_PREFETCH__POLCY", "KVTIER_PREFETCH__POLICY"),
        ("KVTIER_CONFIG_FIEL", "KVTIER_CONFIG_FILE"),
        ("kvtier_chunk_token", "KVTIER_CHUNK_TOKENS"),
    ],
)
def test_unknown_variable(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert load_error() == f"the variable {variable} is not a setting: did you mean {nearest}?"


def test_kvtier_native_is_not_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", "0")
    assert load_settings().chunk_tokens == Settings().chunk_tokens


def test_wrong_unit_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH__DEADLINE", "5 parsecs")
    message = load_error()
    assert message.startswith("prefetch.deadline (in KVTIER_PREFETCH__DEADLINE)")
    assert "'5 parsecs' is not a duration: use a number of seconds, or for example 250ms, 2s or 1m" in message


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("KVTIER_TIERS", "[{name: ram}]", '[{"name": "ram", "type": "cpu", "capacity": "5GiB"}]'),
        ("KVTIER_PLUGINS", "a,b", '["kvtier-example"]'),
    ],
)
def test_variable_that_is_not_json(
    name: str, value: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    message = load_error()
    assert message.startswith(f"{name} is not JSON")
    assert f"use for example {name}='{example}'" in message


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("chunk_tokens", 0, "use a whole number from 1 to 1048576, or auto"),
        ("chunk_tokens", "9" * 50, "use a whole number from 1 to 1048576, or auto"),
        ("chunk_tokens", "9" * 5000, "use a whole number from 1 to 1048576, or auto"),
        ("chunk_tokens", 10**400, "use at most 9223372036854775807"),
        ("recording", {"files": 1 << 63}, "use at most 9223372036854775807"),
        ("linger", "99999999999999999999h", "is more than 876000h: use for example 2s or 1m"),
        ("linger", 1e308, "is more than 876000h"),
        ("linger", 10**400, "is more than 876000h"),
        ("drain_timeout", "1" * 5000 + "s", "is not a duration"),
        ("chunk_tokens", "many", "use a whole number from 1 to 1048576, or auto"),
        ("chunk_tokens", True, "true is not a number"),
        ("linger", "soon", "use a number of seconds"),
        ("tiers", [], "should have at least 1 item"),
        ("tiers", [RAM] * 9, "should have at most 8 items"),
        ("tiers", "ram", "it should be a valid list"),
        ("log_level", "LOUD", "it should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("prefetch", {"policy": "fast"}, "it should be 'best_effort', 'wait' or 'timeout'"),
        ("prefetch", {"deadline": 0}, "it should be greater than 0"),
        ("socket", "/" + "a" * 200, "use at most 107 bytes"),
    ],
)
def test_invalid_value(key: str, value: object, remedy: str) -> None:
    message = load_error({key: value})
    assert message.startswith(key)
    assert remedy in message.lower() or remedy in message


def test_all_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PEER__OTHERS", "a,b")
    monkeypatch.setenv("KVTIER_TIERS", "ram")
    monkeypatch.setenv("KVTIER_LINGR", "1s")
    monkeypatch.setenv("KVTIER_LINGER", "soon")
    lines = sorted(load_error({"log_level": "LOUD"}).splitlines())
    assert [line.split(" is ")[0] for line in lines] == [
        "KVTIER_PEER__OTHERS",
        "KVTIER_TIERS",
        "linger (in KVTIER_LINGER)",
        "log_level (set on the command line, in code or in kv_connector_extra_config)",
        "the variable KVTIER_LINGR",
    ]


def test_all_tiers_are_reported(plugins: Plugins) -> None:
    tiers = [
        SSD | {"name": "a b", "eviction": "mru", "codec": "zip"},
        {"type": 7},
        RAM | {"type": "tape"},
        RAM | {"eviction": {"type": "lru", "sped": 1}, "evictoin": 1},
        RAM | {"tenants": {"none": {}}},
    ]
    with pytest.raises(SettingsError) as caught:
        plugins.tier_settings(load_settings({"tiers": tiers}))
    assert [line.partition(" (")[0] for line in str(caught.value).splitlines()] == [
        "tiers[0].type",
        "tiers[0].eviction",
        "tiers[0].codec",
        "tiers[0].codec",
        "tiers[0].name",
        "tiers[1].type",
        "tiers[2].type",
        "tiers[3].eviction.sped",
        "tiers[3].evictoin",
        "tiers[4].tenants",
    ]


def test_codec_of_a_pool_that_does_not_know_lengths() -> None:
    plugins = Plugins.load([])
    cloud = ModuleType("cloud")
    cloud.kvtier_backends = hookimpl(lambda: {"cloud": WrapperBackend})
    plugins.register(cloud, "cloud", "cloud 1")
    pool = {"name": "pool", "type": "cloud", "codec": "lossless"}
    with pytest.raises(SettingsError, match=r"tiers\[1\]\.codec .*is lossless, but cloud does not know"):
        plugins.tier_settings(load_settings({"tiers": [RAM, pool]}))
    pool["codec"] = "identity"
    assert len(plugins.tier_settings(load_settings({"tiers": [RAM, pool]}))) == 2


def test_each_error_has_a_line() -> None:
    lines = load_error({"chunk_tokens": 0, "linger": "soon"}).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["chunk_tokens", "linger"]


def test_file_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG_FILE", str(tmp_path / "none.yaml"))
    message = load_error()
    assert str(tmp_path / "none.yaml") in message
    assert "No such file or directory" in message
    assert "KVTIER_CONFIG_FILE or --config" in message


@pytest.mark.parametrize(
    ("tiers", "key", "message"),
    [
        (
            [RAM, SSD | {"name": "ram"}],
            "tiers[1].name",
            "is 'ram', which tiers[0] already uses: choose another name",
        ),
        (
            [RAM | {"capacity": "4kB"}],
            "tiers[0].capacity",
            "4000 bytes is less than one page of 4096: use a size that holds many chunks",
        ),
        (
            [RAM, SSD | {"capacity": "5 gigs"}],
            "tiers[1].capacity",
            "'5 gigs' is not a size: use a number of bytes, or for example 5GiB or 500MB",
        ),
        (
            [SSD, RAM],
            "tiers[0].type",
            "the first tier must be memory; put one of cpu, hugepage before the disk tier",
        ),
        (
            [RAM, {key: SSD[key] for key in ("name", "type", "capacity")}],
            "tiers[1].path",
            "is required, for example /var/cache/kvtier",
        ),
        (
            [RAM | {"low_watermark": 0.8, "high_watermark": 0.7}],
            "tiers[0].low_watermark",
            "0.8 is above high_watermark (0.7): use at most 0.7",
        ),
        ([RAM | {"high_watermark": 0.5}], "tiers[0].low_watermark", "0.9 is above high_watermark (0.5)"),
        (
            [RAM, SSD | {"write": "sometimes"}],
            "tiers[1].write",
            "is 'sometimes': it should be 'through', 'on_evict' or 'never'",
        ),
        (
            [RAM, SSD | {"type": "tape"}],
            "tiers[1].type",
            "unknown tier type 'tape': use one of cpu, hugepage, disk, ",
        ),
        ([RAM, {"name": "a"}], "tiers[1].type", "is missing: use one of cpu, hugepage, disk"),
        ([RAM, {"type": 7}], "tiers[1].type", "is 7: use one of cpu, hugepage, disk"),
        (
            [RAM | {"eviction": "mru"}],
            "tiers[0].eviction",
            "unknown eviction policy 'mru': use one of lru,",
        ),
        (
            [RAM, SSD | {"encrypt": {"key_file": "/x", "key_fil": "/x"}}],
            "tiers[1].encrypt.key_fil",
            "is not a setting: did you mean tiers[1].encrypt.key_file?",
        ),
        ([RAM, SSD | {"pth": "/x"}], "tiers[1].pth", "is not a setting: did you mean tiers[1].path?"),
        ([RAM | {"name": "my ram"}], "tiers[0].name", "for example ram"),
    ],
)
def test_invalid_tier(plugins: Plugins, tiers: list[dict[str, Any]], key: str, message: str) -> None:
    shown = tier_error(plugins, *tiers)
    assert shown.startswith(f"{key} (set on the command line")
    assert message in shown


@pytest.mark.parametrize(
    "size", ["99999999999999999999GiB", "8388608TiB", 1 << 63, "9" * 20, "9" * 50 + ".5TiB"]
)
@pytest.mark.parametrize("key", ["capacity", "queue"])
def test_size_that_no_medium_has(plugins: Plugins, key: str, size: object) -> None:
    message = tier_error(plugins, RAM, SSD | {key: size})
    assert message.startswith(f"tiers[1].{key} (set on the command line")
    assert message.endswith("is more than 8191PiB: use for example 5GiB or 500MB")


def test_error_names_the_variable_of_a_tier(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", '[{"name": "ram", "type": "cpu"}]')
    with pytest.raises(SettingsError, match=r"^tiers\[0\]\.capacity \(in KVTIER_TIERS\) is required"):
        plugins.tier_settings(load_settings())


def test_queue_defaults_to_a_quarter_of_the_first_tier(plugins: Plugins) -> None:
    tiers = plugins.tier_settings(
        load_settings({"tiers": [RAM, SSD, {**SSD, "name": "b", "path": "/b", "queue": "1MiB"}]})
    )
    assert [tier.queue for tier in tiers[1:]] == [1 << 28, 1 << 20]


def test_defaults(plugins: Plugins) -> None:
    (tier,) = plugins.tier_settings(Settings())
    assert (tier.name, tier.type, tier.capacity) == ("ram", "cpu", 5 << 30)


def test_error_does_not_show_a_secret() -> None:
    class PoolSettings(TierSettings):
        password: SecretStr | None = Field(default=None, min_length=8, description="", examples=["..."])

    with pytest.raises(ValidationError) as caught:
        PoolSettings.model_validate({**RAM, "password": "hunter2"})
    message = explain(caught.value, PoolSettings, str, "tiers[0].")
    assert message.startswith("tiers[0].password is invalid: ")
    assert "hunter2" not in message


class _Tier(BaseModel):
    """Refuses every value."""

    @model_validator(mode="after")
    def _refuse(self) -> _Tier:
        raise ValueError("`user` requires `password`")


def test_error_of_a_whole_tier() -> None:
    with pytest.raises(ValidationError) as failure:
        _Tier()
    message = explain(failure.value, _Tier, str, "tiers[0].")
    assert message == "tiers[0] is invalid: `user` requires `password`"
