"""Everything that one GPU can tell in a few minutes: `python3 benchmarks/gpu/one_gpu.py --out DIR --commit HASH`.

Stages run in the order of their value, each in a process of its own with a time limit, and only if that fits into what
is left of `--seconds`. Each writes one line at once, so that a kill loses one stage. A stage that has a good committed
line for the same sources on the same kind of device is skipped, so that several runs add up. These files come back:

    stages.jsonl       a line for each stage, see `lines.py`
    log.txt            what stages printed
    profile.json.gz    a chrome trace of one step
    cluster.toml       the card as `atoll doctor --measure` writes it

    --rehearse    all stages with tiny sizes on the CPU: a typo must not cost minutes of a GPU
    --predict     write the predictions that stage `predictions` will be judged by; needs no GPU
    --add FILE    add good lines to the committed ones, if their sources are those of the commit that they name
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # as a script its own folder is on the path, whose `stages` and `lines` are no packages
    sys.path[:] = [
        str(ROOT),
        str(ROOT / "src"),
        *(each for each in sys.path if Path(each).resolve() != ROOT / "benchmarks" / "gpu"),
    ]

from benchmarks.gpu import lines  # noqa: E402

NEEDED = ("numpy", "psutil", "pydantic", "pytest", "torch", "xxhash")
"""Packages without which stages fail. benchmarks/gpu/README.md says which of them to carry."""

GRACE = 2.0
"""Seconds after its limit when a stage is killed."""

AT_THE_END = 6.0
"""Seconds that are kept for the table."""

UNLIMITED = 86_400.0
"""Seconds of each stage of a rehearsal: a loaded machine must not make it fail."""

LAST_LINES = 12
"""Lines of the log in the line of a stage whose process was killed or died."""

TABLE_ROWS = 38
"""With its two head lines the table has forty."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its name, its module, whose `run` it is, and its bound in seconds.

    more: modules that it depends on besides what its own imports, as it runs them in other processes.
    takes_rest: it goes on as long as there is time.
    """

    name: str
    module: str
    seconds: float
    more: tuple[str, ...] = ()
    takes_rest: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that the result depends on."""
        return (f"benchmarks.gpu.stages.{self.module}", *self.more)

    @property
    def digest(self) -> str:
        """Digest of the sources of these modules."""
        return lines.digest_of(self.modules)


TESTS = tuple(
    f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests" / "gpu").glob("*.py")) if path.stem != "__init__"
)

STAGES = (
    Stage("card", "card", 25),
    Stage("truth", "truth", 60),
    Stage("tests", "tests", 150, more=TESTS),
    Stage("gaps", "gaps", 30),
    Stage("ranks", "ranks", 60),
    Stage("options", "options", 65),
    Stage("predictions", "predictions", 55),
    Stage("compile", "compiled", 60),
    Stage("small", "small", 60),
    Stage("checks", "checks", 50),
    Stage("codecs", "codecs", 35),
    Stage("experts", "experts", 60),
    Stage("sequences", "sequences", 30),
    Stage("host", "host", 170),
    Stage("stream", "stream", 25),
    Stage("float8", "float8", 120),
    Stage("soak", "soak", 20, takes_rest=True),
)


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    arguments = _parse(words)
    if arguments.predict:
        from benchmarks.gpu import forecast

        forecast.write()
        print(f"wrote {forecast.PATH.relative_to(ROOT)}")
        return 0
    if arguments.add is not None:
        return _add(arguments.add)
    if arguments.stage:
        return _work(_stage(arguments.stage), arguments.findings, arguments.out, arguments.limit, arguments.rehearse)
    return _run_all(arguments)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go that come back")
    parser.add_argument(
        "--seconds", type=float, default=460.0, help="after how many no stage is running (default: 460)"
    )
    parser.add_argument("--commit", default=os.environ.get("ATOLL_COMMIT", ""), metavar="HASH", help="of the sources")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these stages, in this order")
    parser.add_argument("--again", action="store_true", help="also those that have a good line")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; proves nothing about a GPU")
    parser.add_argument("--predict", action="store_true", help="write predictions.json and no more")
    parser.add_argument("--add", type=Path, metavar="FILE", help="add its good lines to the committed ones and no more")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    known = [stage.name for stage in STAGES]
    unknown = [name for name in arguments.only if name not in known]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(known)}")
    if not (arguments.predict or arguments.add):
        if arguments.out is None:
            parser.error("--out DIR says where the files go that come back")
        if not arguments.rehearse and not arguments.stage and not re.fullmatch("[0-9a-f]{40}", arguments.commit):
            parser.error(f"--commit {arguments.commit!r}: the 40 digits that `git rev-parse HEAD` prints")
    return arguments


