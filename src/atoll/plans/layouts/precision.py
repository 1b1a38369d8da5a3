"""The dtype of each part of the model state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from atoll.base.errors import LayoutError

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of one element, by torch's dtype name."""


FLOAT8_RECIPES: Mapping[str, bool] = MappingProxyType({"rowwise": True, "rowwise_with_gw_hp": False})
"""torchao's recipes of FP8 linear layers by name, and whether the gradient of a weight is computed in FP8 too."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mxfp8": "torchao has linear layers in MXFP8 as a prototype alone, for the block scales of Blackwell",
        "mxfp4": "torchao has linear layers in MXFP4 as a prototype alone, for the block scales of Blackwell",
        "nvfp4": "torchao has linear layers in NVFP4 as a prototype alone, for the block scales of Blackwell",
        "tensorwise": "with one scale for a whole tensor, an outlier takes precision from all rows",
    }
)
"""Reasons against formats that people ask for."""

_MULTIPLE = 16
"""Sizes of an FP8 product are multiples of this: a requirement of the hardware."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Products of linear layers in FP8, with a scale for each row of a factor (e4m3, scales are powers of two).

    recipe: one of `FLOAT8_RECIPES`, torchao's names.  small: also layers that are slower in FP8 than in bf16.

    Raises LayoutError for another recipe.
    """

    recipe: str
    small: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in FLOAT8_RECIPES:
            raise LayoutError(f"FP8 recipe {self.recipe!r}; known: {', '.join(FLOAT8_RECIPES)}")

    def __str__(self) -> str:
        """`large linear layers in FP8 (rowwise)`."""
        return f"{'' if self.small else 'large '}linear layers in FP8 ({self.recipe})"

    @property
    def in_weights(self) -> bool:
        """True if the gradient of a weight, W of a split backward, is computed in FP8."""
        return FLOAT8_RECIPES[self.recipe]

    def takes(self, outputs: int, inputs: int) -> bool:
        """Return True if a linear layer of these sizes, on one tensor-parallel rank, multiplies in FP8.

        Small ones stay in the dtype of activations: their casts take longer than the product saves. The limits are
        those of torchao's `_auto_filter_for_recipe` for "rowwise" (0.18, measured on H100), also for the other recipe,
        for which it has none.
        """
        if outputs % _MULTIPLE or inputs % _MULTIPLE:
            return False
        return self.small or (outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048))


@dataclass(frozen=True, slots=True)
class Precision:
    """Six dtypes, by torch's names, and what multiplies in less.

    compute: parameters and activations in forward and backward.  travel: all-gathers.  stored: stored parameters.
    gradient: accumulation.  reduce: reductions of gradients.  master: master weights and optimizer state.
    products: FP8 products of linear layers; None: they multiply in `compute`.
    """

    name: str
    compute: str
    travel: str
    stored: str
    gradient: str
    reduce: str
    master: str
    products: Float8 | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "travel", "stored", "gradient", "reduce", "master"):
            dtype = getattr(self, field)
            if dtype not in ITEM_BYTES:
                raise LayoutError(f"precision {self.name!r}: {field} = {dtype!r}; known: {', '.join(ITEM_BYTES)}")

    def __str__(self) -> str:
        """`bfloat16`, or `bfloat16, large linear layers in FP8 (rowwise)`."""
        if self.products is None:
            return self.compute
        return f"{self.compute}, {self.products}"

    @property
    def rest(self) -> str:
        """Deprecated name of `stored`."""
        warnings.warn("Precision.rest is deprecated, use Precision.stored", DeprecationWarning, stacklevel=2)
        return self.stored

    @staticmethod
    def preset(name: str) -> Precision:
        """Return the preset `name`: fp32, fp64, bf16 or fp16 (the halves with fp32 master and reductions); or bf16 with
        FP8 products of linear layers, `fp8-rowwise` or `fp8-rowwise_with_gw_hp`."""
        if name not in PRESETS:
            why = Precision.reason_against(name)
            raise LayoutError(f"no precision {name!r}{why and f': {why}'}; known: {', '.join(PRESETS)}")
        return PRESETS[name]

    @staticmethod
    def reason_against(name: str) -> str:
        """Return why there is no preset of that name, if it is one that people ask for; otherwise nothing."""
        return next((reason for part, reason in _REFUSED.items() if part in name.lower()), "")


def _uniform(name: str, dtype: str) -> Precision:
    return Precision(name, dtype, dtype, dtype, dtype, dtype, dtype)


def _mixed(name: str, half: str) -> Precision:
    return Precision(name, half, half, half, "float32", "float32", "float32")


PRESETS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": _uniform("fp32", "float32"),
        "fp64": _uniform("fp64", "float64"),
        "bf16": _mixed("bf16", "bfloat16"),
        "fp16": _mixed("fp16", "float16"),
        **{
            f"fp8-{recipe}": replace(_mixed(f"fp8-{recipe}", "bfloat16"), products=Float8(recipe))
            for recipe in FLOAT8_RECIPES
        },
    }
)
