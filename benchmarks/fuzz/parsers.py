"""The parsers of untrusted documents, each with valid seed documents for the fuzzer.

A parser gets the bytes of one document and reads them as the program does. It accepts them, or raises one of the errors
that it documents; anything else is a defect.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from atoll import schedules
from atoll.config import from_dict, load
from atoll.cost import Cluster
from atoll.data.corpus import documents, find_source
from atoll.data.store import prepare
from atoll.data.tokenizer import FileTokenizer, train_bpe
from atoll.digests import digest
from atoll.documents import parse_json, read_json
from atoll.errors import AtollError
from atoll.ir.text import from_csv, from_text, to_csv, to_text
from atoll.models.weights import INDEX, SINGLE, Weights
from atoll.program import Do
from atoll.runtime.checkpoint import Archive
from atoll.runtime.checkpoint.manifest import MANIFEST, Manifest
from atoll.runtime.checkpoint.metadata import read_contents
from atoll.runtime.monitor import Monitor, read_words
from atoll.schedules.links import Links
from atoll.trace import from_chrome
from atoll.training.folder import RunFolder, read_records, typical_seconds
from atoll.training.interchange import config_of
from atoll.training.lock import read_holder
from atoll.training.loop import resumed_state
from atoll.training.measurements import read_rows, read_run
from benchmarks.integrity.mutations import Checkpoints

CONFIG = b"""
[model]
layers = 4
hidden = 64
heads = 4
[data]
source = "stdlib"
sequence = 64
[train]
steps = 20
global_batch = 16
microbatch = 2
lr = 3e-3
[parallel]
ranks = 4
pipeline = 2
intra = 2
layout = "IIG"
schedule = "1f1b"
[run]
folder = "runs/quickstart"
"""
CLUSTER = b"""
nodes = 2
[device]
memory = 8_000_000_000
bandwidth = 1e10
rates = { float32 = 3e10 }
[node]
devices = 2
link = { rate = 1e9, latency = 2e-5 }
[network]
rate = 1e8
latency = 1e-4
"""
LINKS = b"""
latency = 0.1
seconds = 0.2
[[link]]
ranks = [0, 1]
latency = 1
name = "wan"
"""
BLOCKS = (
    {"stage": 3, "mics_shard_size": 2, "overlap_comm": True},
    {"stage": 2, "reduce_bucket_size": 5e8},
    {"stage": 3, "zero_hpz_partition_size": 2},
)
ORDERS = [
    schedules.build(name, ranks=2, microbatches=3, chunks=chunks)
    for name, chunks in (("1f1b", None), ("zb-v", None), ("interleaved", 2))
]


class Parser(NamedTuple):
    """seeds: documents that are accepted.  refuses: what `read` may raise."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...] = (AtollError,)


def _of_file(name: str, seeds: Sequence[bytes], read: Callable[[Path], object]) -> Callable[[Path], Parser]:
    """One that reads a file of a name."""

    def parser(folder: Path) -> Parser:
        path = folder / name

        def read_content(content: bytes) -> object:
            path.write_bytes(content)
            return read(path)

        return Parser(seeds, read_content)

    return parser


def _texts(read: Callable[[str], object], *seeds: str) -> Callable[[Path], Parser]:
    """One that reads text, of bytes that may be no UTF-8."""
    return lambda _: Parser(
        [seed.encode() for seed in seeds], lambda content: read(content.decode("utf-8", errors="replace"))
    )


def _planned(path: Path) -> object:
    config = load(path)
    return config if config.parallel.auto else config.to_plan()


def _overridden(text: str) -> object:
    config = from_dict({}, overrides=text.split("\n"))
    return config if config.parallel.auto else config.to_plan()


def _block(content: bytes) -> object:
    try:
        words = parse_json(content)
    except ValueError:
        return None  # of a config it is TOML, which is another parser's
    return from_dict({"parallel": {"zero_optimization": words}})


def _deepspeed(folder: Path) -> Parser:
    return Parser([json.dumps(block).encode() for block in BLOCKS], _block)


def _index(folder: Path) -> Parser:
    _write_weights(folder / "of-two.safetensors")
    seed = {"metadata": {"total_size": 96}, "weight_map": {"a": "of-two.safetensors", "b": "of-two.safetensors"}}
    return _weights(folder, INDEX, json.dumps(seed).encode())


def _safetensors(folder: Path) -> Parser:
    _write_weights(folder / SINGLE)
    return _weights(folder, SINGLE, (folder / SINGLE).read_bytes())


def _write_weights(path: Path) -> None:
    save_file({"a": torch.ones(4, 4), "b": torch.ones(8, dtype=torch.bfloat16)}, path)


