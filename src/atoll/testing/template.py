"""The program of the template from which the processes of pools are forked (`atoll.runtime.template`)."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection

from atoll.runtime.launch import LIFELINE
from atoll.runtime.template import Fork, Template, become

_AHEAD = {"transformers": "transformers.modeling_utils"}
"""Modules that ranks of tests import late, by the package that this process has imported if its tests use them. In
every rank the import takes more than a second of a core."""


def start_template(*, sees_gpus: bool) -> Template:
    """Return a template of processes that see every GPU, or none."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if not sees_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    ahead = [module for package, module in _AHEAD.items() if package in sys.modules]
    program = "import sys; from atoll.testing.template import serve_forks; serve_forks(*sys.argv[1:])"
    return Template([sys.executable, "-c", program, *ahead], environment)


def start_process(template: Template, connection: Connection, lifeline: int, output: int) -> Fork:
    """Start a process that serves `connection` until `lifeline` closes, and writes to `output`."""
    started = template.fork({}, (connection.fileno(), lifeline, output))
    if started is None:
        raise RuntimeError("the process from which ranks are forked has ended")
    return started


def serve_forks(*ahead: str) -> None:
    """Import what ranks need, and modules `ahead`, and run a process of a pool in each fork."""
    import torch
    import torch.distributed

    import atoll.runtime.engine  # noqa: F401
    from atoll.base._torch import import_ahead
    from atoll.testing.worker import serve_parent

    import_ahead()
    for module in ahead:
        importlib.import_module(module)
    torch.set_num_threads(1)
    connection, lifeline, output = become()
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ[LIFELINE] = str(lifeline)
        serve_parent(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the clean-up of what the template has imported
