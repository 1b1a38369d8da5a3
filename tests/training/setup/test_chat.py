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

from atoll.base.errors import ConfigError, DataError
from atoll.plans.plan import MeshShape
from atoll.training.config.load import from_dict
from atoll.training.data import IGNORED_LABEL, Supply, TokenBatch
from atoll.training.data.conversations import Rendered, conversation_of
from atoll.training.data.tokenizer import FileTokenizer, train_bpe
from atoll.training.setup.chat import FileTemplate
from atoll.training.setup.samples import Samples, prepare_corpus

transformers = pytest.importorskip("transformers")

TURN = "{{ '<|begin|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|begin|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK
)
SHORTENS = "{% for m in messages %}{% if loop.last or m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}" + ASK
"""Leaves out earlier answers."""
KEEPS_THOUGHTS_OF_THE_LAST = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endfor %}{% set ns.users = -1 %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}{{ '<|begin|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and ns.users == ns.asked %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}" + ASK
)
"""Leaves out the thoughts before the last question, as most templates of models that think."""
RETURNS = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' + m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}"
    "{{ '<|end|>\n' }}{% endif %}{% endfor %}" + ASK
)
"""Ends the last answer with another token than those before it, as the template of GPT-OSS."""
TOOLS = (
    "{% if tools %}{{ '<|begin|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|end|>\n' }}"
    "{% endif %}"
)
CALLS = (
    TOOLS + "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' + (m.content or '') }}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ call.function.name + ARGUMENTS }}{% endfor %}{% endif %}{{ '<|end|>\n' }}"
    "{% endfor %}"
)
AS_JSON, AS_TEXT = (
    CALLS.replace("ARGUMENTS", "call.function.arguments | tojson"),
    CALLS.replace("ARGUMENTS", "call.function.arguments"),
)
AS_PYTHON = CALLS.replace("ARGUMENTS", "call.function.arguments | string")
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
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "é"}'}}
ANSWERS = "fine ünd good<|end|>\nthat is it<|end|>\n"


@dataclass
class Folder:
    """A tokenizer's folder."""

    path: Path
    tokens: tokenizers.Tokenizer

    def template(self, text: str, *, where: str = "config", answers_only: bool = True) -> FileTemplate:
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
        return FileTemplate(self.path / "tokenizer.json", own, answers_only=answers_only)

    def answers(self, template: FileTemplate, record: dict[str, Any] | list[dict[str, Any]]) -> list[tuple[str, str]]:
        """The text of each sample of a record, and that of its labels."""
        return [(self.text(each.ids), self.text(each.ids[each.is_answer])) for each in rendered(template, record)]

    def text(self, ids: Any) -> str:
        return str(self.tokens.decode([int(each) for each in ids], skip_special_tokens=False))


def rendered(template: FileTemplate, record: dict[str, Any] | list[dict[str, Any]]) -> list[Rendered]:
    given = record if isinstance(record, dict) else {"messages": record}
    return template.render(
        conversation_of(given, "a, line 1", reads=lambda has_tools: template.reads(has_tools=has_tools))
    )


def only(template: FileTemplate, record: dict[str, Any] | list[dict[str, Any]]) -> Rendered:
    (found,) = rendered(template, record)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    words = " ".join(message["content"] for message in CHAT) + " user assistant system and some more words"
    tokens = tokenizers.Tokenizer.from_str(train_bpe([words] * 3, 300).to_json())
    tokens.add_special_tokens(["<|begin|>", "<|end|>", "<|return|>"])
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_text(tokens.to_str())
    return Folder(path, tokens)


@pytest.mark.parametrize("where", ["config", "file beside", "own"])
@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["plain", "marked"])
def test_answers_are_what_the_assistant_says_with_the_end_of_its_turn(folder: Folder, text: str, where: str) -> None:
    found = only(folder.template(text, where=where), CHAT)
    assert folder.text(found.ids[found.is_answer]) == ANSWERS
    assert folder.text(found.ids) == "".join(f"<|begin|>{m['role']}\n{m['content']}<|end|>\n" for m in CHAT)
    assert folder.tokens.token_to_id("<|begin|>") in found.ids