def _weights(folder: Path, name: str, seed: bytes) -> Parser:
    def read(content: bytes) -> object:
        (folder / name).unlink(missing_ok=True)  # the last one may be in a memory map still
        (folder / name).write_bytes(content)
        found = Weights(folder, {"a": (4, 4), "b": (8,)})
        return [found.whole(name) for name in ("a", "b") if name in found]

    return Parser([seed], read)


def _metadata(folder: Path) -> Parser:
    seed = (_Checkpoint(folder).folder / ".metadata").read_bytes()
    return Parser([seed], lambda content: read_contents(folder / ".metadata", content))


class _Checkpoint:
    """A checkpoint of which one file is exchanged, with a manifest that vouches for it."""

    def __init__(self, folder: Path) -> None:
        subject = Checkpoints(folder)
        subject.restore()
        self.config, self.folder = subject.config, subject.folder
        self.manifest = Manifest.read(self.folder)

    def put(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)
        files = {**self.manifest.files, name: [(0, len(content), digest(content))]}
        (self.folder / MANIFEST).write_bytes(Manifest(self.manifest.identity, files).encode())


def _state(folder: Path) -> Parser:
    made = _Checkpoint(folder)
    values = read_json(made.folder / "state.json")
    values["state"]["caller"]["config"] = '[model]\nsource = "transformers:llama"\n[train]\nsteps = 5\n'

    def read(content: bytes) -> object:
        made.put("state.json", content)
        resumed_state(made.config, Archive(made.folder), None, run="a" * 32)
        return config_of(made.folder)

    return Parser([json.dumps(values).encode()], read)


def _manifest(folder: Path) -> Parser:
    made = _Checkpoint(folder)
    content = read_json(made.folder / MANIFEST)["content"]

    def read(document: bytes) -> object:
        # What has a right digest is read on: whoever changes the content changes the digest with it.
        body = b'{"content": ' + document + b', "digest": "' + digest(document).encode() + b'"}\n'
        (made.folder / MANIFEST).write_bytes(body)
        archive = Archive(made.folder)
        resumed_state(made.config, archive, None, run="a" * 32)
        return archive.contents

    return Parser([json.dumps(content).encode()], read)


def _tokenizer(folder: Path) -> Parser:
    seed = train_bpe(["some words and more words"], size=270).to_json().encode()
    path = folder / "tokenizer.json"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        found = FileTokenizer.read(path)
        return found.size, found.end_of_text, found.decode(found.encode("some words")[:4])

    return Parser([seed], read)


def _corpus(path: Path) -> object:
    return list(documents(find_source(str(path))))


def _parquet(folder: Path) -> Parser:
    import pyarrow
    from pyarrow import parquet

    path = folder / "seed.parquet"
    parquet.write_table(pyarrow.table({"text": ["a line", "another line"], "other": [1, 2]}), path)
    return _of_file("a.parquet", [path.read_bytes()], _corpus)(folder)


