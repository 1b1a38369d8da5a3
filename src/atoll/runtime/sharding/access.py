"""Access to full parameters and gradients by name, under any layout.

Values are those that the optimizer works on, in the master's dtype (frozen parameters: in the compute dtype, as
stored). An edit goes to the master weights and from there to every copy. It must be the same on all ranks that store a
part of the parameter: the ranks compare their new values, and refuse together if they differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from atoll.base._torch import version
from atoll.base.errors import PlanError
from atoll.runtime.agreement import DIGESTS
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.unit import Unit, UnitSpec


def chosen_names(specs: Sequence[UnitSpec], patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Names of parameters of the whole model that match any of `patterns`, as `fnmatch` has it, in the model's order.

    Raises PlanError for a pattern that matches nothing.
    """
    return matching_names([name for spec in specs for name in spec.names], patterns)


def matching_names(known: Sequence[str], patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Names among `known` that match any of `patterns`, in their order. Raises PlanError as `chosen_names` does."""
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise PlanError(f"no parameter is called {pattern!r}; there are {', '.join(known[:4])}, ... ({len(known)})")
    return tuple(name for name in known if any(fnmatchcase(name, pattern) for pattern in wanted))


@dataclass(slots=True)
class Edit:
    """Whole values of this rank's parameters, as they were read; what was edited since is written back."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    _segments: dict[str, Segment] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(units: Sequence[Unit], names: Collection[str]) -> Edit:
        """Read; every rank that shares a parameter takes part."""
        edit = Edit()
        for segment in _segments_with(units, names):
            for name, value in segment.read_values().items():
                if name in names:
                    edit.values[name] = value
                    edit._segments[name] = segment
                    edit._versions[name] = version(value)
        return edit

    def edited(self) -> dict[str, torch.Tensor]:
        """Return the edited tensors by name."""
        return {name: value for name, value in self.values.items() if version(value) != self._versions[name]}

    def digests(self, names: Sequence[str]) -> torch.Tensor:
        """Return for each name: holders, a number for its new value (0 if unedited), and its square."""
        edited = self.edited()
        found = torch.zeros(len(names), 3, dtype=torch.float64)
        for at, name in enumerate(names):
            if name in self.values:
                own = _digest(edited[name]) if name in edited else 0
                found[at] = torch.tensor([1.0, own, own * own], dtype=torch.float64)
        return found

    def write(self) -> None:
        """Write edited values to where they are stored."""
        edited = self.edited()
        for segment in dict.fromkeys(self._segments[name] for name in edited):
            segment.write_values({name: edited[name] for name in edited if self._segments[name] is segment})


def differing(names: Sequence[str], totals: torch.Tensor) -> list[str]:
    """Names whose digests, summed over their holders, are not all the same."""
    return [
        name
        for name, (holders, own, square) in zip(names, totals.tolist(), strict=True)
        if holders * square != own * own
    ]


def whole_gradients(units: Sequence[Unit], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the step's gradients as the optimizer will get them, apart from clipping; every rank takes part."""
    found = {}
    for segment in _segments_with(units, names):
        if segment.gradients.is_complete:
            found.update({name: value for name, value in segment.read_gradients().items() if name in names})
    return found


def _segments_with(units: Sequence[Unit], names: Collection[str]) -> Iterator[Segment]:
    for unit in units:
        for segment in unit.segments:
            if any(name in names for name in segment.flat.parameters):
                yield segment


def _digest(value: torch.Tensor) -> int:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return 1 + zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) % (DIGESTS - 1)
