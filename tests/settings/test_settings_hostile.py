"""A settings file of any content gives one message, with the line and without the value, or settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import SettingsError
from kvtier.settings import load_settings
from kvtier.settings.errors import MAX_CHARACTERS, MAX_LINES
from kvtier.settings.yaml_file import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_file

WriteFile = Callable[[str], Path]
FILE = Path("/etc/kvtier.yaml")
NUMBER = "9" * 5000


def refusal(text: str | bytes) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_file(FILE, text.encode(errors="surrogatepass") if isinstance(text, str) else text)
    message = str(caught.value)
    assert message.startswith("the settings file /etc/kvtier.yaml")
    assert "\n" not in message
    return message


def nested(levels: int) -> str:
    """Return anchors, each of which repeats the one before nine times."""
    lists = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, levels))
    return "".join(["a0: &a0 [x]\n", *lists])


def merged(levels: int) -> str:
    """Return mappings, each of which merges the one before nine times."""
    maps = (f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, levels))
    return "".join(["a0: &a0 {k: v}\n", *maps])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- chunk_tokens", "use lines such as chunk_tokens: 256"),
        ("just a word", "use lines such as chunk_tokens: 256"),
        ("1: 2", "use lines such as chunk_tokens: 256"),
        ("linger: 1s\nchunk_tokens: 1\nlinger: 2s\n", ", line 3, column 1: duplicate key 'linger'"),
        ("chunk_tokens: 256\nprefetch: {policy: wait\nlinger: 1s\n", " is not YAML: line 3, column "),
        (b"\xff\xfe\x00\xd8binary", " is not YAML: line 1: not UTF-16 text"),
        ("linger: 1s\n{a: 1}: 2\n", ", line 2, column 1: a key is not text"),
        ("? [a]\n: 2\n", ", line 1, column 3: a key is not text"),
        ("tiers:\n- capacity: {{ size }}\n", ", line 2, column 14: a key is not text"),
        ("tenants: {1: {share: 0.5}}\n", ", line 1, column 11: a key is not text"),
        ("prefetch: {~: 2}\n", ", line 1, column 12: a key is not text"),
        ("&a {*a : 1}\n", ", line 1, column 1: a key is not text"),
        (f"? {'k' * 129}\n: 1\n", ", line 1, column 3: a key has more than 128 characters"),
        (
            f"\nchunk_tokens: {NUMBER}\n",
            ", line 2, column 15: a number of 5000 characters: use a shorter one",
        ),
        (f"chunk_tokens: 0x{NUMBER}\n", ", line 1, column 15: a number of 5002 characters"),
        (f"linger: 1.{NUMBER}\n", ", line 1, column 9: a number of 5002 characters"),
        (
            "chunk_tokens: !!int secret\n",
            ", line 1, column 15: not a valid int: write the value without a tag",
        ),
        ("checksum: !!bool secret\n", ", line 1, column 11: not a valid bool"),
        ('chunk_tokens: !!int ""\n', ", line 1, column 15: not a valid int"),
        ("prefetch: !!map secret\n", ", line 1, column 11: settings use no tags: put text"),
        ("weights_id: !secret\n", ", line 1, column 13: settings use no tags: put text that begins with !"),
        ("prefetch: !!set {secret}\n", ", line 1, column 11: settings use no tags"),
        ("a: !!python/object/apply:os.system [ls]\n", ", line 1, column 4: settings use no tags"),
        (
            "weights_id: *secret\n",
            ", line 1, column 13: an alias without its anchor: put text that begins with *",
        ),
        ("weights_id: [&secret a, &secret b]\n", ", line 1, column 25: an anchor that exists already"),
        ('weights_id: "\\ud800"\n', ", line 1, column 13: an escape that is no character"),
        ('weights_id: "\\UFFFFFFFF"\n', " is not YAML: line 1, column "),
        (f"%YAML {NUMBER}.1\n---\na: 1\n", " is not YAML: line 1, column "),
        (b"\na: \xe9\n", " is not YAML: line 2: not UTF-8 text"),
        ("\n\na: \x01\n", " is not YAML: line 3: a control character"),
        ("a: 1\n---\nb: 2\n", " is not YAML: line 2, column 1: "),
        ("a: " + "[" * 20_000, f", line 1, column {MAX_DEPTH + 3}: more than {MAX_DEPTH} mappings and lists"),
        ("a: " + "[" * 20_000 + "]" * 20_000, f"more than {MAX_DEPTH} mappings and lists inside each other"),
        ("{a: " * 20_000, f"more than {MAX_DEPTH} mappings and lists inside each other"),
        ("- " * 20_000, f"more than {MAX_DEPTH} mappings and lists inside each other"),
        ("".join(f"{' ' * n}a:\n" for n in range(500)), f", line {MAX_DEPTH}, column "),
        ("a: &a [*a]\n", f"more than {MAX_DEPTH} mappings and lists inside each other"),
        ("prefetch: &p {<<: *p}\n", f"more than {MAX_DEPTH} mappings and lists inside each other"),
        (nested(20), f"more than {MAX_VALUES} keys and values, those of aliases included"),
        (merged(20), f"more than {MAX_VALUES} keys and values, those of aliases included"),
        (f"tiers: [{'a, ' * MAX_VALUES}]", f"more than {MAX_VALUES} keys and values"),
        ("prefetch: {<<: 3}\n", ", line 1, column 16: only mappings can be merged"),
        (
            "# kvtier\nkvtier:\n  linger: 1s\n",
            ", line 2: the settings are inside kvtier: remove this line, and",
        ),
        ("linger: 1s\nkvtier: {tiers: []}\n", ", line 2: the settings are inside kvtier: remove this line"),
        ("#" * MAX_BYTES + "\n", " has more than 256 KiB: set the path of a settings file"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_refused(text: str | bytes, message: str) -> None:
    shown = refusal(text)
    assert message in shown
    assert "secret" not in shown


@pytest.mark.parametrize("written", ["2024-13-45", "2024-02-30", "2024-02-20", "2024-01-01 25:61:61"])
def test_dates_are_text(written: str, write_file: WriteFile) -> None:
    assert load_settings(file=write_file(f"weights_id: {written}")).weights_id == written


def test_endless_file_is_read_up_to_the_limit() -> None:
    with pytest.raises(SettingsError, match="the settings file /dev/zero has more than 256 KiB"):
        load_settings(file=Path("/dev/zero"))


def test_anchors_and_merged_mappings() -> None:
    text = "tiers:\n- &a\n  type: x\n  y: 1\n- <<: [{y: 2, z: 3}, *a]\n  z: 4\n- *a\n"
    values, lines = parse_file(FILE, text.encode())
    assert values == {"tiers": [{"type": "x", "y": 1}, {"type": "x", "y": 2, "z": 4}, {"type": "x", "y": 1}]}
    assert {
        key: lines[key] for key in ("tiers", "tiers[0]", "tiers[0].y", "tiers[1].type", "tiers[1].z")
    } == {
        "tiers": 1,
        "tiers[0]": 2,
        "tiers[0].y": 4,
        "tiers[1].type": 3,
        "tiers[1].z": 6,
    }


def test_many_problems_and_long_values_give_a_short_message(write_file: WriteFile) -> None:
    unknown = "".join(f"k{number}: 1\n" for number in range(3000))
    with pytest.raises(SettingsError) as caught:
        load_settings(file=write_file(f"log_level: {'x' * 100_000}\ntiers: [{'a, ' * 900}]\n{unknown}"))
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1].startswith("and ")
    assert max(map(len, lines)) < MAX_CHARACTERS + 200
    (level,) = (line for line in lines if line.startswith("log_level"))
    assert "kvtier.yaml, line 1) is 'XXXX" in level
    assert level.endswith("it should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR', for example INFO")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("[" * 20_000, "too many mappings and lists inside each other"),
        (f"[{NUMBER}]", "a number of 5000 digits"),
    ],
)
def test_hostile_json_in_a_variable(written: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", written)
    with pytest.raises(SettingsError, match=rf"^KVTIER_TIERS is not JSON \({problem}\)"):
        load_settings()
    monkeypatch.delenv("KVTIER_TIERS")
    monkeypatch.setenv("KVTIER_PEER__TRANSPORT", '{"type": ' + written)
    with pytest.raises(SettingsError, match=rf"peer\.transport .* is invalid: {problem}"):
        load_settings()


def test_key_that_is_not_text_from_code() -> None:
    with pytest.raises(SettingsError, match=r"prefetch\[1\] "):
        load_settings({"prefetch": {1: 2}})


@given(st.text("ab:{}[]-,&*!|>'\"#% \n\t0123~<?", max_size=60))
def test_any_text_is_refused_or_read(text: str) -> None:
    with suppress(SettingsError):
        values, lines = parse_file(FILE, text.encode())
        assert json.dumps(values)
        assert set(values) <= set(lines)