def test_all_tokens_count_where_that_is_asked_for(folder: Folder) -> None:
    found = only(folder.template(PLAIN, answers_only=False), CHAT)
    assert found.is_answer.all()
    assert np.array_equal(found.ids, only(folder.template(PLAIN), CHAT).ids)
    with pytest.raises(ValueError, match=r"message 3: this answer has weight 0, .*answers_only = false all tokens"):
        rendered(folder.template(PLAIN, answers_only=False), [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]])


def test_words_that_ask_for_an_answer_and_begin_none_are_no_bound(folder: Folder) -> None:
    """The header then counts too."""
    found = only(folder.template(THINKS), CHAT[:3])
    assert folder.text(found.ids[found.is_answer]) == "<|begin|>assistant\nfine ünd good<|end|>\n"


def turn(role: str, content: str) -> str:
    return f"<|begin|>{role}\n{content}<|end|>\n"


@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["plain", "marked"])
def test_an_answer_of_weight_0_is_read_and_not_learned(folder: Folder, text: str) -> None:
    template = folder.template(text)
    for chosen, wanted in ((2, "that is it<|end|>\n"), (4, "fine ünd good<|end|>\n")):
        record = [
            {**message, "weight": int(at != chosen)} if at in (2, 4) else message for at, message in enumerate(CHAT)
        ]
        ((whole, learned),) = folder.answers(template, record)
        assert learned == wanted
        assert whole == "".join(turn(m["role"], m["content"]) for m in CHAT[: 3 if chosen == 4 else 5]) or chosen == 4


THOUGHT = [
    {"role": "user", "content": "hello thére"},
    {"role": "assistant", "reasoning_content": "ünd", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "reasoning_content": "so it is", "content": "fine"},
    {"role": "user", "content": "what"},
    {"role": "assistant", "reasoning_content": "some more", "content": "that is it"},
]


def test_each_answer_is_learned_as_its_own_rendering_has_it(folder: Folder) -> None:
    """A template that leaves out earlier thoughts was refused; rendered whole, all thoughts but the last are lost."""
    call = 'clock{"zone": "é"}'
    first = turn("user", "hello thére") + turn("assistant", f"<think>ünd</think>{call}") + turn("tool", "4")
    first += turn("assistant", "<think>so it is</think>fine")
    second = turn("user", "hello thére") + turn("assistant", call) + turn("tool", "4") + turn("assistant", "fine")
    second += turn("user", "what") + turn("assistant", "<think>some more</think>that is it")
    template = folder.template(KEEPS_THOUGHTS_OF_THE_LAST)
    assert folder.answers(template, THOUGHT) == [
        (first, f"<think>ünd</think>{call}<|end|>\n<think>so it is</think>fine<|end|>\n"),
        (second, "<think>some more</think>that is it<|end|>\n"),
    ]
    not_the_first = [{**message, "weight": 0} if at in (1, 3) else message for at, message in enumerate(THOUGHT)]
    assert folder.answers(template, not_the_first) == [(second, "<think>some more</think>that is it<|end|>\n")]
    with pytest.raises(ValueError, match=r"message 2: the chat template leaves out a part of this answer, .*'ünd'"):
        rendered(folder.template(KEEPS_THOUGHTS_OF_THE_LAST, answers_only=False), THOUGHT)


def test_the_flags_of_an_own_rendering_token_by_token(folder: Folder) -> None:
    first, second = rendered(folder.template(RETURNS), CHAT[1:])
    for found, answer, end in ((first, "fine ünd good", "<|return|>"), (second, "that is it", "<|return|>")):
        tokens = [folder.text([token]) for token in found.ids]
        header = max(at for at, token in enumerate(tokens) if token == "<|begin|>")
        begin = header + len(folder.tokens.encode("assistant\n").ids) + 1
        length = len(folder.tokens.encode(answer).ids)
        assert tokens[begin + length :] == [end]
        assert found.is_answer.tolist() == [at >= begin for at in range(len(tokens))]
    assert folder.text(second.ids).count("<|end|>") == 3


