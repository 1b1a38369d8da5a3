"""What a run of the bench consists of: `python -m benchmarks.hangs.worker ROLE SPEC`, SPEC a file of JSON.

    launch    starts local ranks, as `atoll train` does
    island    starts the ranks of one of two machines, as torchrun does on each
    store     hosts the store, as torchrun's agent does
    rank      trains, and strikes where the spec says: the hang, or the cut, is its own doing

What strikes is patched into this process alone: a call of the executor's table, a hook on a block, a call of the
engine. Before it does, it writes down which rank, step and instruction it is, and when.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.errors import AtollError
from atoll.runtime.launch import exit_with_error, launch_local, watch_parent
from atoll.runtime.rendezvous import host_store, meet, torchrun_environment

STEPS = 400
STRIKES_IN = 4
"""The step that is struck."""
PORT = 29_500
ACROSS = "across"
AFTER_STORE = 40
"""Steps that a run goes on for once its store's host is stopped."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One run. what: an instruction's name, or `hook`, `behind`, `save`, `outside`; `evaluation` before an
    instruction's name for one of an evaluation.  manner: what the rank does there.  case: fields of a
    `atoll.testing.parity.Case`.  layers: of its model.  other: the rank on the cut link's other end.
    """

    folder: str
    case: dict[str, Any]
    layers: int
    ranks: int
    rank: int
    what: str
    manner: str
    timeout: float
    other: int = -1

    @staticmethod
    def read(path: str) -> Spec:
        return Spec(**json.loads(Path(path).read_text(encoding="utf-8")))


def main() -> int:
    role, path = sys.argv[1:]
    spec = Spec.read(path)
    if role == "launch":
        return _launch(spec, path)
    if role == "island":
        return _island(path)
    if role == "store":
        return _store(spec)
    return _rank(spec)


def _launch(spec: Spec, path: str) -> int:
    try:
        return launch_local([*_python(), "rank", path], spec.ranks, limit=spec.timeout)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _python() -> list[str]:
    return [sys.executable, "-m", "benchmarks.hangs.worker"]


def _island(path: str) -> int:
    """The ranks that the environment names, of a machine that is this process's namespaces."""
    started = []
    for local, rank in enumerate(os.environ["HANGS_RANKS"].split()):
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": str(local)}
        started.append(subprocess.Popen([*_python(), "rank", path], env=environment))
    return max(process.wait() != 0 for process in started)


def _store(spec: Spec) -> int:
    store = host_store("127.0.0.1", int(os.environ["MASTER_PORT"]))
    Path(spec.folder, "store").write_text(str(os.getpid()))
    while os.getppid() != 1:
        time.sleep(0.1)
    del store
    return 0


def _rank(spec: Spec) -> int:
    rendezvous = torchrun_environment()
    assert rendezvous is not None, "its launcher's environment says who it is"
    watch_parent()
    # Imports take longer than the timeout of the bench where many processes do them at one time.
    import atoll.testing.parity
    import atoll.training.process  # noqa: F401

    watch = None
    try:
        store, watch = meet(rendezvous, spec.timeout)
        from atoll.runtime.failure import Watch

        Watch.current = watch
        _train(spec, rendezvous.rank, rendezvous.world, store=store)
        watch.stop()
    except Exception as error:
        exit_with_error(error, watch, rendezvous)
    return 0


def _train(spec: Spec, rank: int, world: int, *, store: Any) -> None:
    import torch

    from atoll.runtime import transport
    from atoll.testing.parity import Case
    from atoll.testing.tiny import TinyConfig
    from atoll.training.process import SLACK

    torch.set_num_threads(1)
    transport.join(rank, world, store, device=torch.device("cpu"), timeout=spec.timeout + SLACK)
    case = Case(**spec.case, model=TinyConfig(layers=spec.layers), precision="fp32")
    striker = Striker(spec) if rank == spec.rank else None
    if striker is not None:
        striker.prepare()
    engine = case.engine()
    if striker is not None:
        striker.engine = engine
        striker.hook(engine.model)
    share = case.share(engine, 0)
    steps = STRIKES_IN + AFTER_STORE if spec.manner == "stop store" else STEPS
    for step in range(steps):
        if striker is not None and spec.what == "outside" and step + 1 == STRIKES_IN:
            striker.strike("code outside the engine")
        engine.step(share)
        if step + 1 == STRIKES_IN:
            engine.evaluate(share)
            engine.save(Path(spec.folder, "checkpoint"))
    engine.close()
    transport.leave()


