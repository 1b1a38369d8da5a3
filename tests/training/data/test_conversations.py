"""Records of conversations: what each form says, and which records are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import DataError, RecordError
from atoll.training.data.bad_records import BadRecords
from atoll.training.data.conversations import MOST_MESSAGES, Conversation, conversation_of, conversations
from atoll.training.data.corpus import find_source
from atoll.training.data.keys import CONVERSATIONS, HARMLESS, OPTIONS, REFUSED, WEIGHT_KEYS

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED, RESULT = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
EVERYTHING = (
    "tools",
    "tool_calls",
    "documents",
    "reasoning_content",
    "text",
    "enable_thinking",
    "tool_call_id",
    "developer",
)
"""Names that a capable template reads."""


def of(record: dict[str, Any], *, names: Any = EVERYTHING, ignored: Any = ()) -> Conversation:
    return conversation_of(record, "a.jsonl, line 1", reads=lambda has_tools: names, ignored=ignored)


def read(path: Path, *, bad: BadRecords | None = None) -> list[tuple[str, Conversation]]:
    return list(conversations(find_source(str(path), has_records=True), reads=lambda has_tools: EVERYTHING, bad=bad))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, ANSWERED], "id": 7, "prompt": None},
        {"messages": [ASKED, ANSWERED], "prompt": "2 + 2?", "images": [], "own": "", "tools": " ", "functions": []},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversation": [ASKED, ANSWERED], "language": "English", "turn": 1},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "2 + 2?", "output": "4"},
        {"instruction": "2 + 2?", "input": "", "output": "4", "text": "2 + 2? 4", "history": []},
    ],
)
def test_every_form_gives_the_same_messages(record: dict[str, Any]) -> None:
    assert of(record) == Conversation([ASKED, ANSWERED], (None, True), {})


def test_the_records_of_the_page_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```jsonl\n(.*?)```", page, flags=re.DOTALL):
        while block := block.strip():
            record, end = json.JSONDecoder().raw_decode(block)
            found.append(of(record))
            block = block[end:]
    assert len(found) == 5
    assert [len(each.options) for each in found] == [0, 0, 0, 0, 1]


def test_an_instruction_is_followed_by_its_input_and_preceded_by_its_history() -> None:
    found = of({"instruction": "Add.", "input": "2, 2", "output": "4", "history": [["Hi", "Hello"]], "system": "Be."})
    assert [(each["role"], each["content"]) for each in found.messages] == [
        ("system", "Be."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n\n2, 2"),
        ("assistant", "4"),
    ]
    assert found.learned == (None, None, True, None, True)


def test_a_system_text_beside_the_messages_comes_first_and_once() -> None:
    for messages in ([ASKED, ANSWERED], [SYSTEM, ASKED, ANSWERED]):
        assert of({"messages": messages, "system": "Be brief."}).messages == [SYSTEM, ASKED, ANSWERED]
    with pytest.raises(RecordError, match="its 'system' differs from its first message"):
        of({"messages": [SYSTEM, ASKED, ANSWERED], "system": "Be long."})


def test_only_the_completion_of_a_prompt_is_learned() -> None:
    found = of({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]})
    assert found.learned == (None, None, None, True)


def test_the_developer_is_the_system_to_a_template_that_knows_none() -> None:
    record = {"messages": [{**SYSTEM, "role": "developer"}, ASKED, ANSWERED]}
    assert of(record, names=()).messages == [SYSTEM, ASKED, ANSWERED]
    assert of(record).messages == record["messages"]


# ---- tools


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [TOOL["function"]]},
        {"functions": [TOOL["function"]]},
        {"tools": [{"type": "function", **TOOL["function"]}]},
    ],
)
def test_tools_are_given_as_functions_with_their_kind(given: dict[str, Any]) -> None:
    assert of({"messages": [ASKED, ANSWERED], **given}).options == {"tools": [TOOL]}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, RESULT),
        ({"role": "assistant", "tool_calls": [CALL["function"]], "content": None}, RESULT),
        ({"role": "assistant", "function_call": CALL["function"]}, {"role": "function", "content": "4"}),
        ({"from": "function_call", "value": json.dumps(CALL["function"])}, {"from": "observation", "value": "4"}),
        ({"role": "tool_call", "content": json.dumps(CALL["function"])}, {"role": "tool_response", "content": "4"}),
    ],
)
def test_calls_and_results_of_every_form_are_the_same(call: dict[str, Any], result: dict[str, Any]) -> None:
    found = of({"messages": [ASKED, call, result, ANSWERED]})
    assert found == Conversation([ASKED, CALLED, RESULT, ANSWERED], (None, True, None, True), {})


def test_calls_in_a_row_are_of_one_answer() -> None:
    each = {"from": "function_call", "value": json.dumps(CALL["function"])}
    assert of({"messages": [ASKED, each, each, RESULT, RESULT, ANSWERED]}).messages[1]["tool_calls"] == [CALL, CALL]


def test_arguments_may_be_text_and_ids_are_compared() -> None:
    text = {"id": "a", **CALL, "function": {"name": "add", "arguments": '{"a":2}'}}
    called = {"role": "assistant", "tool_calls": [text]}
    found = of({"messages": [ASKED, called, {**RESULT, "tool_call_id": "a"}, ANSWERED]})
    assert found.messages[1]["tool_calls"] == [text]
    assert found.messages[2]["tool_call_id"] == "a"
    with pytest.raises(RecordError, match=r"message 3: the result of the call 'b', and the calls are \['a'\]"):
        of({"messages": [ASKED, called, {**RESULT, "tool_call_id": "b"}, ANSWERED]})


def test_what_a_template_does_not_read_is_refused_or_harmless() -> None:
    messages = [ASKED, {**ANSWERED, "reasoning_content": "easy"}]
    assert of({"messages": messages}, names=["thinking"]).messages == messages  # transformers knows the other name
    assert of({"messages": messages}, ignored=["reasoning_content"], names=()).messages == [ASKED, ANSWERED]
    for record, name in (
        ({"messages": messages}, "'reasoning_content'"),
        ({"messages": [ASKED, ANSWERED], "tools": [TOOL]}, "the record's tools"),
        ({"messages": [ASKED, ANSWERED], "documents": [{"title": "a"}]}, "the record's 'documents'"),
        ({"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"enable_thinking": False}}, "'enable_thinking'"),
        ({"messages": [ASKED, CALLED, RESULT, ANSWERED]}, "tool_calls"),
    ):
        with pytest.raises(RecordError, match=f"the chat template does not write .*{name}"):
            of(record, names=())
    found = of({"messages": [{**ASKED, "id": 1, "own": 2}, ANSWERED]}, names=["id", "own"])
    assert found.messages[0] == {**ASKED, "id": 1, "own": 2}
    variables = {"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"enable_thinking": False}}
    assert of(variables).options == {"enable_thinking": False}


def test_no_key_is_in_two_tables() -> None:
    tables = [HARMLESS, REFUSED, OPTIONS, CONVERSATIONS, WEIGHT_KEYS]
    assert sum(map(len, tables)) == len({key for table in tables for key in table})


# ---- weights, parts


def test_an_answer_of_weight_0_is_not_learned() -> None:
    for key in WEIGHT_KEYS:
        for no, yes in ((0, 1), (False, True)):
            messages = [ASKED, {**ANSWERED, key: no}, ASKED, {**ANSWERED, key: yes}]
            found = of({"messages": messages})
            assert found == Conversation([ASKED, ANSWERED, ASKED, ANSWERED], (None, False, None, True), {})


def test_parts_are_for_templates_that_take_them() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"text": "2?", "type": "text"}]
    record = {"messages": [{"role": "user", "content": parts}, ANSWERED]}
    assert of(record).messages[0]["content"] == parts
    with pytest.raises(RecordError, match="its content has 2 parts, and the chat template takes text"):
        of(record, names=())
    record["messages"][0]["content"] = parts[:1]
    assert of(record, names=()).messages[0]["content"] == "2 + "


# ---- files


@pytest.mark.slow
def test_a_folder_gives_its_records_and_no_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines(tmp_path / "b.jsonl", {"messages": [ASKED, ANSWERED]})
    (tmp_path / "c.json").write_text(json.dumps([{"prompt": "2 + 2?", "completion": "4"}]))
    (tmp_path / "README.md").write_text("no record")
    rows = datasets.Dataset.from_dict({"messages": [[ASKED, ANSWERED]] * 2, "score": [0.5, 0.6]})
    rows.to_parquet(str(tmp_path / "a.parquet"))
    found = read(tmp_path)
    assert [where.removeprefix(f"{tmp_path}/") for where, _ in found] == [
        "a.parquet, row 1",
        "a.parquet, row 2",
        "b.jsonl, line 1",
        "c.json, object 1",
    ]
    assert all(each.messages == [ASKED, ANSWERED] for _, each in found)
    rows.save_to_disk(str(tmp_path / "saved"))
    for number, (where, each) in enumerate(read(tmp_path / "saved"), start=1):
        assert (where, each.messages) == (f"{tmp_path / 'saved'}, row {number}", [ASKED, ANSWERED])


def test_a_table_keeps_no_nulls_of_other_rows_and_loses_no_column(tmp_path: Path) -> None:
    """All objects of a column of a table have the keys of each: a call of one tool had the arguments of all."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    other = called(name="f", arguments={"x": 1})
    rows = [{"messages": [ASKED, each, RESULT, ANSWERED], "id": 1} for each in (CALLED, other)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [each.messages[1] for _, each in read(tmp_path / "a.parquet")] == [CALLED, other]
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0], "grade": "A"}]), tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=r"row 1: nothing reads 'grade' of this record; .* data\.ignored_keys"):
        read(tmp_path / "a.parquet")