def _run_all(arguments: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}; benchmarks/gpu/README.md says how to carry packages", file=sys.stderr)
        return 2
    if arguments.rehearse:
        card = {"device": lines.CPU, "driver": ""}
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        try:
            card = lines.card()
        except RuntimeError as error:
            print(f"{error}\n--rehearse runs all stages on the CPU", file=sys.stderr)
            return 2
    os.environ["ATOLL_COMMIT"] = arguments.commit
    # Stages start programs elsewhere, for which relative folders would be others.
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join([*given, str(ROOT / "src"), str(ROOT)])
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    written = out / "stages.jsonl"
    known = [*lines.read_lines(lines.COMMITTED), *lines.read_lines(written)]
    _import_ahead()
    print(f"{card['device']}, driver {card['driver'] or 'none'}: {time.monotonic() - BEGIN:.0f} s to begin", flush=True)
    made = []
    for stage in map(_stage, arguments.only) if arguments.only else STAGES:
        left = UNLIMITED if arguments.rehearse else BEGIN + arguments.seconds - time.monotonic() - AT_THE_END
        if not arguments.again and _is_done(stage, known, card["device"]):
            print(f"{stage.name:12} has a good line", flush=True)
        elif stage.seconds + GRACE > left:
            print(f"{stage.name:12} left out: {left:.0f} s are left, it may take {stage.seconds:.0f}", flush=True)
        else:
            limit = left - GRACE if stage.takes_rest or arguments.rehearse else stage.seconds
            line = _line(stage, card, arguments, out, limit)
            lines.append(written, line)
            made.append(line)
            print(f"{stage.name:12} {line['seconds']:6.1f} s  {_short(line['problem']) or 'done'}", flush=True)
    print(table(made), flush=True)
    return 0


def _is_done(stage: Stage, known: Sequence[lines.Line], device: str) -> bool:
    """Return True if a stage has a good line. Its digest takes a second: it is computed only if a line could match."""
    return any(
        lines.is_good(line) and line["name"] == stage.name and line["device"] == device for line in known
    ) and lines.is_done(known, name=stage.name, digest=stage.digest, device=device)


