"""The state of one rank in one file of its host's memory: a *generation*.

    pieces              as they are in memory, each at a multiple of 64 bytes
    header              JSON with its digest: run, plan, step, replicas, state, places of pieces, digest of all pieces
    8 bytes             length of the header

Unlike a checkpoint it has everything that its rank holds, whoever else holds the same, and only ranks of the same plan
can load it. Nothing of it is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from atoll.base.digests import ALGORITHM, digest, seal, unseal
from atoll.base.documents import LARGEST_BYTES, LARGEST_JSON, string, whole_number
from atoll.base.errors import AtollError, DamageError
from atoll.runtime.checkpoint.archive import Archive
from atoll.runtime.checkpoint.background import ALIGNMENT
from atoll.runtime.checkpoint.folders import FORMAT_VERSION
from atoll.runtime.checkpoint.manifest import Manifest
from atoll.runtime.checkpoint.meeting import Meeting
from atoll.runtime.checkpoint.metadata import Contents
from atoll.runtime.checkpoint.pieces import Claim, Piece

_VERSION = 1
_LENGTH = 8
"""Bytes of the header's length."""


class Generation(Archive):
    """A generation opened for loading, with the interface of a checkpoint that has the tensors of this rank alone.

    run, plan: the run's id, and the digest of its plan.  rank: the one that wrote it.  replicas: the ranks that held
    the same then, `rank` among them.  claims: its pieces, each with its first byte.

    Raises DamageError if the header is not what `write_generation` writes; `verify` reads the pieces.
    """

    def __init__(self, path: Path) -> None:
        self.folder, self.version = path, FORMAT_VERSION
        try:
            header, body = _header(path)
            if (header["version"], header["algorithm"]) != (_VERSION, ALGORITHM):
                raise ValueError(f"it has version {header['version']!r} with {header['algorithm']!r}")
            self.run, self.plan, self._digest = (string(header[key]) for key in ("run", "plan", "digest"))
            self.step, self.rank = (whole_number(header[key]) for key in ("step", "rank"))
            self.replicas = tuple(whole_number(each) for each in header["replicas"])
            self.state, identity = dict(header["state"]), dict(header["identity"])
            self._size = whole_number(header["size"], limit=LARGEST_BYTES)
            self.claims = dict(_placed(header["pieces"], self._size))
            if self._size != body or self.rank not in self.replicas:
                raise ValueError(f"{body} bytes of pieces, expected {self._size}; rank {self.rank} of {self.replicas}")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AtollError) as error:
            raise DamageError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self.manifest = Manifest({**identity, "run": self.run}, {})

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.folder.stat().st_size

    @cached_property
    def contents(self) -> Contents:
        """The tensors of which this rank has pieces."""
        tensors = {
            claim.name: TensorStorageMetadata(TensorProperties(dtype=claim.dtype), torch.Size(claim.shape), [])
            for claim in self.claims
        }
        return Contents(tensors, {})

    def verify(self) -> None:
        """Raise DamageError unless every byte of the pieces is as it was written."""
        if digest(self._body().numpy().data) != self._digest:
            raise DamageError(
                f"{self.folder}: the digest does not match; its bytes were changed after they were written"
            )

    def fill(self, path: Path, pieces: Sequence[Piece], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
        """Fill this rank's pieces, and return the first rank's state, as `load_pieces` does; every rank calls it.

        Raises DamageError on every rank if the pieces of any rank are not those of its generation.
        """
        meeting, lost = Meeting(), f"{path.name} in host memory was not loaded"
        meeting.round(lost, lambda: self._compare(pieces, optional))
        meeting.round(lost, lambda: self._copy(pieces))
        state: dict[str, Any] = meeting.round(lost, lambda: self.state, lambda said: [said[0]] * len(said))
        return state

    def _compare(self, pieces: Iterable[Piece], optional: tuple[str, ...]) -> None:
        asked, held = (
            {_range(piece.claim): piece.name for piece in pieces},
            {_range(each): each.name for each in self.claims},
        )
        missing = [name for key, name in asked.items() if key not in held]
        spare = [name for key, name in held.items() if key not in asked and not name.startswith(optional)]
        if missing or spare:
            name, where = [*missing, *spare][0], "not there" if missing else "there, and not here"
            raise DamageError(f"{self.folder} is not what this rank holds: {name!r} is {where}")

    def _copy(self, pieces: Iterable[Piece]) -> None:
        body = self._body()
        places = {_range(claim): (claim, at) for claim, at in self.claims.items()}
        for piece in pieces:
            claim, at = places[_range(piece.claim)]
            piece.tensor.copy_(_view(body, claim, at))

    def _body(self) -> torch.Tensor:
        return torch.from_file(str(self.folder), shared=False, size=self._size, dtype=torch.uint8)


def size_of_body(claims: Iterable[Claim]) -> int:
    """Return the bytes of pieces in a file; a file is never empty."""
    return max(ALIGNMENT, sum(_padded(claim) for claim in claims))


def write_generation(path: Path, pieces: Mapping[Claim, Piece], facts: Mapping[str, Any]) -> None:
    """Write pieces to the file at `path`, which has room for them: devices copy straight to it.

    facts: run, plan, step, rank, replicas, state and identity.

    Raises OSError if there is no room for the header, ValueError or TypeError for facts that JSON cannot express.
    """
    size = size_of_body(pieces)
    body = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    placed, at = [], 0
    for claim, piece in pieces.items():
        _view(body, claim, at).copy_(piece.tensor.detach())
        placed.append([*claim.words, at])
        at += _padded(claim)
    own = {"version": _VERSION, "algorithm": ALGORITHM, "size": size, "digest": digest(body.numpy().data)}
    header = seal({**facts, **own, "pieces": placed})
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(header + len(header).to_bytes(_LENGTH, "little"))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the bytes before it."""
    with path.open("rb") as file:
        end = file.seek(0, 2) - _LENGTH
        file.seek(max(0, end))
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 0 < length <= min(end, LARGEST_JSON):
            raise ValueError(f"its header would have {length} of {end} bytes")
        file.seek(end - length)
        return unseal(file.read(length)), end - length


def _placed(words: Iterable[Sequence[Any]], size: int) -> Iterable[tuple[Claim, int]]:
    """Yield the claims of a header with their places. Raises ValueError for one that is not within `size` bytes."""
    for *each, at in words:
        claim = Claim.of(each)
        shape, within = [*claim.shape], [*claim.within.offsets, *claim.within.sizes]
        for number in (claim.start, claim.stop, at, *shape, *within):
            whole_number(number, limit=LARGEST_BYTES)
        is_plain = all(isinstance(key, str) for key in claim.path) and isinstance(claim.dtype, torch.dtype)
        if not is_plain or not claim.start <= claim.stop <= claim.within.numel or at % ALIGNMENT:
            raise ValueError(f"a piece {each!r} at byte {at}")
        if at + claim.nbytes > size:
            raise ValueError(f"{claim.name!r} ends at byte {at + claim.nbytes} of {size}")
        yield claim, at


def _range(claim: Claim) -> tuple[Any, ...]:
    """Return what identifies a piece; its dtype may be another one when it is loaded."""
    return claim.path, claim.shape, claim.within, claim.start, claim.stop


def _view(body: torch.Tensor, claim: Claim, at: int) -> torch.Tensor:
    return body[at : at + claim.nbytes].view(claim.dtype)


def _padded(claim: Claim) -> int:
    return -(-claim.nbytes // ALIGNMENT) * ALIGNMENT
