"""Python programs that tests start, as forks of a process that has imported torch and Atoll.

    pytestmark = pytest.mark.usefixtures("warm")

A short run of `atoll train` spends most of its processor time on imports: in the parent, in the template of its ranks
and, where a script starts it, in every rank. With this fixture `subprocess` forks a program from a server if it would
start this Python with a module, a script or a text; and so does the program, from a server of its own. Arguments,
environment, folder, descriptors, exit code and parent are those of a process that was started. What differs:

    modules are there already, so variables that they read when they are imported would come too late: such a program
    is started, and so is one with options of Python
    every program has a session of its own
    `/proc/<number>/cmdline` is that of the server, and tracebacks begin with frames of this file

Tests of imports, of starts and of command lines do without the fixture.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from atoll.runtime import template
from atoll.runtime.launch import PROCESS
from atoll.runtime.template import TEMPLATE, become

ROOT = Path(__file__).resolve().parent.parent
TOLD = "ATOLL_TESTS_TOLD"
"""Environment variable with what a fork shall run."""
NAME = "python-server"
"""Name of the process from which a program forks others."""
PROGRAM = "python-program"
"""Name of a program, and of its forks that do not set a name."""
IMPORTED = (
    *(
        "atoll.base._torch",
        "atoll.cli.main",
        "atoll.prediction.planner",
        "atoll.training.process",
        "atoll.training.run.session",
    ),
    *("pydantic", "torch.distributed.launcher.api", "torch.utils.data"),
)
READ_AT_IMPORT = re.compile(
    r"PYTHON(?!FAULTHANDLER$|UNBUFFERED$)|OMP_|MKL_|OPENBLAS_|LD_|MALLOC_|TORCH_LOGS|TORCHINDUCTOR_(?!CACHE_DIR$)|HF_|"
    r"TRANSFORMERS_|TOKENIZERS_|COV_|COVERAGE_|HYPOTHESIS_"
)
ABOVE = 200
"""Numbers of descriptors that nobody asks for."""
PACKET = 1 << 16
ADOPT_ORPHANS = 36

_started = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Server:
    """The other end of a process that forks programs. given: the socket to it; without one, it is started."""

    def __init__(self, given: socket.socket | None = None) -> None:
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = self._start() if given is None else given

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join([str(ROOT), *filter(None, [self._environment.get("PYTHONPATH")])])
            environment = {**self._environment, TEMPLATE: str(theirs.fileno()), "PYTHONPATH": path}
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.warm import serve; serve()"],
                env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)
        return ours

    def close(self) -> None:
        """End the server; programs go on."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def may_start(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return True if a fork would do what the program does."""
        names = {name for name, value in {**environment, **self._environment}.items()
                 if environment.get(name) != self._environment.get(name)}  # fmt: skip
        return program_of(words) is not None and not any(map(READ_AT_IMPORT.match, names))

    def fork(self, told: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the number of a new child."""
        if ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1):
            raise OSError(ctypes.get_errno(), "a parent of forks cannot adopt orphans")
        _bury()
        socket.send_fds(self._socket, [json.dumps({TOLD: json.dumps(told)}).encode()], descriptors)
        answer = self._socket.recv(PACKET).strip()
        if not answer:
            raise OSError("the server of programs cannot fork")
        return int(answer)


@functools.cache
def server() -> Server:
    """The server of this process."""
    return Server()


def program_of(words: Sequence[str]) -> list[str] | None:
    """Return the words after the interpreter, which begin with -m, -c or a script; None for another program."""
    if not words:
        return None
    own = Path(sys.executable)
    if Path(words[0]).parent == own.parent and Path(words[0]).name != own.name:
        with contextlib.suppress(OSError, UnicodeDecodeError), Path(words[0]).open(encoding="utf-8") as script:
            return list(words) if script.readline().startswith(f"#!{own.parent}/python") else None
    program = [*words[2:]] if words[1:2] == ["-u"] else [*words[1:]]
    if Path(words[0]) != own or not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        return None
    return program


@contextlib.contextmanager
def programs(server: Server) -> Iterator[None]:
    """Let `subprocess` fork programs from a server."""
    subprocess.Popen._execute_child = _of(server)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _started  # type: ignore[attr-defined]


def _of(server: Server) -> Any:
    """A method in the place of that by which `subprocess.Popen` starts a process."""

    def execute_child(
        self: subprocess.Popen[Any],
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        *others: Any,
    ) -> None:
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        special = (executable, preexec_fn, gid, gids, uid) != (None,) * 5 or shell or not close_fds
        if special or not server.may_start(words, environment):
            _started(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                *pipes, restore_signals, gid, gids, uid, umask, *others,
            )  # fmt: skip
            return
        told = {
            "words": words,
            "environment": environment,
            "folder": os.path.abspath(os.getcwd() if cwd is None else os.fsdecode(cwd)),
            "umask": umask,
            "places": [0, 1, 2, *pass_fds],
        }
        if not os.path.isdir(str(told["folder"])):
            raise FileNotFoundError(2, os.strerror(2), told["folder"])
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = server.fork(told, [*streams, *pass_fds])
            self._child_created = True  # type: ignore[attr-defined]
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    return execute_child


def left() -> list[psutil.Process]:
    """Return the programs of this process that have not ended, with all that they started."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_program = each.name() == PROGRAM or each.name().startswith(PROCESS)
            if is_program and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def _bury() -> None:
    """Read the end of servers whose programs have ended; they were orphans, and this process has adopted them."""
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            with contextlib.suppress(OSError):
                if f"({NAME}) Z" in Path(f"/proc/{child}/stat").read_text():
                    os.waitpid(int(child), os.WNOHANG)


# ---- the server's side


def serve() -> None:
    """The program of a server: import modules, and run a program in each fork."""
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules["atoll.base._torch"].import_ahead()
    template._DESCRIPTORS = 16  # streams, and what a program passes on
    told, descriptors = _become_program()
    _place(descriptors, told["places"])
    os.chdir(told["folder"])
    if told["umask"] >= 0:
        os.umask(told["umask"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    importlib.invalidate_caches()
    _run(told["words"], program_of(told["words"]) or [])


def _become_program() -> tuple[dict[str, Any], list[int]]:
    """Return in each fork, which has a server of its own."""
    while True:
        descriptors = become()
        told = json.loads(os.environ.pop(TOLD))
        os.environ.clear()
        os.environ.update(told["environment"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            _name(PROGRAM)
            ours = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, 2 * ABOVE))
            subprocess.Popen._execute_child = _of(Server(ours))  # type: ignore[attr-defined]
            return told, descriptors
        ours.close()
        for descriptor in descriptors:  # a pipe ends with its program
            os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        _name(NAME)
        os.environ[TEMPLATE] = str(theirs.detach())


def _name(name: str) -> None:
    Path("/proc/self/comm").write_text(name, encoding="ascii")


def _place(descriptors: Sequence[int], places: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the parent."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip(moved, places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)


def _run(words: list[str], program: list[str]) -> None:
    """Run a module, a text or a script, as Python does."""
    sys.orig_argv[:] = words if words[0] == sys.executable else [sys.executable, *words]
    if "-u" in words[:2] or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    base = [path for path in sys.path if path not in ("", str(ROOT))]
    kind, *arguments = program
    if kind == "-m":
        sys.argv[:] = arguments
        sys.path[:] = [os.getcwd(), *base]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path[:] = ["", *base]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = program
        sys.path[:] = [str(Path(kind).resolve().parent), *base]
        runpy.run_path(kind, run_name="__main__")
