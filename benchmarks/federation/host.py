"""The launcher of one host of one world: `host.py CONFIG SECONDS STEPS RANK WORLD ADDRESS PORT key=value ...`.

It has imported torch and Atoll, forks the host's rank, and forks it again as soon as it has ended without being
finished: a world whose surviving hosts start again at once, without imports. A rank is killed in which the world has
taken no step for `HANG_SECONDS`: gloo may not tell a rank that another one has ended with which it has no connection.
Steps sleep as those of islands do. Rank 0 appends time, number and process of each step to the file STEPS.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch

import atoll.training.run.session  # noqa: F401
from atoll.base._torch import import_ahead
from atoll.training.process import Request, train
from benchmarks.federation.sleeping import emulate

AGAIN_SECONDS = 2.0
"""From the end of a rank to the next one: rank 0, with the store, stays for 1.5 s after a failure, so that all hear of
it. A host that was lost needs longer to start."""
HANG_SECONDS = 60.0
"""Without a step of the world, after which its ranks hang: a link of `SLOW_BITS` needs a fourth of it."""


def main() -> int:
    """Start the rank until it has finished, or until this host is told to leave. Return the rank's last exit code."""
    is_leaving = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal is_leaving
        is_leaving = True  # the rank has got the signal too

    signal.signal(signal.SIGTERM, leave)
    import_ahead()
    while True:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(torch.get_num_threads())  # a fork replaces torch's pool while it has one thread
            sys.exit(_train())
        code = _end_of(pid, Path(sys.argv[3]))
        if code == 0 or is_leaving:
            return code
        time.sleep(AGAIN_SECONDS)


def _end_of(pid: int, steps: Path) -> int:
    """Wait for a rank to end, and return its exit code. A rank that hangs is killed."""
    begin = time.time()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        moved = max(begin, steps.stat().st_mtime if steps.exists() else 0.0)
        if time.time() - moved > HANG_SECONDS:
            print(f"no step for {HANG_SECONDS:g} s: rank {sys.argv[4]} is killed", flush=True)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _train() -> int:
    _, config, _, steps, rank, world, address, port, *sets = sys.argv
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port}

    emulate(float(sys.argv[2]), Path(steps) if rank == "0" else None)
    return train(Request(Path(config), tuple(sets)))


if __name__ == "__main__":
    sys.exit(main())
