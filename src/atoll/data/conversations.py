"""Records of conversations and instructions, as messages that a chat template can write out.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "..." or messages, "completion": "..." or messages}
    {"instruction": "...", "input": "..." (may be missing), "output": "..."}

The roles are system (first, if at all), user and assistant, the last two in turn from the user on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.data.corpus import Source, records
from atoll.errors import DataError

Messages = list[dict[str, str]]
"""Each with a role and its content, and whatever else the record's messages have that is text."""

COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output")
FORMS = '"messages", "prompt" and "completion", or "instruction" and "output"'
MOST_MESSAGES = 10_000
"""Messages of a conversation; a template may be rendered twice for each."""

_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The tokens of a conversation. is_answer: whether each is part of an answer."""

    ids: NDArray[np.uint32]
    is_answer: NDArray[np.bool_]


class ChatTemplate(Protocol):
    """Writes conversations out as tokens."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the tokens, besides the tokenizer's own file."""
        ...

    def render(self, messages: Messages) -> Rendered:
        """The tokens of a conversation. Raises ValueError for one that the template refuses."""
        ...


def conversations(source: Source) -> Iterator[tuple[str, Messages]]:
    """The conversations of a source, each with where it is. Raises DataError for a record that is none."""
    for where, record in records(source, COLUMNS, hint=f"a conversation has {FORMS}"):
        yield where, messages_of(record, where)


def messages_of(record: dict[str, Any], where: str) -> Messages:
    """The messages of a record. Raises DataError where it has none, or where they are out of order."""
    has = {key for key, value in record.items() if value is not None}
    if "messages" in has:
        messages = _messages(record["messages"], "messages", where)
    elif {"prompt", "completion"} <= has:
        messages = [
            *_side(record["prompt"], _USER, "prompt", where),
            *_side(record["completion"], _ASSISTANT, "completion", where),
        ]
    elif {"instruction", "output"} <= has:
        asked = [_text(record[key], key, where) for key in ("instruction", "input") if key in has]
        messages = [
            {"role": _USER, "content": "\n\n".join(text for text in asked if text)},
            {"role": _ASSISTANT, "content": _text(record["output"], "output", where)},
        ]
    else:
        raise DataError(f"{where}: no conversation: it has {', '.join(sorted(has)) or 'no keys'}, and needs {FORMS}")
    _check_order(messages, where)
    return messages


def _side(value: Any, role: str, key: str, where: str) -> Messages:
    """A prompt or a completion: one message of a role, or messages."""
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, key, where)}]
    return _messages(value, key, where)


def _messages(value: Any, key: str, where: str) -> Messages:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        length = f" of {len(value)}" if isinstance(value, list) else ""
        raise DataError(
            f"{where}: {key} is a {type(value).__name__}{length}, not a list of 1 to {MOST_MESSAGES} messages"
        )
    return [_message(each, f"{where}, message {number}") for number, each in enumerate(value, start=1)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a {type(value).__name__}, not an object with role and content")
    given = {name: each for name, each in value.items() if each is not None}
    return {name: _text(given.get(name), name, where) for name in ("role", "content", *given)}


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is a {type(value).__name__}, not text")
    return value.encode("utf-8", errors="replace").decode("utf-8")


def _check_order(messages: Messages, where: str) -> None:
    """Raise DataError for roles out of turn, and for answers that say nothing."""
    turn = _USER
    for number, message in enumerate(messages, start=1):
        role, at = message["role"], f"{where}, message {number}"
        if role == _SYSTEM and number == 1:
            continue
        if role not in (_SYSTEM, _USER, _ASSISTANT):
            raise DataError(f"{at}: the role {role!r}; the roles are system, user and assistant")
        if role != turn:
            raise DataError(
                f"{at}: the {role}'s, where it is the {turn}'s turn; after a system message, if any, user and "
                "assistant take turns"
            )
        if role == _ASSISTANT and not message["content"].strip():
            raise DataError(f"{at}: an empty answer, of which nothing can be learnt; leave the record out")
        turn = _ASSISTANT if role == _USER else _USER
    if all(message["role"] != _ASSISTANT for message in messages):
        raise DataError(f"{where}: no message is the assistant's, so there is no answer to learn")
