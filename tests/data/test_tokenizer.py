"""Tokenizers give back what they were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import ByteTokenizer, FileTokenizer, Tokenizer
from atoll.data.tokenizer import END_OF_TEXT, bpe_size, sample, train_bpe
from atoll.errors import DataError

TEXTS = ["def answer(question):\n    return 42\n", "the cat sat on the mat, the cat sat\n" * 20]

WEIRD = [
    "",
    " ",
    "\n\n\t \r\n\x00\x01",
    "naïve café Ångström ß ﬀ",
    "e\u0301 against \u00e9",
    "日本語 한국어 ไทย العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f9ff \U0010ffff",
    "\ufeffbom \u200b\u2028\u2029\u00a0\u3000 spaces",
    f"a text about {END_OF_TEXT} and <s> </s>",
    "  leading and trailing  ",
]


def _bpe(size: int = 300) -> FileTokenizer:
    return train_bpe(TEXTS, size)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), _bpe()], ids=["bytes", "bpe"])
@pytest.mark.parametrize("text", WEIRD)
def test_weird_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (ids < tokenizer.size).all()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=100)
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


BPE = _bpe()


def test_a_batch_equals_its_texts_one_by_one() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        batch = tokenizer.encode_batch(WEIRD)
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in WEIRD]


def test_bytes_are_exactly_256_and_none_is_special() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.size == 256
    assert tokenizer.end_of_text is None
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode(np.array([0xFF, 97])) == "\ufffda"


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_bpe_merges_up_to_its_size_and_has_an_end_of_text() -> None:
    tokenizer = _bpe(280)
    assert tokenizer.size == 280
    assert len(tokenizer.encode(TEXTS[1])) < len(TEXTS[1]) // 2
    assert tokenizer.end_of_text is not None
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_text_that_speaks_of_the_end_of_text_does_not_end() -> None:
    ids = BPE.encode(f"a{END_OF_TEXT}b")
    assert BPE.end_of_text not in ids
    assert BPE.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_small_corpus_gives_fewer_ids_than_asked_for() -> None:
    tokenizer = train_bpe(["ab"], 1000)
    assert 257 <= tokenizer.size <= 258
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


@pytest.mark.slow
def test_a_word_of_a_million_characters_does_not_stop_the_training() -> None:
    """Training once took time by the square of a word's length: nine minutes for 450,000 letters without a space."""
    text = "ab" * 500_000 + " " * 100_000
    tokenizer = train_bpe([text], 300)
    assert len(tokenizer.encode(text)) < len(text) // 8
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert _bpe().to_json() == _bpe().to_json()


def test_a_tokenizer_file_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.to_json(), encoding="utf-8")
    read = FileTokenizer.read(path)
    assert read.size == BPE.size
    assert read.end_of_text == BPE.end_of_text
    assert all(read.encode(text).tolist() == BPE.encode(text).tolist() for text in WEIRD)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        FileTokenizer.read(path)


def test_names_of_bpe() -> None:
    assert bpe_size("bpe-4096") == 4096
    assert bpe_size("bytes") is None
    assert bpe_size("bpe-4096.json") is None
    with pytest.raises(DataError, match="'bpe-256': needs at least 257"):
        bpe_size("bpe-256")


def test_a_sample_is_bounded_and_spread_over_the_texts() -> None:
    texts = ["a" * 100, "b" * 300, "c" * 600]
    assert list(sample(texts, 1000, limit=1000)) == texts
    assert list(sample(texts, 1000, limit=100)) == ["a" * 10, "b" * 30, "c" * 60]
