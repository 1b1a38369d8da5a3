"""`atoll train` on an emulated device: each step sleeps. Usage: island.py CONFIG SECONDS STEPS key=value ...

Time, number and process of each step are appended to the file STEPS. Ranks are forked from a template, as those of
`atoll train` are: all of them do the same before they train.
"""

from __future__ import annotations

import sys
from pathlib import Path

from atoll.runtime.rendezvous import torchrun_environment
from atoll.runtime.template import is_template
from atoll.training import process


def main() -> int:
    """Train; steps sleep in the template and its forks, and the launcher stays without torch, as `atoll` does."""
    _, config, seconds, steps, *sets = sys.argv
    process._is_own_command = lambda: True
    if is_template() or torchrun_environment() is not None:
        from benchmarks.federation.sleeping import emulate

        emulate(float(seconds), Path(steps))
    return process.train(process.Request(Path(config), tuple(sets)))


if __name__ == "__main__":
    sys.exit(main())
