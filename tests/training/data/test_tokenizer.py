"""Tokenizers give back what they were given."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from atoll.base.errors import DataError
from atoll.training.data import IGNORED_LABEL, ByteTokenizer, FileTokenizer, Packing, Tokenizer, prepare, rows_of
from atoll.training.data.store import verify_cache
from atoll.training.data.tokenizer import END_OF_TEXT, bpe_size, sample, train_bpe
from atoll.training.data.trained import train_tokenizer

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


# ---- special tokens


def named(folder: Path, *special: str, words: tuple[str, ...] = (), frame: str = "", **files: Any) -> Path:
    """A tokenizer's folder. frame: what its post-processor makes of a text, as in "<s> $A"."""
    inner = tokenizers.Tokenizer.from_str(BPE.to_json().replace(END_OF_TEXT, "<|unused|>"))
    inner.add_special_tokens(list(special))
    inner.add_tokens(list(words))
    if frame:
        pairs = [(name, inner.token_to_id(name)) for name in special]
        inner.post_processor = processors.TemplateProcessing(single=frame, special_tokens=pairs)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def as_added(content: str) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content, "special": True}


SAYS_SO = [
    ({"tokenizer_config": {"eos_token": "<|end|>"}}, "<|end|>"),
    ({"tokenizer_config": {"eos_token": as_added("<|end|>")}}, "<|end|>"),
    ({"tokenizer_config": {"eos_token": None}}, None),
    ({"special_tokens_map": {"eos_token": {"content": "<|end|>"}}}, "<|end|>"),
    ({"special_tokens_map": {"eos_token": "<|end|>"}, "tokenizer_config": {"eos_token": "</s>"}}, "<|end|>"),
    (
        {"special_tokens_map": {"eos_token": "<|end|>"}, "tokenizer_config": {"added_tokens_decoder": {}}},
        "</s>",
    ),
    ({"tokenizer_config": {"pad_token": "</s>"}}, "</s>"),
    ({}, "</s>"),
]


@pytest.mark.parametrize(("files", "end"), SAYS_SO)
def test_the_end_of_text_is_what_the_settings_say(tmp_path: Path, files: dict[str, Any], end: str | None) -> None:
    """A known name was taken, whatever the settings said: Qwen's and Llama 3's answers ended with the base model's."""
    folder = named(tmp_path / "a", "</s>", "<|end|>", **files)
    found = FileTokenizer.read(folder / "tokenizer.json")
    assert (None if found.end_of_text is None else found.decode([found.end_of_text])) == end
    assert list(found.closing) == ([] if end is None else [found.end_of_text])
    assert found.opening == ()


@pytest.mark.slow
@pytest.mark.parametrize(("files", "end"), SAYS_SO[:5])
def test_the_end_of_text_is_that_of_transformers(tmp_path: Path, files: dict[str, Any], end: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    folder = named(tmp_path / "a", "</s>", "<|end|>", frame="</s> $A", **files)
    other = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    found = FileTokenizer.read(folder / "tokenizer.json")
    assert found.end_of_text == other.eos_token_id
    assert [*found.opening, *found.encode("the cat")] == other("the cat")["input_ids"]


def test_ids_of_the_generation_end_a_text_and_are_special(tmp_path: Path) -> None:
    folder = named(tmp_path / "a", "<|turn|>", "<|end|>", words=("</s>",))
    plain = FileTokenizer.read(folder / "tokenizer.json")
    assert plain.end_of_text is None  # the word is no special token
    turn, end = (plain._inner.token_to_id(name) for name in ("<|turn|>", "<|end|>"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, turn, end]}))  # 2 is a letter
    found = FileTokenizer.read(folder / "tokenizer.json")
    assert (found.end_of_text, set(found.stops)) == (turn, {turn, end})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    found = FileTokenizer.read(folder / "tokenizer.json")
    assert (found.end_of_text, set(found.stops)) == (end, {turn, end})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert set(FileTokenizer.read(folder / "tokenizer.json").stops) == {end}


