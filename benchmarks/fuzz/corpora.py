"""Tokenizers, texts and token caches."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import zstandard
from pyarrow import parquet  # a reader loads it once it is needed: an input takes no memory for that

from atoll.base.errors import DataError
from atoll.training.data.bad_records import BadRecords
from atoll.training.data.blocks import CORPUS_MANIFEST as BLOCKS_MANIFEST
from atoll.training.data.blocks import Blocks
from atoll.training.data.conversations import conversations
from atoll.training.data.corpus import documents, find_source
from atoll.training.data.rows import How, Packing, rows_of
from atoll.training.data.store import load_cache, prepare
from atoll.training.data.tokenizer import FileTokenizer, train_bpe
from benchmarks.fuzz.reading import Made, Parser, of_file, sealed


def _tokenizer(folder: Path) -> Parser:
    seed = train_bpe(["some words and more words"], size=270).to_json().encode()
    path = folder / "tokenizer.json"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        found = FileTokenizer.read(path)
        return found.size, found.end_of_text, found.decode(found.encode("some words")[:4])

    return Parser([seed], read)


def _settings(name: str, seed: bytes) -> Made:
    """Settings beside a tokenizer.json."""

    def parser(folder: Path) -> Parser:
        path = folder / "tokenizer.json"
        path.write_text(train_bpe(["some words and more words"], size=270).to_json())

        def read(content: bytes) -> object:
            (folder / name).write_bytes(content)
            found = FileTokenizer.read(path)
            return found.end_of_text, found.mask, found.opening, found.closing, found.stops, found.beside()

        return Parser([seed], read)

    return parser


def _corpus(path: Path) -> object:
    return list(documents(find_source(str(path))))


def _conversations(path: Path) -> object:
    bad = BadRecords("skip")
    found = list(conversations(find_source(str(path), has_records=True), reads=lambda has_tools: READ, bad=bad))
    if bad.counts:
        raise DataError(f"{bad.first}: one of {bad.counts.total()}, and {len(found)} others")
    return found


READ = ("tools", "tool_calls", "documents", "text", "reasoning_content", "enable_thinking", "developer")
"""Names that the template of the conversations reads."""

CHAT = b"""{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
{"prompt": "2 + 2?", "completion": "4"}
{"instruction": "Add.", "input": "2, 2", "output": "4", "history": [["Hi", "Hello"]], "system": "Be."}
{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{\\"name\\": \\"f\\"}"}, \
{"from": "observation", "value": "4"}, {"from": "gpt", "value": "4", "weight": 1}], "tools": "[{\\"name\\": \\"f\\"}]"}
{"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}, \
{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{\\"a\\": 2}"}}]}, \
{"role": "tool", "tool_call_id": "x", "content": "c"}, {"role": "assistant", "reasoning_content": "d", \
"content": "e"}], \
"functions": [{"name": "f"}], "documents": [{"title": "t"}], "chat_template_kwargs": {"enable_thinking": false}}
"""

RECORDS = b'{"text": "a line"}\n{"text": "another", "n": [1, 2]}\n'


def _zstd(folder: Path) -> Parser:
    return of_file("a.jsonl.zst", [zstandard.ZstdCompressor().compress(RECORDS)], _corpus)(folder)


def _parquet(folder: Path) -> Parser:
    path = folder / "seed.parquet"
    parquet.write_table(pyarrow.table({"text": ["a line", "another line"], "other": [1, 2]}), path)
    return of_file("a.parquet", [path.read_bytes()], _corpus)(folder)


def _dataset(name: str) -> Made:
    """A folder of the `datasets` package, of which one file is exchanged."""

    def parser(folder: Path) -> Parser:
        import datasets

        datasets.disable_progress_bars()
        root = folder / "saved"
        datasets.Dataset.from_dict({"text": ["a line", "another line"], "other": [1, 2]}).save_to_disk(root)

        def read(content: bytes) -> object:
            (root / name).unlink()  # the last one may be in a memory map still
            (root / name).write_bytes(content)
            return _corpus(root)

        return Parser([(root / name).read_bytes()], read)

    return parser


def _cache(name: str, how: How = "blocks") -> Callable[[Path], Parser]:
    """A token cache of which one file is exchanged, with a manifest that vouches for it."""
    packing = Packing(sequence=16, how=how)

    def parser(folder: Path) -> Parser:
        (folder / "a.txt").write_text("some words and more words\n" * 40)
        held = 0.0 if how != "blocks" else 0.1  # the one document is held out in parts, or not at all
        options: dict[str, Any] = {"tokenizer": "bpe-270", "sequence": 16, "validation": held, "how": how}
        prepare(str(folder / "a.txt"), cache=folder / "cache", **options)
        (cache,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
        names = list(Blocks.read(cache).files)
        seed = (cache / name).read_bytes()

        def read(content: bytes) -> object:
            if name == BLOCKS_MANIFEST:
                content = sealed(content)
            (cache / name).unlink()
            (cache / name).write_bytes(content)
            if name != BLOCKS_MANIFEST:
                (cache / BLOCKS_MANIFEST).write_bytes(Blocks.of(cache, names).encode())
            found = load_cache(cache, cache.name, lambda line: None)
            rows = rows_of(found.trained, packing)
            return found.train[:], found.validation[:], rows.take(np.arange(len(rows)))

        if name == BLOCKS_MANIFEST:
            seed = json.dumps(json.loads(seed)["content"]).encode()
        return Parser([seed], read)

    return parser


PARSERS: Mapping[str, Made] = {
    "tokenizer": _tokenizer,
    "tokenizer's config": _settings(
        "tokenizer_config.json", b'{"eos_token": {"content": "<|endoftext|>"}, "mask_token": null, "pad_token": "a"}'
    ),
    "tokenizer's generation": _settings("generation_config.json", b'{"eos_token_id": [0, 1, 2]}'),
    "corpus, text": of_file("a.txt", [b"a line\nanother line\n\nand a third\n"], _corpus),
    "corpus, JSONL": of_file("a.jsonl", [RECORDS], _corpus),
    "corpus, conversations": of_file("a.jsonl", [CHAT], _conversations),
    "corpus, JSON array": of_file("a.json", [b'[{"text": "a line"}, {"text": "another", "n": [1, 2]}]'], _corpus),
    "corpus, gzip": of_file("a.jsonl.gz", [gzip.compress(RECORDS)], _corpus),
    "corpus, zstd": _zstd,
    "corpus, parquet": _parquet,
    "corpus, dataset's state": _dataset("state.json"),
    "corpus, dataset's fields": _dataset("dataset_info.json"),
    "corpus, dataset's arrow": _dataset("data-00000-of-00001.arrow"),
    "token cache, about": _cache("about.json"),
    "token cache, tokens": _cache("train.npy"),
    "token cache, lengths": _cache("train-lengths.npy", "documents"),
    "token cache, digests": _cache("manifest.json"),
}