def _cache(name: str) -> Callable[[Path], Parser]:
    """A token cache of which one file is exchanged, with a manifest that vouches for it."""

    def parser(folder: Path) -> Parser:
        from atoll.data.blocks import MANIFEST as BLOCKS_MANIFEST
        from atoll.data.blocks import Blocks
        from atoll.data.store import load_cache

        (folder / "a.txt").write_text("some words and more words\n" * 40)
        prepare(str(folder / "a.txt"), tokenizer="bpe-270", cache=folder / "cache", sequence=16, validation=0.1)
        (cache,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
        names = list(Blocks.read(cache).files)
        seed = (cache / name).read_bytes()

        def read(content: bytes) -> object:
            if name == BLOCKS_MANIFEST:
                content = b'{"content": ' + content + b', "digest": "' + digest(content).encode() + b'"}\n'
            (cache / name).unlink()
            (cache / name).write_bytes(content)
            if name != BLOCKS_MANIFEST:
                (cache / BLOCKS_MANIFEST).write_bytes(Blocks.of(cache, names).encode())
            found = load_cache(cache, cache.name, lambda line: None)
            return found.train[:], found.validation[:]

        if name == BLOCKS_MANIFEST:
            seed = json.dumps(json.loads(seed)["content"]).encode()
        return Parser([seed], read)

    return parser


PLAN = {
    "first_step": 1,
    "mesh": {"pp": 1, "inter": 1, "intra": 1, "tp": 1},
    "vocabulary": 256,
    "reads_in_place": False,
    "device": "cpu",
    "stages": [["embed"], ["layers.0", "head"]],
}
INSTRUCTION = {"do": str(next(iter(Do))), "of": 0, "times": 1, "seconds": 0.1, "shortest": 0.1}
TIMING = {
    "seconds": 1.5,
    "memory": "resident",
    "ranks": [
        {
            "instructions": [INSTRUCTION],
            "peak_bytes": 9,
        }
    ],
}
HOLDER = b'{"host": "a", "boot": "b", "process": 3, "started": "4", "since": "x"}'
ROW = b'{"config": {"model": {"layers": 4}}, "seconds": 1.5, "set": ["train.steps=5"]}'
METRICS = b'{"step": 1, "loss": 2.5, "seconds": 0.1}\n{"step": 2, "loss": 2.25, "seconds": 0.2}\n'


def _run(name: str, seed: bytes) -> Callable[[Path], Parser]:
    """A run's folder of which one file is exchanged."""

    def parser(folder: Path) -> Parser:
        run = RunFolder(folder)
        run.config.write_bytes(CONFIG)
        for path, content in ((run.plan, PLAN), (run.timing, TIMING)):
            path.write_text(json.dumps(content))
        run.metrics.write_bytes(METRICS)

        def read(content: bytes) -> object:
            (folder / name).write_bytes(content)
            return read_run(folder), typical_seconds(run.metrics), read_records(run.metrics)

        return Parser([seed], read)

    return parser


def _monitor(folder: Path) -> Parser:
    """Messages of authenticated ranks. Connections without the secret are dropped before this point."""
    monitors = [Monitor(2, host="127.0.0.1", limit=1e9)]
    count = itertools.count(1)
    beat = {"beat": {"doing": "F0", "waits_for": [1], "mark": 3, "host": "a", "pid": 1}}
    report = {"report": {"exit_code": 1, "message": "broken"}, "key": "run"}
    seeds = [json.dumps(words).encode() + b"\n" for words in (beat, report, {"stack": "line 1"}, {"bye": 1})]

    def read(line: bytes) -> object:
        if next(count) % 1000 == 0:  # it keeps reports, as many as there are
            monitors[0].close()
            monitors[0] = Monitor(2, host="127.0.0.1", limit=1e9)
        return json.dumps(monitors[0].answer(1, read_words(line)))

    return Parser(seeds, read, refuses=(ValueError,))


def _trace(folder: Path) -> Parser:
    events = [
        {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {}},
        {"ph": "C", "name": "memory", "pid": 0, "ts": 1.0, "args": {"bytes": 7}},
    ]
    seed = json.dumps({"traceEvents": events, "otherData": {"ranks": 1, "chunks": 1}}).encode()
    return Parser([seed], lambda content: from_chrome(content.decode("utf-8", errors="replace")))


PARSERS: Mapping[str, Callable[[Path], Parser]] = {
    "config": _of_file("a.toml", [CONFIG], _planned),
    "overrides": _texts(_overridden, "train.steps=5\nparallel.layout=GGG", 'parallel.schedule="zb-h1"'),
    "DeepSpeed block": _deepspeed,
    "cluster": _of_file("cluster.toml", [CLUSTER], Cluster.read),
    "links": _of_file("links.toml", [LINKS], Links.read),
    "schedule, CSV": _texts(from_csv, *map(to_csv, ORDERS)),
    "schedule, grid": _texts(from_text, *map(to_text, ORDERS)),
    "safetensors, index": _index,
    "safetensors": _safetensors,
    "checkpoint, metadata": _metadata,
    "checkpoint, state": _state,
    "checkpoint, manifest": _manifest,
    "tokenizer": _tokenizer,
    "corpus, JSONL": _of_file("a.jsonl", [b'{"text": "a line"}\n{"text": "another", "n": [1, 2]}\n'], _corpus),
    "corpus, parquet": _parquet,
    "token cache, about": _cache("about.json"),
    "token cache, tokens": _cache("train.npy"),
    "token cache, digests": _cache("manifest.json"),
    "run, plan": _run("plan.json", json.dumps(PLAN).encode()),
    "run, timing": _run("timing.json", json.dumps(TIMING).encode()),
    "run, metrics": _run("metrics.jsonl", METRICS),
    "run, lock": _of_file(".lock", [HOLDER], read_holder),
    "measured rows": _of_file("rows.json", [ROW], read_rows),
    "trace": _trace,
    "monitor": _monitor,
}


def end_of(parser: Parser, content: bytes) -> str:
    """Parse a document; returns "read", "refused", or the name and message of an undocumented exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parser.read(content)
        except parser.refuses as error:
            str(error).encode()
            return "refused"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            return f"{type(error).__name__}: {error}"[:300]
    return "read"
