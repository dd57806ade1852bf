"""Quantities with units, read exactly: bytes, seconds, bytes per second, watts.

``GB`` is 10^9 and ``GiB`` is 2^30; ``B`` is a byte and ``bit`` a bit, so that "10Gbit/s" and "10GB/s" cannot
be confused. Text is read as a fraction, never as a float, and nothing is floored: "1.5GB" is 1,500,000,000
bytes and "0.3B" is refused. Bare numbers are in the base unit (bytes, seconds, bytes per second, watts),
which is also how the values are stored and sent. The price of exactness is about 6 microseconds a value.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from myriad.spec.errors import SpecError, quoted

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_PREFIXES = _DECIMAL | _BINARY

_BYTES = {f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_BANDWIDTHS = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_BANDWIDTHS |= {f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()}
_BANDWIDTHS |= {f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()}
_WATTS = {f"{prefix}W": Fraction(factor) for prefix, factor in _DECIMAL.items() if prefix != "K"}
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "sec": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}

# More than any quantity here, and less than what overflows a float.
_LARGEST = 10**30
# A quantity's text is short; without the limit a number of a million digits would take minutes to read.
_LONGEST_TEXT = 64
MAX_BYTES = 2**63 - 1  # what a message and SQLite hold

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
_QUANTITY = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>[A-Za-z]+(?:/s)?)")
_BARE = re.compile(_NUMBER)
_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d(?:\.\d+)?)")

_BYTES_HINT = 'write a number of bytes or a size such as "1.5GB" (10^9) or "4GiB" (2^30)'
_SECONDS_HINT = 'write seconds or a duration such as "90m", "1.5h" or "12:00:00"'
_BANDWIDTH_HINT = 'write bytes per second or a rate such as "10Gbit/s" or "20GB/s"'
_POWER_HINT = 'write watts or a power such as "700W" or "6.85kW"'


def parse_bytes(value: Any) -> int:
    """Bytes from a whole number or text such as "4GiB"; SpecError for what is not whole bytes."""
    exact = _exact(value, _BYTES, _BYTES_HINT)
    if exact.denominator != 1:
        raise SpecError(f"{quoted(value)} is not a whole number of bytes; {_BYTES_HINT}")
    if exact > MAX_BYTES:
        raise SpecError(f"{quoted(value)} is more than {MAX_BYTES} bytes; {_BYTES_HINT}")
    return int(exact)


def parse_seconds(value: Any) -> float:
    """Seconds from a number, "90m", "1h30m", "12:00:00" (h:mm:ss) or "2-12:00:00" (days first)."""
    if not isinstance(value, str):
        return float(_exact(value, _SECONDS, _SECONDS_HINT))
    text = value.strip()
    if len(text) <= _LONGEST_TEXT:
        if clock := _CLOCK.fullmatch(text):
            days, hours, minutes = (int(clock[part] or 0) for part in "dhm")
            return float(86400 * days + 3600 * hours + 60 * minutes + Fraction(clock["s"]))
        parts = list(_QUANTITY.finditer(text))
        if len(parts) > 1 and not _QUANTITY.sub("", text).strip():
            return float(sum(_exact(part[0], _SECONDS, _SECONDS_HINT) for part in parts))
        if text.count(":") == 1:
            raise SpecError(f"{quoted(value)} could be hours or minutes; {_SECONDS_HINT}")
    return float(_exact(value, _SECONDS, _SECONDS_HINT))


def parse_bandwidth(value: Any) -> float:
    """Bytes per second from a number or from text such as "10Gbit/s" (1.25e9) or "20GB/s" (2e10)."""
    return float(_exact(value, _BANDWIDTHS, _BANDWIDTH_HINT))


def parse_power(value: Any) -> float:
    """Watts from a number or from text such as "6.85kW"."""
    return float(_exact(value, _WATTS, _POWER_HINT))


def format_bytes(size: int) -> str:
    """``4 GiB`` where four digits of a binary unit are exact, else four of a decimal one: ``1.5 GB``."""
    for prefix, factor in reversed(_BINARY.items()):
        if size % factor == 0 and 0 < size // factor < 10_000:
            return f"{size // factor} {prefix}B"
    return f"{_scaled(size)}B"


def format_bandwidth(bandwidth_bytes_per_s: float) -> str:
    """``20 GB/s``, to four significant digits."""
    return f"{_scaled(bandwidth_bytes_per_s)}B/s"


def format_power(power_w: float) -> str:
    """``6.85 kW``, to four significant digits."""
    return f"{_scaled(power_w)}W"


def format_duration(seconds: float) -> str:
    """``350 us``, ``4.52 s``, ``2m 05s``, ``1h 30m``, ``3d 4h``: the two units a reader cares about."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (59.95, 1.0, "s")):
        if float(f"{seconds:.3g}") < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds else "0 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    whole_minutes = round(seconds / 60)
    if whole_minutes < 24 * 60:
        return f"{whole_minutes // 60}h {whole_minutes % 60:02d}m"
    whole_hours = round(seconds / 3600)
    return f"{whole_hours // 24}d {whole_hours % 24}h"


def _scaled(value: float) -> str:
    """Four significant digits and the decimal prefix that leaves one to three digits before the point."""
    for prefix, factor in (
        ("E", 10**18),
        ("P", 10**15),
        ("T", 10**12),
        ("G", 10**9),
        ("M", 10**6),
        ("k", 10**3),
    ):
        rounded = float(f"{value:.4g}")
        if abs(rounded) >= factor:
            return f"{rounded / factor:.4g} {prefix}"
    return f"{value:.4g} "


def _exact(value: Any, units: dict[str, Fraction], hint: str) -> Fraction:
    """The value in the base unit, as an exact fraction that is zero or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise SpecError(f"{quoted(value)} is not a quantity; {hint}")
    if isinstance(value, str):
        return _read(value, units, hint)
    if not 0 <= value <= _LARGEST:  # not true of nan either
        raise SpecError(f"{quoted(value)} is not a number from 0 to 1e30; {hint}")
    return Fraction(value)


def _read(value: str, units: dict[str, Fraction], hint: str) -> Fraction:
    text = value.strip()
    if len(text) > _LONGEST_TEXT:
        raise SpecError(f"{quoted(value)} is too long for a quantity; {hint}")
    if _BARE.fullmatch(text):
        return Fraction(text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise SpecError(f"{quoted(value)} is not a quantity; {hint}")
    if match["unit"] not in units:
        raise SpecError(f'{quoted(value)} has the unknown unit "{match["unit"]}"; {hint}')
    return Fraction(match["number"]) * units[match["unit"]]


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds, json_schema_input_type=float | str), Field(ge=0)]
BytesPerSecond = Annotated[
    float, BeforeValidator(parse_bandwidth, json_schema_input_type=float | str), Field(gt=0)
]
Watts = Annotated[float, BeforeValidator(parse_power, json_schema_input_type=float | str), Field(ge=0)]