@pytest.mark.parametrize(
    ("frame", "opening", "closing"),
    [
        ("<s> $A", ["<s>"], ["</s>"]),
        ("<s> $A </s>", ["<s>"], ["</s>"]),
        ("$A <sep> <s>", [], ["<sep>", "<s>"]),
        ("$A", [], ["</s>"]),
    ],
)
def test_a_document_begins_and_ends_as_the_post_processor_says(
    tmp_path: Path, frame: str, opening: list[str], closing: list[str]
) -> None:
    folder = named(tmp_path / "a", "<s>", "</s>", "<sep>", frame=frame)
    found = FileTokenizer.read(folder / "tokenizer.json")
    assert [found.decode([token]) for token in found.opening] == opening
    assert [found.decode([token]) for token in found.closing] == closing
    texts = ["the cat", "x" * 450_000, "a mat"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    corpus = prepare(
        str(tmp_path / "texts"), tokenizer=str(folder), cache=tmp_path / "cache", sequence=8, validation=0.0
    )
    wanted = [token for text in texts for token in (*found.opening, *found.encode(text), *found.closing)]
    assert corpus.train[:].tolist() == wanted  # a long text is encoded in pieces


def test_a_cache_knows_the_roles_and_others_are_of_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 20)
    prints = set()
    for files in (
        {},
        {"tokenizer_config": {"eos_token": "<|end|>", "mask_token": "<|unused|>"}},
        {"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": [0]}},
    ):
        folder = named(tmp_path / "b", "</s>", "<|end|>", **files)
        wanted = FileTokenizer.read(folder / "tokenizer.json")
        for _ in range(2):
            corpus = prepare(
                str(tmp_path / "a.txt"), tokenizer=str(folder), cache=tmp_path / "cache", sequence=8, validation=0.0
            )
            found = corpus.tokenizer
            assert (found.end_of_text, found.mask) == (wanted.end_of_text, wanted.mask)
            assert (found.stops, list(found.closing)) == (wanted.stops, list(wanted.closing))
        verify_cache(corpus.folder)
        prints.add(corpus.fingerprint)
    assert len(prints) == 3


def test_a_tokenizer_whose_files_say_what_was_guessed_keeps_its_cache(tmp_path: Path) -> None:
    for files in ({}, {"tokenizer_config": {"eos_token": "</s>"}}):
        found = FileTokenizer.read(named(tmp_path / "b", "</s>", **files) / "tokenizer.json")
        assert found.identity == hashlib.sha256(found.to_json().encode()).hexdigest()


def test_a_tokenizer_is_trained_once_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    folders = [train_tokenizer(tmp_path / "kept", "bpe-300", lambda: TEXTS, said.append) for _ in range(2)]
    assert folders[0] == folders[1]
    assert said == ["training the tokenizer bpe-300 on all sources"]


def test_a_padded_row_needs_no_padding_token(tmp_path: Path) -> None:
    """Its labels are ignored and its positions are its own, so any id does."""
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n' * 4)
    folder = named(tmp_path / "b", "</s>", tokenizer_config={"eos_token": "</s>", "pad_token": None})
    corpus = prepare(
        str(tmp_path / "a.jsonl"),
        tokenizer=str(folder),
        cache=tmp_path / "cache",
        sequence=16,
        validation=0.0,
        how="pad",
    )
    row = rows_of(corpus.trained, Packing(sequence=16, how="pad")).take(np.array([0]))
    length = int(corpus.trained.lengths[0]) - 1  # type: ignore[index]
    assert (row["labels"][0, length:] == IGNORED_LABEL).all()
    assert row["labels"][0, length - 1] == corpus.tokenizer.end_of_text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"eos_token": "<|no|>"}},
            r"its eos_token is '<\|no\|>', and tokenizer\.json has no such",
        ),
        ({"tokenizer_config": "["}, "tokenizer_config.json: cannot be read"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    folder = named(tmp_path / "a", "</s>", **files)
    if "[" in files.values():
        (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=message):
        FileTokenizer.read(folder / "tokenizer.json")
