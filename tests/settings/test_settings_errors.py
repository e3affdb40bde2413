"""Every wrong setting is one message that names the key, where it stands and what to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr, ValidationError

from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings, TierSettings, load_settings
from kvtier.settings_errors import explain

WriteFile = Callable[[str], Path]
RAM = {"name": "ram", "type": "cpu", "capacity": "1GiB"}
SSD = {"name": "ssd", "type": "disk", "capacity": "1GiB", "path": "/var/cache/kvtier"}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([])


def refusal(overrides: Mapping[str, Any] | None = None, *, file: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides, file=file)
    return str(caught.value)


def tier_refusal(plugins: Plugins, *tiers: Mapping[str, Any]) -> str:
    settings = load_settings({"tiers": list(tiers)})
    with pytest.raises(SettingsError) as caught:
        plugins.tier_settings(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_setting_in_the_file(write_file: WriteFile) -> None:
    path = write_file("chunk_token: 256")
    assert refusal(file=path) == f"chunk_token (in {path}) is not a setting: did you mean chunk_tokens?"


def test_an_unknown_nested_setting(write_file: WriteFile) -> None:
    message = refusal(file=write_file("prefetch: {polcy: wait}"))
    assert message.startswith("prefetch.polcy (in ")
    assert message.endswith("is not a setting: did you mean prefetch.policy?")


def test_an_empty_path_is_not_the_current_folder(plugins: Plugins) -> None:
    """What a variable that is not set leaves behind."""
    assert "it is empty: write a path" in refusal({"socket": ""})
    assert "it is empty: write a path" in tier_refusal(plugins, RAM, SSD | {"path": ""})


def test_an_unknown_setting_from_code() -> None:
    message = refusal({"entirely_made_up": 1})
    assert message.startswith(
        "entirely_made_up (given on the command line, in code or in kv_connector_extra_config)"
    )
    assert "write one of chunk_tokens, partial_chunks" in message


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("KVTIER_CHUNK_TOKEN", "KVTIER_CHUNK_TOKENS"),
        ("KVTIER_PREFETCH__POLCY", "KVTIER_PREFETCH__POLICY"),
        ("KVTIER_CONFIG_FIEL", "KVTIER_CONFIG_FILE"),
        ("kvtier_chunk_token", "KVTIER_CHUNK_TOKENS"),
    ],
)
def test_an_unknown_variable(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert refusal() == f"the variable {variable} is not a setting: did you mean {nearest}?"


def test_the_switch_of_the_native_core_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", "0")
    assert load_settings().chunk_tokens == Settings().chunk_tokens


def test_a_wrong_unit_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PREFETCH__DEADLINE", "5 parsecs")
    message = refusal()
    assert message.startswith("prefetch.deadline (in KVTIER_PREFETCH__DEADLINE)")
    assert "'5 parsecs' is no duration: write a number of seconds, or one such as 250ms, 2s or 1m" in message


def test_a_variable_that_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", "[{name: ram}]")
    message = refusal()
    assert message.startswith("KVTIER_TIERS is not JSON")
    assert """write it like KVTIER_TIERS='[{"name": "ram", "type": "cpu", "capacity": "5GiB"}]'""" in message


def test_a_list_that_is_not_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PLUGINS", "a,b")
    assert """write it like KVTIER_PLUGINS='["kvtier-example"]'""" in refusal()


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("chunk_tokens", 0, "it should be greater than or equal to 1"),
        ("chunk_tokens", "many", "it should be a valid integer"),
        ("linger", "soon", "write a number of seconds"),
        ("tiers", [], "should have at least 1 item"),
        ("tiers", [RAM] * 9, "should have at most 8 items"),
        ("tiers", "ram", "it should be a valid list"),
        ("log_level", "LOUD", "it should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("prefetch", {"policy": "fast"}, "it should be 'best_effort', 'wait' or 'timeout'"),
        ("prefetch", {"deadline": 0}, "it should be greater than 0"),
        ("socket", "/" + "a" * 200, "write at most 107 bytes"),
    ],
)
def test_a_value_that_is_wrong(key: str, value: object, remedy: str) -> None:
    message = refusal({key: value})
    assert message.startswith(key)
    assert remedy in message.lower() or remedy in message


def test_each_of_several_mistakes_has_a_line() -> None:
    lines = refusal({"chunk_tokens": 0, "linger": "soon"}).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["chunk_tokens", "linger"]


def test_a_file_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG_FILE", str(tmp_path / "none.yaml"))
    message = refusal()
    assert str(tmp_path / "none.yaml") in message
    assert "No such file or directory" in message
    assert "KVTIER_CONFIG_FILE or --config" in message


def test_a_file_that_does_not_parse_names_the_line(write_file: WriteFile) -> None:
    path = write_file("chunk_tokens: 256\nprefetch: {policy: wait\nlinger: 1s\n")
    message = refusal(file=path)
    assert message.startswith(f"the settings file {path} is not YAML: line 3, column")


def test_a_file_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.yaml"
    path.write_bytes(b"\xff\xfe\x00\xd8binary")
    assert f"the settings file {path} is not YAML" in refusal(file=path)


@pytest.mark.parametrize("text", ["- chunk_tokens", "just a word", "1: 2"])
def test_a_file_that_holds_no_settings_by_name(text: str, write_file: WriteFile) -> None:
    assert "write lines such as chunk_tokens: 256" in refusal(file=write_file(text))


def test_a_key_that_stands_twice_names_the_line(write_file: WriteFile) -> None:
    message = refusal(file=write_file("linger: 1s\nchunk_tokens: 1\nlinger: 2s\n"))
    assert "line 3, column 1: 'linger' stands here for the second time" in message


def test_two_tiers_of_one_name(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {**SSD, "name": "ram"})
    assert message.startswith("tiers[1].name (given on the command line")
    assert "is 'ram', which tiers[0] has already: write another name" in message


def test_a_capacity_smaller_than_a_page(plugins: Plugins) -> None:
    message = tier_refusal(plugins, {**RAM, "capacity": "4kB"})
    assert message.startswith("tiers[0].capacity")
    assert "4000 bytes are less than one page of 4096: write a size that holds many chunks" in message


def test_a_capacity_in_a_wrong_unit(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {**SSD, "capacity": "5 gigs"})
    assert message.startswith("tiers[1].capacity")
    assert "'5 gigs' is no size: write a number of bytes, or a size such as 5GiB or 500MB" in message


def test_a_first_tier_that_is_not_memory(plugins: Plugins) -> None:
    message = tier_refusal(plugins, SSD, RAM)
    assert message.startswith("tiers[0].type")
    assert "the first tier must be memory, write one of cpu, hugepage and the disk tier after it" in message


def test_a_missing_path(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {key: SSD[key] for key in ("name", "type", "capacity")})
    assert message.startswith("tiers[1].path")
    assert message.endswith("is missing: write it, for example /var/cache/kvtier")


def test_a_low_watermark_above_the_high_one(plugins: Plugins) -> None:
    message = tier_refusal(plugins, {**RAM, "low_watermark": 0.8, "high_watermark": 0.7})
    assert message.startswith("tiers[0].low_watermark")
    assert "0.8 is above high_watermark, which is 0.7: write at most 0.7" in message


def test_a_high_watermark_below_the_low_ones_default(plugins: Plugins) -> None:
    assert "0.9 is above high_watermark, which is 0.5" in tier_refusal(
        plugins, {**RAM, "high_watermark": 0.5}
    )


def test_a_bad_write_policy(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {**SSD, "write": "sometimes"})
    assert message.startswith("tiers[1].write")
    assert "is 'sometimes': it should be 'through', 'on_evict' or 'never'" in message


def test_an_unknown_tier_type_lists_those_there_are(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {**SSD, "type": "tape"})
    assert message.startswith("tiers[1].type")
    assert "there is no tier type 'tape': write one of those there are (cpu, hugepage, disk, " in message


@pytest.mark.parametrize(("tier", "problem"), [({"name": "a"}, "is missing"), ({"type": 7}, "is 7")])
def test_a_tier_without_a_type(plugins: Plugins, tier: Mapping[str, Any], problem: str) -> None:
    message = tier_refusal(plugins, RAM, tier)
    assert message.startswith("tiers[1].type")
    assert f"{problem}: write one of cpu, hugepage, disk" in message


def test_an_unknown_eviction_policy_lists_those_there_are(plugins: Plugins) -> None:
    message = tier_refusal(plugins, {**RAM, "eviction": "mru"})
    assert message.startswith("tiers[0].eviction")
    assert "there is no eviction policy 'mru': write one of those there are (lru)" in message


def test_an_unknown_setting_of_a_tier(plugins: Plugins) -> None:
    message = tier_refusal(plugins, RAM, {**SSD, "pth": "/x"})
    assert message.startswith("tiers[1].pth")
    assert "is not a setting: did you mean tiers[1].path?" in message


def test_a_name_that_no_command_could_say(plugins: Plugins) -> None:
    message = tier_refusal(plugins, {**RAM, "name": "my ram"})
    assert message.startswith("tiers[0].name")
    assert "for example ram" in message


def test_a_tier_in_a_variable_is_named_with_it(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", '[{"name": "ram", "type": "cpu"}]')
    with pytest.raises(
        SettingsError, match=r"^tiers\[0\]\.capacity \(in KVTIER_TIERS\) is missing: write it"
    ):
        plugins.tier_settings(load_settings())


def test_the_queue_is_a_quarter_of_the_first_tier_where_none_is_given(plugins: Plugins) -> None:
    tiers = plugins.tier_settings(load_settings({"tiers": [RAM, SSD, {**SSD, "name": "b", "queue": "1MiB"}]}))
    assert [tier.queue for tier in tiers[1:]] == [1 << 28, 1 << 20]


def test_the_defaults_are_right(plugins: Plugins) -> None:
    (tier,) = plugins.tier_settings(Settings())
    assert (tier.name, tier.type, tier.capacity) == ("ram", "cpu", 5 << 30)


def test_a_secret_is_not_repeated() -> None:
    class PoolSettings(TierSettings):
        password: SecretStr | None = Field(default=None, min_length=8, description="", examples=["..."])

    with pytest.raises(ValidationError) as caught:
        PoolSettings.model_validate({**RAM, "password": "hunter2"})
    message = explain(caught.value, PoolSettings, lambda _: "", "tiers[0].")
    assert message.startswith("tiers[0].password is wrong: ")
    assert "hunter2" not in message
