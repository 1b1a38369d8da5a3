"""Records of conversations and instructions, converted to messages for a chat template.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "..." or messages, "completion": "..." or messages}
    {"instruction": "...", "input": "..." (may be missing), "output": "..."}

The roles are an optional system message, followed by user and assistant in turn.
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
"""Messages with a role, content, and any other text fields of the record's messages."""

COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output")
FORMS = '"messages", "prompt" and "completion", or "instruction" and "output"'
MOST_MESSAGES = 10_000
"""Maximum number of messages in a conversation; a template may be rendered twice for each."""

_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens of a conversation. is_answer: whether each token is part of an answer."""

    ids: NDArray[np.uint32]
    is_answer: NDArray[np.bool_]


class ChatTemplate(Protocol):
    """Renders conversations as tokens."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens, apart from the tokenizer's own file."""
        ...

    def render(self, messages: Messages) -> Rendered:
        """Return the tokens of a conversation. Raises ValueError if the template refuses it."""
        ...


def conversations(source: Source) -> Iterator[tuple[str, Messages]]:
    """Yield the conversations of a source with their locations. Raises DataError for a record that is not a
    conversation."""
    for where, record in records(source, COLUMNS, hint=f"a conversation has {FORMS}"):
        yield where, messages_of(record, where)


def messages_of(record: dict[str, Any], where: str) -> Messages:
    """Return the messages of a record. Raises DataError if it has none or their roles are out of order."""
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
        raise DataError(f"{where}: not a conversation: it has {', '.join(sorted(has)) or 'no keys'}, and needs {FORMS}")
    _check_order(messages, where)
    return messages


def _side(value: Any, role: str, key: str, where: str) -> Messages:
    """Return the messages of a prompt or a completion, given as one text or as messages."""
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
    """Raise DataError for roles out of turn and for empty answers."""
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
            raise DataError(f"{at}: an empty answer, from which nothing can be learned; remove the record")
        turn = _ASSISTANT if role == _USER else _USER
    if all(message["role"] != _ASSISTANT for message in messages):
        raise DataError(f"{where}: no message is the assistant's, so there is no answer to learn")
