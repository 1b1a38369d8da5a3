"""The dtype of each part of the model state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.base.errors import LayoutError

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of one element, by torch's dtype name."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Six dtypes, by torch's names.

    compute: parameters and activations in forward and backward.  travel: all-gathers.  stored: stored parameters.
    gradient: accumulation.  reduce: reductions of gradients.  master: master weights and optimizer state.
    """

    name: str
    compute: str
    travel: str
    stored: str
    gradient: str
    reduce: str
    master: str

    def __post_init__(self) -> None:
        for field in ("compute", "travel", "stored", "gradient", "reduce", "master"):
            dtype = getattr(self, field)
            if dtype not in ITEM_BYTES:
                raise LayoutError(f"precision {self.name!r}: {field} = {dtype!r}; known: {', '.join(ITEM_BYTES)}")

    @property
    def rest(self) -> str:
        """Deprecated name of `stored`."""
        warnings.warn("Precision.rest is deprecated, use Precision.stored", DeprecationWarning, stacklevel=2)
        return self.stored

    @staticmethod
    def preset(name: str) -> Precision:
        """Return the preset `name`: fp32, fp64, bf16 or fp16 (the halves with fp32 master and reductions)."""
        if name not in PRESETS:
            raise LayoutError(f"no precision {name!r}; known: {', '.join(PRESETS)}")
        return PRESETS[name]


def _uniform(name: str, dtype: str) -> Precision:
    return Precision(name, *[dtype] * 6)


def _mixed(name: str, half: str) -> Precision:
    return Precision(name, half, half, half, "float32", "float32", "float32")


PRESETS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": _uniform("fp32", "float32"),
        "fp64": _uniform("fp64", "float64"),
        "bf16": _mixed("bf16", "bfloat16"),
        "fp16": _mixed("fp16", "float16"),
    }
)
