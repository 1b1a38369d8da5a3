"""The bytes that ranks may hold, on devices of one size or several."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.prediction.cost import Cluster, Prediction


@dataclass(frozen=True)
class Room:
    """The room on a cluster's devices, of which `headroom` stays free.

    All ranks have the limit of the largest device: a rank on a smaller one counts as fuller by what that lacks. So one
    number tells whether a plan fits, and how far it is from fitting.
    """

    cluster: Cluster
    headroom: float

    @property
    def largest(self) -> int:
        """Bytes of the largest device."""
        return max(kind.device.memory for kind in self.cluster.kinds)

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold on the largest device."""
        return self.largest * (1.0 - self.headroom)

    @property
    def context(self) -> int:
        """The least bytes that a device has taken before the first tensor."""
        return min(kind.device.context for kind in self.cluster.kinds)

    def short(self, prediction: Prediction, rank: int) -> int:
        """Return the bytes that a pipeline rank's device lacks to the largest one."""
        return round((self.largest - prediction.seats.memory(rank)) * (1.0 - self.headroom))

    def shortages(self, prediction: Prediction) -> tuple[int, ...]:
        """Return `short` of each pipeline rank; none if all devices are alike."""
        if not self.cluster.groups:
            return ()
        return tuple(self.short(prediction, rank) for rank in range(prediction.plan.mesh.pipeline))

    def peak(self, prediction: Prediction) -> int:
        """Return the bytes of the fullest pipeline rank, with what its device lacks."""
        ranks = range(prediction.plan.mesh.pipeline)
        return max(prediction.peak(rank).total + self.short(prediction, rank) for rank in ranks)