def _line(stage: Stage, card: dict[str, str], arguments: argparse.Namespace, out: Path, limit: float) -> dict[str, Any]:
    """Run a stage in a process of its own, and return its line."""
    before = {} if arguments.rehearse else lines.state()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings.json"
        number = _start(stage, findings, out, limit, arguments.rehearse)
        digest = stage.digest  # while the stage runs
        problem = _watch(number, begin + limit + GRACE)
        if problem and (out / "log.txt").is_file():
            problem += "\n" + "\n".join((out / "log.txt").read_text(errors="replace").splitlines()[-LAST_LINES:])
        said = findings.with_suffix(".problem")
        if said.is_file():
            problem = said.read_text(encoding="utf-8")
        result = json.loads(findings.read_text(encoding="utf-8")) if findings.is_file() else {}
    return {
        "name": stage.name,
        "digest": digest,
        "commit": arguments.commit,
        **card,
        "rehearsal": arguments.rehearse,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "before": before,
        "after": {} if arguments.rehearse else lines.state(),
        "seconds": round(time.monotonic() - begin, 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "result": _without_nan(result),
        "problem": problem,
    }


def _start(stage: Stage, findings: Path, out: Path, limit: float, rehearse: bool) -> int:
    """Fork a process for a stage: it has imported torch already, which takes seconds."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.setsid()
        log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        print(f"\n==== {stage.name}", flush=True)
        if not rehearse and not _opens_device():
            # Something opened the driver before the fork. A new program is slower to start, and has no such past.
            words = ["--stage", stage.name, "--findings", str(findings), "--out", str(out), "--limit", str(limit)]
            os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *words])
        code = _work(stage, findings, out, limit, rehearse)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the clean-up of what the parent has


def _opens_device() -> bool:
    import torch

    try:
        torch.zeros(1, device="cuda")
    except Exception as error:  # of CUDA, or of a torch without CUDA
        print(f"a forked process cannot open the device: {error}", flush=True)
        return False
    return True


def _work(stage: Stage, findings: Path, out: Path, limit: float, rehearse: bool) -> int:
    """In the process of a stage: run it, and leave the traceback if it fails."""
    from benchmarks.gpu.stage import Run

    run = Run(findings, out, limit, rehearse)
    try:
        if rehearse:
            import torch

            torch.set_num_threads(1)
        module = importlib.import_module(stage.modules[0])
        # What was imported is not looked through again before and after each contender: a second of a large heap.
        gc.collect()
        gc.freeze()
        module.run(run)
    except Exception:
        text = traceback.format_exc()
        print(text, flush=True)
        findings.with_suffix(".problem").write_text(text, encoding="utf-8")
        return 1
    return 0


def _watch(number: int, end: float) -> str:
    """Wait for the process of a stage, and kill it at a time. Return why its result is not whole, if so."""
    begin, status, problem = time.monotonic(), 0, ""
    while True:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            problem = f"stopped at its limit, {end - begin:.0f} s"
            os.killpg(number, signal.SIGKILL)
            os.waitpid(number, 0)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # what it has started and left
        os.killpg(number, signal.SIGKILL)
    if not problem and status:
        code = os.waitstatus_to_exitcode(status)
        problem = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return problem


def _import_ahead() -> None:
    """Import what stages need, so that their processes are forked with it. Nothing here may open the device."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # `is_available` then asks NVML, and opens nothing
    for stage in STAGES:
        try:
            importlib.import_module(stage.modules[0])
        except Exception:  # it fails again in its own process, whose line says why
            traceback.print_exc()
    with contextlib.suppress(Exception):  # a stage that needs it says why it fails
        _build_on_meta()
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    gc.collect()
    gc.freeze()  # collections between contenders then pass over what was imported


def _build_on_meta() -> None:
    """torch imports more of itself when a module is first built, which needs no device."""
    import torch

    from atoll.runtime.models import Decoder
    from benchmarks.gpu import jobs

    with torch.device("meta"):
        Decoder(jobs.TINY.config)


def _short(problem: str) -> str:
    """The line that says most: the last one of a traceback, or the first."""
    said = problem.strip().splitlines()
    is_traceback = bool(said) and said[0].startswith("Traceback")
    return said[-1 if is_traceback else 0][:100] if said else ""


def _stage(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None else metadata.version("torch")


def _without_nan(value: Any) -> Any:
    """NaN and infinity as text: JSON has none of them, and they must not be lost."""
    if isinstance(value, float) and value - value != 0.0:
        return repr(value)
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value


def table(made: Sequence[lines.Line]) -> str:
    """Return a table of the figures, at most forty lines. If some have to be left out, missed targets stay."""
    from benchmarks.gpu.figures import figures

    rows = []
    for line in made:
        if line["problem"]:
            rows.append((0, f"{line['name']:12} {'FAILED':5} {_short(line['problem'])}"))
        for each in figures(line["name"], line["result"], device=line["device"]):
            mark = {None: "", True: "pass", False: "MISS"}[each.passed]
            text = f"{line['name']:12} {mark:5} {each.what:40.40} {each.value}  {each.target}"
            rows.append(({False: 0, True: 1, None: 2}[each.passed], text.rstrip()))
    kept = sorted(range(len(rows)), key=lambda at: rows[at][0])[:TABLE_ROWS]
    head = [f"{'stage':12} {'':5} {'figure':40} value  target", "-" * 80]
    return "\n".join([*head, *(rows[at][1] for at in sorted(kept))])


def _add(path: Path) -> int:
    """Add good lines to the committed ones. Those whose sources are not those of their commit are refused."""
    committed = lines.read_lines(lines.COMMITTED)
    refused = 0
    for line in lines.read_lines(path):
        if not lines.is_good(line) or line in committed:
            continue
        stage = _stage(line["name"])
        was = lines.digest_of(_modules_at(stage, line["commit"]), lambda file, at=line["commit"]: _file_at(at, file))
        if was != line["digest"]:
            print(f"{line['name']}: refused: commit {line['commit'][:12]} has other sources ({was})", file=sys.stderr)
            refused += 1
            continue
        lines.COMMITTED.parent.mkdir(parents=True, exist_ok=True)
        lines.append(lines.COMMITTED, line)
        print(f"{line['name']}: added")
    return 1 if refused else 0


def _modules_at(stage: Stage, commit: str) -> tuple[str, ...]:
    """The modules of a stage that there were at a commit."""
    return tuple(each for each in stage.modules if _file_at(commit, f"{each.replace('.', '/')}.py") is not None)


def _file_at(commit: str, path: str) -> str | None:
    done = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
