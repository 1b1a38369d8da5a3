"""What a checkpoint says of the run that saved it, and whether another run can continue from it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.base.errors import CheckpointError, ConfigError, DamageError
from atoll.runtime import checkpoint
from atoll.runtime.sharding.state import stored_states
from atoll.training.config import Config
from atoll.training.data import Supply
from atoll.training.data.mixing import shares
from atoll.training.run.best import Best
from atoll.training.setup import samples
from atoll.training.setup.optimizers import named_optimizer


def order_of(config: Config) -> dict[str, int]:
    """Return the values that determine the order of samples, apart from the corpus."""
    data = config.data
    how: dict[str, int] = {} if data.how == "blocks" else {data.how: 1, data.rule: 1}
    if data.streaming:
        how |= {"shard": samples.SHARD}
    if data.shares is not None:
        how |= {f"share {number}": count for number, count in enumerate(shares(data.shares))}
    return {"seed": config.train.seed, "sequence": data.sequence, **how}


LARGEST_BATCH = 1 << 24
"""Larger than any global batch: a position beyond that many samples per step is invalid."""


def resumed_state(
    config: Config, opened: checkpoint.Archive, corpus: Supply | None, *, run: str | None = None
) -> dict[str, Any]:
    """Return the state of a checkpoint's run. corpus, run: None if unknown.

    Raises ConfigError for a checkpoint beyond the last step, CheckpointError for one of another corpus or program, and
    DamageError if its state contradicts its folder's name, its manifest or itself.
    """
    path = opened.folder
    step = int(path.name.rpartition("-")[2])
    if step > config.train.steps:
        raise ConfigError(
            f"the newest checkpoint of {config.run.folder} is of step {step}, beyond train.steps = "
            f"{config.train.steps}; set train.steps (or epochs) to more"
        )
    given = opened.state.get("caller")
    state: dict[str, Any] = given if isinstance(given, dict) else {}
    missing = [key for key in ("position", "corpus", "schedule", "order") if key not in state]
    if missing:
        raise CheckpointError(f"{path} was not written by atoll train: its state has no {', '.join(missing)}")
    whose = {} if opened.manifest is None else opened.manifest.identity
    problems = list(_contradictions(state, step=opened.state.get("step", -1), of_folder=step))
    if run is not None and whose.get("run", run) != run:
        problems.append(f"it is of the run {whose['run']}, and the folder of {run}")
    if whose.get("corpus", state["corpus"]) != state["corpus"]:
        problems.append("the manifest names another corpus")
    if problems:
        raise DamageError(f"{path} is not a checkpoint of this run: {'; '.join(problems)}")
    _check_states(config, opened)
    if corpus is not None and state["corpus"] != corpus.fingerprint:
        raise CheckpointError(
            f"{path} was trained on another corpus or tokenizer than data.source = {config.data.source!r} "
            f"with data.tokenizer = {config.data.tokenizer!r} and data.bad_records = {config.data.bad_records!r}; give "
            "the ones it was trained with, or start a new run in another run.folder"
        )
    return state


def _check_states(config: Config, opened: checkpoint.Archive) -> None:
    """Raise CheckpointError if the checkpoint has the state of another optimizer than the config's."""
    named = named_optimizer(config.train)
    wanted = named.keys
    for name, kept in stored_states(opened).items():
        if kept.keys() != wanted and (named.whole is None or kept.keys() != named.whole_keys):
            raise CheckpointError(
                f"{opened.folder} has {', '.join(sorted(kept))} of {name}, and {config.train.optimizer} with this "
                f"config's options keeps {', '.join(sorted(wanted)) or 'nothing'}; use the optimizer that it was "
                "trained with, or begin a new run with model.weights = this checkpoint"
            )


def _contradictions(state: Mapping[str, Any], *, step: Any, of_folder: int) -> Iterator[str]:
    """Return contradictions in the state of a run after `step` steps. of_folder: the step in its folder's name."""
    if type(step) is not int or step != of_folder:
        yield f"its state is of step {reprlib.repr(step)}, its folder of {of_folder}"
        return
    position = state["position"]
    # An island counts from when it became a member.
    least = 0 if "island" in state else step
    if type(position) is not int or not least <= position <= step * LARGEST_BATCH:
        yield f"position {reprlib.repr(position)} after {step} steps, each of 1 to {LARGEST_BATCH} samples"
    schedule = state["schedule"]
    done = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    if type(done) is not int or done != step:
        yield f"its learning rates are those after {reprlib.repr(done)} steps"
    try:
        Best.restored(state.get("best"))
    except ValueError as error:
        yield str(error)
    order = state["order"]
    if not (isinstance(order, dict) and all(type(value) is int and value >= 0 for value in order.values())):
        yield f"order is {reprlib.repr(order)}"