def test_an_answer_that_later_renderings_leave_out_is_learned_in_its_own(folder: Folder) -> None:
    question, answer = turn("user", "hello thére"), turn("assistant", "fine ünd good")
    last = turn("user", "what") + turn("assistant", "that is it")
    assert folder.answers(folder.template(SHORTENS), CHAT[1:]) == [
        (question + answer, "fine ünd good<|end|>\n"),
        (question + last, "that is it<|end|>\n"),
    ]


def test_an_answer_that_changes_what_is_before_it_is_refused(folder: Folder) -> None:
    template = "{% for m in messages %}{{ loop.length }}" + TURN + "{% endfor %}" + ASK
    with pytest.raises(ValueError, match=r"message 4: .* mark answers with \{% generation %\}"):
        rendered(folder.template(template), CHAT[1:])


# ---- tools


def test_tools_and_calls_are_what_transformers_writes(folder: Folder) -> None:
    """`tools` were ignored: the model learned calls without the definitions."""
    template = folder.template(AS_JSON)
    messages = [CHAT[1], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, CHAT[4]]
    given = only(template, {"tools": [CLOCK], "messages": messages})
    parsed = [{**CALL, "function": {"name": "clock", "arguments": {"zone": "é"}}}]
    wanted = transformers.PreTrainedTokenizerFast.from_pretrained(folder.path).apply_chat_template(
        [messages[0], {"role": "assistant", "tool_calls": parsed}, *messages[2:]], tools=[CLOCK]
    )
    assert given.ids.tolist() == wanted["input_ids"]
    assert folder.text(given.ids[given.is_answer]) == (
        '<|begin|>assistant\nclock{"zone": "é"}<|end|>\n<|begin|>assistant\nthat is it<|end|>\n'
    )
    assert folder.text(given.ids).startswith(f"<|begin|>system\n{json.dumps(CLOCK)}<|end|>\n")


@pytest.mark.parametrize("arguments", ['{"zone": "é"}', {"zone": "é"}])
@pytest.mark.parametrize("text", [AS_JSON, AS_TEXT])
def test_arguments_have_the_form_that_the_template_takes(folder: Folder, text: str, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": arguments}}
    ((whole, _),) = folder.answers(folder.template(text), [CHAT[1], {"role": "assistant", "tool_calls": [call]}])
    assert whole.endswith('clock{"zone": "é"}<|end|>\n')


def test_arguments_in_the_syntax_of_python_are_no_json(folder: Folder) -> None:
    ((whole, _),) = folder.answers(folder.template(AS_PYTHON), [CHAT[1], {"role": "assistant", "tool_calls": [CALL]}])
    assert whole.endswith('clock{"zone": "é"}<|end|>\n')  # it got the text


def test_a_template_for_tools_of_its_own_is_used_and_counts(folder: Folder) -> None:
    own = folder.path / "additional_chat_templates"
    own.mkdir()
    prints = {folder.template(PLAIN).fingerprint}
    (own / "tool_use.jinja").write_text(AS_JSON)
    template = folder.template(PLAIN, where="file beside")
    assert folder.text(only(template, {"messages": CHAT[1:3], "tools": [CLOCK]}).ids).startswith("<|begin|>system\n{")
    assert folder.text(only(template, CHAT[1:3]).ids).startswith("<|begin|>user")
    prints.add(template.fingerprint)
    (own / "tool_use.jinja").write_text(AS_TEXT)
    assert len({*prints, template.fingerprint}) == 3


# ---- what a template leaves out

ONLY_USERS = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}" + TURN + "{% endif %}{% endfor %}" + ASK
DROPS_THOUGHTS = "{% for m in messages %}{{ m.role + m.content.split('</think>')[-1] }}{% endfor %}"
ONE_CALL = AS_JSON.replace("in m.tool_calls", "in m.tool_calls[:1]")
NO_NAMES = AS_JSON.replace("t | tojson", "'a tool'")


