"""Quantities: what is read, to what exactly, and with which sentence the rest is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.spec import units
from myriad.spec.errors import SpecError

quick = settings(max_examples=50, deadline=None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("1.5GB", 1_500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("4GiB", 4 * 2**30),
        ("0.5KiB", 512),
        ("1kB", 1000),
        ("1e3MB", 10**9),
        ("2.25TiB", 9 * 2**38),
        ("1EB", 10**18),
        ("0.1GB", 100_000_000),  # 0.1 has no exact float; the fraction has
        (1e3, 1000),
    ],
)
def test_bytes_are_exact(text: object, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30.0),
        (0.5, 0.5),
        ("30", 30.0),
        ("30s", 30.0),
        ("90m", 5400.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("12:00:00", 43200.0),
        ("09:30:00", 34200.0),
        ("00:00:01.5", 1.5),
        ("2-12:00:00", 216000.0),
        ("100:00:00", 360000.0),
        ("500ms", 0.5),
        ("10us", 1e-5),
        ("7d", 604800.0),
    ],
)
def test_seconds(text: object, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("10Gbit/s", 1.25e9),
        ("10 Gbps", 1.25e9),
        ("20GB/s", 2e10),
        ("1GiB/s", 2**30),
        ("400Gbit/s", 5e10),
        (1.25e9, 1.25e9),
    ],
)
def test_bandwidth(text: object, bandwidth: float) -> None:
    assert units.parse_bandwidth(text) == bandwidth


def test_power() -> None:
    assert units.parse_power("6.85kW") == 6850.0
    assert units.parse_power("700W") == 700.0


@pytest.mark.parametrize(
    ("parse", "value", "sentence"),
    [
        (
            units.parse_bytes,
            "0.3B",
            (
                '"0.3B" is not a whole number of bytes; write a number of bytes or a size such as "1.5GB"'
                ' (10^9) or "4GiB" (2^30)'
            ),
        ),
        (
            units.parse_bytes,
            "4G",
            (
                '"4G" has the unknown unit "G"; write a number of bytes or a size such as "1.5GB" (10^9) '
                'or "4GiB" (2^30)'
            ),
        ),
        (
            units.parse_bytes,
            True,
            (
                'true is not a quantity; write a number of bytes or a size such as "1.5GB" (10^9) or '
                '"4GiB" (2^30)'
            ),
        ),
        (
            units.parse_seconds,
            "12:00",
            (
                '"12:00" could be hours or minutes; write seconds or a duration such as "90m", "1.5h" or '
                '"12:00:00"'
            ),
        ),
        (
            units.parse_seconds,
            "1:75:00",
            '"1:75:00" is not a quantity; write seconds or a duration such as "90m", "1.5h" or "12:00:00"',
        ),
        (
            units.parse_seconds,
            -1,
            (
                '-1 is not a number from 0 to 1e30; write seconds or a duration such as "90m", '
                '"1.5h" or "12:00:00"'
            ),
        ),
        (
            units.parse_bandwidth,
            "10GB",
            (
                '"10GB" has the unknown unit "GB"; write bytes per second or a rate such as "10Gbit/s" or'
                ' "20GB/s"'
            ),
        ),
        (
            units.parse_power,
            "fast",
            '"fast" is not a quantity; write watts or a power such as "700W" or "6.85kW"',
        ),
    ],
)
def test_refusals_are_sentences(parse: object, value: object, sentence: str) -> None:
    assert callable(parse)
    with pytest.raises(SpecError) as refused:
        parse(value)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 10**400, None, [], "", " ", "-5s", "1 0", "9" * 100, "1e99B"]
)
def test_nonsense_is_refused_in_every_unit(value: object) -> None:
    for parse in (units.parse_bytes, units.parse_seconds, units.parse_bandwidth, units.parse_power):
        with pytest.raises(SpecError):
            parse(value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.5e-4, "350 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (4.518, "4.52 s"),
        (59.96, "1m 00s"),
        (125, "2m 05s"),
        (3599.7, "1h 00m"),
        (5400, "1h 30m"),
        (86399, "1d 0h"),
        (273600, "3d 4h"),
        (-2, "-2 s"),
    ],
)
def test_durations_as_a_reader_wants_them(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


def test_formats() -> None:
    assert units.format_bytes(0) == "0 B"
    assert units.format_bytes(4 * 2**30) == "4 GiB"
    assert units.format_bytes(1_500_000_000) == "1.5 GB"
    assert units.format_bytes(999_999) == "1 MB"
    assert units.format_bytes(18_463 * 1024) == "18.91 MB"
    assert units.format_bandwidth(2e10) == "20 GB/s"
    assert units.format_power(6850) == "6.85 kW"


@quick
@given(st.integers(0, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_bytes_round_trip_through_any_unit(number: int, unit: str) -> None:
    size = units.parse_bytes(f"{number}{unit}")
    assert units.parse_bytes(size) == size
    assert Fraction(size, units.parse_bytes(f"1{unit}")) == number


@quick
@given(st.integers(0, 2**60))
def test_formatted_bytes_read_back_within_four_digits(size: int) -> None:
    assert units.parse_bytes(units.format_bytes(size)) == pytest.approx(size, rel=5.1e-4)


@quick
@given(st.floats(1e-5, 1e6))
def test_formatted_durations_read_back_within_the_shown_digits(seconds: float) -> None:
    # The last digit shown is a unit of at most 1/60 of the value (hours after 24, minutes after 60).
    assert units.parse_seconds(units.format_duration(seconds)) == pytest.approx(seconds, rel=1 / 48)


@quick
@given(st.floats(1.0, 1e15))
def test_bandwidths_survive_as_numbers(bandwidth: float) -> None:
    assert units.parse_bandwidth(bandwidth) == bandwidth
    assert units.parse_bandwidth(units.format_bandwidth(bandwidth)) == pytest.approx(bandwidth, rel=5.1e-4)
