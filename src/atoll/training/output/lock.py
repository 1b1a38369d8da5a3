"""The lock of a run folder: one run at a time writes to it, on any host.

    <run.folder>/.lock    held by rank 0 from before it reads the folder until it leaves; identifies the holder

Two signs show that a holder is alive. The kernel's lock (`filelock.FileLock`) ends with the process, however it ends.
It is visible to all processes of one kernel, over NFS also to other hosts, and on some file systems to no other
process. And the holder touches the file every `BEAT_SECONDS`. So a run takes over

    from a process of this kernel    if it gets the kernel's lock, if there is one, and the process has ended;
    from another kernel's            if it gets the lock and the file has not been touched for `SILENCE_SECONDS`: the
                                     host has another boot id, also after a restart

A holder that was stopped for longer finds the name of another one when it resumes, and ends before it writes.

The second sign is not `filelock.SoftFileLease`: that takes over by exchanging two names, which NFS refuses, so the lock
of a lost host would stay. And it takes over from a stopped process of this host.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from atoll.base.documents import parse_json, string, whole_number
from atoll.base.errors import ConfigError, RunError

_BEAT_SECONDS = 2.0
SILENCE_SECONDS = 10.0
_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock.

    boot: the kernel's boot id.  started: when the process started, in the kernel's ticks since boot, so that another
    process with the same number is not taken for it.  since: when it took the lock, in UTC.
    """

    host: str
    boot: str
    process: int
    started: str
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    @staticmethod
    def own() -> Holder:
        """Return the holder for this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return Holder(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()) or "", since)

    @property
    def is_of_this_kernel(self) -> bool:
        """True if its process number is one of this kernel."""
        return self.boot == _boot()

    @property
    def is_running(self) -> bool:
        """True if the process is alive; for this kernel's processes only."""
        return _started(self.process) == self.started


class RunLock:
    """The lock of the folder `root`, free until `acquire`. clock, sleep: how it waits for silence."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = root / ".lock"
        self._root = root
        self._clock = clock
        self._sleep = sleep
        self._own: Holder | None = None
        self._lock: FileLock | None = None
        self._stop = threading.Event()

    def acquire(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Acquire the lock. Raises ConfigError, which names the holder, while another run has it.

        say: callback for long waits, and for a takeover.
        """
        # No other user may open it: whoever can read a file can take its `flock`, and would block the run.
        lock = FileLock(self.path, mode=0o600, thread_local=False, fallback_to_soft=False)
        try:
            # A holder that has just released it is waited for; one that identifies itself is not.
            lock.acquire(timeout=1.0, cancel_check=lambda: read_holder(self.path) is not None)
        except Timeout as error:
            raise self._refusal(read_holder(self.path)) from error
        except OSError as error:  # also from a file system that has no locks
            if isinstance(error, PermissionError) or not os.access(self.path, os.W_OK):
                raise ConfigError(
                    f"run.folder = {str(self._root)!r}: its lock {self.path.name} cannot be written; it belongs to "
                    "another user, or the folder is read-only or full. Choose another run.folder"
                ) from error
        try:
            self._take(say)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        threading.Thread(target=self._beat, name="atoll-run-lock", daemon=True).start()

    @contextmanager
    def held(self, say: Callable[[str], None] = lambda line: None) -> Iterator[RunLock]:
        """Context in which this process holds the lock. Raises the errors of `acquire`."""
        self.acquire(say)
        try:
            yield self
        finally:
            self.release()

    def check(self) -> None:
        """Raise RunError if another run has taken over the lock; nothing may be written then."""
        try:
            holder = read_holder(self.path)
        except OSError:  # a file server that does not answer does not tell who holds the lock
            return
        if self._own is not None and holder != self._own:
            raise RunError(
                f"run.folder = {str(self._root)!r} was taken over by {holder or 'nobody: its lock is gone'}; this run "
                f"({self._own}) was silent for more than {SILENCE_SECONDS:g} seconds and ends without writing"
            )

    def release(self) -> None:
        """Release the lock if it is still held by this run."""
        self._stop.set()
        if self._lock is None:
            return
        with suppress(OSError):
            if read_holder(self.path) == self._own:
                self.path.unlink()
        self._lock.release()
        self._lock = self._own = None

    def _take(self, say: Callable[[str], None]) -> None:
        """Write this process into the file, once nobody else may write."""
        before = read_holder(self.path)
        if before is not None:
            self._wait_for_silence(before, say)
            say(f"note: took over {self._root} from {before}, which is gone")
        self._own = Holder.own()
        with self.path.open("r+b", buffering=0) as file:
            file.write(json.dumps(asdict(self._own)).encode().ljust(_LARGEST))
            os.fsync(file.fileno())

    def _wait_for_silence(self, before: Holder, say: Callable[[str], None]) -> None:
        """Raise ConfigError if the holder in the file may still write."""
        if before.is_of_this_kernel:
            if before.is_running:
                raise self._refusal(before)
            return
        say(f"{self._root}: looking for {SILENCE_SECONDS:g} seconds whether {before} is still there")
        first, end = self._touched(), self._clock() + SILENCE_SECONDS
        while self._clock() < end:
            self._sleep(min(_BEAT_SECONDS / 2, 0.5))
            if self._touched() != first:
                raise self._refusal(before)

    def _touched(self) -> int:
        # Opened each time: NFS asks the server for the times of a file when it is opened.
        with self.path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def _refusal(self, holder: Holder | None) -> ConfigError:
        return ConfigError(
            f"run.folder = {str(self._root)!r} is in use by another run "
            f"({holder or 'which has not identified itself'}); "
            "wait for its end, end it, or choose another run.folder"
        )

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with suppress(OSError):
                if read_holder(self.path) == self._own:
                    os.utime(self.path)


def read_holder(path: Path) -> Holder | None:
    """Return the holder in the lock file; None if there is no file, or a truncated one."""
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(_LARGEST))
        host, boot, started, since = (string(found[name]) for name in ("host", "boot", "started", "since"))
        return Holder(host, boot, whole_number(found["process"]), started, since)
    except (FileNotFoundError, ValueError, TypeError, LookupError):
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(process: int) -> str | None:
    """Return the start of a process in ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
