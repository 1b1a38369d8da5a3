"""The table of instructions: one row for each, which says everything about it.

Laws, memory, traffic, drawing, simulation and predictions are folds over these rows, so an instruction is added in one
place: its row, and the call that executes it (`docs/design/adding-an-instruction.md`). Rows of a package of its own,
such as a split vocabulary, stand beside that package and register themselves. `atoll.program.operation` says what a row
is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.program.operation import (
    Amount,
    Fact,
    Lane,
    Need,
    Operation,
    Over,
    Partners,
    Per,
    Phase,
    Scope,
    Sharing,
    Side,
    Workspace,
)

if TYPE_CHECKING:
    from atoll.program.shape import UnitShape

# ---- the core's facts

MOVING = 2
"""Blocks of a rank whose activations may be on their way to host memory at once, or back ahead of their use: one that
moves while a block computes, and the one before."""


def _leaves(unit: UnitShape, phase: Phase | None) -> bool:
    return unit.gradients_leave and phase in unit.flows


def _passage(one: str, several: str, bar: str, *, most: int) -> tuple[Fact, Fact, Fact, Fact]:
    """Return the facts of what leaves for host memory: it is leaving, away, coming, and back ahead of its use.

    one, several: what leaves, in the words of an error.  bar: what it is in a drawing.  most: how many may be leaving
    at once, and how many back.
    """
    leaving = Fact(
        per=Per.PASSAGE, is_flight=True, most=lambda _: most,
        above=f"{several} is leaving for host memory, and {{most}} may be",
        left=f"{one} of microbatch {{phase}} leaves, and is not waited for",
        lane="offload", colour="OFFLOAD", bar=f"{bar} of microbatch {{phase}}",
    )  # fmt: skip
    away = Fact(per=Per.PASSAGE, left=f"{one} of microbatch {{phase}} stays in host memory")
    coming = Fact(
        per=Per.PASSAGE, is_flight=True, left=f"{one} of microbatch {{phase}} comes, and is not used",
        lane="onload", colour="ONLOAD", bar=f"{bar} of microbatch {{phase}}",
    )  # fmt: skip
    back = Fact(
        per=Per.PASSAGE, most=lambda _: most,
        above=f"{several} is back from host memory ahead of its use, and {{most}} may be",
    )  # fmt: skip
    return leaving, away, coming, back


class Facts:
    """Facts of the core's rows."""

    OPEN = Fact(per=Per.STEP, holds_first=True, left="what was sent is not drained")
    UNSHARDED = Fact(
        per=Per.UNIT, applies=lambda unit, _: bool(unit.whole), left="unit {unit} is still unsharded: no FREE"
    )
    GATHERING = Fact(
        per=Per.UNIT, is_flight=True, applies=lambda unit, _: bool(unit.whole),
        left="unit {unit} is gathered and not used",
        size=lambda unit: unit.ahead, most=lambda shape: max(shape.limit, shape.most_asked),
        above="{sum} bytes of gathers are in flight, and {most} may be",
        lane="gather", colour="GATHER", bar="gather {unit}",
    )  # fmt: skip
    MADE = Fact(
        per=Per.PHASE, applies=lambda unit, phase: bool(phase and unit.flows.get(phase)),
        excused=lambda unit: unit.is_left_alone, left="the gradients of unit {unit} in phase {phase} are not reduced",
    )  # fmt: skip
    REDUCING = Fact(
        per=Per.PHASE, is_flight=True, is_in_order=True, most=lambda shape: shape.behind + 1,
        above="{sum} reductions are in flight, and {most} may be",
        lane="reduce", colour="REDUCE", bar="reduce {unit} {phase}",
    )  # fmt: skip
    SYNCING = Fact(per=Per.PHASE, applies=lambda unit, phase: phase in unit.flows)
    SETTLING = Fact(per=Per.UNIT, is_flight=True)
    SYNCED = Fact(per=Per.UNIT)
    UNSTEPPED = Fact(per=Per.UNIT, left="unit {unit} is not stepped by the optimizer")
    POSTED = Fact(per=Per.MESSAGE, is_in_order=True, left="{step} is not waited for", lane="receive", colour="RECV")
    UNREAD = Fact(per=Per.STEP)
    SUMMED = Fact(per=Per.STEP)
    TOTALLED = Fact(per=Per.STEP, holds_first=True)
    JUDGED = Fact(per=Per.STEP)
    CONCLUDED = Fact(per=Per.STEP)
    BEGUN = Fact(per=Per.STEP, left="a step is settled in a program that takes none")
    COLLECTING = Fact(per=Per.UNIT, is_flight=True, lane="matrices", colour="COLLECT", bar="collect {unit}")
    SENDING = Fact(per=Per.UNIT, is_flight=True, lane="matrices", colour="COLLECT", bar="bring back {unit}")
    UPDATED = Fact(per=Per.UNIT, applies=lambda unit, _: bool(unit.matrices or unit.on_host))
    RETURNING = Fact(per=Per.UNIT, is_flight=True)
    CURRENT = Fact(per=Per.UNIT, applies=lambda unit, _: unit.is_stepped_on_host)
    PART_LEAVING = Fact(
        per=Per.PHASE, is_flight=True, applies=_leaves,
        left="gradients of unit {unit} in phase {phase} leave for host memory, and are not waited for",
        lane="offload", colour="OFFLOAD", bar="gradients {unit} {phase}",
    )  # fmt: skip
    PART_AWAY = Fact(
        per=Per.PHASE, applies=_leaves,
        left="gradients of unit {unit} in phase {phase} stay in host memory, and are not complete",
    )  # fmt: skip
    PART_COMING = Fact(
        per=Per.PHASE, is_flight=True, applies=_leaves,
        left="gradients of unit {unit} in phase {phase} come from host memory, and are not waited for",
        lane="onload", colour="ONLOAD", bar="gradients {unit} {phase}",
    )  # fmt: skip
    # Where nothing is reduced, I and W add to what is stored; otherwise only REDUCE does.
    SUM_AWAY = Fact(
        per=Per.PHASE,
        applies=lambda unit, phase: _leaves(unit, phase) and not _flow(unit, phase),
    )
    LEAVING, AWAY, COMING, BACK = _passage(
        "what block {unit} keeps", "what {sum} blocks keep", "block {unit}", most=MOVING
    )
    # A block has its units, and that of its experts.
    OWED_LEAVING, OWED_AWAY, OWED_COMING, OWED_BACK = _passage(
        "what W of unit {unit} needs", "what {sum} units need for W", "W of {unit}", most=2 * MOVING
    )


