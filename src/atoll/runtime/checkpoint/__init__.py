"""Checkpoints: torch Distributed Checkpoint by logical name and global shape.

The life of a save, the same on every rank (`saving.py`):

1. each rank claims its ranges; rank 0 checks that they tile every tensor and chooses one writer per range;
2. rank 0 removes the files of interrupted saves and creates `.saving-<name>` beside the target;
3. every rank writes its ranges as boxes there, and sends their digests to rank 0;
4. rank 0 writes `.metadata`, `manifest.json` with all digests, then `state.json` (the mark of completion), renames the
   folder and points `latest` at it.

A load compares what it reads with the manifest (`archive.py`), on each rank independently.

Distributed Checkpoint writes the files, and plain torch reads them. Messages between ranks are JSON (`meeting.py`),
and a failure in any step is raised as the same error on every rank. Steps 3 and 4 may run in a thread, from copies,
while training continues (`background.py`).

Between checkpoints ranks may keep what they hold in the memory of their hosts (`memory.py`).
"""

from __future__ import annotations

from atoll.runtime.checkpoint.archive import Archive, read_state
from atoll.runtime.checkpoint.background import Background, Told
from atoll.runtime.checkpoint.folders import (
    candidates,
    find,
    is_complete,
    is_one,
    latest,
    prune,
    recover,
    set_aside,
    step_folder,
)
from atoll.runtime.checkpoint.generation import Generation
from atoll.runtime.checkpoint.loading import load_pieces
from atoll.runtime.checkpoint.memory import MemoryCheckpoints, Recovery
from atoll.runtime.checkpoint.pieces import Piece
from atoll.runtime.checkpoint.saving import save
from atoll.runtime.checkpoint.verify import Verification, verify

__all__ = [
    "Archive",
    "Background",
    "Generation",
    "MemoryCheckpoints",
    "Piece",
    "Recovery",
    "Told",
    "Verification",
    "candidates",
    "find",
    "is_complete",
    "is_one",
    "latest",
    "load_pieces",
    "prune",
    "read_state",
    "recover",
    "save",
    "set_aside",
    "step_folder",
    "verify",
]
