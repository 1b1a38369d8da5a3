"""Instructions of a split vocabulary: its embedding and head are slices, which all pipeline ranks work on."""

from __future__ import annotations

from atoll.program.operation import Partners, Side
from atoll.program.table import GRADIENT, READS, WORKS, Facts, computes, posts, receives, sends

EMBEDDING = "embedding"
"""Name of the embedding's slice in `RankShape.slices`."""

HEAD = "head"
"""Name of the head's slice in `RankShape.slices`."""

_OF_ALL = {"peers": Partners.PIPELINE, "carries": "vocabulary"}


class Sliced:
    """L looks up a microbatch's tokens in the slice of the embedding, S scores them with the slice of the head, T and G
    are the gradients of these two, as in `atoll.plans.ir.Op`. SEND, POST and RECV are as those of activations: of what
    was looked up (L), of scores (S), of the totals of a softmax (T), and of the embedding's gradient (G)."""

    L = computes(over=EMBEDDING, reads=True, needs=(READS, WORKS), cause="forward", column="L")
    S = computes(over=HEAD, reads=True, needs=(READS, WORKS), cause="forward", column="S")
    T = computes(over=HEAD, phase="W", needs=(WORKS,), gives=(Facts.MADE,), takes=GRADIENT, cause="weights", column="T")
    G = computes(
        over=EMBEDDING, phase="W", needs=(WORKS,), gives=(Facts.MADE,), takes=GRADIENT, cause="weights", column="G"
    )
    SEND_L = sends("L", stands_for="RECV_F", **_OF_ALL)
    SEND_S = sends("S", stands_for="RECV_B", **_OF_ALL)
    SEND_T = sends("T", **_OF_ALL)
    POST_S = posts("S")
    POST_T = posts("T")
    POST_G = posts("G")
    RECV_S = receives("S", ("F", Side.LAST))
    RECV_T = receives("T", ("T", Side.LAST))
    RECV_G = receives("G", ("B", Side.FIRST))
