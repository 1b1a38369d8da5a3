"""Several sources: shares, order, cache, validation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import DataError
from atoll.training.data import IGNORED_LABEL, SampleOrder, Supply, prepare_supply, preview_supply
from atoll.training.data.mixing import _PERIOD, Mix, shares

SIZES = {"a": 40, "b": 400, "c": 1200}


def write(tmp_path: Path, sizes: dict[str, int] = SIZES) -> list[str]:
    """Texts whose bytes are those of their names."""
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text(name * size)
    return [str(tmp_path / f"{name}.txt") for name in sizes]


def supply(sources: list[str], tmp_path: Path, **options: Any) -> Supply:
    recipe = {"tokenizer": "bytes", "sequence": 8, "validation": 0.0, "cache": tmp_path / "cache", **options}
    return prepare_supply(sources, **recipe)


def letters(found: Supply, position: int, count: int) -> Counter[str]:
    return Counter(chr(row[0]) for row in found.take(position, count)["input_ids"])


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=9), st.integers(1, 20_000))
@settings(max_examples=100)
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], total: int) -> None:
    found = shares(weights, total=total)
    assert sum(found) == total
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - weight * total / sum(weights)) < 1 + 1e-6


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(0, 200),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
@settings(max_examples=100)
def test_each_source_gives_its_samples_in_its_own_order(
    counts: list[int], seed: int, position: int, steps: list[int]
) -> None:
    """However the positions are asked for, a source's positions are 0, 1, 2, ... over the whole run."""
    total = position + sum(steps)
    sources, positions = Mix(counts, seed).take(0, total)
    for source in range(len(counts)):
        own = positions[sources == source]
        assert own.tolist() == list(range(len(own)))
    part = Mix(counts, seed)
    for count in steps:
        taken = part.take(position, count)
        assert np.array_equal(taken[0], sources[position : position + count])
        assert np.array_equal(taken[1], positions[position : position + count])
        position += count


def test_a_period_has_the_exact_shares() -> None:
    mix = Mix(shares([6, 3, 1]), 3)
    for period in range(3):
        sources, _ = mix.take(period * _PERIOD, _PERIOD)
        assert np.bincount(sources).tolist() == [6000, 3000, 1000]
    first, second = (mix.take(period * _PERIOD, _PERIOD)[0] for period in range(2))
    assert not np.array_equal(first, second)


@given(counts=st.lists(st.integers(15, 30), min_size=2, max_size=4), seeds=st.sets(st.integers(0, 99), min_size=3))
@settings(max_examples=30)
def test_places_of_two_seeds_or_periods_differ(counts: list[int], seeds: set[int]) -> None:
    size = sum(counts)
    drawn = [tuple(Mix(counts, seed).take(period * size, size)[0]) for seed in seeds for period in range(3)]
    assert len(set(drawn)) == len(drawn)


def test_the_seed_reaches_the_places_and_each_sources_order(tmp_path: Path) -> None:
    sources = write(tmp_path, {"a": 400, "b": 400, "c": 400})
    names = [supply(sources, tmp_path, seed=seed).names(0, 147) for seed in (0, 1)]
    places = [[str(name).rpartition(" of ")[2] for name in each] for each in names]
    assert places[0] != places[1]
    own = {
        (at, source): tuple(str(name).split()[0] for name in each if str(name).endswith(source))
        for at, each in enumerate(names)
        for source in sources
    }
    assert all(sorted(map(int, order)) == list(range(49)) for order in own.values())
    assert len(set(own.values())) == 6, "two orders are the same"


