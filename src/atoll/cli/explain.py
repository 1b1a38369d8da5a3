"""`atoll explain CONFIG|RUN`: explain the memory, step time and alternatives of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.arguments import CLUSTER, AsJson, Overrides, cluster_of, read_cluster, with_cluster
from atoll.cli.islands import Island, archipelago_of, refuse_island, report_islands

if TYPE_CHECKING:
    from atoll.prediction.explain import Explanation


def explain_command(
    config: Annotated[Path, typer.Argument(help="A TOML file, or the folder of a run.", show_default=False)],
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help=f"{CLUSTER} By default run.cluster, or that of the run.")] = None,
    island: Island = None,
    asks: Annotated[bool, typer.Option("--ask", help="Answer the questions named by KEYS, or list the six.")] = False,
    system: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="SYSTEM", help="Write the plan as settings of torchtitan, deepspeed, megatron or fsdp2."
        ),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of questions, after --ask.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the plan of CONFIG: where the memory and step time of each rank go, the bottleneck, the traffic of each
    layout, and the effect of other choices and clusters. For a RUN, measurements are shown beside the prediction.

    On a cluster file with islands, without --island: what the islands wait for, and what other inner steps and codecs
    would give. Keys of the JSON object then: those of `atoll predict`, and alternatives, with setting, interval, rate
    (tokens a second of all islands), waited (share of the time), sent (bytes a second of all uplinks)
    and late.

    With --ask and keys, answer questions from the numbers of the plan, as in `--ask fullest-rank another-node`.

    Keys of the JSON object: prediction, as `atoll predict` prints it; ranks, one object a pipeline rank with rank,
    during (the instruction at its peak), peak (bytes by component), blocks, state (what it is of, elements, and bytes
    of parameters, gradients and optimizer), in_flight (stage, microbatches, bytes of each) and links (axis, what,
    times, bytes, seconds); resources, with name and saved_seconds if 10 % faster; layouts, alternatives and situations,
    each with choice, value, was, refusal, seconds, tokens_per_second, fits, margin_bytes, peak of the fullest rank and
    difference (seconds, parts, cause, bytes), layouts also with intra_bytes, inter_bytes, busy_seconds and hidden;
    undone, names of the alternatives that undo a choice; measured, null without a run. With --ask: answers, each with
    key, question, sentences and alternatives. With --as: system, version, files (text by name), launch and limits.
    """
    from atoll.prediction.explain import ask, listed, text
    from atoll.prediction.explain import values as plain

    if keys and not asks:
        from atoll.base.errors import ConfigError

        raise ConfigError(f"{' '.join(keys)}: keys of questions follow --ask, as in --ask {keys[0]}")
    if asks and not keys:
        typer.echo("\n".join(listed()))
        return
    if system is not None:
        _settings(system, config, tuple(overrides or ()), cluster, as_json=as_json)
        return
    if island is None and not asks and _explains_all(config, tuple(overrides or ()), cluster, as_json=as_json):
        return
    explanation = _explanation(config, tuple(overrides or ()), cluster, island)
    if asks:
        answers = [ask(explanation, key) for key in keys or ()]
        if as_json:
            _echo_json({"answers": [plain.of_answer(each) for each in answers]})
        else:
            typer.echo("\n\n".join("\n".join(text.answer_lines(each)) for each in answers))
        return
    if as_json:
        _echo_json(plain.values(explanation))
        return
    lines = list(text.describe_explanation(explanation))  # print nothing if the config is refused
    typer.echo("\n".join(lines))


def _settings(system: str, path: Path, overrides: tuple[str, ...], cluster: Path | None, *, as_json: bool) -> None:
    """Print the plan of a config, or of a run's, as another system's settings. A cluster is not needed."""
    from dataclasses import asdict

    from atoll.training.run.measurements import read_run
    from atoll.training.settings import settings_for
    from atoll.training.setup.choosing import load_chosen
    from atoll.training.setup.prediction import predict

    if path.is_dir():
        measured = read_run(path).measured
        loaded, world, named = measured.config, measured.world, cluster or measured.cluster
    else:
        (loaded, _), world = load_chosen(path, with_cluster(overrides, cluster)), None
        named = None if loaded.run.cluster is None else Path(loaded.run.cluster)
    prediction = predict(loaded, named, world=world)
    found = settings_for(system, loaded, prediction)
    if as_json:
        _echo_json(asdict(found))
        return
    lines = [f"{found.system}: settings following the documentation of {found.version}"]
    for name, text in found.files.items():
        lines += ["", f"==> {name} <==", text.rstrip()]
    lines += ["", "start it with", *(f"  {line}" for line in found.launch)]
    if found.limits:
        lines += ["", "not expressed:", *(f"  - {limit}" for limit in found.limits)]
    typer.echo("\n".join(lines))


def _echo_json(found: object) -> None:
    import json

    typer.echo(json.dumps(found))


def _explains_all(path: Path, overrides: tuple[str, ...], cluster: Path | None, *, as_json: bool) -> bool:
    """Explain all islands of a config, if its cluster describes several, and return whether it does."""
    from atoll.training.config import load
    from atoll.training.setup.islands import predict_islands

    if path.is_dir():
        return False
    loaded = load(path, with_cluster(overrides, cluster))
    every = archipelago_of(loaded)
    if every is not None:
        report_islands(predict_islands(loaded, every), as_json=as_json, explains=True)
    return every is not None


def _explanation(path: Path, overrides: tuple[str, ...], cluster: Path | None, island: str | None) -> Explanation:
    from atoll.prediction.explain import Explanation
    from atoll.training.config import load
    from atoll.training.setup.choosing import load_chosen
    from atoll.training.setup.islands import predict_island
    from atoll.training.setup.prediction import predict

    if path.is_dir():
        refuse_island(island)
        return _of_run(path, overrides, cluster)
    sets = with_cluster(overrides, cluster)
    loaded = load(path, sets)
    every = None if island is None else archipelago_of(loaded)
    if every is not None and island is not None:
        return Explanation(predict_island(loaded, every, island))
    refuse_island(island)
    loaded, _ = load_chosen(path, sets, config=loaded)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    return Explanation(predict(loaded, cluster_of(loaded)))


def _of_run(path: Path, overrides: tuple[str, ...], cluster: Path | None) -> Explanation:
    from atoll.base.errors import ConfigError
    from atoll.prediction.cost.comparison import by_part, compare
    from atoll.prediction.explain import Explanation, Measured
    from atoll.training.run.measurements import read_run

    if overrides:
        raise ConfigError("--set changes a config, and a run is over; explain its config.toml with --set instead")
    run = read_run(path)
    prediction = run.measured.predict(read_cluster(cluster or run.measured.cluster))
    differences = compare(prediction, run.timed) if run.timed else ()
    parts = tuple(by_part(differences, rank) for rank in range(len(run.timed)))
    return Explanation(prediction, Measured(run.measured.seconds, parts, run.peaks, run.memory))
