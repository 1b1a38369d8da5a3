"""Conversations through chat templates: which tokens, which of them are answers, and which templates are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from atoll.config.load import from_dict
from atoll.data import IGNORED_LABEL, Batch, Supply
from atoll.data.tokenizer import train_bpe
from atoll.errors import ConfigError, DataError
from atoll.plans import MeshShape
from atoll.training.chat import Template
from atoll.training.samples import Samples, prepare_corpus

pytest.importorskip("transformers")

TURN = "{{ '<|begin|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|begin|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK
)
SHORTENS = "{% for m in messages %}{% if loop.last or m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}" + ASK
"""Leaves out earlier answers."""
THINKS = (
    "{% for m in messages %}"
    + TURN
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n<think>' }}{% endif %}"
)
"""Asks for an answer in words that no answer of a record begins with."""
RAISES = "{{ raise_exception('no such thing as ' + messages[0].content) }}"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello thére"},
    {"role": "assistant", "content": "fine ünd good"},
    {"role": "user", "content": "what"},
    {"role": "assistant", "content": "that is it"},
]
ANSWERS = "fine ünd good<|end|>\nthat is it<|end|>\n"


@dataclass
class Folder:
    """A tokenizer's folder."""

    path: Path
    tokens: tokenizers.Tokenizer

    def template(self, text: str, *, where: str = "config", answers_only: bool = True) -> Template:
        own = None
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            (self.path / name).unlink(missing_ok=True)
        if where == "config":
            values = {"chat_template": text, "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
            (self.path / "tokenizer_config.json").write_text(json.dumps(values))
        elif where == "file beside":
            (self.path / "chat_template.jinja").write_text(text)
        else:
            own = self.path / "own.jinja"
            own.write_text(text)
        return Template(self.path / "tokenizer.json", own, answers_only=answers_only)

    def text(self, ids: Any) -> str:
        return str(self.tokens.decode([int(each) for each in ids], skip_special_tokens=False))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    words = " ".join(message["content"] for message in CHAT) + " user assistant system and some more words"
    tokens = tokenizers.Tokenizer.from_str(train_bpe([words] * 3, 300).to_json())
    tokens.add_special_tokens(["<|begin|>", "<|end|>"])
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_text(tokens.to_str())
    return Folder(path, tokens)


@pytest.mark.parametrize("where", ["config", "file beside", "own"])
@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["plain", "marked"])
def test_answers_are_what_the_assistant_says_with_the_end_of_its_turn(folder: Folder, text: str, where: str) -> None:
    found = folder.template(text, where=where).render(CHAT)
    assert folder.text(found.ids[found.is_answer]) == ANSWERS
    assert folder.text(found.ids) == "".join(f"<|begin|>{m['role']}\n{m['content']}<|end|>\n" for m in CHAT)
    assert folder.tokens.token_to_id("<|begin|>") in found.ids


def test_all_tokens_count_where_that_is_asked_for(folder: Folder) -> None:
    found = folder.template(PLAIN, answers_only=False).render(CHAT)
    assert found.is_answer.all()
    assert np.array_equal(found.ids, folder.template(PLAIN).render(CHAT).ids)


def test_words_that_ask_for_an_answer_and_begin_none_are_no_bound(folder: Folder) -> None:
    """The header then counts too."""
    found = folder.template(THINKS).render(CHAT[:3])
    assert folder.text(found.ids[found.is_answer]) == "<|begin|>assistant\nfine ünd good<|end|>\n"


def test_a_template_that_changes_earlier_answers_is_refused(folder: Folder) -> None:
    template = folder.template(SHORTENS)
    assert template.render(CHAT[1:3]).is_answer.any()
    with pytest.raises(ValueError, match=r"message 2: .* mark answers with \{% generation %\}"):
        template.render(CHAT[1:])


def test_a_template_of_ones_own_replaces_the_tokenizers(folder: Folder) -> None:
    folder.template(RAISES)
    own = folder.path / "own.jinja"
    own.write_text(PLAIN)
    found = Template(folder.path / "tokenizer.json", own, answers_only=True).render(CHAT)
    assert folder.text(found.ids[found.is_answer]) == ANSWERS


def test_the_fingerprint_is_of_everything_that_decides(folder: Folder) -> None:
    prints = []
    for text, where, only in (
        (PLAIN, "config", True),
        (PLAIN, "config", False),
        (MARKED, "config", True),
        (PLAIN, "own", True),
    ):
        prints.append(folder.template(text, where=where, answers_only=only).fingerprint)
    assert len(set(prints)) == len(prints)
    assert folder.template(PLAIN).fingerprint == prints[0]


# ---- wrong beginnings


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"chat_template": ""}'])
def test_a_tokenizer_without_a_template_says_what_to_do(folder: Folder, content: str | None) -> None:
    if content is not None:
        (folder.path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"no chat template: .* set data\.chat_template to a file with one"):
        Template(folder.path / "tokenizer.json", None, answers_only=True)


def test_a_template_that_is_no_template_is_named(folder: Folder) -> None:
    with pytest.raises(ValueError, match="the chat template refuses it"):
        folder.template("{% for m in messages %}").render(CHAT)


@pytest.mark.parametrize("content", ["[" * 200, '{"chat_template": 3}', '{"chat_template": [1]}'])
def test_a_config_that_cannot_be_read_is_named(folder: Folder, content: str) -> None:
    (folder.path / "tokenizer_config.json").write_text(content)
    with pytest.raises((DataError, ValueError), match=r"tokenizer|template"):
        Template(folder.path / "tokenizer.json", None, answers_only=True).render(CHAT)


def test_a_template_file_that_is_not_there_is_named(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"data\.chat_template: .*none\.jinja cannot be read"):
        Template(folder.path / "tokenizer.json", folder.path / "none.jinja", answers_only=True)


