"""What the steps of a run gave: shared between ranks, and written down on rank 0.

[Note: who decides] Information that only some ranks have (a signal, the newest checkpoint) is summed over the ranks
once per step before they act on it, so that no rank leaves the others waiting.

[Note: steps of islands] With outer steps, islands exchange losses and signals only after steps where they wait for each
other anyway: those after which a fragment is applied, and those with an evaluation, a save or a comparison. A sum over
the world in each step would stall islands behind the outer gradients, which use the same connections. Steps in between
are recorded when islands wait, as means over the islands, and a signal is heard then.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from atoll.base.errors import UserError
from atoll.plans.layouts import Footprint
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.sharding.outer import distance
from atoll.runtime.transport import Later
from atoll.training.output.record import Recorder
from atoll.training.run.measure import peak_memory, share_timeline, share_timing, share_trace
from atoll.training.run.oddities import SLOW, Spikes, expert_load, straggler
from atoll.training.run.run import RankRun
from atoll.training.run.signals import StopRequest
from atoll.training.run.utilisation import device_peak, utilised_seconds
from atoll.training.setup.prediction import in_short, named_cluster, predict_plan
from atoll.training.setup.samples import vocabulary_of

TRACED_STEP = 3
"""Step of a start whose actions are traced; the first ones are slower."""


class Results:
    """The results of a run's steps.

    A step's result is known after it was submitted (with post-validated steps, one step later): `expect` is called in
    the order of the steps, and `record` with each result.

    recorder: on rank 0, once it was opened.  tokens: of this start.
    on_fault: called with a bad step, once it is written down.
    """

    def __init__(self, run: RankRun, *, on_fault: Callable[[StepResult], None]) -> None:
        self.recorder: Recorder | None = None
        self.tokens = 0
        self.traced = 0
        self._run = run
        self._engine = run.engine
        self._on_fault = on_fault
        self._utilised: float | None = None
        self._expected: deque[tuple[float, Later | None]] = deque()
        """Of each step whose result is not known: its rate, and the sum of what its ranks know."""
        self._apart: list[tuple[float, StepResult]] = []
        """Results of this island since islands met last, with their rates."""
        self._memory = torch.zeros(run.engine.plan.mesh.world)
        self._load: dict[str, float] = {}
        self._last: StepResult | None = None
        self._spikes = {"loss": Spikes(1.2), "grad_norm": Spikes(3.0)}

    def open(self, first: int, *, run_id: str | None, is_fresh: bool) -> None:
        """Open the record of the run at step `first`, and predict the run."""
        run, engine = self._run, self._engine
        plan = engine.plan
        own = engine.footprint()
        values = torch.zeros(plan.mesh.world, 4, dtype=torch.float64)
        values[engine.place.rank] = torch.tensor([own.parameters, own.gradients, own.optimizer, own.host])
        held = [Footprint(*(int(part) for part in row)) for row in engine.transport.total(values).tolist()]
        self.traced = min(first + TRACED_STEP, run.config.train.steps)
        if not run.is_writer:
            return
        assert run_id is not None, "rank 0 knows the run"
        run.check_lock()
        recorder = Recorder(run.folder, run.config, run.corpus.tokenizer, run=run_id, step=first, is_fresh=is_fresh)
        self.recorder = recorder
        run.folder.write_run_id(run_id)
        blocks = engine.adapter.blocks()
        stages = [[blocks[at].name for at in stage] for stage in engine.runs]
        device = engine.device
        facts: dict[str, Any] = {
            "vocabulary": vocabulary_of(run.config, run.corpus),
            "reads_in_place": engine.reads_in_place,
            "device": device.type,
        }
        cluster = named_cluster(run.config)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        peak = device_peak(name, plan.precision.compute, cluster, plan.mesh.world)
        rates = None if peak is None else asdict(peak)
        notes = [*run.progress.samples.notes]
        recorder.plan(plan, held, stages, **facts, peak=rates, first_step=first + 1, corpus=notes)
        try:
            found = predict_plan(run.config, plan, cluster or run.here, **facts)
            recorder.prediction(found)
            run.display.say(f"predicted: {in_short(found)}")
            self._utilised = None if peak is None else utilised_seconds(found, peak)
        except UserError as error:
            if cluster is not None:
                run.display.say(f"note: the run is not predicted: {error}")

    # ---- between steps

    def expect(self, rate: float) -> None:
        """Start to share what ranks know after a step that was submitted with this rate."""
        later = self._engine.transport.total_later(self._known()) if not self._engine.plan.has_islands else None
        self._expected.append((rate, later))

    def _known(self) -> torch.Tensor:
        """Return what only this rank knows."""
        received = self._run.stop.received
        signals = torch.tensor([received is number for number in StopRequest.numbers], dtype=torch.float64)
        memory = torch.zeros(self._engine.plan.mesh.world, dtype=torch.float64)
        memory[self._engine.place.rank] = peak_memory(self._engine.device)
        busy = torch.zeros_like(memory)
        busy[self._engine.place.rank] = self._engine.timing.busy_seconds
        experts = self._engine.timing.experts
        load = torch.zeros(0 if experts is None else 2, len(memory), dtype=torch.float64)
        if experts is not None:
            load[:, self._engine.place.rank] = torch.tensor([experts.rows, experts.seconds], dtype=torch.float64)
        return torch.cat([signals, memory, busy, load.view(-1)])

    def record(self, result: StepResult | None) -> signal.Signals | None:
        """Record a step whose result is known. Return the signal that a rank had received by then, or None."""
        if result is None:
            return None
        rate, later = self._expected.popleft()
        if later is None:
            self._apart.append((rate, result))
            return self.record_apart() if self._meets(result.step) else None
        asked, busy = self._heard(later.wait())
        self._write(result, rate, busy)
        return asked

    def forget(self) -> None:
        """Drop what is expected of steps that a rollback took back."""
        while self._expected:
            later = self._expected.popleft()[1]
            if later is not None:
                later.wait()

    def _heard(self, totals: torch.Tensor) -> tuple[signal.Signals | None, list[float]]:
        """The signal, and the seconds that each rank computed, from the sums of `expect`. Keeps memory and the load of
        experts for the record."""
        count = len(StopRequest.numbers)
        asked = [number for number, ranks in zip(StopRequest.numbers, totals[:count], strict=True) if ranks]
        self._memory, busy, *load = totals[count:].view(-1, len(self._memory))
        if load:
            rows, seconds = (each.tolist() for each in load)
            self._load = expert_load(rows, seconds, self._engine.plan.mesh)
        return (asked[0] if asked else None), busy.tolist()

    def _write(self, result: StepResult, rate: float, busy: Sequence[float], distance: float | None = None) -> None:
        """Write down a step. distance: of islands from the anchors, where it is known."""
        self._last = result
        memory = int(self._memory.max())
        self.tokens += result.tokens
        self._run.check_lock()
        epoch = self._run.progress.samples.epoch(self._run.progress.position_after(result.step))
        self._run.display.step(result, memory_bytes=memory, epoch=epoch)
        if self.recorder is not None:
            load = self._load if any(busy) else {}
            odd = (
                self._odd(result, busy)
                | load
                | self._imbalance(result.step)
                | ({} if distance is None else {"island_distance": distance})
            )
            self.recorder.step(result, rate=rate, epoch=epoch, memory_bytes=memory, odd=odd, utilised=self._utilised)
        if result.fault is not None:
            self._on_fault(result)

    def _imbalance(self, step: int) -> dict[str, float]:
        """Return the metrics of rows of documents."""
        found = self._run.progress.samples.imbalance(self._run.progress.positions[step])
        return {} if found is None else {"attention_imbalance": found.ranks, "microbatch_imbalance": found.microbatches}

    # ---- islands

    @property
    def is_apart(self) -> bool:
        """True while this island has results that the others do not know."""
        return bool(self._apart)

    def oldest(self, step: int) -> int:
        """Return the oldest step before `step` whose result is not written yet, or `step`."""
        return self._apart[0][1].step if self._apart else step

    def _meets(self, step: int) -> bool:
        """Return True if islands wait for each other after `step`: see [Note: steps of islands]."""
        train, saves, outer = self._run.config.train, self._run.config.checkpoint, self._engine.outer
        dues = (train.eval_every, saves.every, saves.memory, train.check_replicas)
        is_due = any(every and step % every == 0 for every in dues)
        return is_due or step in (self.traced, train.steps) or (outer is not None and outer.meets(step))

    def record_apart(self) -> signal.Signals | None:
        """Write down the steps since islands met last, as means over the islands; the signal that a rank has got."""
        outer, transport = self._engine.outer, self._engine.transport
        assert outer is not None, "only islands meet"
        pending, self._apart = self._apart, []
        own = torch.zeros(len(pending), 5, dtype=torch.float64)
        if transport.speaks and self._engine.place.pp == 0:
            for row, (_, each) in zip(own, pending, strict=True):
                parts = [each.loss * each.tokens, each.grad_norm, each.bubble, float(each.skipped), float(each.tokens)]
                row.copy_(torch.tensor(parts, dtype=torch.float64))
        known = self._known()
        totals = transport.total(torch.cat([own.reshape(-1), outer.take_moved(), known]))
        rows = totals[: own.numel()].reshape(own.shape).tolist()
        asked, busy = self._heard(totals[own.numel() + 2 :])
        apart = distance(totals[own.numel() :][:2].tolist())
        islands = self._engine.plan.islands
        for (rate, result), (loss, norm, bubble, skipped, tokens) in zip(pending, rows, strict=True):
            if skipped and not result.skipped:
                self._run.display.say(f"note: step {result.step}: {skipped:.0f} of {islands} islands skipped it")
            is_last = result is pending[-1][1]
            mean = replace(
                result,
                loss=loss / tokens,
                grad_norm=norm / islands,
                bubble=bubble / islands,
                skipped=bool(skipped),
                tokens=round(tokens),
            )
            none = [0.0] * len(busy)
            self._write(mean, rate, busy if is_last else none, distance=apart if is_last else None)
        return asked

    def _odd(self, result: StepResult, busy: Sequence[float]) -> dict[str, float]:
        """Return spikes, and the rank that its peers wait for."""
        found: dict[str, float] = {}
        if not result.skipped:
            for name, spikes in self._spikes.items():
                ratio = spikes.ratio(getattr(result, name))
                if ratio is not None:
                    found[f"{name}_spike"] = ratio
                    self._run.display.say(
                        f"note: step {result.step}: {name} {getattr(result, name):.4g} is {ratio:.1f} times the usual"
                    )
        rank, ratio = straggler(busy, self._engine.plan.mesh)
        return found | ({"straggler": rank, "straggler_ratio": ratio} if ratio > SLOW else {})

    # ---- end

    def trace(self) -> None:
        """Record the trace of the last step."""
        trace = share_trace(self._engine)
        if self.recorder is not None and trace is not None:
            self.recorder.trace(trace)

    def timing(self) -> None:
        """Record the seconds of the instructions of the last step."""
        timed, timeline = share_timing(self._engine), share_timeline(self._engine)
        if self.recorder is not None and timed is not None and self._last is not None:
            memory = "resident" if self._engine.device.type == "cpu" else "allocated"
            self.recorder.timing(self._last, timed, peaks=self.peaks(), memory=memory)
            self.recorder.timeline(self._last, timeline or ())

    def peaks(self) -> tuple[int, ...]:
        """Return the peak memory of each pipeline rank: the maximum over its ranks."""
        mesh = self._engine.plan.mesh
        stages = [mesh.place(rank).pp for rank in range(mesh.world)]
        own = list(zip(stages, map(int, self._memory.tolist()), strict=True))
        return tuple(max(each for at, each in own if at == stage) for stage in range(mesh.pipeline))