def test_a_parquet_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"no column 'messages' or .*\(it has text\); a conversation has \"messages\""):
        read(tmp_path / "a.parquet")


def test_text_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.txt is text without records"):
        read(tmp_path / "a.txt")
    with pytest.raises(DataError, match="no records below"):
        read(tmp_path)


# ---- broken records


def turns(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


PART = {"type": "image_url", "image_url": {"url": "a"}}
BROKEN = [
    ({"text": "a"}, 'not a conversation: it has text, and needs "messages"'),
    ({}, "not a conversation: it has no keys"),
    ({"prompt": "a"}, "not a conversation: it has prompt"),
    ({"messages": "a"}, "messages is a str, not a list of 1 to"),
    (turns(), "messages is a list of 0, not"),
    (turns(*[ASKED] * (MOST_MESSAGES + 1)), "messages is a list of 10001"),
    (turns(ASKED, ANSWERED, conversations=[ASKED]), "it has both 'messages' and 'conversations'"),
    (turns(ASKED, "4"), "message 2: a str, not an object with role and content"),
    (turns(ASKED, {"role": "assistant"}), "message 2: content is a NoneType, not text"),
    (turns({"content": "a"}, ANSWERED), "message 1: role is a NoneType"),
    (turns({"role": "bot", "content": "a"}), "message 1: the role 'bot'; the roles are system, developer"),
    (turns(ASKED, {"role": "assistant", "content": {"a": 1}}), "message 2: content is a dict, not text"),
    (turns({"role": "user", "content": [PART]}, ANSWERED), "message 1: part 1 of its content is 'image_url', not text"),
    (turns({"role": "user", "content": ["a"]}, ANSWERED), "message 1: part 1 of its content is 'str', not text"),
    (turns(ASKED, {**ANSWERED, "mood": "good"}), "message 2: the chat template does not write 'mood'"),
    (turns(ASKED, {**ANSWERED, "refusal": "no"}), "message 2: the chat template does not write 'refusal'"),
    (turns(ASKED, {**ANSWERED, "weight": 0.5}), "message 2: weight = 0.5; the labels of a message count (1) or do not"),
    (turns({**ASKED, "train": True}, ANSWERED), "message 1: train = True of the user's message; only answers"),
    (turns(ASKED, {**ANSWERED, "weight": 0}), "each answer has weight 0, so there is no answer to learn"),
    (turns(ANSWERED, ASKED), "message 1: the assistant's, where it is the user's turn"),
    (turns(ASKED, ASKED, ANSWERED), "message 2: the user's, where it is the assistant's turn"),
    (turns(ASKED, ANSWERED, ANSWERED), "message 3: the assistant's, where it is the user's turn"),
    (turns(RESULT, ANSWERED), "message 1: the tool's, where it is the user's turn"),
    (turns(ASKED, ANSWERED, RESULT), "message 3: a tool's result, and the answer before it calls none"),
    (turns(ASKED), "no message is the assistant's"),
    (turns(ASKED, {"role": "assistant", "content": " \n"}), "message 2: an empty answer"),
    ({"prompt": "a", "completion": ""}, "message 2: an empty answer"),
    ({"instruction": "a", "output": 4}, "output is a int, not text"),
    ({"instruction": {"a": 1}, "output": "4"}, "instruction is a dict, not text"),
    ({"instruction": "a", "output": "4", "history": ["a"]}, "history is not a list of pairs"),
    (turns(ASKED, ANSWERED, grade="A", mood=1), "nothing reads 'grade', 'mood' of this record"),
    (turns(ASKED, ANSWERED, prompt="another"), "nothing reads 'prompt' of this record"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "it has 'chosen': it is a preference"),
    ({"prompt": "a", "completion": "b", "label": False}, "it has 'label': it may say that the answer is a bad one"),
    (turns(ASKED, ANSWERED, images=["a.png"]), "it has 'images': only text is learned"),
    ({"input_ids": [1], "labels": [1]}, "it has 'input_ids': it is encoded already"),
    (turns(ASKED, ANSWERED, tools="[1"), "tools: not JSON"),
    (turns(ASKED, ANSWERED, tools={"a": 1}), "tools is a dict, not a list"),
    (turns(ASKED, ANSWERED, tools=[{"type": "web_search"}]), "tools 1: not a function with a name"),
    (turns(ASKED, {**CALLED, "tool_calls": [1]}), "message 2, tool call 1: a int, not an object"),
    (turns({**ASKED, "tool_calls": [CALL]}), "message 1: the user's message has tool_calls"),
    (turns(ASKED, called(name="f", arguments="{")), "tool call 1: arguments: not JSON"),
    (turns(ASKED, called(name="f", arguments=[1])), "tool call 1: arguments are a list, not an object"),
    (turns(ASKED, called(name="f", extra=1)), "tool call 1: not a call, which has the function's name"),
    (turns(ASKED, {"from": "function_call", "value": "add(2, 2)"}), "message 2: tool_calls: not JSON"),
    (turns(ASKED, ANSWERED, chat_template_kwargs={"tools": []}), "chat_template_kwargs are an object of"),
]


@pytest.mark.parametrize(("record", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_record_that_is_no_conversation_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}, record)
    with pytest.raises(RecordError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line 2")
    assert caught.value.file == str(path)
    bad = BadRecords("skip")
    assert [where for where, _ in read(path, bad=bad)] == [f"{path}, line 1"]
    assert bad.counts == {(str(path), caught.value.kind): 1}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ""}, ASKED, ANSWERED, ASKED],
        [SYSTEM, {"role": "developer", "content": "a"}, ASKED, SYSTEM, ANSWERED, SYSTEM, ASKED, ANSWERED],
        [ASKED, CALLED, RESULT, RESULT, SYSTEM, ANSWERED],
        [ASKED, CALLED],
        [ASKED, CALLED, RESULT, CALLED, RESULT, ANSWERED],
    ],
)
def test_orders_that_are_taken(messages: list[dict[str, Any]]) -> None:
    assert of({"messages": messages}).messages == messages


def test_lines_that_are_no_objects_are_skipped_and_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *[{"messages": [ASKED, ANSWERED]}] * 30)
    path.write_text(path.read_text() + '{"messages": \n[1]\n{"text": 1}\n')
    bad = BadRecords("skip")
    assert len(read(path, bad=bad)) == 30
    counted = bad.check(30, "data.source = 'a'")
    assert counted is not None
    assert str(counted) == (
        f"3 of 33 records are broken: 1 of {path}: not JSON; 1 of {path}: not a conversation; 1 of {path}: not an "
        "object"
    )
    with pytest.raises(DataError, match=r"data\.source = 'a': 3 of 29 records .*At most 10% are skipped .*line 31"):
        bad.check(26, "data.source = 'a'")
