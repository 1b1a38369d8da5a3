"""A process that has imported torch and forks the processes of pools.

A fork takes milliseconds, the imports take seconds of a core in every process. The template has a single thread and
opens no device, so no lock is held and nothing is shared but read-only pages when it forks. Its requests are packets
with descriptors:

    start         connection, lifeline and output of a new process  ->  its process number
    poll <pid>    ->  its exit code, or nothing while it runs
    wait <pid>    ->  its exit code, once it has ended

It ends with the process that started it: the socket closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from atoll.runtime.launch import LIFELINE

_PACKET = 64
_DESCRIPTORS = 3


class Template:
    """The parent's side: starts processes and knows how they ended."""

    def __init__(self, *, sees_gpus: bool) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if not sees_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from atoll.testing.template import serve; serve()", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """True while it can start processes."""
        return self._process.poll() is None

    def start(self, connection: Connection, lifeline: int, output: int) -> ForkedProcess:
        """Fork a process that serves `connection` until `lifeline` closes, and writes to `output`."""
        pid = self.ask("start", (connection.fileno(), lifeline, output))
        if pid is None:
            raise RuntimeError("the process from which ranks are forked has ended")
        return ForkedProcess(self, pid)

    def ask(self, request: str, descriptors: Sequence[int] = ()) -> int | None:
        """Send a request. Return the number in the answer, or None if there is none."""
        with self._turn, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [request.encode()], descriptors)
            answer = self._socket.recv(_PACKET).decode()
            return int(answer) if answer.strip() else None
        return None

    def close(self) -> None:
        """End the template. The processes that it started go on until their lifelines close."""
        self._socket.close()
        self._process.wait()


class ForkedProcess:
    """A process that a template started, with the part of `subprocess.Popen`'s interface that pools use."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self._code is None:
            self._code = self._template.ask(f"poll {self.pid}")
        return self._code

    def wait(self) -> int:
        """Wait for the end of the process. Return its exit code."""
        if self._code is None:
            # A template that was killed cannot say how its processes ended.
            self._code = self._template.ask(f"wait {self.pid}") or 0
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    """The template's side: import, then answer until the socket closes."""
    import torch
    import torch.distributed

    import atoll.runtime.engine  # noqa: F401
    from atoll.testing.worker import main

    torch.set_num_threads(1)
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        words, descriptors, _, _ = socket.recv_fds(requests, _PACKET, _DESCRIPTORS)
        match words.decode().split():
            case ["start"]:
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    _become(main, *descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                requests.send(str(pid).encode())
            case ["poll" | "wait" as how, number]:
                pid, status = os.waitpid(int(number), os.WNOHANG if how == "poll" else 0)
                requests.send(str(os.waitstatus_to_exitcode(status) if pid else " ").encode())
            case _:
                return


def _become(main: Callable[[int], None], connection: int, lifeline: int, output: int) -> NoReturn:
    """Run a process of a pool in the fork, and end it without the template's clean-up."""
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ[LIFELINE] = str(lifeline)
        main(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
