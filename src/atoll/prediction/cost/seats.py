"""The devices that the pipeline ranks of a plan run on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from atoll.plans.plan import MeshShape
from atoll.prediction.cost.cluster import Cluster


@dataclass(frozen=True)
class Seats:
    """The kinds of nodes that each pipeline rank of a mesh is on.

    A pipeline rank has many places, one for each data-parallel and tensor-parallel rank. It is as slow as the slowest
    of their devices, and holds what fits the smallest.
    """

    cluster: Cluster
    mesh: MeshShape

    @cached_property
    def _at(self) -> tuple[tuple[Cluster, ...], ...]:
        return tuple(self.cluster.at(self.mesh, rank) for rank in range(self.mesh.pipeline))

    def at(self, rank: int) -> tuple[Cluster, ...]:
        """Return the kinds of a pipeline rank. Raises ConfigError as `Cluster.at`."""
        return self._at[rank]

    @cached_property
    def kinds(self) -> tuple[Cluster, ...]:
        """All kinds of nodes that are used, as ranks fill them."""
        used = {id(kind) for own in self._at for kind in own}
        return tuple(kind for kind in self.cluster.kinds if id(kind) in used)

    def memory(self, rank: int) -> int:
        """Return the bytes of a pipeline rank's device."""
        return min(kind.device.memory for kind in self.at(rank))

    def context(self, rank: int) -> int:
        """Return the bytes of a pipeline rank's device that are taken before the first tensor."""
        return max(kind.device.context for kind in self.at(rank))

    def pause(self, rank: int) -> float:
        """Return the idle seconds of a pipeline rank's F and of its I."""
        return max(kind.device.efficiency.pause for kind in self.at(rank))

    @property
    def is_fullest(self) -> str:
        """What is said of the rank whose device is nearest to full."""
        return "is the fullest" if self.cluster.groups else "has the highest peak"

    def name(self, rank: int) -> str:
        """Return a pipeline rank in words, with its kinds if there are several."""
        names = [kind.name for kind in self.at(rank) if kind.name]
        return " ".join([f"rank {rank}", *(["on", " and ".join(names)] if names else [])])
