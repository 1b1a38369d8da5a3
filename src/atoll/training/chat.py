"""Rendering of conversations by a tokenizer's chat template, with `transformers`.

The tokens are those of the whole conversation as rendered. A template may mark answers with {% generation %}.
Otherwise, an answer is the text by which the conversation up to it is longer than the conversation before it with the
template's prompt for an answer.
"""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import Config
from atoll.data.conversations import Messages, Rendered
from atoll.documents import read_json, read_text
from atoll.errors import DataError
from atoll.training.sources import package

LARGEST_TEMPLATE = 1 << 20
"""Largest template that is read, in bytes."""

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a tokenizer.json that affect the output of a template."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_template(config: Config) -> Template | None:
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
    return Template(file, None if own is None else Path(own).expanduser(), answers_only=config.data.answers_only)


class Template:
    """The chat template of the tokenizer in `file`, or that in the file `own`.

    answers_only: whether only labels of answers count.
    """

    def __init__(self, file: Path, own: Path | None, *, answers_only: bool) -> None:
        self._file, self._own, self._answers_only = file, own, answers_only
        names = BESIDE if file.name == "tokenizer.json" else ()
        self._beside = {name: path for name in names if (path := file.parent / name).is_file()}
        self._given = None if own is None else _read(own)
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

    def render(self, messages: Messages) -> Rendered:
        """Return the tokens of a conversation. Raises ValueError if the template refuses it."""
        if not self._answers_only:
            ids = self._tokens(self._write(messages))["input_ids"]
            return Rendered(np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.bool_))
        if self._marks_answers:
            found = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            return Rendered(
                np.array(found["input_ids"], dtype=np.uint32), np.array(found["assistant_masks"], dtype=np.bool_)
            )
        text = self._write(messages)
        found = self._tokens(text, return_offsets_mapping=True)
        begins = np.array([begin for begin, _ in found["offset_mapping"]], dtype=np.int64)
        is_answer = np.zeros(len(begins), dtype=np.bool_)
        for first, last in self._answers(messages, text):
            is_answer |= (begins >= first) & (begins < last)
        return Rendered(np.array(found["input_ids"], dtype=np.uint32), is_answer)

    def _answers(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Return the ranges of answers in the text of a conversation, in characters."""
        found = []
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            through = self._write(messages[: at + 1])
            before = self._write(messages[:at], add_generation_prompt=True)
            if not through.startswith(before):  # the prompt for an answer is not the beginning of the answer
                before = self._write(messages[:at])
            if not text.startswith(through) or not through.startswith(before):
                raise ValueError(
                    f"message {at + 1}: the chat template writes this answer, or what is before it, otherwise when "
                    "more follows, so where it begins and ends cannot be told; mark answers with {% generation %} and "
                    "{% endgeneration %} in a template of your own (data.chat_template)"
                )
            found.append((len(before), len(through)))
        return found

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

    @cached_property
    def _marks_answers(self) -> bool:
        return _MARKS.search(self._tokenizer.get_chat_template()) is not None

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

    def _write(self, messages: Messages, **options: Any) -> str:
        return str(self._apply(messages, tokenize=False, **options)) if messages else ""

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except DataError:
            raise
        except Exception as error:  # any exception of a template, or of a missing file
            raise ValueError(f"the chat template refuses it: {error}") from error

    def _tokens(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, add_special_tokens=False, **options)


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=LARGEST_TEMPLATE)
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template: {path} cannot be read ({error})") from error
