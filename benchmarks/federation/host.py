"""The launcher of one host of one world: `host.py CONFIG SECONDS STEPS RANK WORLD ADDRESS PORT key=value ...`.

It has imported torch and Atoll, forks the host's rank, and forks it again as soon as it has ended without being
finished: a world whose surviving hosts start again at once, without imports. Steps sleep as those of islands do. Rank 0
appends time, number and process of each step to the file STEPS.
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
from atoll.runtime.engine import Engine
from atoll.training.process import Request, train
from benchmarks.federation.island import noted, submit

AGAIN_SECONDS = 2.0
"""From the end of a rank to the next one: rank 0, with the store, stays for 1.5 s after a failure, so that all hear of
it. A host that was lost needs longer to start."""


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
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0 or is_leaving:
            return code
        time.sleep(AGAIN_SECONDS)


def _train() -> int:
    _, config, _, steps, rank, world, address, port, *sets = sys.argv
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port}

    Engine.submit = noted(Path(steps)) if rank == "0" else submit  # type: ignore[method-assign]
    return train(Request(Path(config), tuple(sets)))


if __name__ == "__main__":
    sys.exit(main())
