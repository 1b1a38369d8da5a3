"""The engine, which executes a plan on torch.distributed."""

from __future__ import annotations

import atexit
import re
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from atoll.base._torch import local_part
from atoll.base.digests import digest
from atoll.base.errors import (
    BadStepError,
    CheckpointError,
    CostWarning,
    DamageError,
    PlanError,
    RankError,
    ReplicaError,
    RunError,
    WeightsWarning,
)
from atoll.base.faults import ROLLBACKS, SKIPS_IN_A_ROW, Answer, Fault, Made, Policy, Rollback, Sighting
from atoll.plans.ir import Schedule
from atoll.plans.layouts import Footprint, WorkingMemory, swapped_along
from atoll.plans.plan import Plan
from atoll.prediction.advice import advice
from atoll.program import Instruction, Operation, Program
from atoll.program.trace import Trace
from atoll.runtime import checkpoint
from atoll.runtime.agreement import Agreement
from atoll.runtime.allocator import keep_freed_memory
from atoll.runtime.assemble.build import build
from atoll.runtime.assemble.holdings import held_at_rest, held_now, needed_in_a_step, shape_of
from atoll.runtime.assemble.ties import untie_as_stored
from atoll.runtime.batches import Batches, Labels, Share
from atoll.runtime.checkpoint import Archive, Background, Piece, Told, is_complete
from atoll.runtime.lanes import Kind, Lane, lane_of, lanes_of
from atoll.runtime.launch import share_cores
from atoll.runtime.models import Adapter, Batch, Loss, adapter_for, weights_for
from atoll.runtime.models.batch import IGNORED_LABEL
from atoll.runtime.models.buffers import buffers_outside, first_names, persistent_buffers, transient_buffers
from atoll.runtime.models.sums import check_sum
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.executor import Executor, Outcome
from atoll.runtime.pipeline.probe import Probe, bad_parameter, first_of_all, places_of
from atoll.runtime.pipeline.step_end import LossScaler, Refused, StepEnd, StepResult
from atoll.runtime.same import DIGEST, check_same, software
from atoll.runtime.sharding.access import Edit, chosen_names, differing, whole_gradients
from atoll.runtime.sharding.coding import Moment
from atoll.runtime.sharding.matrices import MatrixUpdate
from atoll.runtime.sharding.optimizer import GroupOptions, OptimizerFactory, ShardedOptimizer
from atoll.runtime.sharding.outer import OuterSteps
from atoll.runtime.sharding.replicas import Holding, differences, digest_of, holdings, share, short
from atoll.runtime.sharding.state import load_state, load_values, model_pieces, save_state, stored_states
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensor_parallel import tensor_parallel
from atoll.runtime.sharding.tensors import whole_output
from atoll.runtime.transport import Channel, Peers, connect, world_rank, world_size, world_store
from atoll.runtime.verdict import SHOWN
from atoll.runtime.vocabulary.split import ways_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Sums over the evaluated samples of all ranks.

    tokens: labels that count, or samples of a batch without labels.  counted: the count of the loss, `tokens` unless
    the loss returns another one.
    """

    loss_sum: float
    tokens: int
    counted: float

    @property
    def loss(self) -> float:
        """Mean loss; 0 if the count is 0."""
        return self.loss_sum / self.counted if self.counted else 0.0

    def __add__(self, other: Evaluation) -> Evaluation:
        """Return the sum of both evaluations."""
        return Evaluation(self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.counted + other.counted)


class Engine:
    """Trains a model under a plan.

    model: a module with an adapter (atoll.runtime.models), built on `meta` or with the same values on every rank.
    optimizer: a function from parameter groups of 1-D slices to an elementwise torch optimizer, or a `MatrixUpdate`,
    such as `atoll.Muon`.
    groups: (name, shape) -> options of the parameter's group, such as {"weight_decay": 0.0}.
    clip: maximum global gradient norm, above 0; None does not clip.
    weights: a folder of initial weights, safetensors or a checkpoint; each rank reads its own shards. What of a folder
    is not used, or not as its config says, is in `notes` and a WeightsWarning on rank 0.
    bad_steps: how to handle steps whose loss or gradients are not finite: "stop", "skip" or "rollback N"; see
    `atoll.base.faults`.
    labels: "shifted" if a label is the token that its position predicts, "unshifted" if it is the token at its own
    position, as in transformers; the engine then shifts them.
    loss: (outputs of the model's last block, microbatch) -> the loss summed over what counts, or a pair of this sum and
    its count; without it the adapter's. See `atoll.models.Loss`. On a tensor-parallel group the outputs are whole.

    torch.distributed must be initialised with the world size of the plan's mesh, unless that is one.
    Raises PlanError on every rank if model and plan do not match.

    program: the instructions of this rank in a step.
    checkpoints: folders that a rollback may load, by step: those that this engine has saved and loaded, and those that
    the caller adds on every rank. Rank 0 checks which of them still exist.
    """

    program: Program
    reads_in_place: bool

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        optimizer: OptimizerFactory,
        groups: GroupOptions | None = None,
        clip: float | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        weights: Path | str | None = None,
        bad_steps: Policy | str = "stop",
        labels: Labels = "shifted",
        loss: Loss | None = None,
    ) -> None:
        whole = optimizer.whole if isinstance(optimizer, MatrixUpdate) else None
        self.plan = plan = plan if plan.whole == whole else replace(plan, whole=whole)
        self.model = model
        self.clip = clip
        self.labels = labels
        self.loss = loss
        self.bad_steps = bad_steps if isinstance(bad_steps, Policy) else Policy.parse(bad_steps)
        self.checkpoints: dict[int, Path] = {}
        self.step_number = 0
        named = getattr(loss, "__qualname__", type(loss).__name__)
        _check_same(model, plan, seed=seed, labels=labels, clip=clip, loss=named)
        self.place = plan.mesh.place(world_rank())
        self.device = _with_index(torch.device(device)) if device is not None else _default_device()
        share_cores(world_size())
        if self.device.type == "cpu":
            keep_freed_memory()
        self.transport = connect(self.place, self.device, has_islands=plan.outer is not None)
        self._agreement = Agreement(self.transport)
        self._seed = seed
        self._moment = Moment()
        self._lanes: dict[Kind, Lane] = {}
        self.outer: OuterSteps | None = None
        self._outcome: Outcome | None = None
        self._played: dict[int, tuple[Share, Outcome]] = {}
        self._answered: StepResult | None = None
        self._skips = self._rollbacks = self._furthest = 0
        self._compared = 0
        self._damage: DamageError | None = None
        self._background = Background()
        self._before_update: Callable[[], None] | None = None
        self._has_gradients = False
        atexit.register(_close, weakref.ref(self))
        problem: Exception | None = None
        with self._agreement.guard("building the engine"):
            try:
                self._build(optimizer, groups, weights)
            except Exception as error:
                problem = error
            self._agreement.agree(problem)
            self._lower()
            if weights is not None and is_complete(Path(weights)):
                load_values(Path(weights), self.units, self._buffers(), spare=transient_buffers(self.adapter))
                for unit in self.units:
                    unit.sync_parameters(is_exact=True)
                if self.outer is not None:
                    self.outer.adopt()

    def _build(self, optimizer: OptimizerFactory, groups: GroupOptions | None, weights: Path | str | None) -> None:
        plan = self.plan
        if self.labels not in get_args(Labels):
            raise PlanError(f'labels = {self.labels!r}; it is "shifted" or "unshifted"')
        if self.clip is not None and not self.clip > 0:  # NaN too
            raise PlanError(
                f"clip = {self.clip}; the largest gradient norm is above 0, or None to leave gradients alone"
            )
        if self.loss is not None and plan.vocabulary_parallel:
            raise PlanError(
                "vocabulary_parallel computes token cross-entropy on slices of the logits, and the engine was given "
                "another loss; leave one of them out"
            )
        if plan.outer is not None and self.bad_steps.answer is Answer.ROLLBACK:
            raise PlanError(
                f'bad_steps = "{self.bad_steps}" would bring one island back to an earlier step than the others; with '
                'outer steps use "stop" or "skip"'
            )
        folder = None if weights is None else Path(weights)
        untied = [] if folder is None else untie_as_stored(self.model, folder)
        self.adapter: Adapter = adapter_for(self.model)
        stored = None if folder is None or is_complete(folder) else weights_for(self.adapter, folder)
        self.notes = (*untied, *(() if stored is None else stored.notes))
        for note in self.notes if self.place.rank == 0 else ():
            warnings.warn(note, WeightsWarning, stacklevel=4)
        self._shared_buffers = first_names(self.adapter)
        predicts_next = getattr(self.adapter, "predicts_next", True)
        if self.labels == "unshifted" and not predicts_next:
            raise PlanError(
                'labels = "unshifted" applies to models that predict the next token; labels of '
                f'{type(self.model).__name__} are at the positions that predict them: leave it out, or use "shifted"'
            )
        outline = Outline.of(self.adapter, plan)
        self.runs = outline.runs
        tensor = None
        if plan.mesh.tensor > 1:
            tensor = tensor_parallel(self.adapter, plan, self.transport.mesh_along("tp"), apart=outline.ends)
        if outline.vocabulary is not None:
            for kind, ways in ways_of(outline.rank_of_stage, plan.mesh.pipeline):
                self.transport.open_links(kind, ways)
        if plan.post_validation:
            self.transport.open_links(Channel.VERDICT, [(at + 1, at) for at in range(plan.mesh.pipeline - 1)])
        self.transport.open_links(None, outline.sharing)
        if plan.whole is not None:
            axes = tuple(axis for axis in swapped_along(plan.layout.optimizer) if plan.outer is None or axis != "inter")
            self.transport.open_swaps(*axes)
            self.transport.open_swaps(*axes, "tp")
        self._lanes = lanes_of(
            self.device,
            alone=plan.nest(self.place).ranks == 1,
            waits_on_host=self.transport.waits_on_host,
        )
        around = Surroundings(
            plan.sharding(self.place),
            self.transport,
            self.device,
            lanes=self._lanes,
            weights=stored,
            seed=self._seed,
            moment=self._moment,
        )
        self.advice = self._advise(outline)
        collector = Collector()
        self._sharded = build(outline, around=around, collector=collector, seed=self._seed, tensor=tensor)
        self._batches = Batches(
            plan,
            self.place,
            self.device,
            agreement=self._agreement,
            vocabulary=self._sharded.vocabulary,
            labels=self.labels,
            may_copy=self.loss is not None or not predicts_next,
        )
        self.units = self._sharded.units
        if not self._sharded.trainable:
            raise PlanError("the model has no trainable parameter; set requires_grad on what is to be trained")
        self._optimizer = ShardedOptimizer(
            self.units,
            optimizer,
            named_shapes=self._sharded.trainable,
            options=groups,
            matrices=self._sharded.matrices,
        )
        self._end = StepEnd(
            self.units,
            self._sharded.specs,
            self._optimizer,
            transport=self.transport,
            clip=self.clip,
            scaler=LossScaler() if plan.precision.compute == "float16" else None,
            is_post_validated=plan.post_validation,
        )
        self._executor = Executor(
            outline,
            self._sharded,
            self._end,
            loss=self.adapter.loss if self.loss is None else _OwnLoss(self.loss, self.device),
            transport=self.transport,
            collector=collector,
            seed=self._seed,
            lanes=tuple(self._lanes.values()) if plan.nest(self.place).ranks > 1 else (),
        )
        if plan.outer is not None:
            lane = self._lanes["outer"] = lane_of("outer", self.device, waits_on_host=self.transport.waits_on_host)
            count = len(self._sharded.specs)
            self.outer = OuterSteps(self.units, plan.outer, self.transport, lane=lane, count=count, seed=self._seed)

    def _lower(self) -> None:
        """Lower this rank's programs, equal on all ranks that share its parameters, and reserve the memory they lend.

        The lent memory depends on a program in which ranks read each other's memory; whether they do is known
        afterwards.
        """
        place = self.place
        shape = shape_of(self._sharded, self.plan, place, reads_in_place=True)
        self.program = self._executor.lower(shape)
        self.transport.memory.share(self._needed(reads_in_place=True).lent)
        seeing = self.agree(float(self.transport.memory.sees(Peers.along("intra", place))))
        self.reads_in_place = seeing == place.mesh.world
        if not self.reads_in_place:
            self.program = self._executor.lower(shape_of(self._sharded, self.plan, place, reads_in_place=False))
        # If a model keeps values besides its parameters, the first step shows how a forward changes them.
        self._watches_buffers = self.agree(float(bool(self._buffers()))) > 0
        mesh = self.plan.mesh
        digests = [-1] * (mesh.pipeline * mesh.tensor)
        digests[place.pp * mesh.tensor + place.tp] = self.program.digest
        self._agreement.agree_on(
            digests,
            PlanError(
                "ranks that share parameters would execute different programs; build the same model with the same "
                "plan on "
                "every rank"
            ),
        )

    def _advise(self, outline: Outline) -> tuple[str, ...]:
        """Warn on rank 0 about wasteful settings of the plan."""
        found = advice(self.plan, outline.sizes)
        for each in found if self.place.rank == 0 else ():
            warnings.warn(each, CostWarning, stacklevel=4)
        return found

    def _split_loss(self) -> AbstractContextManager[None]:
        """Return the loss of logits that are split over a tensor-parallel group, forward and backward."""
        return loss_parallel() if self.plan.mesh.tensor > 1 else nullcontext()

    # ---- training

    def step(self, batch: Mapping[str, Any], *, before_update: Callable[[], None] | None = None) -> StepResult:
        """Train on this data-parallel rank's share of a step, and wait for its result.

        batch: arrays or tensors by name, or mappings of these, each [microbatches * microbatch, ...], the same on every
        pipeline rank of one data-parallel rank. A language model has `input_ids` and `labels` (-100 = does not count).

        before_update: called on every rank when the gradients are complete and before they are used, to read them with
        `full_gradients`. Not supported with post-validated steps, which do not wait for gradients.

        The loss is the mean over what counts in the step on all ranks. The first error of a rank is raised on all.
        """
        if before_update is not None and self.plan.post_validation:
            raise PlanError("before_update waits for the gradients, post-validated steps do not; turn one of them off")
        self._before_update = before_update
        try:
            result = self.submit(batch)
        finally:
            self._before_update = None
        settled = self.settle()
        result = settled if settled is not None else result
        assert result is not None, "a step that is not outstanding has a result"
        return result

    def submit(self, batch: Mapping[str, Any], following: Mapping[str, Any] | None = None) -> StepResult | None:
        """Train on a batch; if the plan's steps are post-validated, do not wait for the result.

        Returns the result of the previous step in that case (None the first time; `settle` returns the last), otherwise
        this step's. With `following`, the batch of the next call, the ranks agree on that batch while this one runs,
        and there is no barrier between steps.

        With outer steps the result is that of this rank's island.
        """
        result = self._submit(batch, following)
        if self.outer is not None and self.outer.is_due(self.step_number):
            self._act_outer(self.outer)
        return result

    def _act_outer(self, outer: OuterSteps) -> None:
        """Do the outer work after the last step. Waits for the step's verdict."""
        self._settle()
        with self._agreement.guard(f"the outer step after step {self.step_number}"):
            outer.act(self.step_number)

    def _submit(self, batch: Mapping[str, Any], following: Mapping[str, Any] | None) -> StepResult | None:
        begin = time.monotonic()
        self._check_whole()
        share = self._batches.claim(batch)
        if following is not None:
            self._batches.announce(following)
        if share.tokens == 0:
            raise RunError(f"step {self.step_number + 1} has no token that counts: every label is {IGNORED_LABEL}")
        look = None if self._before_update is None else self._show_gradients
        before = self._digests_of_buffers() if self._watches_buffers else {}
        self._outcome = self._play(share, self.step_number, since=begin, look=look)
        self.step_number += 1
        if self._watches_buffers:
            self._watches_buffers = False
            self._check_buffers(before)
        # With a post-validated step, this verdict is on the step before.
        self._played = {at: played for at, played in self._played.items() if at == self.step_number - 1}
        self._played[self.step_number] = share, self._outcome
        refused = self._end.take_refused()
        if refused is None:
            answered, self._answered = self._answered, None
            return self._count(self._end.take_result()) or answered
        result = self._answer(refused)
        if refused.result.step < self.step_number:  # a step that follows it has run, and is replayed
            self._outcome = self._play(share, self.step_number - 1, since=begin, look=look)
            self._played[self.step_number] = share, self._outcome
        return result

    def _play(
        self,
        share: Share,
        step: int,
        *,
        since: float | None = None,
        look: Callable[[], None] | None = None,
        is_rehearsal: bool = False,
    ) -> Outcome:
        """Run the program of the step after `step`."""
        since = time.monotonic() if since is None else since
        self._moment.step = step
        with (
            self._agreement.guard(f"step {step + 1}", self._executor.doing, pace=self._agreement.steps),
            _keeping_random_state(self.device),
            self._split_loss(),
        ):
            for stage in self._sharded.stages:
                stage.train(True)
            self._end.begin(step=step + 1, tokens=share.tokens, since=since, look=look, is_rehearsal=is_rehearsal)
            return self._executor.run(
                share.pieces,
                step=step,
                first_microbatch=self.place.data * self.plan.schedule.microbatches,
                scale=lambda: self._loss_scale() / share.tokens,
                training=True,
            )

    def _loss_scale(self) -> float:
        """Return the loss scale of the step, once the verdict on the one before is known; gradients have it as well."""
        self._moment.scale = self._end.loss_scale
        return self._moment.scale

    def _show_gradients(self) -> None:
        """Call the step's `before_update`. If it raises, the step is undone: its gradients are discarded."""
        assert self._before_update is not None, "there is something to be called"
        self._has_gradients = True
        try:
            self._before_update()
        except BaseException:
            self._end.forget()
            raise
        finally:
            self._has_gradients = False

    def settle(self) -> StepResult | None:
        """Wait for the verdict on the last step and apply it; None if no step is pending."""
        self._settle()
        answered, self._answered = self._answered, None
        return answered

    def _settle(self) -> None:
        """Wait for the verdict, and keep the result for the next call of `settle` or `submit`."""
        if not self._end.is_outstanding:
            return
        with self._agreement.guard("the verdict on a step", pace=self._agreement.steps):
            self._end.settle()
        refused = self._end.take_refused()
        self._answered = self._count(self._end.take_result()) if refused is None else self._answer(refused)

    # ---- bad steps

    def _count(self, result: StepResult | None) -> StepResult | None:
        """Record that a step was taken."""
        if result is not None and not result.skipped:
            self._skips = 0
            if result.step > self._furthest:
                self._rollbacks = 0
        return result

    def _answer(self, refused: Refused) -> StepResult:
        """Apply the policy to a bad step and return its result with the fault. Raises BadStepError on every rank if the
        run stops; the engine is then in the state before the step."""
        step = refused.result.step
        self._end.cancel()
        fault = self._find(refused)
        result = replace(refused.result, fault=fault)
        why = "Nothing was updated"
        if self.bad_steps.answer is Answer.SKIP:
            self._skips += 1
            if fault.is_of_parameters:
                why = "Nothing was updated; skipping steps does not repair parameters"
            elif self._skips > SKIPS_IN_A_ROW:
                why = f"Nothing was updated in the {SKIPS_IN_A_ROW} steps before either, which were skipped"
            else:
                return result
        if self.bad_steps.answer is Answer.ROLLBACK:
            self._rollbacks += 1
            self._furthest = max(self._furthest, step)
            if self._rollbacks > ROLLBACKS:
                why = f"Nothing was updated; {ROLLBACKS} rollbacks did not bring the run beyond step {self._furthest}"
            elif rollback := self._go_back(step - self.bad_steps.steps):
                return replace(result, rollback=rollback)
            else:
                why = f"There is no complete checkpoint of step {max(0, step - self.bad_steps.steps)} or before"
        self.step_number = step - 1
        narrow = ", or use precision fp32" if self.plan.precision.compute in ("float16", "bfloat16") else ""
        others = [f'"{each}"' for each in ("skip", "rollback N") if not each.startswith(self.bad_steps.answer)]
        raise BadStepError(
            f"{fault.describe()}\n{why}. Lower the learning rate, clip the gradient norm{narrow}; or continue past "
            f"such steps with bad_steps = {' or '.join(others)}",
            fault=fault,
        )

    def _find(self, refused: Refused) -> Fault:
        """Find where a step's values became non-finite: in the parameters, or in the replayed step."""
        step, specs = refused.result.step, self._sharded.specs
        share, outcome = self._played[step]
        count = self.plan.schedule.microbatches
        first, total = self.place.data * count, count * self.plan.mesh.data
        names = places_of(specs)
        # If the replay does not show the fault again, the losses of the step itself tell more.
        probe = Probe(self.place.rank, first=first, size=self.plan.microbatch, names=names)
        last = len(self.adapter.blocks()) - 1
        for microbatch, loss in outcome.losses.items():
            probe.look(Made.LOSS, [loss], last, microbatch=microbatch)
        with self._agreement.guard(f"looking for the fault of step {step}", self._executor.doing):
            bad = bad_parameter(self.units, self.place.rank, names)
            of_step, marked = first_of_all([*probe.seen, *([bad] if bad else [])], self.transport, total)
        was_repeated, cause = True, of_step
        if of_step is None or of_step.made is not Made.PARAMETER:
            self._executor.probe = probe = Probe(self.place.rank, first=first, size=self.plan.microbatch, names=names)
            try:
                self._play(share, step - 1, is_rehearsal=True)
            finally:
                self._executor.probe = None
            with self._agreement.guard(f"looking for the fault of step {step}"):
                self._end.settle()
                again = self._end.take_refused()
                assert again is not None, "a rehearsal is refused"
                was_repeated = not again.is_finite
                cause, seen = first_of_all(probe.seen, self.transport, total)
            marked = seen or marked
        return self._describe(refused, cause if was_repeated else None, marked, was_repeated=was_repeated)

    def _describe(
        self, refused: Refused, cause: Sighting | None, marked: Sequence[int], *, was_repeated: bool
    ) -> Fault:
        specs, size = self._sharded.specs, self.plan.microbatch
        blocks = [block.name for block in self.adapter.blocks()]
        fault = Fault(
            refused.result.step,
            refused.result.loss,
            refused.result.grad_norm,
            units=tuple(specs[at].name for at in refused.units),
            microbatches=tuple(marked),
            was_repeated=was_repeated,
        )
        if cause is None:
            return fault
        names = [name for spec in specs for name in spec.names]
        block = blocks[cause.block] if cause.block >= 0 else "vocabulary"
        coordinates = self.plan.mesh.place(cause.rank).coordinates.items()
        held = f"rank {cause.rank} ({', '.join(f'{axis} {at}' for axis, at in coordinates)})"
        name = names[cause.name] if cause.name >= 0 else ""
        if cause.made is Made.PARAMETER:
            what = f"parameter {name} on {held}, before the step: an earlier update or a load wrote it"
            return replace(fault, rank=cause.rank, block=block, what=what, is_of_parameters=True)
        at = cause.microbatch * size
        samples = range(at, at + size) if cause.sample < 0 else range(at + cause.sample, at + cause.sample + 1)
        said = {
            Made.INPUT: f"what block {block} received in the forward",
            Made.OUTPUT: f"the output of block {block}",
            Made.LOSS: "the loss, from a finite output of the model",
            Made.GRADIENT: f"the gradient that the backward of block {block} began with",
            Made.WEIGHT_GRADIENT: f"the gradient of {name}",
            Made.INPUT_GRADIENT: f"the gradient of the input of block {block}",
        }[cause.made]
        which = f"sample {samples[0]}" if len(samples) == 1 else f"one of samples {samples[0]} to {samples[-1]}"
        what = f"{said}, in microbatch {cause.microbatch} on {held}; {which} of the step"
        return replace(fault, rank=cause.rank, block=block, microbatch=cause.microbatch, samples=samples, what=what)

    def _go_back(self, step: int) -> Rollback | None:
        """Load the newest complete checkpoint of `step` or before; return None on every rank if there is none."""
        with suppress(CheckpointError, RankError):  # a failed save is not a checkpoint to return to
            self.finish_saving()
        while True:
            known = [at for at, folder in self.checkpoints.items() if at <= step and is_complete(folder)]
            found = round(self.agree(max(known, default=-1) if self.place.rank == 0 else 0))
            if found < 0:
                return None
            try:
                return Rollback(found, self.checkpoints[found], self._load(self.checkpoints[found]))
            except DamageError:
                del self.checkpoints[found]

    # ---- evaluation

    def evaluate(self, batch: Mapping[str, Any]) -> Evaluation:
        """Return the loss over this rank's share of a batch, at most one step's microbatches, without dropout or
        gradients.

        Every data-parallel rank must pass the same number of samples; pad the last batch with labels of -100.
        """
        self._settle()
        share = self._batches.take(batch)
        outcome = self._run_forward(share.pieces)
        loss = 0.0 if outcome.loss_sum is None else float(outcome.loss_sum)
        own = [loss, sum(map(float, outcome.counts)), len(outcome.counts)]
        total, counted, said = self.transport.total(torch.tensor(own, dtype=torch.float64)).tolist()
        return Evaluation(total, share.tokens, counted if said else share.tokens)

    def logits(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's output for one microbatch on the last stage's ranks: [B, S, vocabulary], or the output of
        its last block. Return None on other ranks."""
        self._settle()
        outcome = self._run_forward([self._batches.take_one(batch)], keep_logits=True)
        return outcome.logits[0] if outcome.logits else None

    def _run_forward(self, batches: Sequence[Batch], *, keep_logits: bool = False) -> Outcome:
        self._check_whole()
        pace = self._agreement.evaluations
        with self._agreement.guard("an evaluation", self._executor.doing, pace=pace), self._split_loss():
            for stage in self._sharded.stages:
                stage.train(False)
            return self._executor.run(batches, training=False, keep_logits=keep_logits)

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Evaluate the anchors of outer steps, the model that checkpoints have, inside the context. Without outer steps
        nothing changes. Every rank must enter; do not train inside."""
        if self.outer is None:
            yield
            return
        self._settle()
        inside = self.outer.anchored()
        with self._agreement.guard("bringing anchors to where parameters rest"):
            inside.__enter__()
        try:
            yield
        finally:
            with self._agreement.guard("bringing parameters back"):
                inside.__exit__(None, None, None)

    # ---- state and measurements of the rank

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer of this rank's slices, for learning-rate schedules."""
        return self._optimizer.torch

    @property
    def busy_seconds(self) -> float:
        """Seconds of compute of this rank in the last training step."""
        return self._end.busy

    def memory(self) -> Footprint:
        """Return the bytes of parameters, gradients and optimizer state that this rank stores now."""
        anchors = [] if self.outer is None else self.outer.tensors()
        return held_now(self.units, [*self._optimizer.state_tensors(), *anchors])

    def footprint(self, *, states: int | None = None) -> Footprint:
        """Return the predicted bytes of this rank's state between steps; `states` as in `atoll.layouts.footprint`."""
        return held_at_rest(self.units, self.plan.sharding(self.place), states=states)

    def working_memory(self) -> WorkingMemory:
        """Return the bytes that this rank needs within a step in addition to stored state and saved activations."""
        return self._needed(reads_in_place=self.reads_in_place)

    def _needed(self, *, reads_in_place: bool) -> WorkingMemory:
        peaks = self.program.peaks
        return needed_in_a_step(self._sharded, self.plan, self.place, reads_in_place=reads_in_place, peaks=peaks)

    def trace(self) -> Trace:
        """Return this rank's timeline of the last training step, in seconds of the host's monotonic clock."""
        if self._outcome is None:
            raise PlanError("no training step has run yet, so there is no timeline")
        placement = self.plan.schedule.placement
        return Trace(self._outcome.spans, ranks=placement.ranks, chunks=placement.chunks)

    @contextmanager
    def timing(self) -> Iterator[dict[tuple[Operation, int], float]]:
        """Time the instructions of the steps inside the context.

        Yields a dictionary that is filled when the context ends: the seconds of each instruction in the last step, by
        instruction and index of its block or unit (-1: none), as the mean over microbatches: the input of
        `atoll.sim.Rates`. For instructions that wait for a message or for other ranks it is the shortest of its kind;
        instructions that wait once a step are left out.
        """
        found: dict[tuple[Operation, int], float] = {}
        self._executor.is_timed = True
        try:
            yield found
        finally:
            self._executor.is_timed = False
        if self._outcome is not None:
            taken = self.taken()
            waits: dict[Operation, list[float]] = {}
            for (do, _), each in taken.items():
                if do.waits:
                    waits.setdefault(do, []).extend(each)
            shortest = {do: min(each) for do, each in waits.items() if len(each) > 1}
            for key, each in taken.items():
                if not key[0].waits:
                    found[key] = fmean(each)
                elif key[0] in shortest:
                    found[key] = shortest[key[0]]

    def taken(self) -> dict[tuple[Operation, int], list[float]]:
        """Return the seconds of each execution of the instructions of the last step, including waits.

        By instruction and index of its block or unit, as in `timing`; empty unless the step ran in that context. The
        instructions are sequential, so they add up to the step except for host time between them.
        """
        return {} if self._outcome is None else self._outcome.clock.seconds()

    def instructions(self) -> list[tuple[Instruction, float, float]]:
        """Return the instructions of the last step with start and end, in seconds of the host's monotonic clock.

        Each precedes the instructions nested in it; empty unless the step ran in the context of `timing`.
        """
        return [] if self._outcome is None else self._outcome.clock.instructions()

    def check_replicas(self) -> None:
        """Compare replicas of parameters and optimizer state bit by bit. Every rank must call it.

        If they differ, raises ReplicaError on every rank; it names the ranks that differ from the majority, and the
        blocks.
        """
        self._settle()
        self._settle_parameters()
        with self._agreement.guard("comparing replicas"):
            own = list(holdings(self.units, self._optimizer.states(), self.place, outer=self.outer))
            found = differences(share(own, self.transport))
        if not found:
            self._compared = self.step_number
            return
        names = [spec.name for spec in self._sharded.specs]
        lines = [each.describe(names) for each in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"and {len(found) - SHOWN} more differences")
        raise ReplicaError(
            f"after step {self.step_number}: {'; '.join(lines)}. Memory, a device or a link has changed bits, or "
            f"code wrote on only some ranks. Replicas were last equal at step {self._compared}: continue from a "
            "checkpoint of that step or before, without the named machine",
            ranks=tuple(sorted({rank for each in found for rank in each.ranks})),
        )

    # ---- reading and editing of parameters

    @contextmanager
    def full_parameters(self, names: str | Sequence[str] = "*") -> Iterator[dict[str, torch.Tensor]]:
        """Context with the full parameters by name; in-place edits are written back.

        names: names or patterns of `fnmatch`. A rank gets those of its pipeline stages. Values are the optimizer's, in
        the master's dtype. Every rank of the mesh must enter with the same names, and make the same edits to parameters
        that it shares with other ranks; if edits differ, every rank raises PlanError and nothing changes.
        """
        self._settle()
        chosen = self._agreed_names(names)
        with self._agreement.guard("reading parameters"):
            edit = Edit.of(self.units, set(chosen))
        yield edit.values
        with self._agreement.guard("editing parameters"):
            totals = self.transport.total(edit.digests(chosen).reshape(-1)).reshape(-1, 3)
            wrong = differing(chosen, totals)
            if wrong:
                problem = PlanError(
                    f"{', '.join(wrong)} edited differently on ranks that share it; make the same edit on every rank. "
                    "Nothing was changed"
                )
                self._agreement.refuse(problem)
                raise problem
            edit.write()
            if self.outer is not None:
                self.outer.adopt(edit.edited().keys())

    def state_dict(self, *, whole: bool = True) -> dict[str, torch.Tensor] | dict[str, list[Piece]]:
        """Return parameters and persistent buffers of this rank's pipeline stages, by name; every rank must call it.

        With `whole`, full tensors, as in `full_parameters`; otherwise the shards that this rank stores, as ranges of
        flattened tensors. Shards are views: do not write to them.
        """
        if whole:
            with self.full_parameters() as values:
                return {**values, **{name: buffer.clone() for name, buffer in self._buffers().items()}}
        self._settle()
        found: dict[str, list[Piece]] = {}
        for piece in model_pieces(self.units, self._buffers()):
            found.setdefault(".".join(piece.path[1:]), []).append(piece)
        return found

    def full_gradients(self, names: str | Sequence[str] = "*") -> dict[str, torch.Tensor]:
        """Return full gradients by name, summed over all ranks and not clipped; only within `before_update` of `step`.

        Every rank of the mesh must call it with the same names; it gets those of its pipeline stages.
        """
        if not self._has_gradients:
            raise PlanError(
                "gradients can be read while a step's before_update runs: engine.step(batch, before_update=f)"
            )
        chosen = self._agreed_names(names)
        with self._agreement.guard("reading gradients"):
            found = whole_gradients(self.units, set(chosen))
        correction = self._end.correction
        return found if correction == 1.0 else {name: value * correction for name, value in found.items()}

    def _agreed_names(self, names: str | Sequence[str]) -> tuple[str, ...]:
        """Return the parameters selected by `names`, which must be the same on every rank."""
        self._settle_parameters()
        problem: Exception | None = None
        chosen: tuple[str, ...] = ()
        try:
            chosen = chosen_names(self._sharded.specs, names)
        except PlanError as error:
            problem = error
        with self._agreement.guard("choosing parameters"):
            self._agreement.agree(problem)
            digest = zlib.crc32(repr(chosen).encode())
            problem = PlanError("the ranks request different parameters; give every rank the same names")
            self._agreement.agree_on([digest], problem)
        return chosen

    # ---- checkpoints

    def save(
        self,
        folder: str | Path,
        state: Mapping[str, Any] | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        background: bool = False,
        told: Told | None = None,
    ) -> None:
        """Write a checkpoint that any layout, schedule and world size can load; `state` is JSON from the caller.

        identity: JSON about the run for the manifest, in addition to the step.
        background: return once this rank's part is copied to host memory, and write it while training continues. The
        next save and `finish_saving` wait for it. A failed attempt is repeated; the final error is raised only by
        `finish_saving`.
        told: called on this rank, in the writing thread, with the error of a failed attempt, and with None once the
        checkpoint is published. By default failures are warnings.
        """
        self._check_whole()
        self._settle()
        with self._agreement.guard("saving a checkpoint"):
            save: Callable[..., None] = checkpoint.save
            if background:
                save = partial(self._background.begin, told=told)
            else:
                self._background.wait()
            scaler = None if self._end.scaler is None else asdict(self._end.scaler)
            own: dict[str, Any] = {"step": self.step_number, "scaler": scaler, "caller": dict(state or {})}
            if self.outer is not None:
                self.outer.settle()
                own["outer"] = self.outer.state()
            whose = {"step": self.step_number, **(identity or {})}
            save_state(
                Path(folder),
                self.units,
                self._optimizer,
                buffers=self._buffers(),
                state=own,
                identity=whose,
                outer=self.outer,
                island=self._island,
                save=save,
            )
        self.checkpoints[self.step_number] = Path(folder)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background, if any. Every rank must call it.

        Raises the error of the save on every rank: CheckpointError or RankError.
        """
        with self._agreement.guard("waiting for a checkpoint to be written"):
            try:
                self._background.finish()
            except (CheckpointError, RankError) as error:  # training does not depend on it
                self._agreement.refuse(error)
                raise

    @property
    def saving_bytes(self) -> int:
        """Bytes of host memory of this rank's copy for saving in the background; 0 before the first save."""
        return self._background.nbytes

    def load(self, folder: str | Path, *, check: Callable[[Archive], object] | None = None) -> dict[str, Any]:
        """Load a checkpoint of the same model from any layout and world size. Return the caller's `state`.

        check: called with the checkpoint on this rank before anything is changed; its error is raised on every rank.

        The content is compared with its digests. Raises the same error on every rank: DamageError if it differs,
        CheckpointError if the checkpoint is missing or of another model. After a DamageError an older checkpoint can be
        loaded; until one is, the engine refuses every step.
        """
        self._settle()
        self._answered = None
        return self._load(Path(folder), check=check)

    def _load(self, folder: Path, *, check: Callable[[Archive], object] | None = None) -> dict[str, Any]:
        self._settle_parameters()
        problem: Exception | None = None
        opened: Archive | None = None
        try:
            opened = Archive(folder)
            stored = stored_states(opened)
            self._optimizer.check_states(stored)
            if check is not None:
                check(opened)
        except Exception as error:
            problem = error
        with self._agreement.guard("loading a checkpoint"):
            self._agreement.agree(problem)
            assert opened is not None, "the ranks have agreed that it is open"
            try:
                own = load_state(
                    folder,
                    self.units,
                    self._optimizer,
                    buffers=self._buffers(),
                    opened=opened,
                    spare=transient_buffers(self.adapter),
                    outer=self.outer,
                    island=self._island,
                )
            except DamageError as error:
                self._damage = error
                self._agreement.refuse(error)
                raise
            self._damage = None
        self.step_number = int(own["step"])
        self.checkpoints[self.step_number] = folder
        if self._end.scaler is not None and own.get("scaler") is not None:
            self._end.scaler = LossScaler(**own["scaler"])
        caller = own["caller"]
        assert isinstance(caller, dict)
        return caller

    @property
    def _island(self) -> int:
        """The number of this rank's island."""
        return 0 if self.outer is None else self.place.inter

    def _check_whole(self) -> None:
        """Raise RunError while some values come from a damaged checkpoint."""
        if self._damage is not None:
            raise RunError(
                f"the last load only filled a part of the engine; load a complete checkpoint first: {self._damage}"
            )

    def _settle_parameters(self) -> None:
        """Wait until nothing reads the parameters, before an agreement after which they are written."""
        with self._agreement.guard("settling parameters"):
            for unit in self.units:
                unit.wait_for_parameters()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of this rank's blocks and of no block, by qualified name; under
        tensor parallelism, the plain tensors."""
        blocks = self.adapter.blocks()
        own = [blocks[at] for stage in self._sharded.stages for at in stage.run]
        return {name: local_part(buffer) for name, buffer in persistent_buffers(self.adapter, own).items()}

    def _digests_of_buffers(self) -> dict[str, str]:
        return {name: digest_of([buffer]) for name, buffer in self._buffers().items()}

    def _check_buffers(self, before: Mapping[str, str]) -> None:
        """Raise PlanError on every rank if the forward has changed buffers in a way that one process would not.

        Running statistics, such as those of BatchNorm, cover only a rank's own samples, and a recomputed forward
        updates them twice. The check runs once, after the first step, and misses a buffer that starts to change later.
        """
        with self._agreement.guard("comparing buffers"):
            after = self._digests_of_buffers()
            changed = [name for name in after if before.get(name) != after[name]]
            everywhere = buffers_outside(self.adapter)
            own = [
                Holding(short(digest(self._shared_buffers.get(name, name).encode())), short(after[name]), 0, kind=0)
                for name in after
                if name in changed or name in everywhere
            ]
            held = share(own, self.transport)
            is_changed = self.transport.total(torch.tensor([len(changed)], dtype=torch.float64)).item() > 0
        if self.plan.recompute != "none" and is_changed:
            why = "a forward that is recomputed changes them twice; turn recompute off, or"
        elif differences(held):
            alone = self.plan.mesh.data == 1
            why = (
                "each stage changes its own copy of a buffer that stages share; run them in one stage, or"
                if alone
                else "each rank has seen its own samples; where the samples are not to be mixed,"
            )
        else:
            return
        modules = dict(self.model.named_modules())
        parts = [name.rpartition(".") for name in changed]
        found = dict.fromkeys(f"{module} ({type(modules[module]).__name__})" for module, _, _ in parts)
        names = ", ".join([*list(found)[:SHOWN], *(["..."] if len(found) > SHOWN else [])]) or "modules of other ranks"
        raise PlanError(
            f"the forward changes buffers of {names}, and they are no longer those of one process: {why} use GroupNorm "
            "or LayerNorm, SyncBatchNorm on CUDA, or statistics that stay as they are (`module.eval()`)"
        )

    # ---- agreement and failure

    def agree(self, value: float) -> float:
        """Return the sum of `value` over all ranks."""
        with self._agreement.guard("agreeing on a number", pace=self._agreement.steps):
            return float(self.transport.total(torch.tensor([value], dtype=torch.float64)))

    def close(self) -> None:
        """Wait for a checkpoint in progress, and stop the engine's threads. Call it before the process group is
        destroyed; it is also called when the interpreter exits."""
        with suppress(Exception):  # finish_saving raises the error
            self._background.wait()
        self._agreement.close()
        for lane in self._lanes.values():
            lane.close()
        self.transport.close()


def _check_same(model: nn.Module, plan: Plan, **options: object) -> None:
    """Raise ConfigError on every rank unless all have the same software, plan, options and model, and equal initial
    values."""
    store = world_store()
    if store is None or world_size() == 1:
        return
    facts = software() | {f"plan.{each.name} =": _fact(getattr(plan, each.name)) for each in fields(plan)}
    facts |= {f"{name} =": str(value) for name, value in options.items()}
    for part, parameters in _parts(model).items():
        outline = [(name, *each.shape, str(each.dtype), each.requires_grad, each.is_meta) for name, each in parameters]
        facts[f"the model's {part}.*"] = DIGEST + digest(repr(outline).encode())
        facts[f"the initial state of {part}.*"] = DIGEST + digest_of(each for _, each in parameters if not each.is_meta)
    check_same(
        store,
        world_rank(),
        world_size(),
        facts=facts,
        advice="build the same model by the same plan on every rank: on the meta device, where Atoll draws its values "
        "from the seed, or with the same values",
    )


def _fact(value: object) -> str:
    """Return a comparable fact. Orders are left out: they are compared as programs, which are lowered from them."""
    if not isinstance(value, Schedule):
        return str(value)
    return f"{value.name}, {value.ranks} ranks, {value.chunks} chunks, {value.microbatches} microbatches"


def _parts(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return parameters grouped by layer: by name up to the first number, or by the first word."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        numbered = re.match(r"(.*?\.\d+)\.", name)
        found.setdefault(numbered[1] if numbered else name.partition(".")[0], []).append((name, parameter))
    return found


class _OwnLoss:
    """A user's loss, which does not support outputs that are split over a tensor-parallel group.

    The first microbatches show whether it returns a sum.
    """

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._is_known = False

    def __call__(self, outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
        whole = whole_output(outputs)
        found = self._loss(whole, batch)
        if not self._is_known:
            with _keeping_random_state(self._device):
                self._is_known = check_sum(self._loss, whole, batch, found=found)
        return found


class _keeping_random_state:  # noqa: N801  (a context manager, used as a verb)
    """Context that restores the user's random generators after blocks were seeded."""

    def __init__(self, device: torch.device) -> None:
        devices = [device] if device.type == "cuda" else []
        self._fork = torch.random.fork_rng(devices=devices)

    def __enter__(self) -> None:
        self._fork.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._fork.__exit__(*details)


def _close(engine: weakref.ref[Engine]) -> None:
    living = engine()
    if living is not None:
        living.close()


def _default_device() -> torch.device:
    return _with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _with_index(device: torch.device) -> torch.device:
    """Return "cuda" as this thread's current device: in another thread it would be the first one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
