"""The files of a checkpoint."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from atoll.base.digests import digest
from atoll.base.documents import read_json
from atoll.runtime.checkpoint import Archive, latest
from atoll.runtime.checkpoint.loading import tensor_of
from atoll.runtime.checkpoint.manifest import MANIFEST, Manifest
from atoll.runtime.checkpoint.metadata import BoxLocation, read_contents
from atoll.training.interchange import config_of
from atoll.training.resumed import resumed_state
from benchmarks.fuzz.reading import Made, Parser, sealed
from benchmarks.integrity.mutations import Checkpoints


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
        body = sealed(document)
        (made.folder / MANIFEST).write_bytes(body)
        archive = Archive(made.folder)
        resumed_state(made.config, archive, None, run="a" * 32)
        return archive.contents

    return Parser([json.dumps(content).encode()], read)


def _latest(folder: Path) -> Parser:
    root = _Checkpoint(folder).folder.parent

    def read(content: bytes) -> object:
        (root / "latest").write_bytes(content)
        return latest(root)

    return Parser([(root / "latest").read_bytes()], read)


def _tensor(folder: Path) -> Parser:
    """A box of a tensor, as a checkpoint's files have them one behind the other."""
    seeds = []
    for value in (torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)):
        file = io.BytesIO()
        torch.save(value, file)
        seeds.append(file.getvalue())
    return Parser(seeds, lambda content: tensor_of(content, folder / "__0_0.distcp", BoxLocation("", 0, len(content))))


PARSERS: Mapping[str, Made] = {
    "checkpoint, metadata": _metadata,
    "checkpoint, state": _state,
    "checkpoint, manifest": _manifest,
    "checkpoint, latest": _latest,
    "checkpoint, tensor": _tensor,
}
