"""Plan a run on 512 GPUs, on a laptop: no GPU, no weights, no torch.

It shows a cluster described by data sheets, the fastest plan that the planner finds for a Llama of 70 billion
parameters in a space of choices that is kept small, what else it looked at, what a slower link would do, and the
sections of a config that keep the plan.

    python examples/plan_512.py
    python examples/plan_512.py --network ethernet-25

It takes about ten seconds, and prints

    512 GPUs, 64 nodes of 8, roce-400 between them
    mesh inter 64 x intra 4 x tp 2, layout IGG, schedule 1f1b, microbatch 1 x 4, recompute none
    7.23 s a step, 580k tokens/s, MFU 50.9%; highest peak 67.2 GiB of 79.2 GiB
    the same plan with a network half as fast: 9.52 s a step
    instead:
       +5.4%  mesh inter 256 x tp 2, layout GGG, schedule 1f1b, microbatch 1 x 4, recompute none
    ...
    [parallel]
    ranks = 512
    ...
"""

from __future__ import annotations

import argparse

import atoll
from atoll.base.toml import value_to_toml
from atoll.base.units import format_bytes, format_seconds
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import Candidate, Goal, Order, Space, choices, settings


def cluster_of(nodes: int, network: str) -> Cluster:
    """Nodes of eight H100s, each GPU with a network card of its own."""
    return Cluster.of(
        {
            "nodes": nodes,
            "device": {"preset": "h100-80gb", "context": 1_500_000_000},
            "node": {"devices": 8, "cards": 8, "link": {"preset": "nvlink4", "reach": 0.8}},
            "network": {"preset": network, "reach": 0.8},
        }
    )


SPACE = Space(  # without it everything is tried, which takes minutes
    schedules=(Order("1f1b"), Order("interleaved", 2), Order("zb-v")),
    tensor=(1, 2, 4, 8),
    microbatch=(1, 2),
    precision=("bf16",),
    residency=("action",),
    unit=(1,),
    prefetch=(None,),
    post_validation=(False,),
    vocabulary_parallel=(False,),
)


def describe(plan: Candidate) -> str:
    """The main choices of a plan."""
    names = ("mesh", "layout", "schedule", "microbatch", "recompute")
    return ", ".join(f"{name} {choices(plan)[name]}" for name in names)


def sections(plan: Candidate) -> str:
    """A plan as sections of a config for `atoll train`."""
    return "\n\n".join(
        "\n".join([f"[{section}]", *(f"{key} = {value_to_toml(value)}" for key, value in keys.items())])
        for section, keys in settings(plan).items()
    )


def main() -> None:
    """Ask the planner."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", default="roce-400", help="a preset: see docs/clusters.md")
    parser.add_argument("--tiny", action="store_true", help="a question for a test")
    options = parser.parse_args()

    nodes, layers, samples = (2, 8, 32) if options.tiny else (64, 80, 1024)
    cluster = cluster_of(nodes, options.network)
    model = Transformer.llama(layers=layers, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000)
    answer = atoll.plan(model, cluster, Goal(global_batch=samples, sequence=4096), SPACE)
    best, found = answer.best, answer.prediction

    print(f"{8 * nodes} GPUs, {nodes} nodes of 8, {options.network} between them")
    print(describe(best))
    peak = max(found.peak(rank).total for rank in range(found.plan.mesh.pipeline))
    print(
        f"{format_seconds(found.seconds)} a step, {found.tokens_a_second / 1e3:.0f}k tokens/s, MFU {found.mfu:.1%}; "
        f"highest peak {format_bytes(peak)} of {format_bytes(cluster.device.memory)}"
    )
    assert cluster.network is not None
    slower = found.on(cluster.model_copy(update={"network": cluster.network.times(0.5)}))
    print(f"the same plan with a network half as fast: {format_seconds(slower.seconds)} a step")
    print("instead:")
    for other in answer.runners_up:
        print(f"  {other.seconds / best.seconds - 1:+6.1%}  {describe(other)}")
    print(sections(best))


if __name__ == "__main__":
    main()
