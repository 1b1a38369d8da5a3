"""Rows of documents: every label once, documents apart, and what is too long."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.training.data import IGNORED_LABEL, Corpus, Packing, Rows, prepare, rows_of
from atoll.training.data.rows import pack


@given(sizes=st.lists(st.integers(1, 40), max_size=200), room=st.integers(40, 100))
@settings(max_examples=200)
def test_packing_puts_everything_somewhere_once_and_overfills_nothing(sizes: list[int], room: int) -> None:
    rows = pack(np.array(sizes, dtype=np.int64), room)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in row) for row in rows]
    assert all(0 < each <= room for each in filled)
    # Best fit decreasing needs at most 11/9 of the fewest rows, and one more.
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // room) * 2 + 1
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_packing_fills_rows() -> None:
    sizes = np.random.default_rng(0).integers(1, 513, 5000)
    assert sizes.sum() / (512 * len(pack(sizes, 512))) > 0.99


LENGTHS = (1, 9, 3, 30, 2, 17, 8, 5, 12, 16)
"""Bytes of the documents."""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, length in enumerate(LENGTHS):
        (folder / f"{number}.txt").write_text(chr(ord("a") + number) * (length - 1) + "." if length > 1 else "!")
    return prepare(
        str(folder), tokenizer="bytes", cache=tmp_path, sequence=16, validation=0.0, how="documents", too_long="split"
    )


def all_of(rows: Rows) -> dict[str, np.ndarray]:
    return rows.take(np.arange(len(rows)))


def documents_of(batch: dict[str, np.ndarray]) -> list[bytes]:
    """What the rows teach, each document as its first input and its labels, and that its positions count from 0."""
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        begins = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
        for begin, end in pairwise(begins):
            assert positions[begin:end].tolist() == list(range(end - begin))
            if (labels[begin:end] != IGNORED_LABEL).all():
                assert (ids[begin + 1 : end] == labels[begin : end - 1]).all()
                found.append(bytes([ids[begin], *labels[begin:end].tolist()]))
            else:
                assert (labels[begin:end] == IGNORED_LABEL).all()
                assert (ids[begin:end] == 0).all()
    return sorted(found)


def test_rows_have_each_document_once(corpus: Corpus) -> None:
    rows = rows_of(corpus.trained, Packing(sequence=29, how="documents"))
    texts = [chr(ord("a") + at).encode() * (length - 1) + b"." for at, length in enumerate(LENGTHS) if length > 1]
    assert documents_of(all_of(rows)) == sorted(texts)
    assert not rows.notes


def test_a_document_that_is_too_long_goes_on_in_another_row(corpus: Corpus) -> None:
    rows = rows_of(corpus.trained, Packing(sequence=16, how="documents", too_long="split"))
    found = documents_of(all_of(rows))
    assert found.count(b"d" * 17) == 1
    assert b"d" * 13 + b"." in found
    assert sum(len(each) - 1 for each in found) == sum(LENGTHS) - len(LENGTHS)
    (note,) = rows.notes
    assert note.startswith("1 of 10 documents have more than data.sequence + 1 = 17 tokens and continue in another row")


@pytest.mark.parametrize(("rule", "left"), [("drop", []), ("truncate", [b"d" * 17])])
def test_a_document_that_is_too_long_is_left_out_or_cut(corpus: Corpus, rule: str, left: list[bytes]) -> None:
    rows = rows_of(corpus.trained, Packing(sequence=16, how="documents", too_long=rule))  # type: ignore[arg-type]
    found = documents_of(all_of(rows))
    assert [each for each in found if each.startswith(b"d")] == left
    assert len(found) == len([length for length in LENGTHS if length > 1]) - (not left)
    assert rule in rows.notes[0]


def test_padded_rows_have_one_document_and_no_positions(corpus: Corpus) -> None:
    batch = all_of(rows_of(corpus.trained, Packing(sequence=29, how="pad")))
    assert batch.keys() == {"input_ids", "labels"}
    counts = sorted((batch["labels"] != IGNORED_LABEL).sum(1).tolist())
    assert counts == sorted(length - 1 for length in LENGTHS if length > 1)


def test_batches_in_order_have_every_row_and_one_shape(corpus: Corpus) -> None:
    rows = rows_of(corpus.trained, Packing(sequence=29, how="documents"))
    batches = list(rows.in_order(3, limit=100))
    assert {each["labels"].shape for each in batches} == {(3, 29)}
    together = {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
    assert documents_of(together) == documents_of(all_of(rows))
    assert len(list(rows.in_order(1, limit=2))) == 2


def test_whole_documents_are_held_back(tmp_path: Path) -> None:
    """And at least one, however long."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{number}" * 50)
    options = {"tokenizer": "bytes", "cache": tmp_path, "sequence": 60, "how": "documents"}
    corpus = prepare(str(folder), validation=0.02, **options)  # type: ignore[arg-type]
    held, trained = set(corpus.validation[:].tolist()), set(corpus.train[:].tolist())
    assert len(held) == 1
    assert len(trained) == 3
    assert not held & trained


def test_a_source_of_its_own_is_held_back(tmp_path: Path) -> None:
    """In blocks and as documents; another content of it is another corpus, and a missing one is named."""
    train, held = tmp_path / "train.txt", tmp_path / "held.txt"
    train.write_text("abc" * 40)
    held.write_text("xyz" * 20)
    prints = set()
    for how in ("blocks", "documents"):
        corpus = prepare(
            str(train),
            tokenizer="bytes",
            cache=tmp_path,
            sequence=8,
            validation=str(held),
            how=how,  # type: ignore[arg-type]
        )
        assert bytes(corpus.train[:].tolist()) == train.read_bytes()
        assert bytes(corpus.validation[:].tolist()) == held.read_bytes()
        prints.add(corpus.fingerprint)
    held.write_text("zyx" * 20)
    prints.add(prepare(str(train), tokenizer="bytes", cache=tmp_path, sequence=8, validation=str(held)).fingerprint)
    assert len(prints) == 3
    with pytest.raises(Exception, match=r"data\.validation = .*nowhere'?: there is no such file or folder"):
        prepare(str(train), tokenizer="bytes", cache=tmp_path, sequence=8, validation=str(tmp_path / "nowhere"))
