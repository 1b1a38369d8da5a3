"""Records of conversations and instructions, converted to what a chat template takes.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "..." or messages, "completion": "..." or messages}
    {"instruction": "...", "input": "..." (may be missing), "output": "..."}

A record may also have `tools`, `documents`, `system`, `history` and `chat_template_kwargs`. Each other key is in one of
the tables of `atoll.training.data.keys`, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import RecordError
from atoll.training.data import keys
from atoll.training.data.bad_records import BadRecords
from atoll.training.data.corpus import Source, records
from atoll.training.data.keys import ASSISTANT, DEVELOPER, SYSTEM, TOOL, USER
from atoll.training.data.tools import (
    BROKEN_MESSAGE,
    NOT_A_CONVERSATION,
    calls_of,
    documents_of,
    is_empty,
    text_of,
    tools_of,
    variables_of,
)

ChatMessage = dict[str, Any]
"""A message with its role, its content (text, or a list of text parts), its `tool_calls`, and other keys that the
template reads."""

RULES = 2
"""Version of these rules, increased whenever the same record gives other messages."""

FORMS = '"messages", "conversations", "prompt" and "completion", or "instruction" and "output"'
COLUMNS = (*keys.CONVERSATIONS, "prompt", "completion", "instruction", "input", "output")
"""Columns of a table, of which it has at least one."""

MOST_MESSAGES = 10_000
"""Maximum number of messages in a conversation; a template may be rendered twice for each."""

UNUSED, OUT_OF_TURN, NOTHING_TO_LEARN = "keys that are not used", "a role out of turn", "no answer to learn"
"""Further kinds of faults, beside those of `atoll.training.data.tools` and `atoll.training.data.keys`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A record as a chat template takes it.

    learned: for each message, True for an answer whose labels count, False for one whose labels do not because its
    weight is 0, and None for any other.
    options: further arguments of the template: tools, documents, and variables of its own.
    """

    messages: list[ChatMessage]
    learned: tuple[bool | None, ...]
    options: dict[str, Any]


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

    def reads(self, *, has_tools: bool) -> Collection[str]:
        """Return the names of all variables and keys that the template reads. has_tools: the one for tools."""
        ...

    def render(self, conversation: Conversation) -> list[Rendered]:
        """Return the samples of a conversation: several, if the template writes earlier answers otherwise once more
        follows. Raises ValueError if the template refuses it or leaves out a part of it."""
        ...


Reads = Callable[[bool], Collection[str]]
"""Returns the names that a template reads, for conversations with tools or without."""


def conversations(
    source: Source, *, reads: Reads = lambda has_tools: (), ignored: Collection[str] = (), bad: BadRecords | None = None
) -> Iterator[tuple[str, Conversation]]:
    """Yield the conversations of a source with their locations.

    ignored: keys of records and messages that are not used.  bad: collects records that are no conversation.
    """
    bad = BadRecords() if bad is None else bad
    without = {*keys.HARMLESS, *ignored}
    for where, record in records(source, COLUMNS, hint=f"a conversation has {FORMS}", without=without, bad=bad):
        with bad.skipping():
            yield where, conversation_of(record, where, reads=reads, ignored=ignored)


def conversation_of(
    record: dict[str, Any], where: str, *, reads: Reads = lambda has_tools: (), ignored: Collection[str] = ()
) -> Conversation:
    """Return the conversation of a record. Raises RecordError if it is none, or has a key that would be lost."""
    given = {key: value for key, value in record.items() if value is not None and key not in ignored}
    for key, (kind, reason) in keys.REFUSED.items():
        if key in given and not is_empty(given[key]):
            raise RecordError(where, kind, f"it has {key!r}: {reason}")
    tools = tools_of(given, where)
    names = reads(tools is not None)
    read = _Reader(names, frozenset(ignored))
    messages, learned, used = read.form(given, where)
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    options |= documents_of(given, where)
    options |= variables_of(given, where)
    for key in options:
        if key not in names:
            what = "the record's tools" if key == "tools" else f"the record's {key!r}"
            raise RecordError(
                where,
                UNUSED,
                f"the chat template does not write {what}, so the answers would be learned without them; take a "
                "template that does (data.chat_template), or remove them",
            )
    unused = sorted(
        key
        for key, value in given.items()
        if key not in used and key not in keys.OPTIONS and key not in keys.HARMLESS and not is_empty(value)
    )
    if unused:
        raise RecordError(
            where,
            UNUSED,
            f"nothing reads {', '.join(map(repr, unused))} of this record; remove what is not to be learned, or name "
            "it in data.ignored_keys",
        )
    _check_order(messages, learned, where)
    return Conversation(messages, tuple(learned), options)


# ---- forms of a record


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the messages of a record for a template that reads `names`."""

    names: Collection[str]
    ignored: Collection[str]

    def form(self, given: dict[str, Any], where: str) -> tuple[list[ChatMessage], list[bool | None], set[str]]:
        """Return the messages of a record, which of them are learned, and the keys that were used."""
        listed = [key for key in keys.CONVERSATIONS if key in given]
        used = {*listed, "system"}
        if len(listed) > 1:
            raise RecordError(where, NOT_A_CONVERSATION, f"it has both {' and '.join(map(repr, listed))}")
        if listed:
            messages, learned = self.messages(given[listed[0]], listed[0], where)
            if given.get("prompt") in [message.get("content") for message in messages[:2]]:
                used.add("prompt")  # the first question once more
        elif {"prompt", "completion"} <= given.keys():
            used |= {"prompt", "completion"}
            prompt, _ = self.side(given["prompt"], USER, "prompt", where)
            answer, learned = self.side(given["completion"], ASSISTANT, "completion", where)
            messages, learned = [*prompt, *answer], [*(None for _ in prompt), *learned]
        elif {"instruction", "output"} <= given.keys():
            used |= {"instruction", "input", "output", "history"}
            asked = [text_of(given[key], key, where) for key in ("instruction", "input") if key in given]
            messages = [
                *_history(given.get("history", []), where),
                {"role": USER, "content": "\n\n".join(text for text in asked if text)},
                {"role": ASSISTANT, "content": text_of(given["output"], "output", where)},
            ]
            learned = [message["role"] == ASSISTANT or None for message in messages]
        else:
            has = ", ".join(sorted(given)) or "no keys"
            raise RecordError(where, NOT_A_CONVERSATION, f"not a conversation: it has {has}, and needs {FORMS}")
        if (system := text_of(given.get("system", ""), "system", where)) and not _begins_with(messages, system):
            if messages[0]["role"] == SYSTEM:
                raise RecordError(where, BROKEN_MESSAGE, "its 'system' differs from its first message, the system's")
            messages, learned = [{"role": SYSTEM, "content": system}, *messages], [None, *learned]
        return messages, learned, used

    def side(self, value: Any, role: str, key: str, where: str) -> tuple[list[ChatMessage], list[bool | None]]:
        """Return the messages of a prompt or a completion, given as one text or as messages."""
        if isinstance(value, str):
            return [{"role": role, "content": text_of(value, key, where)}], [role == ASSISTANT or None]
        return self.messages(value, key, where)

    def messages(self, value: Any, key: str, where: str) -> tuple[list[ChatMessage], list[bool | None]]:
        """Return a list of messages, and which of them are learned."""
        if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
            length = f" of {len(value)}" if isinstance(value, list) else ""
            raise RecordError(
                where,
                NOT_A_CONVERSATION,
                f"{key} is a {type(value).__name__}{length}, not a list of 1 to {MOST_MESSAGES} messages",
            )
        messages: list[ChatMessage] = []
        learned: list[bool | None] = []
        was_call = False
        for number, each in enumerate(value, start=1):
            message, counts, is_call = self.message(each, f"{where}, message {number}")
            if is_call and was_call:  # calls made together, of one answer
                messages[-1]["tool_calls"] += message["tool_calls"]
                learned[-1] = learned[-1] or counts
            else:
                messages.append(message)
                learned.append(counts)
            was_call = is_call
        return messages, learned

    def message(self, value: Any, where: str) -> tuple[ChatMessage, bool | None, bool]:
        """Return a message, whether it is learned, and whether its role alone makes it a tool call."""
        if not isinstance(value, dict):
            raise RecordError(where, BROKEN_MESSAGE, f"a {type(value).__name__}, not an object with role and content")
        given = {key: each for key, each in value.items() if each is not None and key not in self.ignored}
        for alias, key in keys.ALIASES.items():
            if alias in given and key not in given:
                given[key] = given.pop(alias)
        name = text_of(given.pop("role", None), "role", where)
        if name not in keys.ROLES:
            raise RecordError(where, BROKEN_MESSAGE, f"the role {name!r}; the roles are {', '.join(keys.ROLES)}")
        role, is_call = keys.ROLES[name], name in keys.CALLS
        if role == DEVELOPER and DEVELOPER not in self.names:  # OpenAI's later name for the system's messages
            role = SYSTEM
        counts = _weight(given, role, where)
        message: ChatMessage = {"role": role}
        content = given.pop("content", None)
        calls = given.pop("tool_calls", None)
        if (old := given.pop("function_call", None)) is not None:
            calls = [*(calls or []), old]
        if is_call:
            content, calls = None, content
        if calls is not None and not is_empty(calls):
            message["tool_calls"] = calls_of(calls, role, where)
            if "tool_calls" not in self.names:
                raise RecordError(where, UNUSED, f"the chat template does not write tool_calls; {keys.TAKE_ANOTHER}")
        if content is not None or not (message.keys() | given.keys()) & {"tool_calls", *keys.REASONING}:
            message["content"] = self.content(content, where)
        message |= self.others(given, where)
        return message, counts, is_call

    def content(self, value: Any, where: str) -> str | list[dict[str, str]]:
        """Return the content of a message: text, or parts of text for a template that takes them."""
        if not isinstance(value, list):
            return text_of(value, "content", where)
        texts = []
        for number, part in enumerate(value, start=1):
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part, dict) or set(part) - {"type", "text"}:
                raise RecordError(
                    where, keys.NOT_TEXT, f"part {number} of its content is {kind!r}, not text; only text is learned"
                )
            texts.append(text_of(part.get("text"), f"part {number} of its content", where))
        if "text" in self.names:
            return [{"type": "text", "text": text} for text in texts]
        if len(texts) > 1:
            raise RecordError(
                where,
                BROKEN_MESSAGE,
                f"its content has {len(texts)} parts, and the chat template takes text; join the parts as the model "
                "is to see them",
            )
        return "".join(texts)

    def others(self, given: dict[str, Any], where: str) -> ChatMessage:
        """Return the further keys of a message that the template reads."""
        found: ChatMessage = {}
        for key, value in given.items():
            if key in self.names or (key in keys.REASONING and not keys.REASONING.isdisjoint(self.names)):
                found[key] = text_of(value, key, where) if key in keys.TEXTS else value
            elif key not in keys.HARMLESS and key not in keys.HARMLESS_IN_MESSAGES and not is_empty(value):
                raise RecordError(
                    where,
                    UNUSED,
                    f"the chat template does not write {key!r} of this message; {keys.TAKE_ANOTHER}, or name it in "
                    "data.ignored_keys",
                )
        return found