@pytest.mark.parametrize(
    ("text", "record", "message"),
    [
        (PLAIN, {"messages": CHAT, "tools": [CLOCK]}, "does not write the record's tools"),
        (NO_NAMES, {"messages": CHAT, "tools": [CLOCK]}, "does not write the tools clock"),
        (ONLY_USERS, CHAT, "message 1: the chat template does not write this message, the system's"),
        (
            DROPS_THOUGHTS,
            [CHAT[1], {"role": "assistant", "content": "<think>ünd</think>fine"}],
            "message 2: the chat template leaves out a part of this answer, which begins '<think>ünd",
        ),
        (
            ONE_CALL,
            [CHAT[1], {"role": "assistant", "tool_calls": [CALL, CALL]}],
            "message 2: the chat template does not write all calls of 'clock'",
        ),
    ],
)
def test_a_text_that_the_template_leaves_out_is_named(folder: Folder, text: str, record: Any, message: str) -> None:
    with pytest.raises((DataError, ValueError), match=message):
        rendered(folder.template(text), record)


def test_the_prompt_for_an_answer_may_have_its_first_words(folder: Folder) -> None:
    record = [CHAT[1], {"role": "assistant", "content": "<think> fine"}]
    assert folder.answers(folder.template(THINKS), record)[0][1] == " fine<|end|>\n"
    echo = "{% for m in messages %}{{ m.role }}{{ m.content if m.role == 'user' else 'more' }}{% endfor %}"
    with pytest.raises(ValueError, match="message 2: the chat template leaves out a part of this answer"):
        rendered(folder.template(echo), [CHAT[1], {"role": "assistant", "content": CHAT[1]["content"]}])


def test_a_message_may_be_written_in_any_form(folder: Folder) -> None:
    form = "{% for m in messages %}{{ '<|begin|>' + m.role }}{{ m.content | upper if m.role == 'user' else m.content }}"
    ((whole, _),) = folder.answers(folder.template(form + "{{ '<|end|>' }}{% endfor %}"), CHAT)
    assert "HELLO" in whole


def test_parts_are_joined_as_the_template_does(folder: Folder) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "thére"}]
    form = "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% else %}"
    form += "{% for part in m.content %}{{ part.text + ';' }}{% endfor %}{% endif %}{% endfor %}"
    ((whole, _),) = folder.answers(folder.template(form), [{"role": "user", "content": parts}, CHAT[2]])
    assert whole == "userhello;thére;assistantfine ünd good"
    other = "{{ 'text' if false }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="message 1: the chat template takes text, and this content has parts"):
        rendered(folder.template(other), [{"role": "user", "content": parts}, CHAT[2]])


def in_parts(text: str) -> str:
    """The template that takes only lists of parts, beside one that takes text."""
    content = "{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    return text.replace("+ m.content + '", f"}}}}{content}{{{{ '").replace(
        "+ (m.content or '') ", f"}}}}{content}{{{{ ''"
    )


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        MARKED.replace("{{ m.content", "{{ '' + m.content"),
        RETURNS.replace("m.content }}", "m.content + '' }}"),
        AS_JSON,
        AS_TEXT,
    ],
    ids=["plain", "marked", "returns", "calls", "calls as text"],
)
@pytest.mark.parametrize("answers_only", [True, False])
def test_a_template_that_takes_only_parts_gets_text_as_one(folder: Folder, text: str, answers_only: bool) -> None:
    """As templates of models that read images, to which a text is characters without a type."""
    record: dict[str, Any] = {"messages": CHAT}
    if "tools" in text:
        result = {"role": "tool", "content": "ten"}
        record = {
            "messages": [*CHAT[:2], {"role": "assistant", "tool_calls": [CALL]}, result, *CHAT[2:]],
            "tools": [CLOCK],
        }
    assert in_parts(text) != text
    wanted = rendered(folder.template(text, answers_only=answers_only), record)
    template = folder.template(in_parts(text), answers_only=answers_only)
    for _ in range(2):  # tried, and known
        found = rendered(template, record)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.is_answer, other.is_answer)
            assert one.is_answer.any()
    given = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    assert [list(each.ids) for each in rendered(template, given)] == [
        list(each.ids) for each in rendered(template, CHAT)
    ]