# ---- samples


def settings(folder: Folder, records: list[Any], **data: Any) -> dict[str, Any]:
    source = folder.path.parent / "records.jsonl"
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return {
        "data": {
            "source": str(source),
            "format": "chat",
            "tokenizer": str(folder.path),
            "cache": str(folder.path.parent / "cache"),
            "sequence": 64,
            "validation": 0.2,
            **data,
        },
        "train": {"global_batch": 4, "microbatch": 1},
    }


def some_records(count: int) -> list[Mapping[str, Any]]:
    return [
        {"prompt": "what " * (at % 7 + 1), "completion": f"that is {at}" + " it" * (at % 11)} for at in range(count)
    ]


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "shard": 1024}])
@pytest.mark.parametrize("packing", ["documents", "pad"])
def test_samples_are_the_same_on_any_ranks_and_have_answers_as_labels(
    folder: Folder, packing: str, streaming: dict[str, Any]
) -> None:
    folder.template(PLAIN)
    config = from_dict(settings(folder, some_records(60), packing=packing, **streaming))
    corpus = prepare_corpus(config)
    alone = Samples(config, corpus, MeshShape().place(0))
    ranks = [Samples(config, corpus, MeshShape(inter=2, intra=2).place(rank)) for rank in range(4)]
    learnt: set[str] = set()
    for _ in range(20):
        wanted = alone.take()
        assert is_same([rank.take() for rank in ranks], wanted)
        assert ("position_ids" in wanted) == (packing == "documents")
        for row in wanted["labels"]:
            learnt |= set(folder.text(row[row != IGNORED_LABEL]).split("<|end|>\n"))
    wanted_answers = {record["completion"] for record in some_records(60)}
    assert learnt - {""} <= wanted_answers
    assert len(learnt) > 40
    validation = [batch for _, batch in alone.validation()]
    assert validation
    assert is_same([next(iter(rank.validation()))[1] for rank in ranks], validation[0])


def is_same(shares: list[Batch], whole: Batch) -> bool:
    return all(np.array_equal(np.concatenate([share[name] for share in shares]), whole[name]) for name in whole)


def test_a_cache_is_read_again_without_the_template_being_rendered(folder: Folder, monkeypatch: Any) -> None:
    folder.template(PLAIN)
    config = from_dict(settings(folder, some_records(30)))
    first: Supply = prepare_corpus(config)
    monkeypatch.setattr(Template, "render", None)
    assert prepare_corpus(config).fingerprint == first.fingerprint


def test_long_conversations_are_left_out_and_counted(folder: Folder) -> None:
    folder.template(PLAIN)
    records = [*some_records(30), {"prompt": "what", "completion": "it " * 200}]
    config = from_dict(settings(folder, records, validation=0.0))
    notes = Samples(config, prepare_corpus(config), MeshShape().place(0)).notes
    assert len(notes) == 1
    assert notes[0].startswith("1 of 31 documents have more than data.sequence + 1 = 65 tokens and are left out")
    records[-1] = {"prompt": "what " * 200, "completion": "it"}
    config = from_dict(settings(folder, records, validation=0.0, too_long="truncate"))
    (note,) = Samples(config, prepare_corpus(config), MeshShape().place(0)).notes
    assert "lose their end; 1 of them with all their answers" in note


@pytest.mark.parametrize(
    ("text", "record", "message"),
    [
        (PLAIN, {"text": "a"}, r"records\.jsonl, line 31: not a conversation: it has text"),
        (PLAIN, {"prompt": "a", "completion": ""}, r"records\.jsonl, line 31, message 2: an empty answer"),
        (RAISES, {"prompt": "a", "completion": "b"}, r"records\.jsonl, line 1: the chat template refuses it: no such"),
        ("none", {"prompt": "a", "completion": "b"}, r"line 1: .*(no token of an answer|cannot be told)"),
        ("{% generation %}{% endgeneration %}x y", {"prompt": "a", "completion": "b"}, r"line 1: .*(answer|refuses)"),
    ],
)
def test_what_is_wrong_names_file_and_record(folder: Folder, text: str, record: Any, message: str) -> None:
    folder.template(text)
    with pytest.raises(DataError, match=message):
        prepare_corpus(from_dict(settings(folder, [*some_records(30), record])))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300", "nowhere"])
def test_a_tokenizer_that_cannot_have_a_template_is_refused(folder: Folder, tokenizer: str) -> None:
    with pytest.raises(DataError, match="needs a tokenizer with a chat template"):
        prepare_corpus(from_dict(settings(folder, some_records(9), tokenizer=tokenizer)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"packing": "blocks"}, 'use "documents" or "pad"'),
        ({"text_field": "body"}, r"data\.text_field has no effect"),
        ({"format": "text", "answers_only": False}, r"data\.answers_only applies to conversations"),
        ({"format": "text", "chat_template": "a.jinja"}, r"data\.chat_template applies to conversations"),
        ({"format": "text", "too_long": "drop"}, r"data\.too_long has no effect with data\.packing"),
        ({"validation": 0.7}, r"data\.validation = 0\.7: must be a share of the corpus from 0 to 0\.5, or a file"),
        ({"validation": ""}, "must be a share"),
        ({"validation": True}, "must be a share"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(folder: Folder, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(settings(folder, some_records(9), **data))


def test_masking_and_patience_need_what_they_work_on(folder: Folder) -> None:
    values = settings(folder, some_records(9), validation=0)
    values["train"] |= {"objective": "masked", "patience": 2}
    with pytest.raises(ConfigError) as caught:
        from_dict(values).to_plan()
    assert 'it is not compatible with data.packing = "documents"' in str(caught.value)
    assert "train.patience = 2 needs a validation loss" in str(caught.value)