class Workspaces:
    """Working memory of the core's rows."""

    UNSHARDED = Workspace("parameters", Per.UNIT)
    STAGED = Workspace("staged", Per.UNIT)
    GRADIENT = Workspace("gradients", Per.PHASE)
    REDUCING = Workspace("gradients", Per.PHASE, Sharing.EACH)
    MATRICES = Workspace("matrices", Per.UNIT, Sharing.EACH)
    SHARDED = Workspace("sharded", Per.PHASE)
    ARRIVING = Workspace("arriving", Per.UNIT, Sharing.TOGETHER)
    KEPT = Workspace("activations", Per.BLOCK, Sharing.EACH)
    KEPT_FOR_LOSS = Workspace("activations", Per.STAGE, Sharing.EACH)
    ANSWERED = Workspace("activations", Per.WEIGHT, Sharing.EACH)
    PENDING = Workspace("pending", Per.BLOCK, Sharing.EACH)
    WEIGHED = Workspace("pending", Per.WEIGHT, Sharing.EACH)
    PASSING = Workspace("passing", Per.BLOCK, Sharing.EACH)
    IN_LOSS = Workspace("passing", Per.STAGE, Sharing.EACH)
    MESSAGES = Workspace("messages", Per.STAGE, Sharing.EACH)


def _whole(unit: UnitShape, _: Phase | None) -> int:
    return unit.whole


def _copied_early(unit: UnitShape, _: Phase | None) -> int:
    """Gathered into the copy itself, unless a part is staged for the group to read in place."""
    return unit.whole if unit.ahead >= unit.whole else 0


def _staged(unit: UnitShape, _: Phase | None) -> int:
    return unit.ahead if unit.ahead < unit.whole else 0


def _flow(unit: UnitShape, phase: Phase | None) -> int:
    return unit.flows.get(phase, 0) if phase else 0