def test_each_role_has_its_text_in_the_form_that_the_template_takes(folder: Folder) -> None:
    """A system's text is often joined to the first question, and a text whose words are elsewhere is not missed."""
    system = "{% if m.role == 'system' %}{{ m.content + '' }}{% else %}{{ m.content[0].text }}{% endif %}"
    begin = "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}"
    mixed = f"{begin}{system}{{{{ '<|end|>\n' }}}}{{% endfor %}}{ASK}"
    echo = [{"role": "system", "content": "it"}, *CHAT[3:]]
    for messages in (CHAT, echo, CHAT[1:]):
        for text in (mixed, in_parts(PLAIN)):
            found, wanted = only(folder.template(text), messages), only(folder.template(PLAIN), messages)
            assert np.array_equal(found.ids, wanted.ids)
            assert np.array_equal(found.is_answer, wanted.is_answer)
    drops = in_parts(ONLY_USERS)
    with pytest.raises(ValueError, match="message 1: the chat template does not write this message, the system's"):
        rendered(folder.template(drops), CHAT)
    assert only(folder.template(drops), CHAT[1:]).is_answer.any()


def test_a_template_that_takes_both_gets_text(folder: Folder) -> None:
    both = in_parts(PLAIN).replace(
        "{%- for part", "{% if m.content is string %}{{ m.content.strip() }}{% else %}{% for part"
    )
    both = both.replace("{{ part.text }}{% endfor %}", "{{ part.text + ';' }}{% endfor %}{% endif %}")
    template = folder.template(both)
    assert np.array_equal(only(template, CHAT).ids, only(folder.template(PLAIN), CHAT).ids)
    thoughts = [CHAT[1], {"role": "assistant", "content": "<think>ünd</think>fine"}]
    drops = folder.template(both.replace("m.content.strip()", "m.content.split('</think>')[-1]"))
    with pytest.raises(ValueError, match="leaves out a part of this answer"):
        rendered(drops, thoughts)  # as parts it would be written, which nobody will give to the model


def test_a_template_of_ones_own_replaces_the_tokenizers(folder: Folder) -> None:
    folder.template(RAISES)
    own = folder.path / "own.jinja"
    own.write_text(PLAIN)
    found = only(FileTemplate(folder.path / "tokenizer.json", own, answers_only=True), CHAT)
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


def test_a_tokenizer_without_a_limit_is_read(folder: Folder) -> None:
    """`transformers` writes int(1e30) for "no limit", and every such tokenizer was refused."""
    template = folder.template(PLAIN)
    path = folder.path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": int(1e30)}))
    found = only(template, CHAT)
    assert folder.text(found.ids[found.is_answer]) == ANSWERS
    assert FileTokenizer.read(folder.path / "tokenizer.json").end_of_text == folder.tokens.token_to_id("<|end|>")


# ---- wrong beginnings


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"chat_template": ""}'])
def test_a_tokenizer_without_a_template_says_what_to_do(folder: Folder, content: str | None) -> None:
    if content is not None:
        (folder.path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"no chat template: .* set data\.chat_template to a file with one"):
        FileTemplate(folder.path / "tokenizer.json", None, answers_only=True)


def test_a_template_that_is_no_template_is_named(folder: Folder) -> None:
    template = folder.template("{% for m in messages %}")
    with pytest.raises(DataError, match=r"tokenizer\.json: its chat template cannot be parsed"):
        rendered(template, CHAT)
    with pytest.raises(ValueError, match="the chat template refuses it"):
        template.render(conversation_of({"messages": CHAT}, "a"))


@pytest.mark.parametrize("content", ["[" * 200, '{"chat_template": 3}', '{"chat_template": [1]}'])
def test_a_config_that_cannot_be_read_is_named(folder: Folder, content: str) -> None:
    (folder.path / "tokenizer_config.json").write_text(content)
    with pytest.raises((DataError, ValueError), match=r"tokenizer|template"):
        rendered(FileTemplate(folder.path / "tokenizer.json", None, answers_only=True), CHAT)


def test_a_template_file_that_is_not_there_is_named(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"data\.chat_template: .*none\.jinja cannot be read"):
        FileTemplate(folder.path / "tokenizer.json", folder.path / "none.jinja", answers_only=True)


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


