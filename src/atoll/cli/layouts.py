"""`atoll show layouts`: memory per rank and traffic per link of the 27 layouts, for a given size."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.base.units import parse_count


def command(
    parameters: Annotated[float, typer.Option(help="Parameters of the model, as in 7e9 or 7b.", parser=parse_count)],
    trainable: Annotated[
        float | None, typer.Option(help="Trainable parameters; by default all.", parser=parse_count)
    ] = None,
    intra: Annotated[int, typer.Option(help="Ranks of a group, with fast links.")] = 8,
    inter: Annotated[int, typer.Option(help="Groups, with slow links between them.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches for each rank and step.")] = 1,
    gradient_bytes: Annotated[float, typer.Option(help="Bytes of a stored gradient: 2, or 4 for fp32.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Print the memory and traffic of each of the 27 layouts, by the published accounting.

    2 bytes for a parameter, 12 for its optimizer state, 2 for every element sent. Residency `action`, gradients reduced
    for each microbatch, collectives on two levels.
    """
    rows = table(
        parameters=parameters,
        trainable=parameters if trainable is None else trainable,
        inter=inter,
        intra=intra,
        microbatches=microbatches,
        gradient_bytes=gradient_bytes,
    )
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2))
        return
    _print(rows, title=f"{intra} ranks a group, {inter} groups, {microbatches} microbatches a rank and step")


def table(
    *,
    parameters: float,
    trainable: float,
    inter: int,
    intra: int,
    microbatches: int,
    gradient_bytes: float = 2,
) -> list[dict[str, Any]]:
    """Return one object per layout, with the documented keys of `atoll show layouts --json`."""
    from atoll.plans.layouts import ALL_LAYOUTS, published_memory, traffic

    travel_bytes = 2
    rows: list[dict[str, Any]] = []
    for layout in ALL_LAYOUTS:
        memory = published_memory(
            layout,
            parameters=parameters,
            trainable=trainable,
            inter=inter,
            intra=intra,
            gradient_bytes=gradient_bytes,
        )
        sent = traffic(
            layout,
            parameters_bytes=travel_bytes * parameters,
            trainable_bytes=travel_bytes * trainable,
            inter=inter,
            intra=intra,
            microbatches=microbatches,
        )
        better = layout.dominated_by
        rows.append(
            {
                "layout": layout.name,
                "effective": layout.effective,
                "aliases": list(layout.aliases),
                "bytes_per_rank": {
                    "parameters": _number(memory.parameters),
                    "gradients": _number(memory.gradients),
                    "optimizer": _number(memory.optimizer),
                    "total": _number(memory.total),
                    "held": _number(memory.held),
                },
                "traffic": {"intra_bytes": _number(sent.intra_bytes), "inter_bytes": _number(sent.inter_bytes)},
                "dominated_by": None if better is None else better.name,
            }
        )
    return rows


def _number(value: float) -> int | float:
    """Return whole bytes as an integer."""
    return int(value) if value == int(value) else value


def _print(rows: list[dict[str, Any]], *, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from atoll.base.units import format_bytes

    grid = Table(
        title=title, box=box.SIMPLE_HEAD, caption="per rank; kB, MB, GB are powers of 1000", title_justify="left"
    )
    grid.add_column("layout", no_wrap=True)
    for heading in ("p", "g", "os", "total", "held", "sent intra", "sent inter"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("known as / dominated by", no_wrap=True)
    for row in rows:
        amounts = [*row["bytes_per_rank"].values(), *row["traffic"].values()]
        remark = ", ".join(row["aliases"]) if row["effective"] else f"dominated by {row['dominated_by']}"
        cells = [format_bytes(amount, decimal=True) for amount in amounts]
        grid.add_row(row["layout"], *cells, remark, style="" if row["effective"] else "dim")
    console = Console()
    console.width = max(console.width, 120)
    console.print(grid)
