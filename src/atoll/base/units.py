"""Formatting and parsing of bytes, seconds and counts, and texts of bounded length."""

from __future__ import annotations

import math

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "k", "M", "B", "T")


def bounded(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters: of a longer one its beginning and its end."""
    if len(text) <= longest:
        return text
    gap = f" [... {len(text)} characters ...] "
    left = longest - len(gap)
    return f"{text[: left // 2]}{gap}{text[len(text) - (left - left // 2) :]}"


def format_bytes(count: float, *, decimal: bool = False) -> str:
    """Return `count` bytes in three significant digits: "512 B", "1.5 KiB", "80 GiB"; in powers of 1000 if
    `decimal`."""
    names = _DECIMAL if decimal else _BINARY
    value, name = _scale(count, base=1000 if decimal else 1024, names=names)
    return f"{_digits(value)} {name}"


def format_count(count: float) -> str:
    """Return `count` in three significant digits: "950", "2.5M", "7B" (a billion)."""
    value, name = _scale(count, base=1000, names=_COUNTS)
    return f"{_digits(value)}{name}"


def parse_count(text: str) -> float:
    """Parse a count such as "7e9", "7b", "7B" (a billion), "70m" or "1.5T".

    Raises ValueError if the text is not a number.
    """
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    number = text[:-1] if scale > 1.0 else text
    try:
        return float(number) * scale
    except ValueError:
        raise ValueError(f"{text!r} is not a count such as 7e9, 7b or 350m") from None


def format_rate(per_second: float, unit: str) -> str:
    """Return a rate of `unit`: "7.2k tokens/s"."""
    return f"{format_count(per_second)} {unit}/s"


def format_seconds(seconds: float) -> str:
    """Return a duration: "850 us", "12.3 ms", "4.56 s", "3 min 05 s", "2 h 07 min", "3 d 04 h"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 59.95:
        for name, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if seconds >= scale or name == "us":
                return f"{_digits(seconds / scale)} {name}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def _scale(value: float, *, base: int, names: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    # 999.5 would be written as 1000 of the smaller unit.
    while abs(value) >= base - 0.5 and power < len(names) - 1:
        value /= base
        power += 1
    return value, names[power]


def _digits(value: float) -> str:
    """Return three significant digits without an exponent or trailing zeros."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
