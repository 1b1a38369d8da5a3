"""Layout: where parameters, gradients and optimizer state are stored. 27 exist, 14 are effective."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.base.errors import LayoutError
from atoll.plans.layouts.level import Level

LAYOUT_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "NNN": ("ddp", "zero-0"),
        "NNG": ("zero-1",),
        "NGG": ("zero-2",),
        "GGG": ("zero-3", "fsdp"),
        "III": ("mics", "hsdp"),
    }
)
"""Names that other systems use for each layout."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Three levels in the order parameter, gradient, optimizer state: `Layout("IIG")`.

    Raises LayoutError for a name that is not three of N, I and G; `Layout.parse` also takes aliases and any case.
    """

    name: str

    def __post_init__(self) -> None:
        if len(self.name) != 3 or any(letter not in Level.__members__ for letter in self.name):
            raise LayoutError(_unknown(self.name))

    @staticmethod
    def parse(text: str) -> Layout:
        """Return the layout called `text`: three levels or an alias ("zero-2", "ZeRO2", "hsdp"), in any case."""
        word = text.strip().lower()
        squeezed = word.replace("-", "").replace("_", "")
        for name, aliases in LAYOUT_ALIASES.items():
            if squeezed in (alias.replace("-", "") for alias in aliases):
                return Layout(name)
        if len(word) == 3 and all(letter.upper() in Level.__members__ for letter in word):
            return Layout(word.upper())
        raise LayoutError(_unknown(text))

    @property
    def parameters(self) -> Level:
        """p, the level of the parameters."""
        return Level[self.name[0]]

    @property
    def gradients(self) -> Level:
        """g, the level of the gradients."""
        return Level[self.name[1]]

    @property
    def optimizer(self) -> Level:
        """os, the level of master weights and optimizer state."""
        return Level[self.name[2]]

    @property
    def effective(self) -> bool:
        """True if the optimizer state is sharded at least as finely as parameters and gradients."""
        return self.optimizer >= max(self.parameters, self.gradients)

    @property
    def dominated_by(self) -> Layout | None:
        """The layout with less memory and no more traffic than this one; None for an effective layout.

        It is the same layout with os at the finer level of p and g.
        """
        if self.effective:
            return None
        finer = max(self.parameters, self.gradients)
        return Layout(self.name[:2] + finer.name)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of the layout in other systems."""
        return LAYOUT_ALIASES.get(self.name, ())

    def __str__(self) -> str:
        return self.name


def _unknown(text: str) -> str:
    aliases = list(itertools.chain.from_iterable(LAYOUT_ALIASES.values()))
    names = ["".join(letters) for letters in itertools.product("nig", repeat=3)]
    near = difflib.get_close_matches(text.lower(), aliases + names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no layout {text!r}: {hint}a layout is three levels, of parameters, gradients and optimizer state, each "
        f"N (whole), I (sharded in the group) or G (sharded over all data-parallel ranks), as in 'IIG'; "
        f"or one of {', '.join(aliases)}"
    )


ALL_LAYOUTS: tuple[Layout, ...] = tuple(Layout("".join(letters)) for letters in itertools.product("NIG", repeat=3))
"""The 27 layouts, parameters slowest, from NNN to GGG."""

EFFECTIVE: tuple[Layout, ...] = tuple(layout for layout in ALL_LAYOUTS if layout.effective)
"""The 14 layouts that no other dominates by construction."""