def test_without_weights_an_epoch_passes_each_sample_once(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path)
    samples = {name: (size - 1) // 8 for name, size in SIZES.items()}
    assert found.samples == sum(samples.values())
    for epoch in range(2):
        assert letters(found, epoch * found.samples, found.samples) == samples
        names = found.names(epoch * found.samples, found.samples)
        assert len(set(names)) == found.samples
    assert found.epoch(found.samples * 3 // 2) == pytest.approx(1.5, abs=0.01)


def test_weights_say_how_much_is_taken_of_each(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path, weights=[0.5, 0.25, 0.25])
    assert letters(found, 0, _PERIOD) == {"a": 5000, "b": 2500, "c": 2500}
    small, _, large = found.epochs(_PERIOD)
    assert (small, large) == (5000 / 4, 2500 / 149)


def test_a_single_source_has_the_order_it_always_had(tmp_path: Path) -> None:
    text = bytes(range(32, 127)) * 9
    (tmp_path / "a.txt").write_bytes(text)
    found = supply([str(tmp_path / "a.txt")], tmp_path, seed=5)
    assert found.names(0, 4) == [96, 101, 59, 21]  # what it was before there could be several
    taken = found.take(90, 60)["input_ids"][:, 0]
    assert taken.tolist() == [text[8 * index] for index in found.names(90, 60)]


def test_the_sources_of_one_size_are_shuffled_apart() -> None:
    assert not np.array_equal(SampleOrder(50, 1, 0).take(0, 50), SampleOrder(50, 1, 1).take(0, 50))


def test_another_source_is_encoded_alone(tmp_path: Path) -> None:
    sources, said = write(tmp_path), list[str]()
    supply(sources[:2], tmp_path, report=said.append)
    assert [line for line in said if line.startswith("encoding")] == [f"encoding {path}" for path in sources[:2]]
    said.clear()
    grown = supply(sources, tmp_path, report=said.append)
    assert said == [f"encoding {sources[2]}"]
    assert grown.fingerprint != supply(sources[:2], tmp_path).fingerprint
    assert grown.fingerprint != supply(sources[::-1], tmp_path).fingerprint


def test_one_tokenizer_is_trained_on_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("walrus " * 300)
    (tmp_path / "b.txt").write_text("oyster " * 300)
    sources, said = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], list[str]()
    found = supply(sources, tmp_path, tokenizer="bpe-280", report=said.append)
    assert [len(found.tokenizer.encode(f" {word}")) for word in ("walrus", "oyster")] == [1, 1]
    assert sum("training the tokenizer" in line for line in said) == 1
    said.clear()
    again = supply(sources, tmp_path, tokenizer="bpe-280", report=said.append)
    assert (again.fingerprint, said) == (found.fingerprint, [])

    (kept,) = (
        path.parent for path in (tmp_path / "cache").glob("*/tokenizer.json") if len(list(path.parent.iterdir())) == 2
    )
    content = (kept / "tokenizer.json").read_bytes()
    (kept / "tokenizer.json").write_bytes(content.replace(b"walrus", b"wolrus"))
    assert supply(sources, tmp_path, tokenizer="bpe-280", report=said.append).fingerprint == found.fingerprint
    assert sum("training the tokenizer" in line for line in said) == 1


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-270"])
def test_a_preview_writes_nothing_and_is_what_is_prepared(tmp_path: Path, tokenizer: str) -> None:
    recipe = {"tokenizer": tokenizer, "sequence": 8, "cache": tmp_path / "cache", "weights": [1, 1, 2]}
    sources = write(tmp_path)
    seen = preview_supply(sources, **recipe)
    assert seen is not None
    assert not (tmp_path / "cache").exists()
    made = prepare_supply(sources, **recipe)
    assert seen.fingerprint == made.fingerprint
    assert np.array_equal(seen.take(7, 30)["labels"], made.take(7, 30)["labels"])


def test_each_source_is_validated(tmp_path: Path) -> None:
    found = supply(write(tmp_path, {"a": 400, "b": 4000, "c": 40_000}), tmp_path, validation=0.25)
    seen = Counter[str]()
    for source, batch in found.validation(4, limit=10):
        rows = batch["input_ids"][batch["labels"][:, 0] != IGNORED_LABEL]
        assert set(rows.flatten().tolist()) <= {0, ord(Path(source).stem)}
        seen[Path(source).stem] += 1
    assert seen == {"a": 1, "b": 2, "c": 7}
    every = Counter(Path(source).stem for source, _ in found.validation(4, limit=10_000))
    assert every == {"a": 4, "b": 32, "c": 313}


def test_a_source_of_its_own_validates_all(tmp_path: Path) -> None:
    (held,) = write(tmp_path, {"h": 90})
    found = supply(write(tmp_path), tmp_path, validation=held)
    assert [source for source, _ in found.validation(4, limit=2)] == [held, held]
    assert sum(letters(found, 0, found.samples or 0).values()) == sum((size - 1) // 8 for size in SIZES.values())


@pytest.mark.parametrize("how", ["documents", "pad"])
def test_whole_documents_of_several_sources(tmp_path: Path, how: str) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(name * (number % 5 + 2))
    found = supply([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path, how=how, weights=[3, 1])
    batch = found.take(0, 400)
    assert ("position_ids" in batch) is (how == "documents")
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        counted = labels != IGNORED_LABEL
        assert len({*labels[counted].tolist(), *ids[counted].tolist()}) == 1


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    sources = write(tmp_path, {"a": 5, "b": 400, "c": 400})
    with pytest.raises(DataError, match=r"a\.txt' has no sample of data\.sequence = 8"):
        supply(sources, tmp_path)
    with pytest.raises(DataError, match=r"the corpus is too small: .* are 98 samples .* train\.global_batch = 99"):
        supply(sources[1:], tmp_path, global_batch=99)
    with pytest.raises(DataError, match=r"data\.weights: 1 of 100001 .* is less than one sample in 10,000"):
        supply(sources[1:], tmp_path, weights=[1, 100_000])
    with pytest.raises(DataError, match=r"data\.text_field = 'body' has no effect: data\.source = .*b\.txt', .*c\.txt"):
        supply(sources[1:], tmp_path, text_field="body")


def test_text_may_stand_beside_records_with_a_field(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"body": "' + "r" * 100 + '"}\n')
    found = supply([*write(tmp_path, {"a": 400}), str(tmp_path / "r.jsonl")], tmp_path, text_field="body")
    assert set(letters(found, 0, found.samples or 0)) == {"a", "r"}
