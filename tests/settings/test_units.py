from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("5GiB", 5 << 30),
        ("5 GiB", 5 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("9007199254740993", 2**53 + 1),
        ("5Ki", 5 << 10),
        ("5Mi", 5 << 20),
        ("5Gi", 5 << 30),
        ("1.5Gi", 3 << 29),
        ("5Ti", 5 << 40),
        ("5Pi", 5 << 50),
        ("5Ei", 5 << 60),
        ("5k", 5_000),
        ("5M", 5_000_000),
        ("5G", 5_000_000_000),
        ("5T", 5 * 10**12),
        ("5P", 5 * 10**15),
        ("5E", 5 * 10**18),
        ("5PiB", 5 << 50),
        ("5kB", 5_000),
        ("5KB", 5_000),
        ("4096.0", 4096),
        (4096.0, 4096),
    ],
)
def test_parse_size(written: object, count: int) -> None:
    assert parse_size(written) == count


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(0.5, 0.5), (2, 2), ("250ms", 0.25), ("2s", 2), ("1m", 60), ("1h", 3600), ("0.5", 0.5), ("7us", 7e-6)],
)
def test_parse_duration(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written",
    [
        "5g",
        "5gib",
        "5m",
        "5K",
        "5ki",
        "GiB",
        "-1",
        -1,
        True,
        None,
        "",
        "5 GiB/s",
        "\u0665GiB",
        [5],
        "1e9",
    ],
)
def test_invalid_size(written: object) -> None:
    with pytest.raises(ValueError, match="for example 5GiB or 500MB"):
        parse_size(written)


@pytest.mark.parametrize(("written", "shown"), [(5.0, "5.0"), (0.5, "0.5"), (" 5.0 ", "5.0"), ("1.5", "1.5")])
def test_fraction_without_a_unit(written: object, shown: str) -> None:
    with pytest.raises(ValueError, match=f"^{shown} has no unit: use for example {shown}GiB, or a "):
        parse_size(written)


@pytest.mark.parametrize(
    "written", ["5 sec", "5GiB", "-1s", -1, False, None, "inf", float("nan"), float("inf")]
)
def test_invalid_duration(written: object) -> None:
    with pytest.raises(ValueError, match="for example 250ms, 2s or 1m"):
        parse_duration(written)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatted_size_round_trips(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.01, abs=1)


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_formatted_duration_round_trips(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.01)


def test_zero_duration_is_formatted_in_seconds() -> None:
    assert format_duration(0) == "0s"
