"""Base class, value types and error messages shared by the tables of a config.

A key is documented by the string below it, which pydantic keeps as the description of the field. docs/training.md
shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Pattern of `module:name`."""


def as_tuple(value: Any) -> Any:
    """Return a tuple in place of TOML's list."""
    return tuple(value) if isinstance(value, list) else value


Positive = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Natural = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Probability, Probability], BeforeValidator(as_tuple)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


class Section(BaseModel):
    """A table of the config: immutable, no unknown keys, no conversions except int to float."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def problems_of(cls, values: Mapping[str, Any], name: str) -> list[str]:
        """Return the problems of `values` as this table, which an error calls `name`."""
        try:
            cls.model_validate(values)
        except ValidationError as error:
            return [
                f"{name}.{'.'.join(map(str, detail['loc']))} = {detail['input']!r}: "
                + (
                    f"unknown key; there are {', '.join(cls.model_fields)}"
                    if detail["type"] == "extra_forbidden"
                    else detail["msg"].replace("Input should be", "must be")
                )
                for detail in error.errors(include_url=False)
            ]
        return []


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ValueError with all `problems`, one per line, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def join_or(values: Sequence[object]) -> str:
    """Return `values` as text: "1, 2 or 4"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
