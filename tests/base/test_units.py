"""Numbers as people read them."""

import pytest

from atoll.base.units import format_bytes, format_count, format_rate, format_seconds, parse_count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB"), (2**40 - 1, "1 TiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_decimal_bytes() -> None:
    assert format_bytes(38.5e9, decimal=True) == "38.5 GB"
    assert format_bytes(999.7, decimal=True) == "1 kB"


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (950, "950"), (7200, "7.2k"), (2.5e6, "2.5M"), (7e9, "7B")])
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("7e9", 7e9), ("7b", 7e9), ("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12), ("2k", 2000), ("0", 0), ("1000", 1000)],
)
def test_counts_are_read_as_people_write_them(text: str, count: float) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "b", "7 x", "7bb", "seven", "7,5b"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 7e9, 7b or 350m"):
        parse_count(text)


def test_rate() -> None:
    assert format_rate(7234, "tokens") == "7.23k tokens/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.00085, "850 us"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (59.97, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (86400 * 3 + 4 * 3600, "3 d 04 h"),
        (-2, "-2 s"),
        (float("inf"), "unknown"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
