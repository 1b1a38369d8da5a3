"""[data]: the corpus, and how it is cut into samples."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from atoll.base.errors import ConfigError
from atoll.training.config.section import Names, Positive, Section, as_tuple, raise_all


def _as_validation(value: Any) -> Any:
    is_share = type(value) in (int, float) and 0 <= value <= 0.5
    if not is_share and not (isinstance(value, str) and value):
        raise ValueError("must be a share of the corpus from 0 to 0.5, or a file or folder")
    return value


def _as_sources(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    given = as_tuple(value)
    names = tuple(given) if isinstance(given, (tuple, dict)) else ()
    if not names or not all(isinstance(each, str) and each for each in names):
        raise ValueError('must be "stdlib", a file or a folder, or a list of these, or a table with their shares')
    shares = given.values() if isinstance(given, dict) else ()
    if not all(type(each) in (int, float) and 0 < each < math.inf for each in shares):
        raise ValueError("must be a table of sources with their shares, numbers above 0")
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} more than once; write a table of sources with their shares")
    return given


class Data(Section):
    """[data]: the corpus, and how it is cut into samples."""

    source: Annotated[str | tuple[str, ...] | dict[str, float] | None, BeforeValidator(_as_sources)] = None
    """file or folder of the corpus, a list of these, or a table of them with shares of the samples, as in
    `{ web = 0.6, code = 0.4 }`; without shares each gives all. "stdlib" is there for a trial: docs/data.md"""
    streaming: bool = False
    """encode the sources during the run: docs/data.md#streaming"""
    format: Literal["text", "chat"] = "text"
    """"text", or "chat" for conversations and instructions: docs/data.md#conversations"""
    tokenizer: str = "auto"
    """"bytes" (256 ids, none special), "bpe-N" (trained on the corpus), or a tokenizer.json; "auto" takes the tokenizer
    in the model's folder if it has one, else bpe-4096"""
    chat_template: str | None = None
    """file with a Jinja template that replaces the tokenizer's own"""
    answers_only: bool = True
    """compute the loss on the assistant's answers only; false: on all tokens of a conversation"""
    ignored_keys: Names = ()
    """keys of conversations and of their messages that are not used; any other unknown key is an error:
    docs/data.md#keys-of-a-record"""
    bad_records: Literal["stop", "skip"] = "stop"
    """policy for a broken record: "stop" the run, or "skip" and count it, up to a tenth of a source:
    docs/data.md#broken-records"""
    sequence: Positive = 256
    """sequence length: tokens in a sample"""
    packing: Literal["auto", "blocks", "documents", "pad"] = "auto"
    """contents of a sample: a block of joined documents ("blocks"), several whole documents ("documents"), or one
    document with padding ("pad"); "auto" is "documents" for chat and "blocks" for text: docs/data.md#samples"""
    balance: bool = False
    """order the rows of each step so that microbatches and ranks have about equal attention work:
    docs/data.md#balance"""
    too_long: Literal["auto", "split", "drop", "truncate"] = "auto"
    """"split", "drop" or "truncate" documents longer than a sample; "auto" drops conversations and splits text"""
    validation: Annotated[float | str, BeforeValidator(_as_validation)] = 0.02
    """share of the corpus held out for validation, from 0 to 0.5, or a separate file or folder"""
    text_field: str = "text"
    """key or column that contains the text in JSONL, parquet and datasets"""
    cache: str | None = None
    """folder in which tokenizers and token arrays are cached"""

    @model_validator(mode="after")
    def _check(self) -> Data:
        problems = []
        is_chat = self.format == "chat"
        if is_chat and self.packing == "blocks":
            problems.append(
                'data.packing = "blocks" joins conversations; with data.format = "chat" use "documents" or "pad"'
            )
        if is_chat and self.text_field != "text":
            problems.append('data.text_field has no effect with data.format = "chat"; leave it out')
        for_chat = {
            "chat_template": self.chat_template is not None,
            "answers_only": not self.answers_only,
            "ignored_keys": bool(self.ignored_keys),
        }
        if not is_chat and any(for_chat.values()):
            key = next(key for key, is_set in for_chat.items() if is_set)
            problems.append(f'data.{key} applies to conversations only; set data.format = "chat", or leave it out')
        if self.how == "blocks" and self.too_long != "auto":
            problems.append(
                'data.too_long has no effect with data.packing = "blocks", which cuts joined documents; set packing to '
                '"documents" or "pad", or leave too_long out'
            )
        if self.balance and self.how != "documents":
            problems.append(
                f'data.balance orders rows of several documents, and with data.packing = "{self.how}" all rows have '
                'the same attention work; set packing to "documents", or leave balance out'
            )
        raise_all(problems)
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources. Raises ConfigError if there is none."""
        if self.source is None:
            raise ConfigError(
                'data.source is not set: the file or folder of the corpus, or a list of these; "stdlib", the source '
                "text of Python's standard library, is there for a trial"
            )
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Shares of the samples to draw from each source; None: in proportion to their samples."""
        return tuple(self.source.values()) if isinstance(self.source, dict) else None

    @property
    def how(self) -> Literal["blocks", "documents", "pad"]:
        """The packing, with "auto" resolved."""
        if self.packing != "auto":
            return self.packing
        return "documents" if self.format == "chat" else "blocks"

    @property
    def rule(self) -> Literal["split", "drop", "truncate"]:
        """The rule for documents longer than a sample, with "auto" resolved."""
        if self.too_long != "auto":
            return self.too_long
        return "drop" if self.format == "chat" else "split"
