"""Checks of a training run in one process, which starts no ranks and writes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.base.errors import CheckpointError, DamageError
from atoll.plans.plan import Plan
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.checkpoint import Archive, is_complete
from atoll.runtime.models import adapter_for
from atoll.runtime.models.weights import weights_for
from atoll.training.config import Config
from atoll.training.data import Supply
from atoll.training.models.pretrained import first_weights, notes_of_source
from atoll.training.output.folder import RunFolder, Start
from atoll.training.process import Request, check_config
from atoll.training.run.resumed import resumed_state
from atoll.training.setup.build import build_as_stored
from atoll.training.setup.choosing import load_chosen
from atoll.training.setup.here import has_gpus
from atoll.training.setup.prediction import expected_vocabulary
from atoll.training.setup.rates import learning_rates
from atoll.training.setup.samples import preview_corpus, vocabulary_of


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that passed all checks.

    vocabulary: number of ids of its model.  device: device of its ranks, "cpu" or "cuda"; None on another machine.
    """

    config: Config
    plan: Plan
    vocabulary: int
    device: str | None


def check_run(request: Request, *, elsewhere: bool = False, say: Callable[[str], None]) -> Checked:
    """Check a run as its ranks would.

    In this order: config, plan, folder, corpus, devices, the model of each pipeline rank on `meta`, the files of its
    weights, the checkpoint to continue from.

    elsewhere: the run is for another machine, so the devices of this one are not checked.
    say: callback for checks that could not be made.

    Raises the errors of the run.
    """
    config, _ = load_chosen(request.path, request.overrides)
    plan = check_config(config)
    folder = RunFolder(Path(config.run.folder))
    start = request.effective_start
    folder.check(start, makes=False)
    corpus = preview_corpus(config)
    if corpus is None:
        say("note: the corpus is not prepared yet; its length, and the tokenizer's, are checked when it is")
    else:
        config = config.with_steps_of(corpus.samples)
        learning_rates(config.train)
    vocabulary = expected_vocabulary(config) if corpus is None else vocabulary_of(config, corpus)
    device = None if elsewhere else "cuda" if has_gpus(config, config.parallel.ranks) else "cpu"
    model, untied = build_as_stored(config, vocabulary)
    for rank in range(plan.mesh.pipeline):
        describe_rank(lambda: copy.deepcopy(model), plan, rank, reads_in_place=device == "cpu")
    for note in notes_of_source(config):
        say(f"note: {note}")
    weights = first_weights(config)
    read = () if weights is None or is_complete(weights) else weights_for(adapter_for(model), weights).notes
    for note in (*untied, *read):
        say(f"note: {note}")
    if start in (Start.AUTO, Start.CONTINUE):
        _check_continued(config, folder, corpus, say)
    return Checked(config, plan, vocabulary, device)


def _check_continued(config: Config, folder: RunFolder, corpus: Supply | None, say: Callable[[str], None]) -> None:
    """Check the checkpoint that the run would continue from, apart from its tensors. Raises the errors of the run."""
    damaged = []
    for path in folder.candidates():
        try:
            resumed_state(config, Archive(path), corpus, run=folder.run_id())
        except DamageError as error:
            say(f"note: {error}")
            damaged.append(path)
        else:
            return
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder.checkpoints} is whole")