def sharded_bytes(unit: UnitShape, phase: Phase | None) -> int:
    """Return the bytes of a phase's sharded gradients that come and go within a step."""
    return unit.sharded.get(phase, 0) if phase else 0


def _accumulated(unit: UnitShape, phase: Phase | None) -> int:
    """Gradients that nothing reduces are accumulated where they are stored, from the first one on."""
    return 0 if _flow(unit, phase) else sharded_bytes(unit, phase)


def _arriving(unit: UnitShape, _: Phase | None) -> int:
    return unit.arriving


def _exchanged(unit: UnitShape, _: Phase | None) -> int:
    return unit.exchanged


def _transformed(unit: UnitShape, _: Phase | None) -> int:
    return unit.transformed


WORKS = Need(Facts.OPEN, "microbatches are over")
READS = Need(Facts.UNSHARDED, "unit {unit} is used before it is unsharded")
WRITES = Need(Facts.SYNCING, "a gradient of unit {unit} is made after its sync", holds=False, of_all=True)
ADDS = Need(Facts.SUM_AWAY, "a gradient of unit {unit} is made while earlier ones are in host memory", holds=False)
_AWAY = Need(Facts.PART_AWAY, "unit {unit} is reduced while earlier gradients are in host memory", holds=False)
GRADIENT = (Amount(Workspaces.GRADIENT, _flow), Amount(Workspaces.SHARDED, _accumulated))
_ARRIVING = Amount(Workspaces.ARRIVING, _arriving)


def _here(*facts: Fact) -> tuple[Need, ...]:
    where = ("on its way to host memory", "in host memory", "on its way from host memory")
    return tuple(Need(fact, "{step} reads what is " + at, holds=False) for fact, at in zip(facts, where, strict=True))


_CURRENT = Need(Facts.CURRENT, "unit {unit} is read before its parameters come from host memory")
_TWICE = tuple(Need(fact, "unit {unit} is gathered twice", holds=False) for fact in (Facts.UNSHARDED, Facts.GATHERING))
_ONCE = (_CURRENT, *_TWICE)
_SUMS = Need(Facts.SUMMED, "{do} comes before SUMS")
_UNREAD = Need(Facts.UNREAD, "the gradients of unit {unit} are written while others may read them")
_UPDATED = Need(Facts.UPDATED, "unit {unit} goes back before its matrices, or its state from host memory, are updated")
_VERDICT = "a verdict is waited for, then made good, then perhaps taken back"
_TURN = "the matrices of unit {unit} come to {do} in another order than they are exchanged in"


def sends(kind: str, **rest: Any) -> Operation:
    """Return the row of a message's send."""
    given = {"peers": Partners.NEIGHBOUR, "bar": ("send", "SEND", "{step}"), "carries": "activations", **rest}
    return Operation(lane=Lane.PIPELINE, scope=Scope.MICROBATCH, over=Over.NONE, sends=kind, **given)


def posts(kind: str) -> Operation:
    """Return the row that begins to receive messages of a kind."""
    return Operation(
        lane=Lane.PIPELINE, scope=Scope.MICROBATCH, over=Over.NONE, posts=kind, is_aside=True, gives=(Facts.POSTED,),
        takes=(Amount(Workspaces.MESSAGES, lambda stage, _: stage.received.get(kind, 0)),),
    )  # fmt: skip


def receives(kind: str, source: tuple[str, Side]) -> Operation:
    """Return the row that waits for a message. source: its kind where it is sent, and the rank."""
    return Operation(
        lane=Lane.PIPELINE, scope=Scope.MICROBATCH, over=Over.NONE, waits=True, peers=Partners.NEIGHBOUR, receives=kind,
        needs=(Need(Facts.POSTED, "{step} is waited for in another order than it was posted"),),
        ends=(Facts.POSTED,), source=source, cause="messages",
    )  # fmt: skip


def computes(**rest: Any) -> Operation:
    """Return the row of a microbatch's computation."""
    given = {"scope": Scope.MICROBATCH, "over": Over.NONE, **rest}
    return Operation(peers=Partners.TENSOR, **given)


def _of_step(**rest: Any) -> Operation:
    given = {"over": Over.NONE, **rest}
    return Operation(scope=Scope.STEP, **given)


