"""Tokenizers trained on several sources or on a sample of large ones, cached separately from token arrays.

<cache>/<key>/          key = hash of (identities of the sources, the tokenizer's name)
    tokenizer.json
    manifest.json       its digests
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from filelock import FileLock

from atoll.base.errors import DataError
from atoll.training.data.blocks import CORPUS_MANIFEST, Blocks, DamagedCorpusError
from atoll.training.data.corpus import Source
from atoll.training.data.recipe import Report
from atoll.training.data.store import writing_cache
from atoll.training.data.tokenizer import TOKENIZER, bpe_size, train_bpe

_FORMAT = 1


def folder_of(name: str, sources: Sequence[Source], cache: Path) -> Path:
    """Return the folder of the tokenizer of these sources, whose `identity` must be known."""
    about = {
        "format": _FORMAT,
        "trained": name,
        "sources": [[source.kind.value, source.text_field, source.identity] for source in sources],
    }
    return cache / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def is_kept(folder: Path) -> bool:
    """Return True if a folder has an undamaged tokenizer."""
    try:
        Blocks.read(folder).open(folder / TOKENIZER).check()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DamagedCorpusError):
        return False
    return True


def train(folder: Path, name: str, texts: Callable[[], Iterable[str]], say: Report) -> Path:
    """Return the tokenizer.json of a folder, after training it on the texts unless it exists."""
    size = bpe_size(name)
    if size is None:
        raise DataError(f"data.tokenizer = {name!r} is none that is trained")
    with writing_cache(folder.parent), FileLock(folder.parent / f"{folder.name}.lock"):
        if not is_kept(folder):
            say(f"training the tokenizer {name} on all sources")
            found = train_bpe(texts(), size)
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
            (part / TOKENIZER).write_text(found.to_json(), encoding="utf-8")
            (part / CORPUS_MANIFEST).write_bytes(Blocks.of(part, [TOKENIZER]).encode())
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
    return folder / TOKENIZER