def _history(value: Any, where: str) -> list[ChatMessage]:
    """Return the messages of earlier turns, given as pairs of question and answer."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise RecordError(where, BROKEN_MESSAGE, "history is not a list of pairs of question and answer")
    return [
        {"role": role, "content": text_of(text, f"history {number}", where)}
        for number, pair in enumerate(value, start=1)
        for role, text in zip((USER, ASSISTANT), pair, strict=True)
    ]


def _begins_with(messages: Sequence[ChatMessage], system: str) -> bool:
    return messages[0] == {"role": SYSTEM, "content": system}


def _weight(given: dict[str, Any], role: str, where: str) -> bool | None:
    """Return whether the labels of a message count, see `Conversation`. Removes the keys that say so."""
    counts = True if role == ASSISTANT else None
    for key in keys.WEIGHT_KEYS:
        value = given.pop(key, None)
        if value is None:
            continue
        if isinstance(value, str) or value not in (0, 1):
            raise RecordError(
                where, BROKEN_MESSAGE, f"{key} = {value!r}; the labels of a message count (1) or do not (0)"
            )
        if value and role != ASSISTANT:
            raise RecordError(
                where,
                BROKEN_MESSAGE,
                f"{key} = {value!r} of the {role}'s message; only answers are learned, or with data.answers_only = "
                "false all tokens",
            )
        if role == ASSISTANT:
            counts = counts and bool(value)
    return counts


# ---- order


_MAY_FOLLOW: Mapping[str, Collection[str | None]] = {
    USER: {None, SYSTEM, DEVELOPER, ASSISTANT, TOOL},
    ASSISTANT: {USER, SYSTEM, DEVELOPER, TOOL},
    TOOL: {ASSISTANT, TOOL},
    SYSTEM: {None, USER, ASSISTANT, TOOL, SYSTEM, DEVELOPER},
    DEVELOPER: {None, USER, ASSISTANT, TOOL, SYSTEM, DEVELOPER},
}
"""For each role, the roles of the message before it."""


def _check_order(messages: list[ChatMessage], learned: list[bool | None], where: str) -> None:
    """Raise RecordError for roles out of turn, results without a call, and empty answers."""
    before: str | None = None
    asked = False
    calls: set[str] | None = None
    for number, (message, counts) in enumerate(zip(messages, learned, strict=True), start=1):
        role, at = message["role"], f"{where}, message {number}"
        if before not in _MAY_FOLLOW[role] or (role == ASSISTANT and not asked):
            turn = USER if before in (None, ASSISTANT) or not asked else ASSISTANT
            raise RecordError(
                at,
                OUT_OF_TURN,
                f"the {role}'s, where it is the {turn}'s turn; user and assistant take turns, with the system's and "
                "the developer's messages anywhere, and tools' results after their calls",
            )
        if role == TOOL and calls is None:
            raise RecordError(at, OUT_OF_TURN, "a tool's result, and the answer before it calls none")
        given = message.get("tool_call_id")
        if role == TOOL and given is not None and calls and given not in calls:
            raise RecordError(at, OUT_OF_TURN, f"the result of the call {given!r}, and the calls are {sorted(calls)}")
        if role == ASSISTANT:
            made = message.get("tool_calls")
            calls = None if made is None else {call["id"] for call in made if "id" in call}
        if counts and not has_content(message):
            raise RecordError(at, NOTHING_TO_LEARN, "an empty answer, from which nothing can be learned; remove it")
        asked |= role == USER
        before = role
    if not any(learned):
        has = any(message["role"] == ASSISTANT for message in messages)
        reason = "each answer has weight 0" if has else "no message is the assistant's"
        raise RecordError(where, NOTHING_TO_LEARN, f"{reason}, so there is no answer to learn")


def has_content(message: ChatMessage) -> bool:
    """Return True if a message says something: text, thoughts or calls."""
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts_of(message))


def texts_of(message: ChatMessage) -> list[str]:
    """Return the texts of a message: those of its content, and its thoughts."""
    content = message.get("content", "")
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [*parts, *(message[key] for key in sorted(keys.REASONING) if key in message)]
