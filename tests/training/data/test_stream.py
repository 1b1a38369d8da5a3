"""Sources that are encoded shard by shard: what is cut, in which order it comes, what is kept, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import DataError
from atoll.training.data import Supply, TokenBatch, documents, find_source, prepare_supply, stream
from atoll.training.data.shards import cut, identity_of
from atoll.training.data.stream import KEPT, Stream

SHARD = 1 << 10
DOCUMENTS = 260


def texts() -> list[str]:
    return [f"{number:05} " + "x" * (number * 7 % 90) for number in range(DOCUMENTS)]


def write(tmp_path: Path, name: str = "texts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return path


def supply(source: Path, tmp_path: Path, **options: Any) -> Supply:
    recipe = {"tokenizer": "bytes", "sequence": 16, "validation": 0.0, "shard": SHARD, "seed": 3, **options}
    return prepare_supply([str(source)], **{"cache": tmp_path / "cache", **recipe})


def is_same(one: TokenBatch, other: TokenBatch) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def of(supply: Supply) -> Stream:
    (feed,) = supply.feeds
    assert isinstance(feed, Stream)
    return feed


def following_of(found: Supply) -> tuple[int, ...]:
    """The shards of the window that is encoded in the background, once they are."""
    ahead = of(found)._ahead
    assert ahead is not None
    return ahead.result().window.shards


def test_a_supply_that_is_closed_encodes_no_more(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path)
    found.take(0, 1)
    assert not of(found)._is_closed.is_set()
    found.close()
    assert of(found)._is_closed.is_set()


def samples_of(found: Supply) -> int:
    """Of an epoch; all shards are counted for it."""
    feed = of(found)
    feed._find(1_000_000)
    total = feed._index.total(len(feed._shards))
    assert total is not None
    return total


def shards_on_disk(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").glob("*.stream/*") if path.is_dir()]


# ---- how a source is cut


def cut_of(path: Path, nbytes: int) -> list[list[str]]:
    source = find_source(str(path))
    return [list(documents(each.source)) for each in cut(replace(source, identity=identity_of(source)), nbytes)]


@pytest.mark.parametrize("nbytes", [1 << 10, 3000, 1 << 20])
def test_lines_are_in_one_shard_each(tmp_path: Path, nbytes: int) -> None:
    found = cut_of(write(tmp_path), nbytes)
    assert [text for shard in found for text in shard] == texts()
    size = (tmp_path / "texts.jsonl").stat().st_size
    assert len(found) == -(-size // nbytes)


def test_a_line_longer_than_a_shard_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    lines = ["a", "b" * 5000, "c" * 1500, "d"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps({"text": line}) for line in lines).encode())
    found = cut_of(path, 1 << 10)
    assert [text for shard in found for text in shard] == lines
    assert [] in found


def test_small_files_share_a_shard_and_text_is_not_cut(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(str(number) * 300)
    (folder / "5.txt").write_text("5" * 4000)
    assert [[text[0] for text in shard] for shard in cut_of(folder, 1 << 10)] == [
        ["0", "1", "2"],
        ["3", "4"],
        ["5"],
        ["6", "7", "8"],
        ["9"],
    ]


def test_tables_are_cut_between_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    parquet.write_table(pyarrow.table({"text": texts()}), tmp_path / "texts.parquet", row_group_size=20)
    datasets.Dataset.from_dict({"text": texts()}).save_to_disk(str(tmp_path / "saved"))
    for name in ("texts.parquet", "saved"):
        found = cut_of(tmp_path / name, 2048)
        assert len(found) > 2
        assert [text for shard in found for text in shard] == texts()


# ---- in which order


@pytest.mark.parametrize("how", ["blocks", "documents", "pad"])
def test_an_epoch_passes_each_sample_once(tmp_path: Path, how: str) -> None:
    found = supply(write(tmp_path), tmp_path, how=how)
    total = samples_of(found)
    epochs = []
    for epoch in range(2):
        names = found.names(epoch * total, total)
        assert len(set(names)) == total
        taken = found.take(epoch * total, total)["input_ids"]
        epochs.append(Counter(bytes(row.astype(np.uint8)) for row in taken))
        assert found.epoch((epoch + 1) * total) == pytest.approx(epoch + 1)
    assert epochs[0] == epochs[1]
    assert not is_same(found.take(0, total), found.take(total, total))


def test_orders_of_two_seeds_epochs_windows_or_sources_differ(tmp_path: Path) -> None:
    """Of shards, and of the samples of windows of one size: lines of one length fill shards of one size."""
    lines = "".join(json.dumps({"text": f"{number:05} " + "x" * 20}) + "\n" for number in range(700))
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        path.write_text(lines)
    recipe = {"tokenizer": "bytes", "sequence": 16, "validation": 0.0, "shard": SHARD, "cache": tmp_path / "cache"}
    shards: dict[tuple[int, ...], tuple[int, ...]] = {}
    samples: dict[tuple[int, ...], tuple[int, ...]] = {}
    for seed in (3, 4):
        for number, feed in enumerate(prepare_supply([str(path) for path in paths], seed=seed, **recipe).feeds):
            assert isinstance(feed, Stream)
            feed._find(1_000_000)  # all shards are counted for it
            total = feed._index.total(len(feed._shards))
            assert total is not None
            for epoch in range(3):
                windows = list(feed._walk(epoch * total))
                shards[seed, number, epoch] = tuple(shard for window in windows for shard in window.shards)
                assert sorted(shards[seed, number, epoch]) == list(range(len(feed._shards)))
                for window in windows:
                    names = [str(name) for name in feed.names(window.start, window.samples)]
                    begins = [sum(window.counts[:at]) for at in range(len(window.shards))]
                    home = {feed._shards[shard].source.name: begins[at] for at, shard in enumerate(window.shards)}
                    order = tuple(
                        home[shard] + int(sample) for sample, _, shard in (name.partition(" of ") for name in names)
                    )
                    assert sorted(order) == list(range(window.samples))
                    samples[seed, number, epoch, window.number] = order
            feed.close()
    assert len(shards) == 12
    assert len(set(shards.values())) == len(shards), "two orders of shards are the same"
    sizes = Counter(len(order) for order in samples.values())
    assert max(sizes.values()) > 24, "windows of one size are compared"
    assert len(set(samples.values())) == len(samples), "two orders of samples are the same"


def test_samples_depend_on_the_position_alone(tmp_path: Path) -> None:
    """However a rank asks, from wherever it begins, with and without what others have left in the cache."""
    source = write(tmp_path)
    whole = supply(source, tmp_path).take(0, 600)
    for cache, begin, step in (("cache", 0, 7), ("cache", 333, 50), ("other", 123, 9), ("other", 590, 10)):
        found = supply(source, tmp_path, cache=tmp_path / cache)
        for position in range(begin, 600 - step + 1, step):
            wanted = {name: values[position : position + step] for name, values in whole.items()}
            assert is_same(found.take(position, step), wanted), (cache, begin, position)


def test_a_name_says_where_a_sample_is(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path, how="pad")
    taken = found.take(30, 20)
    for name, row in zip(found.names(30, 20), taken["input_ids"], strict=True):
        number, _, place = str(name).partition(" of ")
        shard = int(place.partition(", shard ")[2].partition(" of ")[0]) - 1
        text = list(documents(of(found)._shards[shard].source))
        pieces = [inputs[at : at + 16] for inputs in (each[:-1] for each in text) for at in range(0, len(inputs), 16)]
        assert bytes(row[row > 0].astype(np.uint8)).decode() in pieces, number


def test_progress_is_in_epochs(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path)
    seen = []
    for position in range(0, 400, 10):
        found.take(position, 10)
        seen.append(found.epoch(position + 10))
    assert seen == sorted(seen)
    assert found.epoch(400) == pytest.approx(400 / samples_of(found), rel=0.05)


# ---- what is encoded and kept


def test_shards_are_encoded_when_they_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = supply(write(tmp_path), tmp_path)
    count = len(of(found)._shards)
    assert count > KEPT + 6
    assert len(shards_on_disk(tmp_path)) == 1  # the first sample needs no other
    total = 0
    for position in range(0, 900, 10):
        found.take(position, 10)
        following_of(found)  # while a shard is encoded and another deleted, a listing may show both
        total = max(total, len(shards_on_disk(tmp_path)))
    assert KEPT <= total <= KEPT + 1  # with the first
    assert of(found)._index.total(count) is not None


def test_a_resumed_run_encodes_its_window_and_no_other(tmp_path: Path) -> None:
    source, encoded = write(tmp_path), list[int]()
    before = supply(source, tmp_path)
    wanted = before.take(0, 520)
    following_of(before)
    for path in shards_on_disk(tmp_path):
        shutil.rmtree(path)
    found = supply(source, tmp_path)
    feed = of(found)
    encode = feed._encode
    feed._encode = lambda shard: (encoded.append(shard), encode(shard))[1]
    assert is_same(found.take(510, 10), {name: values[510:] for name, values in wanted.items()})
    (opened, *_) = feed._recent
    following = following_of(found)
    assert set(encoded) == {*opened.window.shards, *following}


def test_an_index_that_is_damaged_is_made_anew(tmp_path: Path) -> None:
    source, said = write(tmp_path), list[str]()
    before = supply(source, tmp_path)
    wanted = before.take(0, 300)
    following_of(before)  # or the thread that encodes ahead writes the index again
    (index,) = (tmp_path / "cache").glob("*.stream/index-*.json")
    index.write_bytes(index.read_bytes()[:-20])
    found = supply(source, tmp_path, report=said.append).take(290, 10)
    assert is_same(found, {name: values[290:] for name, values in wanted.items()})
    assert any(line.endswith("to count its samples") for line in said)


def test_what_fails_in_the_background_is_raised_in_the_step(tmp_path: Path) -> None:
    source = write(tmp_path)
    lines = source.read_text().splitlines()
    lines[100] = lines[100][:-1] + "!"
    source.write_text("\n".join(lines) + "\n")
    found = supply(source, tmp_path)

    def train() -> None:
        for position in range(0, 10_000, 10):
            found.take(position, 10)

    with pytest.raises(DataError, match=r"texts\.jsonl, line \d+ of those that begin from byte \d+ on: not JSON"):
        train()


def test_a_file_that_changes_under_a_run_is_found(tmp_path: Path) -> None:
    source = write(tmp_path)
    total = samples_of(supply(source, tmp_path))
    text = source.read_text()
    source.write_text(text.replace("00200 ", "00200 y", 1).replace('x"', '"', 1))
    assert len(source.read_text()) == len(text)
    os.utime(source, (1, 1))
    with pytest.raises(DataError, match=r"its files have changed since it was first encoded; restore them, or"):
        supply(source, tmp_path).take(0, total)


# ---- together with the rest


def test_a_share_of_the_first_shard_validates(tmp_path: Path) -> None:
    found = supply(write(tmp_path), tmp_path, validation=0.4, how="pad", sequence=100)
    held = {bytes(row[:5].astype(np.uint8)) for _, batch in found.validation(4, limit=9) for row in batch["input_ids"]}
    held.discard(bytes(5))
    total = samples_of(found)
    trained = {bytes(row[:5].astype(np.uint8)) for row in found.take(0, total)["input_ids"]}
    assert held
    assert not held & trained
    assert len(held | trained) == DOCUMENTS
    for position in range(0, 2 * total, 20):
        found.take(position, 20)
    assert of(found)._first in {path.name for path in shards_on_disk(tmp_path)}  # it is not deleted


def test_streams_are_mixed_and_share_a_tokenizer(tmp_path: Path) -> None:
    one, other = write(tmp_path, "one.jsonl"), tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": "walrus " * 9}) + "\n" for _ in range(60)))
    recipe = {
        "tokenizer": "bpe-270",
        "sequence": 16,
        "validation": str(one),
        "shard": SHARD,
        "cache": tmp_path / "cache",
    }
    found, again = (prepare_supply([str(one), str(other)], weights=[1, 3], **recipe) for _ in range(2))
    assert found.fingerprint == again.fingerprint
    assert len(found.tokenizer.encode(" walrus")) == 1
    assert [source for source, _ in found.validation(4, limit=1)] == [str(one)]
    assert is_same(found.take(1234, 8), again.take(1234, 8))
    names = Counter(str(name).rpartition(" of ")[2] for name in found.names(0, 400))
    assert names[str(other)] == pytest.approx(300, abs=30)


def test_two_feeds_of_a_process_share_the_cache(tmp_path: Path) -> None:
    """As two ranks of a machine do: one encodes while the other waits, and neither needs what the other deletes."""
    source = write(tmp_path)
    one, other = (supply(source, tmp_path) for _ in range(2))
    for position in range(0, 600, 20):
        assert is_same(one.take(position, 10), other.take(position, 10))


def test_what_has_no_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no sample of data\.sequence = 100000"):
        supply(write(tmp_path), tmp_path, sequence=100_000).take(0, 1)


def test_a_wait_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "NOTED_SECONDS", 0.0)
    said = list[str]()
    found = supply(write(tmp_path), tmp_path, report=said.append)
    for position in range(0, 100, 10):
        found.take(position, 10)
    assert any(line.startswith("note: a step waited") for line in said)
    assert of(found).waited > 0
