"""Two islands on one machine: two ranks each, and a slow link between that is really slow.

It shows what a layout sends over the slow link, predicted before the run and measured in it. Each island is a network
namespace of Linux; the link is a pair of virtual interfaces with a token bucket on both ends. In each island the script
starts torchrun as one would on two machines. The kernel counts what crosses.

    python examples/two_islands.py
    python examples/two_islands.py --megabits 1000

It needs Linux with `unshare`, `nsenter`, `ip` and `tc`, and root or user namespaces; where these are missing it says so
and predicts only. Bytes are predicted without the headers of packets, and seconds with a guess of how fast this machine
computes. On two busy cores it printed

    two islands of 2 ranks, 200 Mbit/s between them, 3.64 million parameters
    GGG  a step, predicted 43.38 MB across, 1.80 s; measured 43.50 MB, 2.74 s
    IGG  a step, predicted 21.84 MB across, 1.00 s; measured 21.91 MB, 1.81 s
    IIG  a step, predicted 14.56 MB across, 0.85 s; measured 14.61 MB, 1.70 s
    NNG  a step, predicted 14.56 MB across, 0.83 s; measured 14.61 MB, 1.13 s
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import atoll
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.explain import travel

INTERFACE, ADDRESSES, PORT = "across", ("10.88.0.1", "10.88.0.2"), 29500
ISLANDS, RANKS = 2, 2  # ranks of an island
LAYOUTS = ("GGG", "IGG", "IIG", "NNG")
MICROBATCHES, SAMPLES, SEQUENCE, VOCABULARY = 2, 2, 32, 256
QUIET = 10_000  # bytes in a tenth of a second that are but heartbeats


@dataclass(frozen=True)
class Sizes:
    """The options: model size, number of steps, and speed of the link."""

    megabits: float
    steps: int
    hidden: int
    layers: int

    @property
    def words(self) -> list[str]:
        """As options of this script."""
        return [f"--{name}={getattr(self, name):g}" for name in ("megabits", "steps", "hidden", "layers")]


# ---- the islands: run in this machine's network, or in that of the first island


def missing() -> str | None:
    """Why this machine cannot make islands; None where it can."""
    lacks = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if lacks:
        return f"{', '.join(lacks)} not found; install util-linux and iproute2"
    result = subprocess.run([*namespace(), *limit(100, "lo").split()], capture_output=True, text=True, check=False)
    return result.stderr.strip() or "no reason given" if result.returncode else None


def namespace() -> list[str]:
    """The prefix that runs a command in a new network namespace, which ends with its last process."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--"]


def limit(megabits: float, device: str) -> str:
    """The command that limits the bits an interface sends per second."""
    return f"tc qdisc add dev {device} root tbf rate {megabits}mbit burst 256kb latency 200ms"


@contextmanager
def islands(megabits: float) -> Iterator[Sequence[list[str]]]:
    """The prefixes that run a command in each island: the first is this process's own, the second that of a child."""
    # The child reads from a pipe, and so ends with this process, however that ends.
    with subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE) as other:
        there = ["nsenter", f"--net=/proc/{other.pid}/ns/net", "--"]
        while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)  # it has not left yet
        call([], f"ip link add {INTERFACE} type veth peer {INTERFACE} netns {other.pid}")
        for enter, address in zip(([], there), ADDRESSES, strict=True):
            call(enter, "ip link set lo up")
            call(enter, f"ip address add {address}/24 dev {INTERFACE}")
            call(enter, f"ip link set {INTERFACE} up")
            call(enter, limit(megabits, INTERFACE))
        yield [], there


def call(enter: Sequence[str], command: str) -> None:
    """Run a command in an island, which must succeed."""
    subprocess.run([*enter, *command.split()], check=True)


def launch(sizes: Sizes) -> int:
    """torchrun in both islands; the first exit code that is not 0."""
    run = f"--nnodes {ISLANDS} --nproc-per-node {RANKS} --master-addr {ADDRESSES[0]} --master-port {PORT}".split()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with islands(sizes.megabits) as enter:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *run]
        agents = [
            subprocess.Popen(
                [*enter[at], *torchrun, "--node-rank", str(at), __file__, "--rank", *sizes.words], env=environment
            )
            for at in range(ISLANDS)
        ]
        return next(filter(None, [agent.wait() for agent in agents]), 0)


# ---- a rank