class Do:
    """The core's instructions.

    F         the forward of a block                   FINISH_F  the loss, or what the next stage is given
    START_I   the loss's backward, or the gradient that was received
    I         the backward of a block                  FINISH_I  the gradient for the previous stage
    W         the weights' gradients of a unit         FINISH_W  releases the microbatch's received buffers

    SEND_x    sends                                    POST_x    begins to receive
    RECV_x    waits for what was posted

    GATHER    begins to gather a unit's parameters     WHOLE     waits for that, or for RETURN
    FETCH     gathers them, and waits                  FREE      frees the unsharded copy

    REDUCE    begins to reduce a phase's gradients     REDUCED   waits for that: their unsharded buffer is freed
    SYNC      begins to bring a phase's gradients to the optimizer's level

    DRAIN     releases all microbatches, after the last send

    The step's end, of a unit:
    SYNCED    waits for SYNC, and for RETURN if the step did not use the parameters
    UNSCALE   divides the gradients by the loss scale   COPIES   sums them over the ranks that share the unit
    AHEAD     steps it ahead of the verdict, then as RETURN
    COLLECT   begins to send slices of its matrices to their owners, if the optimizer transforms them whole
    TRANSFORM transforms those that this rank owns, and begins to send back slices of the result
    UPDATE    waits for these, and updates the matrices
    RETURN    begins to send the updated parameters to where they are stored

    and of all:
    QUIET     waits until no other rank reads this one's gradients in place
    SUMS      adds up loss, norm and which parameters have gradients, over the ranks of a stage
    CORRECT   steps units again whose parameters have gradients where none had been expected, or none
    JOIN      adds the sums of the pipeline ranks before       PASS     gives them to the next one
    TOTAL     begins to add up the sums of all ranks
    VERDICT   waits for that, or for the sums passed back along the pipeline: the step is taken, clipped or refused
    STEP      steps the optimizer for good
    TAKE_BACK begins the program again if a step ahead was wrong
    """

    F = computes(
        scope=Scope.BLOCK, over=Over.BLOCK, reads=True, exchanges=True, needs=(READS, WORKS), cause="forward",
        column="F",
        takes=(Amount(Workspaces.KEPT, lambda block, _: block.kept),),
        within=(Amount(Workspaces.PASSING, lambda block, _: block.in_forward),),
    )  # fmt: skip
    FINISH_F = computes()
    START_I = computes(
        frees=(Amount(Workspaces.KEPT_FOR_LOSS, lambda stage, _: stage.loss),),
        within=(Amount(Workspaces.IN_LOSS, lambda stage, _: stage.in_loss),),
    )
    I = computes(  # noqa: E741  (the field's name for it)
        scope=Scope.BLOCK, over=Over.BLOCK, phase="I", reads=True, exchanges=True,
        needs=(READS, WRITES, ADDS, WORKS, *_here(Facts.LEAVING, Facts.AWAY, Facts.COMING)),
        ends=(Facts.BACK,), gives=(Facts.MADE,),
        takes=(*GRADIENT, Amount(Workspaces.PENDING, lambda block, _: block.pending)), cause="backward", column="I",
        frees=(Amount(Workspaces.KEPT, lambda block, _: block.freed),),
        within=(Amount(Workspaces.PASSING, lambda block, _: block.in_backward),),
    )  # fmt: skip
    FINISH_I = computes()
    W = computes(
        scope=Scope.UNIT, over=Over.UNIT, phase="W",
        needs=(WRITES, ADDS, WORKS, *_here(Facts.OWED_LEAVING, Facts.OWED_AWAY, Facts.OWED_COMING)),
        ends=(Facts.OWED_BACK,), gives=(Facts.MADE,),
        takes=(*GRADIENT, Amount(Workspaces.ANSWERED, lambda weight, _: weight.answered)), cause="weights", column="W",
        frees=(Amount(Workspaces.WEIGHED, lambda weight, _: weight.pending),),
    )  # fmt: skip
    FINISH_W = computes(frees=(Amount(Workspaces.MESSAGES, lambda stage, _: sum(stage.received.values())),))

    SEND_F = sends("F", to=Side.NEXT)
    SEND_B = sends("B", to=Side.PREVIOUS, carries="backward")
    POST_F = posts("F")
    POST_B = posts("B")
    RECV_F = receives("F", ("F", Side.PREVIOUS))
    RECV_B = receives("B", ("B", Side.NEXT))

    # Only parameters that are stored sharded are gathered; of others WHOLE waits for their sync alone.
    GATHER = Operation(
        lane=Lane.DATA, begins=True, is_aside=True, moves=True, carries="gathers",
        needs=_ONCE,
        gives=(Facts.GATHERING,), ends=(Facts.RETURNING,),
        takes=(Amount(Workspaces.STAGED, _staged), Amount(Workspaces.UNSHARDED, _copied_early)), cause="gathers",
    )  # fmt: skip
    WHOLE = Operation(
        lane=Lane.DATA, waits=True,
        needs=(
            _CURRENT,
            Need(Facts.UNSHARDED, "unit {unit} is waited for, and is unsharded already", holds=False),
            Need(Facts.GATHERING, "unit {unit} is waited for, and no gather of it is in flight"),
        ),
        ends=(Facts.GATHERING, Facts.RETURNING), gives=(Facts.UNSHARDED,),
        frees=(Amount(Workspaces.STAGED),), takes=(Amount(Workspaces.UNSHARDED, _whole),), cause="gathers",
    )  # fmt: skip
    FETCH = Operation(
        lane=Lane.DATA, waits=True, moves_as=GATHER, carries="gathers",
        needs=_ONCE,
        ends=(Facts.RETURNING,), gives=(Facts.UNSHARDED,), frees=(Amount(Workspaces.STAGED),),
        takes=(Amount(Workspaces.UNSHARDED, _whole),), cause="gathers", bar=("gather", "GATHER", "gather {unit}"),
    )  # fmt: skip
    FREE = Operation(
        begins=True, is_aside=True,
        needs=(Need(Facts.UNSHARDED, "unit {unit} is freed, and is not unsharded", of_all=True),),
        ends=(Facts.UNSHARDED,), frees=(Amount(Workspaces.UNSHARDED),),
    )  # fmt: skip

    REDUCE = Operation(
        lane=Lane.DATA, scope=Scope.PHASE, begins=True, is_aside=True, moves=True, carries="reductions",
        needs=(WORKS, _AWAY, Need(Facts.SYNCING, "unit {unit} is reduced after its sync", holds=False)),
        ends=(Facts.MADE,), gives=(Facts.REDUCING, Facts.SETTLING),
        # The next microbatch's gradients go to another buffer; where none was made, zeros are reduced.
        frees=(Amount(Workspaces.GRADIENT),),
        takes=(Amount(Workspaces.REDUCING, _flow), Amount(Workspaces.SHARDED, sharded_bytes), _ARRIVING),
    )  # fmt: skip
    REDUCED = Operation(
        lane=Lane.DATA, scope=Scope.PHASE, is_aside=True, waits=True,
        needs=(Need(Facts.REDUCING, "unit {unit} is waited for before what was reduced earlier"),),
        ends=(Facts.REDUCING,), frees=(Amount(Workspaces.REDUCING, _flow), _ARRIVING), cause="reductions",
    )  # fmt: skip
    SYNC = Operation(
        lane=Lane.DATA, scope=Scope.PHASE, begins=True, is_aside=True, moves=True, carries="sync",
        needs=(
            Need(Facts.SYNCING, "unit {unit} is synced twice", holds=False),
            Need(Facts.MADE, "unit {unit} is synced before it is reduced", holds=False),
            _AWAY,
        ),
        ends=(Facts.SETTLING,), gives=(Facts.SYNCING, Facts.SETTLING),
        takes=(Amount(Workspaces.SHARDED, sharded_bytes), _ARRIVING),
        bar=("reduce", "REDUCE", "sync {unit} {phase}"),
    )  # fmt: skip

    DRAIN = _of_step(
        lane=Lane.PIPELINE, peers=Partners.PIPELINE, ends=(Facts.OPEN,),
        needs=tuple(Need(fact, _VERDICT, holds=False) for fact in (Facts.JUDGED, Facts.CONCLUDED)),
    )  # fmt: skip
    SYNCED = Operation(
        lane=Lane.DATA, waits=True,
        needs=(
            Need(Facts.SYNCED, "unit {unit} is waited for twice", holds=False),
            Need(Facts.SYNCING, "unit {unit} is waited for, and was not synced"),
        ),
        ends=(Facts.REDUCING, Facts.SETTLING), gives=(Facts.SYNCED, Facts.UNSTEPPED),
        frees=(Amount(Workspaces.REDUCING),), cause="reductions",
    )  # fmt: skip
    UNSCALE = Operation(needs=(_UNREAD,))
    COPIES = Operation(lane=Lane.PIPELINE, waits=True, peers=Partners.PIPELINE, needs=(_UNREAD,))
    COLLECT = Operation(
        lane=Lane.DATA, moves=True, carries="matrices",
        needs=(
            Need(Facts.SYNCED, "unit {unit} is collected before its gradients are there"),
            *(Need(fact, _TURN, holds=False) for fact in (Facts.COLLECTING, Facts.SENDING, Facts.UPDATED)),
        ),
        gives=(Facts.COLLECTING,), takes=(Amount(Workspaces.MATRICES, _exchanged),), cause="optimizer",
    )  # fmt: skip
    TRANSFORM = Operation(
        moves=True, carries="matrices", needs=(Need(Facts.COLLECTING, _TURN),),
        ends=(Facts.COLLECTING,), gives=(Facts.SENDING,), within=(Amount(Workspaces.MATRICES, _transformed),),
        cause="optimizer", column="STEP",
    )  # fmt: skip
    UPDATE = Operation(
        lane=Lane.DATA, waits=True, needs=(Need(Facts.SENDING, _TURN),),
        ends=(Facts.SENDING,), gives=(Facts.UPDATED,), frees=(Amount(Workspaces.MATRICES, _exchanged),),
        cause="optimizer",
    )  # fmt: skip
    RETURN = Operation(
        lane=Lane.DATA, moves=True, carries="return", bar=("return", "RETURN", "{step}"),
        needs=(Need(Facts.CONCLUDED, "{do} comes before STEP"), _UPDATED), gives=(Facts.RETURNING,),
    )  # fmt: skip
    AHEAD = Operation(
        moves_as=RETURN, carries="return", column="STEP",
        needs=(Need(Facts.SYNCED, "unit {unit} is stepped before its gradients are there"), _UPDATED),
        ends=(Facts.UNSTEPPED,), gives=(Facts.RETURNING,),
    )  # fmt: skip

    QUIET = _of_step(lane=Lane.DATA, waits=True, gives=(Facts.UNREAD,), cause="reductions")
    SUMS = _of_step(
        lane=Lane.DATA, waits=True, peers=Partners.STAGE, over=Over.ALL,
        needs=(Need(Facts.SYNCED, "unit {unit} is missing in the sums"),),
        # What the verdict of this step waits for is not the total of the one before.
        ends=(Facts.TOTALLED, Facts.BEGUN), gives=(Facts.SUMMED,),
    )  # fmt: skip
    CORRECT = _of_step(needs=(_SUMS,))
    JOIN = _of_step(
        lane=Lane.PIPELINE, waits=True, peers=Partners.NEIGHBOUR, needs=(_SUMS,), hears=("P", Partners.NEIGHBOUR),
        cause="sums",
    )  # fmt: skip
    PASS = _of_step(lane=Lane.PIPELINE, peers=Partners.NEIGHBOUR, needs=(_SUMS,), tells="P")
    TOTAL = _of_step(lane=Lane.PIPELINE, peers=Partners.ALL, needs=(_SUMS,), gives=(Facts.TOTALLED,), tells="A")
    VERDICT = _of_step(
        lane=Lane.PIPELINE, waits=True, peers=Partners.ALL, needs=(Need(Facts.TOTALLED, "{do} comes before TOTAL"),),
        ends=(Facts.TOTALLED,), gives=(Facts.JUDGED,), hears=("A", Partners.ALL), cause="sums",
    )  # fmt: skip
    STEP = _of_step(
        peers=Partners.TENSOR, over=Over.ALL, needs=(Need(Facts.JUDGED, "{do} comes before VERDICT"),),
        ends=(Facts.JUDGED, Facts.UNSTEPPED), gives=(Facts.CONCLUDED,), cause="optimizer", column="STEP",
    )  # fmt: skip
    TAKE_BACK = _of_step(
        peers=Partners.ALL, needs=(Need(Facts.CONCLUDED, "{do} comes before STEP"),), ends=(Facts.CONCLUDED,),
        gives=(Facts.BEGUN,),
    )  # fmt: skip
