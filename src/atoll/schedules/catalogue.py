"""The schedules that exist. To add one: its function, a row here, its picture, its laws."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.errors import ConfigError
from atoll.ir.schedule import Schedule
from atoll.schedules.gpipe import gpipe
from atoll.schedules.one_forward_one_backward import one_forward_one_backward


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a closed form is a function of: p ranks with v chunks, m microbatches, and costs equal on all ranks.

    Costs are of a rank's whole share: T_F forward, T_I backward for the input, T_W backward for the weights.
    """

    ranks: int
    microbatches: int
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    chunks: int = 1

    @property
    def work(self) -> float:
        """m (T_F + T_I + T_W), what every rank computes."""
        return self.microbatches * (self.forward + self.input_grad + self.weight_grad)


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """A published or derived formula: its text, where it holds, and the same two as functions of the sizes.

    Bubbles are of the makespan, without hops: makespan = work + bubble.
    """

    text: str
    domain: str
    holds: Callable[[Sizes], bool]
    value: Callable[[Sizes], float]


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalogue.

    fused_bubble   the full backward releases the input's gradient at its end
    early_bubble   after its I part, as Atoll's runtime does
    peak           microbatches whose activations rank r keeps at most, r from 0
    options        what `function` takes besides ranks and microbatches
    """

    name: str
    function: Callable[..., Schedule]
    summary: str
    paper: str
    fused_bubble: ClosedForm
    early_bubble: ClosedForm
    peak_text: str
    peak: Callable[[Sizes, int], float]
    options: tuple[str, ...] = ()


def _always(sizes: Sizes) -> bool:
    return True


_FUSED_RAMP = ClosedForm(
    text="(p-1)(T_F+T_I+T_W)",
    domain="equal ranks, any p and m",
    holds=_always,
    value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + sizes.input_grad + sizes.weight_grad),
)
_EARLY_RAMP = ClosedForm(
    text="(p-1)(T_F+T_I)",
    domain="equal ranks, any p and m",
    holds=_always,
    value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + sizes.input_grad),
)

_ENTRIES = (
    Entry(
        name="gpipe",
        function=gpipe,
        summary="all forwards, then all backwards",
        paper="arXiv 1811.06965",
        fused_bubble=_FUSED_RAMP,
        early_bubble=_EARLY_RAMP,
        peak_text="m",
        peak=lambda sizes, rank: sizes.microbatches,
    ),
    Entry(
        name="1f1b",
        function=one_forward_one_backward,
        summary="one forward, one backward in turn",
        paper="arXiv 2006.09503",
        fused_bubble=_FUSED_RAMP,
        early_bubble=_EARLY_RAMP,
        peak_text="min(m, p-r)",
        peak=lambda sizes, rank: min(sizes.microbatches, sizes.ranks - rank),
    ),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Name -> row, in the order in which they are listed to users."""


def build(name: str, *, ranks: int, microbatches: int, **options: object) -> Schedule:
    """Builds the schedule `name`. Raises ConfigError for an unknown name or option, or an impossible size."""
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ConfigError(f"schedule {name!r} does not exist{_nearest(name, CATALOGUE)}: choose one of "
                          f"{', '.join(CATALOGUE)}")  # fmt: skip
    for word, count in (("ranks", ranks), ("microbatches", microbatches)):
        if count < 1:
            raise ConfigError(f"schedule {name!r} needs at least 1 of {word}, not {count}")
    for option in options:
        if option not in entry.options:
            known = ", ".join(entry.options) or "none"
            guess = _nearest(option, entry.options)
            raise ConfigError(f"schedule {name!r} has no option {option!r}{guess}: its options are {known}")
    return entry.function(ranks=ranks, microbatches=microbatches, **options)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