def train(sizes: Sizes) -> None:
    """One rank of the run: each layout in turn, its seconds and bytes beside what was predicted."""
    import torch
    import torch.distributed as dist

    from atoll.runtime.models import Decoder, DecoderConfig

    dist.init_process_group("gloo")
    dist.barrier()  # connects the ranks
    for layout in LAYOUTS:
        with torch.device("meta"):
            model = Decoder(DecoderConfig(**decoder(sizes)))
        engine = atoll.Engine(model, plan_of(layout), optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        ids = torch.randint(VOCABULARY, (MICROBATCHES * SAMPLES, SEQUENCE + 1))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        engine.step(batch)
        dist.barrier()
        before, start = bytes_sent(), time.monotonic()
        for _ in range(sizes.steps):
            engine.step(batch)
        dist.barrier()
        seconds = (time.monotonic() - start) / sizes.steps
        sent = (bytes_sent() - before) / sizes.steps
        if dist.get_rank() == 0:
            print(f"{predict(sizes, layout)}; measured {sent / 1e6:5.2f} MB, {seconds:.2f} s", flush=True)
        engine.close()
    dist.destroy_process_group()


def bytes_sent() -> int:
    """Bytes sent from this island to the other, headers included, once all updated parameters have arrived."""
    before, now = -QUIET, 0
    while now - before >= QUIET:
        time.sleep(0.1)
        with open("/proc/self/net/dev", encoding="ascii") as lines:
            before, now = now, next(int(words[9]) for words in map(str.split, lines) if words[0] == f"{INTERFACE}:")
    return now


# ---- the model, the plan and its prediction: without torch


def decoder(sizes: Sizes) -> dict[str, int]:
    """Sizes of Atoll's own decoder."""
    heads = {"heads": 4, "kv_heads": 4}
    return {"vocabulary": VOCABULARY, "layers": sizes.layers, "hidden": sizes.hidden, "ffn": 4 * sizes.hidden, **heads}


def plan_of(layout: str) -> atoll.Plan:
    """Two groups of two ranks, without a pipeline."""
    schedule = atoll.schedule("1f1b", ranks=1, microbatches=MICROBATCHES)
    return atoll.Plan(atoll.MeshShape(inter=ISLANDS, intra=RANKS), atoll.Layout(layout), schedule, microbatch=SAMPLES)


def predict(sizes: Sizes, layout: str) -> str:
    """Bytes that cross from one island to the other and seconds, of a step."""
    cluster = Cluster.of(
        {
            "nodes": ISLANDS,
            # Of a CPU core that two ranks share; `atoll doctor --measure` finds your machine's.
            "device": {"memory": 2_000_000_000, "bandwidth": 5e9, "rates": {"float32": 1.5e10}},
            "node": {"devices": RANKS, "link": {"rate": 1e9, "latency": 5e-5, "busy": 1.0}},
            "network": {"rate": sizes.megabits * 1e6 / 8, "latency": 1e-4},
        }
    )
    workload = Transformer.decoder(**decoder(sizes), on_cpu=True).workload
    use = Use(samples=SAMPLES, sequence=SEQUENCE, compute="float32")
    found = Prediction(workload, plan_of(layout), cluster, use, reads_in_place=True)
    across = RANKS * travel(found).inter
    return f"{layout}  a step, predicted {across / 1e6:5.2f} MB across, {found.seconds:.2f} s"


def main() -> None:
    """The command, the same in the network of the first island, or a rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabits", type=float, default=200.0, help="of the link, each way, a second")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a model for a test")
    for name in ("island", "rank"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    hidden, layers = (64, 2) if given.tiny else (given.hidden, given.layers)
    sizes = Sizes(given.megabits, given.steps, hidden, layers)

    if given.rank:
        train(sizes)
    elif given.island:
        sys.exit(launch(sizes))
    else:
        count = Transformer.decoder(**decoder(sizes)).parameters / 1e6
        print(f"two islands of {RANKS} ranks, {sizes.megabits:g} Mbit/s between them, {count:.2f} million parameters")
        sys.stdout.flush()
        why = missing()
        if why is None:
            sys.exit(subprocess.call([*namespace(), sys.executable, __file__, "--island", *sizes.words]))
        print(f"this machine cannot make islands, so nothing is measured: {why}")
        for layout in LAYOUTS:
            print(predict(sizes, layout))


if __name__ == "__main__":
    main()
