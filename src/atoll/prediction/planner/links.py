"""The links between data-parallel ranks that bounds count on."""

from __future__ import annotations

from atoll.plans.plan import MeshShape, View
from atoll.prediction.cost import Cluster
from atoll.program.sim import Speed


def data_links(cluster: Cluster, mesh: MeshShape, *, has_islands: bool = False) -> dict[str, Speed]:
    """Return the links between data-parallel ranks of a step, by axis. has_islands: other groups take steps of their
    own."""
    axes = ("intra",) if has_islands else ("inter", "intra")
    # Of several kinds of nodes a rank may be on the one with the fastest links.
    return {
        axis: max((kind.along(mesh, axis) for kind in cluster.kinds), key=lambda link: link.rate)
        for axis in axes
        if mesh.sizes[axis] > 1
    }


def sent_share(axis: str, mesh: MeshShape, view: View = View.DENSE) -> float:
    """Return the share of a buffer that a rank sends in one transfer along an axis."""
    intra = mesh.intra // mesh.expert if view is View.EXPERTS else mesh.intra
    return 1.0 - 1.0 / intra if axis == "intra" else (1.0 - 1.0 / mesh.inter) / intra