class Striker:
    """Strikes once."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.engine: Any = None
        self._struck = False

    def prepare(self) -> None:
        """Put the blow into the executor's table, or before a save."""
        from atoll.runtime.pipeline import executor
        from atoll.runtime.services import checkpoints

        mode, _, name = self.spec.what.rpartition(" ")
        striker, wanted = self, mode != "evaluation"
        original: Callable[..., Callable[[], None]] = executor.call_of

        def struck(on: Any, instruction: Any) -> Callable[[], None]:
            call = original(on, instruction)
            if instruction.do != name:
                return call

            def strike_and_call() -> None:
                training = on.microbatches.state.is_training
                if training == wanted and (not training or on.counter.step + 1 == STRIKES_IN):
                    striker.strike(f"step {STRIKES_IN}, {instruction}" if training else f"evaluation, {instruction}")
                call()

            return strike_and_call

        executor.call_of = struck
        save = checkpoints.save_state

        def struck_save(*arguments: Any, **named: Any) -> None:
            if self.spec.what == "save":
                self.strike("saving a checkpoint")
            save(*arguments, **named)

        checkpoints.save_state = struck_save

    def hook(self, model: Any) -> None:
        """Put the blow into a hook of a block in the middle, before its forward or behind it."""
        if self.spec.what not in ("hook", "behind"):
            return
        at = next(at for at, block in enumerate(model) if at and any(p.numel() for p in block.parameters()))

        def struck(*_: object) -> None:
            if self.engine is not None and self.engine.step_number + 1 == STRIKES_IN:
                # Before a block's forward the model is still behind the one before.
                self.strike(f"step {STRIKES_IN}, 0F0.{at - (self.spec.what == 'hook')}")

        register = model[at].register_forward_pre_hook if self.spec.what == "hook" else model[at].register_forward_hook
        register(struck)

    def strike(self, where: str) -> None:
        """Write down where this is, and do it."""
        if self._struck:
            return
        self._struck = True
        manner = self.spec.manner
        if manner.startswith(("drop", "down", "gone")):
            self._cut(manner)
        draft = Path(self.spec.folder, "draft")
        draft.write_text(json.dumps({"where": where, "time": time.time(), "pid": os.getpid()}), encoding="utf-8")
        draft.rename(Path(self.spec.folder, "truth"))
        if manner == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif manner == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif manner == "sleep":
            stuck_in_the_users_code()
        elif manner == "hold":  # a call into C that keeps the interpreter
            ctypes.PyDLL(None).sleep(3600)
        elif manner == "call":  # and one that does not
            ctypes.CDLL(None).sleep(3600)
        elif manner == "stop store":
            os.kill(int(Path(self.spec.folder, "store").read_text()), signal.SIGSTOP)

    def _cut(self, manner: str) -> None:
        """Cut links in this rank's network namespace. Nobody hears of it."""
        if manner in ("down", "gone"):
            _do("ip", "link", "set", ACROSS, "down")
            return
        _do("nft", "add table inet hangs")
        for chain in ("input", "output"):
            _do("nft", f"add chain inet hangs {chain} {{ type filter hook {chain} priority 0; }}")
        if manner == "drop":
            rules = [f"output oifname {ACROSS} drop", f"input iifname {ACROSS} drop"]
        elif manner == "drop one way":
            rules = [f"output oifname {ACROSS} drop"]
        elif manner == "drop messages":  # all but the way to the monitor
            from atoll.runtime.failure import Watch

            address = None if Watch.current is None else Watch.current._address
            assert address is not None, "this rank is watched"
            port = address.port
            passes = [f"output tcp {end} {port} accept" for end in ("sport", "dport")]
            rules = [*passes, f"output oifname {ACROSS} drop"]
        else:
            other = int(Path(self.spec.folder, f"pid-{self.spec.other}").read_text())
            rules = [f"output tcp sport {mine} tcp dport {its} drop" for mine, its in connections(other)]
            assert rules, "these ranks have a connection"
        for rule in rules:
            _do("nft", f"add rule inet hangs {rule}")


def stuck_in_the_users_code() -> None:
    time.sleep(3600)


def connections(other: int) -> list[tuple[int, int]]:
    """Ports of the TCP connections between this process and another one of this namespace, both ways."""
    own, its = _ports("self"), _ports(str(other))
    both = [ends for ends in own if ends[::-1] in its]
    return both + [ends[::-1] for ends in both]


def _ports(process: str) -> set[tuple[int, int]]:
    inodes = set()
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "01":
                found.add((int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16)))
    return found


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    if "RANK" in os.environ and sys.argv[1] == "rank":
        Path(Spec.read(sys.argv[2]).folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    raise SystemExit(main())
