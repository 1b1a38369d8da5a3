"""Arguments shared by several commands, and the loading of a cluster file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.base.toml import value_to_toml

if TYPE_CHECKING:
    from atoll.prediction.cost import Cluster
    from atoll.training.config import Config

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)]

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, as in --set train.microbatch=2."),
]

CLUSTER = "A TOML file that describes devices and links."

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

EXAMPLE = """
    [device]
    preset = "h100-80gb"
    [node]
    devices = 8
    cards = 8
    link = { preset = "nvlink4" }
    [network]
    preset = "infiniband-ndr"
"""


def with_cluster(overrides: Sequence[str] | None, cluster: Path | None) -> list[str]:
    """Return the overrides with --cluster appended, which replaces run.cluster."""
    named = [] if cluster is None else [f"run.cluster={value_to_toml(str(cluster))}"]
    return [*(overrides or ()), *named]


def cluster_of(config: Config) -> Cluster:
    """Return run.cluster, or this machine as `atoll train` measured it for as many ranks; that is said on stderr.
    Raises ConfigError if there is neither."""
    from atoll.training.setup.here import measured_cluster
    from atoll.training.setup.prediction import named_cluster

    here = measured_cluster(config, config.parallel.ranks)
    if here is not None:
        typer.echo(f"note: no cluster is named; taken is this machine: {here.device.source}", err=True)
        return here
    return named_cluster(config) or read_cluster(None)


def read_cluster(path: str | Path | None) -> Cluster:
    """Return the cluster of a file. Raises ConfigError if no file is given, and names the keys to write into one."""
    from atoll.base.errors import ConfigError
    from atoll.prediction.cost import Cluster, presets

    if path is not None:
        return Cluster.read(path)
    known = presets()
    raise ConfigError(
        "seconds need a cluster: name its file with --cluster, or as run.cluster, such as cluster.toml with\n"
        f"{EXAMPLE}\ndevices: {', '.join(known['devices'])}\nlinks: {', '.join(known['links'])}"
    )
