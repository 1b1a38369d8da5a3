"""A process that has imported torch and forks new ones.

A fork takes milliseconds; the imports take seconds of a core in every process. A template runs a program up to
`become`, which answers requests and returns in every fork. It has one thread and opens no device, so no lock is held,
and a fork shares only memory that is copied on the first write.

A request is a packet with environment variables as JSON, and descriptors. The answer is a process number.

[Note: whose children forks are] A template forks twice, and the process in between ends. The kernel then makes the new
process a child of the nearest ancestor that adopts orphans: the one that made the request, which waits for it as for
any other child, also if the template has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

TEMPLATE = "ATOLL_TEMPLATE"
"""Environment variable that makes a process a template: the descriptor of its requests."""

_PACKET = 1 << 16
_DESCRIPTORS = 3
_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER in prctl.h."""


class Template:
    """The parent's side: starts a template, and new processes from it.

    The template ends with the process that started it, because the socket closes. Its forks go on.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`, which calls `become`. Raises OSError if this process cannot adopt orphans."""
        if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, 1):
            raise OSError(ctypes.get_errno(), "a parent of forks cannot adopt orphans")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                list(command),
                env={**environment, TEMPLATE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """True while it can start processes."""
        return self._process.poll() is None

    def fork(self, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> Fork | None:
        """Return a new process with these variables and descriptors, or None if the template cannot start it.

        Waits until the template has imported its modules.
        """
        with self._turn, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(dict(environment)).encode()], descriptors)
            answer = self._socket.recv(_PACKET)
            return Fork(int(answer)) if answer.strip() else None
        return None

    def close(self) -> None:
        """End the template. Processes that it started go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Fork:
    """A process that a template started, with the part of `subprocess.Popen`'s interface that is used.

    returncode: the exit code, negative for a signal; None until `poll` or `wait` has seen the end.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process. Return its exit code."""
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        # A signal handler may do the same between any two of these lines: the code is read before the end is taken.
        with contextlib.suppress(ChildProcessError):
            if self.returncode is None:
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)
                if found is not None:
                    self.returncode = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
        return self.returncode


def is_template() -> bool:
    """Return True if this process is a template that has not become another process."""
    return TEMPLATE in os.environ


def become() -> list[int]:
    """Answer requests until the parent ends. Return in each new process, with the descriptors that the request had.

    A new process has a session of its own, and the template's environment with the variables of the request. Its
    `/proc/PID/environ` lacks these variables; a rank's number is in the name of its process, `atoll rank 1`. The
    template itself exits: with 1 if it cannot be forked, because an import has started a thread.
    """
    requests = socket.socket(fileno=int(os.environ.pop(TEMPLATE)))
    if not _is_forkable():
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection would write to every object, and so copy every page
    while True:
        words, descriptors, _, _ = socket.recv_fds(requests, _PACKET, _DESCRIPTORS)
        if not words:
            os._exit(0)
        pid = _fork_twice()
        if pid == 0:
            requests.close()
            os.environ.update(json.loads(words))
            _draw_anew()
            _renew_threads()
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b" " if pid is None else str(pid).encode())


def _draw_anew() -> None:
    """Seed numpy's own generator as its import does. Python does the same for `random` in every fork, and torch's
    generators start with a constant."""
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()


def _renew_threads() -> None:
    """Let torch replace its pool of threads while this process has one thread. torch does it at the first use after a
    fork, without a lock: the threads of lanes would meet there, and all but one would fail with "Invalid thread pool".
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _is_forkable() -> bool:
    """Return True if this process has one thread, once libraries that allow forks have ended theirs before one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _fork_twice() -> int | None:
    """Return 0 in a new process that is not this one's child and has a session of its own. Return its number here, or
    None if the system has no room for it. See [Note: whose children forks are]."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reader)
        between = os.getpid()
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                # Before anyone knows the number: until then its process group is the template's, which a signal to the
                # group would end, and `killpg` of its own number fails.
                os.setsid()
                os.write(writer, str(os.getpid()).encode())
                os.close(writer)
                while os.getppid() == between:  # what runs here sees the parent that it keeps
                    os.sched_yield()
                return 0
        os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    with open(reader, "rb") as answer:
        said = answer.read()
    return int(said) if said else None
