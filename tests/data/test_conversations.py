"""Records of conversations: what each form says, and which records are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.data.conversations import MOST_MESSAGES, conversations
from atoll.data.corpus import find_source
from atoll.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def read(path: Path) -> list[tuple[str, list[dict[str, str]]]]:
    return list(conversations(find_source(str(path), has_records=True)))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, ANSWERED], "id": 7, "prompt": None},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "2 + 2?", "output": "4"},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
    ],
)
def test_every_form_gives_the_same_messages(tmp_path: Path, record: dict[str, Any]) -> None:
    path = lines(tmp_path / "a.jsonl", record)
    assert read(path) == [(f"{path}, line 1", [ASKED, ANSWERED])]


def test_an_instruction_is_followed_by_its_input(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"instruction": "Add.", "input": "2, 2", "output": "4"})
    assert read(path)[0][1][0]["content"] == "Add.\n\n2, 2"


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
    assert all(messages == [ASKED, ANSWERED] for _, messages in found)
    rows.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == [(f"{tmp_path / 'saved'}, row {n}", [ASKED, ANSWERED]) for n in (1, 2)]


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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, 'line 2: not a conversation: it has text, and needs "messages"'),
        ({}, "line 2: not a conversation: it has no keys"),
        ({"prompt": "a"}, "line 2: not a conversation: it has prompt"),
        ({"messages": "a"}, "line 2: messages is a str, not a list of 1 to"),
        ({"messages": []}, "line 2: messages is a list of 0, not"),
        ({"messages": [ASKED] * (MOST_MESSAGES + 1)}, "line 2: messages is a list of 10001"),
        ({"messages": [ASKED, "4"]}, "line 2, message 2: a str, not an object with role and content"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "line 2, message 2: content is a NoneType, not text"),
        ({"messages": [{"content": "a"}, ANSWERED]}, "line 2, message 1: role is a NoneType"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": [1]}]}, "line 2, message 2: tool_calls is a list, not text"),
        ({"messages": [ASKED, {"role": "tool", "content": "4"}]}, "message 2: the role 'tool'; the roles are system"),
        ({"messages": [ANSWERED, ASKED]}, "message 1: the assistant's, where it is the user's turn"),
        ({"messages": [ASKED, ASKED, ANSWERED]}, "message 2: the user's, where it is the assistant's turn"),
        ({"messages": [ASKED, {"role": "system", "content": "a"}]}, "message 2: the system's, where"),
        ({"messages": [ASKED]}, "line 2: no message is the assistant's"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "line 2, message 2: an empty answer"),
        ({"prompt": "a", "completion": ""}, "line 2, message 2: an empty answer"),
        ({"instruction": "a", "output": 4}, "line 2: output is a int, not text"),
        ({"instruction": {"a": 1}, "output": "4"}, "line 2: instruction is a dict, not text"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}, record)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_conversation_may_end_with_a_question(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [{"role": "system", "content": ""}, ASKED, ANSWERED, ASKED]})
    assert len(read(path)[0][1]) == 4
