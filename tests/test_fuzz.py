"""Mutated documents are accepted or refused with a documented error: a small run of `benchmarks/fuzz`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.changes import change
from benchmarks.fuzz.reading import end_of

PARSERS = pytest.importorskip(
    "benchmarks.fuzz.parsers", reason="a package whose files are fuzzed is not installed"
).PARSERS


@pytest.mark.wide(13)
@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_changed_document_is_read_or_refused(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name](tmp_path)
    assert {end_of(parser, seed) for seed in parser.seeds} == {"read"}

    @settings(max_examples=150)
    @given(st.sampled_from(parser.seeds), st.integers(0, 2**32))
    def check(seed: bytes, number: int) -> None:
        assert end_of(parser, change(seed, random.Random(number))) in ("read", "refused")

    check()
