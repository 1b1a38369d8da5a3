"""The engine, which executes a plan on torch.distributed."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from atoll.base.errors import BadStepError, PlanError, RunError
from atoll.base.faults import BadStepPolicy
from atoll.base.labels import IGNORED_LABEL
from atoll.plans.layouts import Footprint
from atoll.plans.plan import Plan
from atoll.program import WorkingMemory, needed_in_a_step
from atoll.runtime.agreement import Agreement
from atoll.runtime.allocator import keep_freed_memory
from atoll.runtime.assemble.alike import check_alike
from atoll.runtime.assemble.rank import EngineOptions, Rank, assemble, check_host, lower_programs
from atoll.runtime.assemble.stored import stored_now
from atoll.runtime.batches import BatchShare, Labels
from atoll.runtime.checkpoint import Archive, Background, Told, is_complete
from atoll.runtime.federation.seat import IslandSeat
from atoll.runtime.lanes import JobLane, LaneKind
from atoll.runtime.launch import share_cores
from atoll.runtime.models import Batch, Loss
from atoll.runtime.models.buffers import transient_buffers
from atoll.runtime.pipeline.executor import Outcome
from atoll.runtime.pipeline.routing import Balance
from atoll.runtime.pipeline.step_end import Refused, StepEnd, StepResult
from atoll.runtime.randomness import keeping_random_state
from atoll.runtime.services.bad_steps import BadSteps
from atoll.runtime.services.buffers import Buffers
from atoll.runtime.services.checkpoints import Checkpoints
from atoll.runtime.services.evaluation import Evaluation
from atoll.runtime.services.membership import IslandMembership
from atoll.runtime.services.parameters import Parameters, StoredShard
from atoll.runtime.services.stream import WeightStream
from atoll.runtime.services.timing import StepTiming
from atoll.runtime.sharding.coding import Moment
from atoll.runtime.sharding.matrices import MatrixUpdate
from atoll.runtime.sharding.optimizer import GroupOptions, OptimizerFactory
from atoll.runtime.sharding.state import load_values
from atoll.runtime.transport import connect, world_rank, world_size


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
    its count; without it the adapter's. See `atoll.runtime.models.Loss`. On a tensor-parallel group the outputs are
    whole.
    balance: how the load of a mixture's experts is balanced, by selection biases or losses of its routers, which are
    part of the loss that a step returns.
    seat: the island's part in a federation, if outer steps have `Apart`: docs/islands.md.
    away: bytes of activations in host memory of each pipeline rank, as `Prediction.away` predicts them, to be checked
    before the first step. If not given, each rank checks its own in the first step.

    torch.distributed must be initialised with the world size of the plan's mesh, unless that is one.
    Raises PlanError on every rank if model and plan do not match.

    program: the instructions of this rank in a step.  federation: of an island that comes and goes.
    checkpoints: folders that a rollback may load, by step: those that this engine has saved and loaded, and those that
    the caller adds on every rank. Rank 0 checks which of them still exist.
    timing: timelines and durations of the last step, and the context in which instructions are timed.
    stream: whole weights, one after the other, for whoever needs them: see `WeightStream`.
    """

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
        bad_steps: BadStepPolicy | str = "stop",
        labels: Labels = "shifted",
        loss: Loss | None = None,
        balance: Balance | None = None,
        away: Sequence[int] = (),
        seat: IslandSeat | None = None,
    ) -> None:
        whole = optimizer.whole if isinstance(optimizer, MatrixUpdate) else None
        self.plan = plan = plan if plan.whole == whole else replace(plan, whole=whole)
        self.model, self.clip, self.labels, self.loss = model, clip, labels, loss
        policy = bad_steps if isinstance(bad_steps, BadStepPolicy) else BadStepPolicy.parse(bad_steps)
        folder = None if weights is None else Path(weights)
        balance = Balance() if balance is None else balance
        self._moment = Moment()
        options = EngineOptions(
            optimizer,
            groups,
            clip,
            seed=seed,
            labels=labels,
            loss=loss,
            weights=folder,
            bad_steps=policy,
            balance=balance,
            moment=self._moment,
            away=away,
            seat=seat,
        )
        self.checkpoints: dict[int, Path] = {}
        self.step_number = 0
        named = getattr(loss, "__qualname__", type(loss).__name__)
        check_alike(model, plan, seed=seed, labels=labels, clip=clip, loss=named, balance=balance)
        self.place = plan.mesh.place(world_rank())
        self.device = _device_of(device)
        share_cores(world_size())
        if self.device.type == "cpu":
            keep_freed_memory()
        self.transport = connect(self.place, self.device, has_islands=plan.has_islands)
        self._agreement = Agreement(self.transport)
        self._lanes: dict[LaneKind, JobLane] = {}
        # Context of the loss of logits that are split over a tensor-parallel group, forward and backward.
        self._split_loss: Callable[[], AbstractContextManager[None]] = (
            loss_parallel if plan.mesh.tensor > 1 else nullcontext
        )
        # Of a post-validated step that was settled between two calls, until the next call returns it.
        self._answered: StepResult | None = None
        self._before_update: Callable[[], None] | None = None
        self._background = Background()
        atexit.register(_close, weakref.ref(self))
        with self._agreement.guard("building the engine"):
            problem: Exception | None = None
            rank: Rank | None = None
            try:
                rank = assemble(
                    model, plan, options, transport=self.transport, device=self.device, agreement=self._agreement
                )
            except Exception as error:
                problem = error
            self._agreement.agree(problem)
            assert rank is not None, "the ranks have agreed that they are assembled"
            self._own(rank, policy)
            if folder is not None and is_complete(folder):
                load_values(folder, self.units, self._buffers.own(), spare=transient_buffers(self.adapter))
                for unit in self.units:
                    unit.sync_parameters(is_exact=True)
                if self.outer is not None:
                    self.outer.adopt()

    def _own(self, rank: Rank, policy: BadStepPolicy) -> None:
        """Lower the programs of a rank that was assembled, and build what the engine owns besides."""
        self.adapter, self.outer, self.units = rank.adapter, rank.outer, rank.sharded.units
        self.notes, self.advice, self.runs = rank.notes, rank.advice, rank.outline.runs
        self._sharded, self._batches, self._optimizer = rank.sharded, rank.batches, rank.optimizer
        self._end, self._executor, self._lanes, self._sequences = rank.end, rank.executor, rank.lanes, rank.sequences
        self.program, self.reads_in_place = lower_programs(rank)
        check_host(rank, self.program)
        self.timing = StepTiming(rank)
        self._buffers, self._parameters = Buffers(self.model, rank), Parameters(rank)
        self.stream = WeightStream(self.model, rank, self._buffers, settle=self._settle)
        self.federation = IslandMembership.of(rank, settle=self._settle, go_on=partial(_go_on, self))
        self.saving = Checkpoints(
            rank, self._buffers, self._parameters, background=self._background, known=self.checkpoints
        )
        self.bad_steps = BadSteps(policy, rank, self.saving, replay=self._play, load=partial(_load, self))

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
        begin = time.monotonic()
        self.saving.check_loaded()
        self.stream.check()
        share = self._batches.claim(batch)
        if following is not None:
            self._batches.announce(following)
        if share.tokens == 0:
            raise RunError(f"step {self.step_number + 1} has no token that counts: every label is {IGNORED_LABEL}")
        before = self._buffers.digests()
        self._play(share, self.step_number, since=begin)
        self.step_number += 1
        self._buffers.check(before)
        # With a post-validated step, this verdict is on the step before.
        refused = self._end.take_refused()
        if refused is None:
            answered, self._answered = self._answered, None
            result = self.bad_steps.count(self._end.take_result()) or answered
        else:
            result = self._answer(refused)
            if refused.result.step < self.step_number:  # a step that follows it has run, and is replayed
                self._play(share, self.step_number - 1, since=begin)
        if self.outer is not None:
            self.outer.count(share.tokens)
            if self.outer.is_due(self.step_number):
                self._settle()
                with self._agreement.guard(f"the outer step after step {self.step_number}"):
                    self.step_number = self.outer.act(self.step_number)
        return result

    def _play(self, share: BatchShare, step: int, *, since: float | None = None, is_rehearsal: bool = False) -> None:
        """Run the program of the step after `step`. is_rehearsal: the step is refused whatever its result is."""
        self._moment.step = step
        look = None
        if self._before_update is not None and not is_rehearsal:
            look = partial(self._parameters.show_gradients, self._before_update)

        since = time.monotonic() if since is None else since
        with (
            self._agreement.guard(f"step {step + 1}", self._executor.doing, pace=self._agreement.steps),
            keeping_random_state(self.device),
            self._split_loss(),
        ):
            for stage in self._sharded.stages:
                stage.train(True)
            self._end.begin(step=step + 1, tokens=share.tokens, since=since, look=look, is_rehearsal=is_rehearsal)
            outcome = self._executor.run(
                share.pieces,
                step=step,
                first_microbatch=self.place.share * self.plan.schedule.whole_microbatches,
                scale=partial(_scale, self._end, self._moment, share.tokens),
                training=True,
            )
        if not is_rehearsal:
            self.timing.outcome = outcome
            self.bad_steps.remember(step + 1, share, outcome)

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
        self._answered = self.bad_steps.count(self._end.take_result()) if refused is None else self._answer(refused)

    def _answer(self, refused: Refused) -> StepResult:
        """Return the result of a bad step. Raises BadStepError on every rank if the run stops."""
        try:
            return self.bad_steps.answer(refused)
        except BadStepError:
            self.step_number = refused.result.step - 1
            raise

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
        taken = self._batches.take_one(batch)
        outcome = self._run_forward([taken], keep_logits=True)
        if not outcome.logits:
            return None
        if self._sequences is None:
            return outcome.logits[0]
        with self._agreement.guard("collecting outputs", pace=self._agreement.evaluations):
            return self._sequences.whole(outcome.logits, self.transport, self._batches.length_of(batch))

    def _run_forward(self, batches: Sequence[Batch], *, keep_logits: bool = False) -> Outcome:
        self.saving.check_loaded()
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
        with self._agreement.guard("writing anchors to the parameter shards"):
            inside.__enter__()
        try:
            yield
        finally:
            with self._agreement.guard("writing parameters back to the shards"):
                inside.__exit__(None, None, None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer of this rank's slices, for learning-rate schedules."""
        return self._optimizer.torch

    def memory(self) -> Footprint:
        """Return the bytes of parameters, gradients and optimizer state that this rank stores now; see `footprint`."""
        anchors, states = [] if self.outer is None else self.outer.tensors(), self._optimizer.state_tensors()
        found, kept = stored_now(self.units, states, anchors, on_host=not self.plan.has_islands), self._executor.kept
        return found if kept is None else replace(found, host=found.host + kept.nbytes)

    def footprint(self, *, states: int | None = None) -> Footprint:
        """Return the predicted bytes of this rank's state between steps; `states` as in
        `atoll.plans.layouts.footprint`. `host` has those of activations: `away`, or as far as a step has met them."""
        found, kept = self.program.shape.footprint(states=states), self._executor.kept
        return found if kept is None else replace(found, host=found.host + kept.expected)

    def working_memory(self) -> WorkingMemory:
        """Return the bytes that this rank needs within a step in addition to stored state and saved activations."""
        return needed_in_a_step(self.program.shape, self.program.peaks)

    def check_replicas(self) -> None:
        """Compare replicas of parameters and optimizer state bit by bit. Every rank must call it.

        If they differ, raises ReplicaError on every rank; it names the ranks that differ from the majority, and the
        blocks.
        """
        self._settle()
        self._parameters.compare_replicas(self.step_number)

    # ---- parameters

    @contextmanager
    def full_parameters(self, names: str | Sequence[str] = "*") -> Iterator[dict[str, torch.Tensor]]:
        """Context with the full parameters by name; in-place edits are written back.

        names: names or patterns of `fnmatch`. A rank gets those of its pipeline stages. Values are the optimizer's, in
        the master's dtype. Every rank of the mesh must enter with the same names, and make the same edits to parameters
        that it shares with other ranks; if edits differ, every rank raises PlanError and nothing changes.
        """
        self._settle()
        with self._parameters.edit(names) as values:
            yield values

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return full parameters and persistent buffers of this rank's pipeline stages; every rank must call it."""
        with self.full_parameters() as values:
            return {**values, **{name: buffer.clone() for name, buffer in self._buffers.own().items()}}

    def shards(self) -> list[StoredShard]:
        """Return what this rank stores of parameters, in the master's dtype, and of persistent buffers, as boxes of
        whole tensors; every rank must call it. Their tensors are views: do not write to them."""
        self._settle()
        return list(self._parameters.shards(self._buffers.own()))

    def full_gradients(self, names: str | Sequence[str] = "*") -> dict[str, torch.Tensor]:
        """Return full gradients by name, summed over all ranks and not clipped; only within `before_update` of `step`.

        Every rank of the mesh must call it with the same names; it gets those of its pipeline stages.
        """
        return self._parameters.gradients(names)

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
        self.saving.check_loaded()
        self._settle()
        self.saving.save(
            Path(folder), self.step_number, state or {}, identity=identity or {}, background=background, told=told
        )

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background, if any. Every rank must call it.

        Raises the error of the save on every rank: CheckpointError or RankError.
        """
        self.saving.finish()

    def load(self, folder: str | Path, *, check: Callable[[Archive], object] | None = None) -> dict[str, Any]:
        """Load a checkpoint of the same model from any layout and world size. Return the caller's `state`.

        check: called with the checkpoint on this rank before anything is changed; its error is raised on every rank.

        The content is compared with its digests. Raises the same error on every rank: DamageError if it differs,
        CheckpointError if the checkpoint is missing or of another model. After a DamageError an older checkpoint can be
        loaded; until one is, the engine refuses every step.
        """
        self.stream.check()
        self._settle()
        self._answered = None
        return _load(self, Path(folder), check=check)

    def close(self) -> None:
        """Wait for a checkpoint in progress, and stop the engine's threads. Call it before the process group is
        destroyed; it is also called when the interpreter exits."""
        with suppress(Exception):  # finish_saving raises the error
            self._background.wait()
        if self.federation is not None:
            self.federation.steps.close()
        self._agreement.close()
        for lane in self._lanes.values():
            lane.close()
        self.transport.close()


def _go_on(engine: Engine, step: int) -> None:
    engine.step_number = max(engine.step_number, step)


def _load(engine: Engine, folder: Path, *, check: Callable[[Archive], object] | None = None) -> dict[str, Any]:
    engine.step_number, caller = engine.saving.load(folder, check=check)
    return caller


def _scale(end: StepEnd, moment: Moment, tokens: int) -> float:
    """Return the factor of a step's loss, once the verdict on the step before is known; encoded gradients have the same
    scale."""
    moment.scale = end.loss_scale
    return moment.scale / tokens


def _close(engine: weakref.ref[Engine]) -> None:
    if (living := engine()) is not None:
        living.close()


def _device_of(given: torch.device | str | None) -> torch.device:
    """Return "cuda", the default if there is one, as this thread's current device: in others it is the first one."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given is None else given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
