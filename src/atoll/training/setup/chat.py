"""Rendering of conversations by a tokenizer's chat template, with `transformers`.

The tokens are those of a conversation as rendered, up to its last message or up to an answer that is rendered otherwise
once more follows. A template may mark answers with {% generation %}. Otherwise, an answer is the text by which the
conversation up to it is longer than the conversation before it with the template's prompt for an answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atoll.base.documents import parse_json, read_json, read_text
from atoll.base.errors import DataError
from atoll.training.config import Config
from atoll.training.data.conversations import ChatMessage, Conversation, Rendered, texts_of
from atoll.training.models.sources import package

LARGEST_TEMPLATE = 1 << 20
"""Largest template that is read, in bytes."""

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files beside a tokenizer.json that affect the output of a template."""

FURTHER = "additional_chat_templates"
"""Folder beside a tokenizer.json with further templates, such as one for conversations with tools."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_ANY = "ATOLL-ANY"
"""A text that stands for any other."""
_DIGITS = "7305482916"
"""Digits that stand for any text, with a message's number: a template may write words otherwise."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer in a rendering. at: index of its message.  begin, end: in characters."""

    at: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A rendering that is trained on. messages: number of messages from the first on.  answers: those that count."""

    messages: int
    text: str
    answers: list[_Answer]


def chat_template(config: Config) -> FileTemplate | None:
    """Return the template for data.format = "chat". Raises DataError if the tokenizer has none."""
    if config.data.format != "chat":
        return None
    path = Path(config.tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f'data.format = "chat" needs a tokenizer with a chat template, and data.tokenizer = {config.tokenizer!r} '
            "is no such folder or tokenizer.json; give those of a model"
        )
    own = config.data.chat_template
    return FileTemplate(file, None if own is None else Path(own).expanduser(), answers_only=config.data.answers_only)


class FileTemplate:
    """The chat template of the tokenizer in `file`, or that in the file `own`.

    answers_only: whether only labels of answers count.
    """

    def __init__(self, file: Path, own: Path | None, *, answers_only: bool) -> None:
        self._file, self._own, self._answers_only = file, own, answers_only
        names = _BESIDE if file.name == "tokenizer.json" else ()
        self._beside = {name: path for name in names if (path := file.parent / name).is_file()}
        if names:
            self._beside |= {f"{FURTHER}/{path.name}": path for path in sorted((file.parent / FURTHER).glob("*.jinja"))}
        self._given = None if own is None else _read(own)
        self._in_parts: dict[tuple[str, bool], bool] = {}
        """By role, and whether there are tools: True if the template accepts only a list of parts; see `_formed`."""
        if self._given is None and not self._has_template():
            raise DataError(
                f"{file}: this tokenizer has no chat template: there is no chat_template.jinja next to it, and no "
                'tokenizer_config.json that has a "chat_template"; set data.chat_template to a file with one'
            )

    @property
    def fingerprint(self) -> str:
        """Hash of the files, and of the choice of labels that count."""
        total = hashlib.sha256(b"answers" if self._answers_only else b"all")
        for name, path in self._beside.items():
            with path.open("rb") as file:
                total.update(name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
        if self._given is not None:
            total.update(b"\0" + self._given.encode())
        return total.hexdigest()

    def reads(self, *, has_tools: bool) -> Collection[str]:
        """Return the names of all variables and keys that the template reads. Raises DataError if it cannot be parsed.

        has_tools: of the template for tools, where the tokenizer has one.
        """
        return self._names_with_tools if has_tools else self._names_without

    def render(self, conversation: Conversation) -> list[Rendered]:
        """Return the samples of a conversation. Raises ValueError if the template refuses it or leaves out a part.

        Most templates iterate over the arguments of a call or write them as JSON, so they get an object. One that
        refuses it gets the text of it, as OpenAI's files have it.
        """
        try:
            return self._render(_with_arguments(conversation, as_text=False))
        except ValueError:
            if not any("tool_calls" in message for message in conversation.messages):
                raise
            with suppress(ValueError):
                return self._render(_with_arguments(conversation, as_text=True))
            raise

    def _render(self, given: Conversation) -> list[Rendered]:
        given = self._formed(given)
        parts = self._parts(given) if self._answers_only else [self._whole(given)]
        _check_written(given, parts, lambda messages: self._write(given, messages))
        return [self._encode(given, part) for part in parts]

    def _formed(self, given: Conversation) -> Conversation:
        """Return a conversation whose contents have the form that the template takes: text, or a list of parts.

        [Note: only parts] Templates of models that read images iterate over the parts of a content. Some do so without
        a case for text, of which they then write nothing, or which they refuse. Such a role gets its text as one part.
        Which roles these are is tried with contents of digits, so that it does not depend on the record.
        """
        tools = "tools" in given.options
        if "text" not in self._template(has_tools=tools):
            return given
        texts = [at for at, message in enumerate(given.messages) if isinstance(message.get("content"), str)]
        roles = {given.messages[at]["role"] for at in texts}
        if any((role, tools) not in self._in_parts for role in roles):
            found = self._roles_in_parts(given, texts)
            if found is None:
                return given  # the checks say what is not written
            self._in_parts |= {(role, tools): role in found for role in roles}
        messages = list(given.messages)
        for at in texts:
            if self._in_parts[messages[at]["role"], tools]:
                messages[at] = _as_parts(messages[at])
        return replace(given, messages=messages)

    def _roles_in_parts(self, given: Conversation, texts: Sequence[int]) -> Collection[str] | None:
        """Return the roles whose texts the template writes only as parts, or None if it writes them in neither form.

        texts: indices of messages with text.
        """
        roles = {given.messages[at]["role"] for at in texts}

        def written(in_parts: Collection[str]) -> set[str]:
            messages = list(given.messages)
            for at in texts:
                message = {**messages[at], "content": f"{_DIGITS}{at:05}"}
                messages[at] = _as_parts(message) if message["role"] in in_parts else message
            with suppress(ValueError):
                text = self._write(given, messages)
                return {messages[at]["role"] for at in texts if f"{_DIGITS}{at:05}" in text}
            return set()

        as_text = written(())
        if as_text == roles:
            return ()
        as_parts = written(roles)
        if as_parts == roles:
            return roles
        return next((tried for tried in (roles - as_text, as_parts) if written(tried) == roles), None)

    def _whole(self, given: Conversation) -> _Part:
        """Return a conversation of which all tokens count."""
        for at, (message, counts) in enumerate(zip(given.messages, given.learned, strict=True)):
            if message["role"] == "assistant" and counts is False:
                raise ValueError(
                    f"message {at + 1}: this answer has weight 0, and with data.answers_only = false all tokens count; "
                    "remove the weight, or set answers_only = true"
                )
        text = self._write(given, given.messages)
        answers = [_Answer(at, 0, len(text)) for at, counts in enumerate(given.learned) if counts]
        return _Part(len(given.messages), text, answers)

    def _parts(self, given: Conversation) -> list[_Part]:
        """Return the renderings that are trained on, from the shortest to the longest.

        [Note: own renderings] A template may write an answer otherwise once more follows; most leave out its thoughts.
        The model gives the answer as its own rendering has it: that of the messages up to it. So from the last answer
        to the first, an answer shares a rendering that begins with its own, or gets its own.
        """
        found = [_Part(len(given.messages), self._write(given, given.messages), [])]
        for at in reversed([at for at, counts in enumerate(given.learned) if counts]):
            own = self._write(given, given.messages[: at + 1])
            if not found[-1].text.startswith(own):
                found.append(_Part(at + 1, own, []))
            found[-1].answers.append(_Answer(at, 0, len(own)))
        pairs = zip(given.messages, given.learned, strict=True)
        is_all = all(counts for message, counts in pairs if message["role"] == "assistant")
        if len(found) == 1 and is_all and self._marks_answers(given):
            return found  # each mark counts
        for part in found:
            part.answers[:] = [self._with_begin(given, part, each) for each in part.answers]
        return [part for part in reversed(found) if part.answers]

    def _with_begin(self, given: Conversation, part: _Part, answer: _Answer) -> _Answer:
        # The rendering begins with the answer's own: see the note.
        return replace(answer, begin=self._begin(given, answer.at, part.text[: answer.end]))

    def _begin(self, given: Conversation, at: int, own: str) -> int:
        """Return where the answer begins in its own rendering, in characters."""
        before = given.messages[:at]
        if self._marks_answers(given):  # marks tell where it is; this only tells it from the answers before it
            return _same(self._write(given, before), own)
        for prompts in (True, False):  # the prompt for an answer may not be the beginning of this one
            if own.startswith(begin := self._write(given, before, add_generation_prompt=prompts)):
                return len(begin)
        raise ValueError(
            f"message {at + 1}: the chat template writes what is before this answer otherwise once it follows, so "
            "where the answer begins cannot be told; mark answers with {% generation %} and {% endgeneration %} in a "
            "template of your own (data.chat_template)"
        )

    def _encode(self, given: Conversation, part: _Part) -> Rendered:
        """Return the tokens of a rendering; those of its answers count."""
        options: dict[str, Any] = {"return_offsets_mapping": True}
        if self._answers_only and self._marks_answers(given):
            found = self._apply(
                given,
                given.messages[: part.messages],
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs=options,
            )
            marked = np.array(found["assistant_masks"], dtype=np.bool_)
        else:
            found = self._tokenizer(part.text, add_special_tokens=False, **options)
            marked = np.ones(len(found["input_ids"]), dtype=np.bool_)
            if not self._answers_only:
                return Rendered(np.array(found["input_ids"], dtype=np.uint32), marked)
        begins = np.array([begin for begin, _ in found["offset_mapping"]], dtype=np.int64)
        is_answer = np.zeros(len(begins), dtype=np.bool_)
        for answer in part.answers:
            is_answer |= (begins >= answer.begin) & (begins < answer.end)
        return Rendered(np.array(found["input_ids"], dtype=np.uint32), is_answer & marked)

    @cached_property
    def _tokenizer(self) -> Any:
        """Return the tokenizer of `transformers`, which renders and encodes."""
        kind = package("transformers").PreTrainedTokenizerFast
        try:
            for name, path in self._beside.items():  # within the bounds; transformers has none
                _ = _read(path) if name.endswith(".jinja") else read_json(path, rounds=True)
            if self._beside:
                made = kind.from_pretrained(str(self._file.parent), local_files_only=True)
            else:
                made = kind(tokenizer_file=str(self._file))
            if self._given is not None:
                made.chat_template = self._given
            if not isinstance(template := made.get_chat_template(), str):
                raise TypeError(f"its chat template is a {type(template).__name__}, not text")
        except DataError:
            raise
        except Exception as error:  # exceptions of transformers and of its validators have no common class
            raise DataError(f"{self._file}: cannot be read as a tokenizer with a chat template ({error})") from error
        return made

    def _template(self, *, has_tools: bool) -> str:
        """Return the template of conversations with tools, or without."""
        return str(self._tokenizer.get_chat_template(tools=[] if has_tools else None))

    def _marks_answers(self, given: Conversation) -> bool:
        return _MARKS.search(self._template(has_tools="tools" in given.options)) is not None

    @cached_property
    def _names_with_tools(self) -> Collection[str]:
        return self._names(self._template(has_tools=True))

    @cached_property
    def _names_without(self) -> Collection[str]:
        return self._names(self._template(has_tools=False))

    def _names(self, template: str) -> Collection[str]:
        """Return the variables, attributes and strings of a template."""
        jinja2 = package("jinja2")
        try:
            tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAGS.sub("", template))
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"{self._file}: its chat template cannot be parsed ({error})") from error
        nodes = jinja2.nodes
        names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
        return frozenset(names | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})

    def _has_template(self) -> bool:
        if "chat_template.jinja" in self._beside:
            return True
        path = self._beside.get("tokenizer_config.json")
        if path is None:
            return False
        try:
            values = read_json(path, rounds=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        return isinstance(values, dict) and bool(values.get("chat_template"))

    def _write(self, given: Conversation, messages: Sequence[ChatMessage], **options: Any) -> str:
        return str(self._apply(given, messages, tokenize=False, **options)) if messages else ""

    def _apply(self, given: Conversation, messages: Sequence[ChatMessage], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **given.options, **options)
        except DataError:
            raise
        except Exception as error:  # any exception of a template, or of a missing file
            raise ValueError(f"the chat template refuses it: {error}") from error


# ---- what a template leaves out


def _check_written(given: Conversation, parts: Sequence[_Part], write: Callable[[Sequence[ChatMessage]], str]) -> None:
    """Raise ValueError if a rendering lacks a text of its conversation.

    Answers are compared in their own places, apart from spaces. Another message, which a template may write in any
    form, is missing if the rendering stays the same with another text in its place.
    """
    first = 0
    for part in parts:
        text = _squeezed(part.text)
        for at in range(first, part.messages):
            message = given.messages[at]
            if isinstance(message.get("content"), list) and str(message["content"]) in part.text:
                raise ValueError(
                    f"message {at + 1}: the chat template takes text, and this content has parts; join them"
                )
            if given.learned[at] or all(any(form in text for form in _forms(each)) for each in texts_of(message)):
                continue
            messages = given.messages[: part.messages]
            other = [*messages[:at], _with_text(message, _ANY), *messages[at + 1 :]]
            if write(other) == part.text:
                raise ValueError(
                    f"message {at + 1}: the chat template does not write this message, the {message['role']}'s; "
                    f"{_INSTEAD}"
                )
        first = part.messages
        for answer in part.answers:
            _check_answer(given.messages[answer.at], part.text, answer)
    tools = [tool["function"]["name"] for tool in given.options.get("tools", ())]
    if missing := [name for name in tools if all(name not in part.text for part in parts)]:
        raise ValueError(f"the chat template does not write the tools {', '.join(missing)}; {_INSTEAD}")


_INSTEAD = "use a template that does (data.chat_template), or remove it from the record"


def _check_answer(message: ChatMessage, text: str, answer: _Answer) -> None:
    """Raise ValueError if the text of an answer lacks some of it. The prompt for an answer may have its first words."""
    number, own = answer.at + 1, text[answer.begin : answer.end]
    squeezed, begin = _squeezed(text[: answer.end]), len(_squeezed(text[: answer.begin]))
    for each in texts_of(message):
        if each.strip() and not any(_ends_after(squeezed, form, begin) for form in _forms(each)):
            raise ValueError(
                f"message {number}: the chat template leaves out a part of this answer, which begins "
                f"{each.strip()[:60]!r}; {_INSTEAD}"
            )
    calls = [call["function"] for call in message.get("tool_calls", ())]
    for name in {call["name"] for call in calls}:
        if own.count(name) < sum(call["name"] == name for call in calls):
            raise ValueError(f"message {number}: the chat template does not write all calls of {name!r}; {_INSTEAD}")
    for call in calls:
        arguments = call["arguments"]
        if isinstance(arguments, dict) and str(arguments) in own and str(arguments) != _json(arguments):
            raise ValueError(f"message {number}: the chat template writes {str(arguments)[:60]}, which is not JSON")


def _same(one: str, other: str) -> int:
    """Return the number of characters with which two texts begin alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _ends_after(text: str, part: str, begin: int) -> bool:
    """Return True if a part of the text ends after `begin`."""
    at = text.rfind(part)
    return at >= 0 and at + len(part) > begin


def _forms(text: str) -> tuple[str, str]:
    """Return a text as it is and as a JSON string, without spaces."""
    return _squeezed(text), _squeezed(_json(text)[1:-1])


def _with_text(message: ChatMessage, text: str) -> ChatMessage:
    other = {**message, "content": text}
    return _as_parts(other) if isinstance(message.get("content"), list) else other


def _as_parts(message: ChatMessage) -> ChatMessage:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_arguments(given: Conversation, *, as_text: bool) -> Conversation:
    """Return a conversation with the arguments of all calls as objects, or as text."""

    def form(arguments: Any) -> Any:
        if as_text:
            return arguments if isinstance(arguments, str) else _json(arguments)
        return parse_json(arguments) if isinstance(arguments, str) else arguments

    def calls(message: ChatMessage) -> Iterator[dict[str, Any]]:
        for call in message["tool_calls"]:
            function = call["function"]
            yield {**call, "function": {**function, "arguments": form(function["arguments"])}}

    messages = [
        {**message, "tool_calls": list(calls(message))} if "tool_calls" in message else message
        for message in given.messages
    ]
    return replace(given, messages=messages)


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=LARGEST_TEMPLATE)
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template: {path} cannot be read ({error})") from error