@pytest.mark.parametrize("streaming", [{}, {"streaming": True}])
@pytest.mark.parametrize("packing", ["documents", "pad"])
def test_samples_are_the_same_on_any_ranks_and_have_answers_as_labels(
    folder: Folder, packing: str, streaming: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.training.setup.samples.SHARD", 1024)  # several of them
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


def is_same(shares: list[TokenBatch], whole: TokenBatch) -> bool:
    return all(np.array_equal(np.concatenate([share[name] for share in shares]), whole[name]) for name in whole)


def test_a_cache_is_read_again_without_the_template_being_rendered(folder: Folder, monkeypatch: Any) -> None:
    folder.template(PLAIN)
    config = from_dict(settings(folder, some_records(30)))
    first: Supply = prepare_corpus(config)
    monkeypatch.setattr(FileTemplate, "render", None)
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


def test_the_samples_of_a_record_are_held_out_together(folder: Folder) -> None:
    """Each has what the others are judged by."""
    folder.template(RETURNS)
    ask = [[{"role": "user", "content": f"{at} what"}, CHAT[4], CHAT[3], CHAT[4]] for at in range(40)]
    corpus = prepare_corpus(from_dict(settings(folder, [{"messages": each} for each in ask], validation=0.3)))
    (feed,) = corpus.feeds
    trained = folder.text(np.concatenate([*feed.take(0, len(feed._rows))["input_ids"]]))
    held = folder.text(np.concatenate([*next(iter(corpus.held[0].rows.in_order(999, limit=1)))["input_ids"]]))
    for at in range(40):
        question = f"<|begin|>user\n{at} what"
        assert (trained.count(question), held.count(question)) in {(2, 0), (0, 2)}
    assert 8 <= sum(f"user\n{at} what" in held for at in range(40)) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [{}, {"streaming": True}])
def test_broken_records_are_skipped_counted_and_a_part_of_the_identity(
    folder: Folder, streaming: dict[str, Any]
) -> None:
    folder.template(PLAIN)
    broken = [{"prompt": "a", "completion": ""}, {"text": "a"}, {"text": "b"}]
    given = settings(folder, [*some_records(40), *broken], validation=0.1, **streaming)
    with pytest.raises(DataError, match=r"records\.jsonl, line 41, message 2: an empty answer"):
        prepare_corpus(from_dict(given))
    given["data"]["bad_records"] = "skip"
    skipping = from_dict(given)
    for _ in range(2):  # encoded, and from the cache
        notes = Samples(skipping, prepare_corpus(skipping), MeshShape().place(0)).notes
        (note,) = [note for note in notes if "broken" in note]
        assert note.startswith("3 of 43 records are broken: 2 of ")
        assert note.endswith('records.jsonl: no answer to learn (data.bad_records = "skip")')
    whole = settings(folder, some_records(40), validation=0.1, **streaming)
    prints = [prepare_corpus(from_dict(whole)).fingerprint]
    whole["data"]["bad_records"] = "skip"
    prints.append(prepare_corpus(from_dict(whole)).fingerprint)
    assert len(set(prints)) == 2
    given = settings(folder, [*some_records(20), *broken], bad_records="skip", **streaming)
    with pytest.raises(DataError, match=r"3 of 23 records are broken: .*At most 10% are skipped"):
        prepare_corpus(from_dict(given))


@pytest.mark.parametrize(
    ("text", "record", "message"),
    [
        (PLAIN, {"text": "a"}, r"records\.jsonl, line 31: not a conversation: it has text"),
        (PLAIN, {"prompt": "a", "completion": ""}, r"records\.jsonl, line 31, message 2: an empty answer"),
        (RAISES, {"prompt": "a", "completion": "b"}, r"records\.jsonl, line 1: the chat template refuses it: no such"),
        (
            "none",
            {"prompt": "a", "completion": "b"},
            "line 1: message 1: the chat template does not write this message",
        ),
        (
            "{% generation %}{% endgeneration %}x y",
            {"prompt": "a", "completion": "b"},
            "line 1: message 1: the chat template does not write this message",
        ),
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
