"""Prepared corpora: the split, the cache, several processes at once, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import DataError
from atoll.testing.progress import finish
from atoll.training.data import Corpus, batch, expected_ids, prepare, preview
from atoll.training.data.blocks import BLOCK_BYTES
from atoll.training.data.split import hold_back, split
from atoll.training.data.store import verify_cache


def _folder(tmp_path: Path, documents: int = 40) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for index in range(documents):
        (folder / f"{index:03}.txt").write_text(f"document {index}: " + "some words again and again, " * 5)
    return folder


def _prepare(source: Path, tmp_path: Path, **options: Any) -> Corpus:
    settings = {"tokenizer": "bpe-300", "cache": tmp_path / "cache", "sequence": 8, **options}
    return prepare(str(source), **settings)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), fraction=st.floats(0, 0.99))
@settings(max_examples=150)
def test_the_split_is_disjoint_covers_everything_and_keeps_the_fraction(lengths: list[int], fraction: float) -> None:
    parts, total = split(lengths, fraction), sum(lengths)
    seen = np.zeros(total, dtype=int)
    for start, stop in parts.train + parts.validation:
        assert start < stop
        seen[start:stop] += 1
    assert (seen == 1).all()
    assert parts.train
    held = sum(stop - start for start, stop in parts.validation)
    assert abs(held - fraction * total) <= max(0.5 * fraction * total, 1)


@given(lengths=st.lists(st.integers(1, 9), min_size=200, max_size=300), fraction=st.floats(0.05, 0.5))
@settings(max_examples=30)
def test_many_short_documents_are_held_back_whole_and_spread(lengths: list[int], fraction: float) -> None:
    parts = split(lengths, fraction)
    assert parts.by == "documents"
    ends = {0, *np.cumsum(lengths).tolist()}
    assert all(start in ends and stop in ends for start, stop in parts.validation)
    assert parts.validation[0][0] < sum(lengths) / 4
    assert parts.validation[-1][1] > sum(lengths) * 3 / 4


def test_a_single_document_gives_its_tail() -> None:
    assert split([100], 0.1).train == ((0, 90),)
    assert split([100], 0.1).validation == ((90, 100),)
    assert split([100], 0.0).validation == ()


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8), fraction=st.floats(1e-6, 0.99))
@settings(max_examples=150)
def test_few_documents_still_leave_a_validation_split_or_an_error(lengths: list[int], fraction: float) -> None:
    """Documents without tokens hold nothing out."""
    if sum(lengths) > 1:
        parts = split(lengths, fraction)
        assert parts.train
        assert sum(stop - start for start, stop in parts.validation) >= 1
    sizes = np.array(lengths)
    if np.count_nonzero(sizes) < 2:
        with pytest.raises(DataError, match=f"whole documents, and there is only {np.count_nonzero(sizes)}; take more"):
            hold_back(lengths, fraction)
        return
    held = hold_back(lengths, fraction)
    assert sizes[held].sum() >= 1
    assert sizes[~held].sum() >= 1
    assert not hold_back(lengths, 0.0).any()


@pytest.mark.parametrize("how", ["blocks", "documents", "pad"])
@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("fraction", [1e-4, 0.05, 0.5])
def test_a_corpus_of_few_documents_is_validated_or_refused(
    tmp_path: Path, count: int, fraction: float, how: str
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefgh" * 4 + str(at)}) + "\n" for at in range(count)))
    tokens = round(count * 33 * fraction)
    if (how != "blocks" and count == 1) or (how == "blocks" and tokens < 9):
        with pytest.raises(DataError, match="validation"):
            _prepare(path, tmp_path, tokenizer="bytes", validation=fraction, how=how)
        return
    corpus = _prepare(path, tmp_path, tokenizer="bytes", validation=fraction, how=how)
    assert len(corpus.validation) >= 2
    assert len(corpus.train) >= 2


def test_train_and_validation_are_the_documents(tmp_path: Path) -> None:
    corpus = _prepare(_folder(tmp_path), tmp_path, validation=0.1)
    end = corpus.tokenizer.decode([corpus.tokenizer.end_of_text or 0])
    train = corpus.tokenizer.decode(corpus.train).split(end)
    held = corpus.tokenizer.decode(corpus.validation).split(end)
    assert train[-1] == held[-1] == ""
    texts = {file.read_text() for file in (tmp_path / "texts").iterdir()}
    assert len(train[:-1]) + len(held[:-1]) == len(texts) == 40
    assert set(train[:-1]) | set(held[:-1]) == texts
    assert 2 <= len(held[:-1]) <= 6


def test_arrays_are_read_only_maps_of_small_integers(tmp_path: Path) -> None:
    corpus = _prepare(_folder(tmp_path), tmp_path)
    for tokens in (corpus.train, corpus.validation):
        assert isinstance(tokens[:8], np.memmap)
        assert tokens.dtype == np.uint16
        assert not tokens[:8].flags.writeable


def test_bytes_need_no_end_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é and more\n".encode() * 30)
    corpus = _prepare(path, tmp_path, tokenizer="bytes", validation=0.1)
    together = np.concatenate([corpus.train, corpus.validation])
    assert bytes(together.tolist()) == path.read_bytes()
    assert corpus.tokenizer.size == 256


@pytest.mark.slow
def test_long_documents_are_encoded_whole(tmp_path: Path) -> None:
    """Long texts are cut for the encoder: at line ends, and inside a line that is longer than a piece."""
    text = "short lines\n" * 20_000 + "é" * 250_000 + "\nend"
    path = tmp_path / "long.txt"
    path.write_text(text)
    corpus = _prepare(path, tmp_path, validation=0.0)
    assert corpus.tokenizer.decode(corpus.train) == text + "<|endoftext|>"
    assert len(corpus.validation) == 0


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = _prepare(folder, tmp_path)
    saved = next((tmp_path / "cache").glob("*/tokenizer.json"))
    again = _prepare(folder, tmp_path, tokenizer=str(saved))
    assert np.array_equal(again.train, first.train)
    assert again.fingerprint == first.fingerprint


def _entries(tmp_path: Path) -> dict[str, int]:
    files = (tmp_path / "cache").glob("*/*")
    return {str(file): file.stat().st_mtime_ns for file in files}


def test_a_second_call_writes_nothing_and_gives_the_same(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    lines: list[str] = []
    first = _prepare(folder, tmp_path, report=lines.append)
    assert len(lines) == 2
    before = _entries(tmp_path)
    second = _prepare(folder, tmp_path, report=lines.append)
    assert len(lines) == 2
    assert _entries(tmp_path) == before
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train, first.train)
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


@pytest.mark.parametrize("change", [{"validation": 0.2}, {"tokenizer": "bpe-301"}, {"tokenizer": "bytes"}])
def test_other_settings_make_another_corpus(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = _folder(tmp_path)
    assert _prepare(folder, tmp_path).fingerprint != _prepare(folder, tmp_path, **change).fingerprint
    assert len(list((tmp_path / "cache").glob("*/about.json"))) == 2


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_records_without_text_are_skipped_and_counted(tmp_path: Path, tokenizer: str) -> None:
    lines = [json.dumps({"text": f"document {index} " * 5}) for index in range(40)]
    lines[7], lines[9], lines[11] = "{", '{"body": "a"}', '{"text": [1]}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 8: not JSON"):
        _prepare(path, tmp_path, tokenizer=tokenizer)
    corpus = _prepare(path, tmp_path, tokenizer=tokenizer, bad_records="skip")
    assert corpus.notes == [
        f"3 of 40 records are broken: 1 of {path}: field 'text' is not text; 1 of {path}: no field 'text'; "
        f'1 of {path}: not JSON (data.bad_records = "skip")'
    ]
    assert _prepare(path, tmp_path, tokenizer=tokenizer, bad_records="skip").notes == corpus.notes
    path.write_text("\n".join(line for line in lines if "document" in line) + "\n")
    whole = _prepare(path, tmp_path, tokenizer=tokenizer)
    assert np.array_equal(whole.train, corpus.train)
    assert whole.fingerprint != corpus.fingerprint


def test_changed_text_of_the_same_size_makes_another_corpus(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = _prepare(folder, tmp_path)
    file = folder / "007.txt"
    file.write_text(file.read_text().replace("words", "sword"))
    assert _prepare(folder, tmp_path).fingerprint != first.fingerprint


def test_the_same_text_elsewhere_gives_the_same_fingerprint_from_a_fresh_cache(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    first = _prepare(_folder(tmp_path / "here"), tmp_path / "here")
    second = _prepare(_folder(tmp_path / "there"), tmp_path / "there")
    assert first.fingerprint == second.fingerprint


def test_about_says_where_it_came_from(tmp_path: Path) -> None:
    corpus = _prepare(_folder(tmp_path), tmp_path)
    about = json.loads(next((tmp_path / "cache").glob("*/about.json")).read_text())
    assert about["fingerprint"] == corpus.fingerprint
    assert about["documents"] == 40
    assert about["tokens"] == len(corpus.train) + len(corpus.validation)
    assert about["tokenizer_name"] == "bpe-300"


_PREPARE_SCRIPT = """
import sys
from pathlib import Path
from atoll.training.data import prepare
lines = []
corpus = prepare(sys.argv[1], tokenizer="bpe-300", cache=Path(sys.argv[2]), sequence=8, report=lines.append)
assert "torch" not in sys.modules
print(corpus.fingerprint, len(lines))
"""


@pytest.mark.slow
def test_of_several_processes_one_works_and_all_agree(tmp_path: Path) -> None:
    folder = _folder(tmp_path, documents=300)
    arguments = [sys.executable, "-c", _PREPARE_SCRIPT, str(folder), str(tmp_path / "cache")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [finish(process)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({fingerprint for fingerprint, _ in outputs}) == 1
    assert sorted(lines for _, lines in outputs) == ["0", "0", "2"]


def test_what_a_killed_preparation_left_is_removed(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _prepare(folder, tmp_path)
    whole = next((tmp_path / "cache").glob("*/about.json")).parent
    abandoned = whole.with_name(whole.name + ".part-x")
    whole.rename(abandoned)
    _prepare(folder, tmp_path)
    assert whole.is_dir()
    assert not abandoned.exists()


def test_a_failed_preparation_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("{broken")
    with pytest.raises(DataError, match="not JSON"):
        _prepare(path, tmp_path)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["about.json", "tokenizer.json", "manifest.json", "train.npy", "validation.npy"])
def test_a_cache_whose_files_are_short_is_made_anew(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path)
    before = _prepare(folder, tmp_path)
    arrays = np.array(before.train, copy=True), np.array(before.validation, copy=True)
    file = _cache(tmp_path) / name
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    lines: list[str] = []
    after = _prepare(folder, tmp_path, report=lines.append)
    assert f"{file.parent}: this cached corpus was damaged" in lines[0]
    assert all(np.array_equal(*pair) for pair in zip(arrays, (after.train, after.validation), strict=True))
    assert after.fingerprint == before.fingerprint
    assert file.read_bytes() == content
    assert not list((tmp_path / "cache").glob("*.part-*"))


@pytest.mark.slow
def test_a_block_that_a_run_found_damaged_is_made_anew_by_the_next(tmp_path: Path) -> None:
    folder = _folder(tmp_path, documents=3000)
    _prepare(folder, tmp_path, tokenizer="bytes")
    file = _cache(tmp_path) / "train.npy"
    content = file.read_bytes()
    _flip(file, 2 * BLOCK_BYTES + 5)
    lines: list[str] = []
    run = _prepare(folder, tmp_path, tokenizer="bytes", report=lines.append)
    assert not lines, "nobody has read so far"
    with pytest.raises(DataError, match=r"damaged \(train\.npy: its digest .*the next run creates it again"):
        np.asarray(run.train)
    assert _preview(folder, tmp_path) is not None
    assert file.read_bytes() != content, "a preview writes nothing"
    _prepare(folder, tmp_path, tokenizer="bytes", report=lines.append)
    assert "does not match" in lines[0]
    assert file.read_bytes() == content
    assert verify_cache(file.parent) > 0


def _preview(folder: Path, tmp_path: Path) -> object:
    return preview(str(folder), tokenizer="bytes", cache=tmp_path / "cache", sequence=8)


def _cache(tmp_path: Path) -> Path:
    return next((tmp_path / "cache").glob("*/about.json")).parent


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    """55 of 400 damaged caches gave other samples under the same fingerprint."""
    folder = _folder(tmp_path, documents=3000)
    _prepare(folder, tmp_path, tokenizer="bytes")
    file = _cache(tmp_path) / "train.npy"
    assert file.stat().st_size > 4 * BLOCK_BYTES
    _flip(file, 2 * BLOCK_BYTES + 5)
    train = _prepare(folder, tmp_path, tokenizer="bytes").train
    per_block = BLOCK_BYTES // train.dtype.itemsize
    assert len(train[: per_block * 2 - 128]) == per_block * 2 - 128
    assert len(batch(train, np.array([0, len(train) // 8 - 2]), 8)["labels"]) == 2
    for broken in (slice(2 * per_block, 2 * per_block + 1), slice(None), np.array([[0, 2 * per_block]])):
        with pytest.raises(DataError, match=rf"train\.npy: its digest does not match in bytes {2 * BLOCK_BYTES}"):
            train[broken]
    with pytest.raises(DataError, match="does not match"):
        np.asarray(train)
    with pytest.raises(DataError, match="does not match"):
        verify_cache(_cache(tmp_path))


@pytest.mark.parametrize("name", ["about.json", "tokenizer.json", "manifest.json", "validation.npy", "train.npy"])
def test_any_byte_of_a_cache_is_checked(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path)
    _prepare(folder, tmp_path)
    file = _cache(tmp_path) / name
    read = verify_cache(file.parent)
    assert read == sum(path.stat().st_size for path in file.parent.iterdir() if path.name != "manifest.json")
    for at in range(0, file.stat().st_size, max(1, file.stat().st_size // 9)):
        _flip(file, at)
        with pytest.raises(DataError, match="this cached corpus is damaged"):
            verify_cache(file.parent)
        _flip(file, at)


def test_arrays_in_each_others_place_are_damage(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _prepare(folder, tmp_path)
    train, held = (_cache(tmp_path) / name for name in ("train.npy", "validation.npy"))
    train.rename(tmp_path / "kept")
    held.rename(train)
    (tmp_path / "kept").rename(held)
    with pytest.raises(DataError, match="damaged"):
        verify_cache(held.parent)


def test_a_cache_from_before_there_were_digests_gets_them_once_it_is_verified(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = _prepare(folder, tmp_path)
    manifest = _cache(tmp_path) / "manifest.json"
    made = manifest.read_bytes()
    manifest.unlink()
    lines: list[str] = []
    assert _prepare(folder, tmp_path, report=lines.append).fingerprint == first.fingerprint
    assert len(lines) == 1
    assert "created by a version without digests" in lines[0]
    assert manifest.read_bytes() == made

    manifest.unlink()
    _flip(manifest.with_name("train.npy"), 300)
    with pytest.raises(DataError, match="its content has the fingerprint"):
        verify_cache(manifest.parent)
    assert not manifest.exists()
    assert _prepare(folder, tmp_path).fingerprint == first.fingerprint
    assert manifest.read_bytes() == made


def test_a_corpus_too_small_for_one_step_says_the_sizes(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_text("x" * 100)
    with pytest.raises(DataError) as caught:
        _prepare(path, tmp_path, tokenizer="bytes", sequence=10, global_batch=16)
    message = str(caught.value)
    assert "95 training tokens are 9 samples" in message
    assert "train.global_batch = 16" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bpe-100"}, "'bpe-100': needs at least 257"),
        ({"tokenizer": "words"}, 'neither "bytes" nor "bpe-N"'),
        ({"validation": 1.0}, r"data\.validation = 1\.0"),
        ({"sequence": 0}, r"data\.sequence = 0"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _prepare(_folder(tmp_path), tmp_path, **options)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(DataError, match=r"empty\.txt': no text"):
        _prepare(path, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache = .*file.*cannot be written"):
        _prepare(_folder(tmp_path), tmp_path, cache=blocker / "cache")


def test_what_takes_long_is_announced_once(tmp_path: Path) -> None:
    source = _folder(tmp_path)
    lines: list[str] = []
    _prepare(source, tmp_path, report=lines.append)
    assert lines[-1] == f"encoding {source}"
    del lines[:]
    _prepare(source, tmp_path, report=lines.append)
    assert lines == []


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_a_preview_is_what_is_prepared_and_writes_nothing(tmp_path: Path, tokenizer: str) -> None:
    source, cache = str(_folder(tmp_path)), tmp_path / "cache"
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": cache, "sequence": 8}
    seen = preview(source, **options)
    assert seen is not None
    assert not cache.exists()
    corpus = prepare(source, **options)
    assert seen.fingerprint == corpus.fingerprint
    assert np.array_equal(seen.train, corpus.train)
    again = preview(source, **options)
    assert again is not None
    assert again.fingerprint == corpus.fingerprint
    with pytest.raises(DataError, match="the corpus is too small"):
        preview(source, **options, global_batch=10_000)


def test_a_preview_of_a_large_source_reads_it_only_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.training.data.store.PREVIEWED_BYTES", 100)
    source = str(_folder(tmp_path))
    options: dict[str, Any] = {"tokenizer": "bytes", "cache": tmp_path / "cache", "sequence": 8}
    assert preview(source, **options) is None
    prepare(source, **options)
    assert preview(source, **options) is not None


def test_ids_of_a_tokenizer_are_known_by_its_name(tmp_path: Path) -> None:
    assert (expected_ids("bytes"), expected_ids("bytes", masked=True)) == (256, 257)
    assert (expected_ids("bpe-300"), expected_ids("bpe-300", masked=True)) == (300, 301)
    corpus = _prepare(_folder(tmp_path), tmp_path)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert expected_ids(str(folder)) == corpus.tokenizer.size
