"""Agreement of the ranks of a save or load: rank 0 collects the results, decides, and answers each rank.

Messages are JSON. Distributed Checkpoint's own collectives use pickle, so anyone who reaches a rank's port could make
it run code. One error on any rank becomes the same error on all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from atoll.base.documents import parse_json
from atoll.base.errors import CheckpointError, DamageError, RankError, UserError

_Failure = tuple[str, str]
"""Kind of an error, one of the four below, and its text."""

PART = 1 << 26
"""Bytes of a message from one rank to another, at most."""
DAMAGED, MENDABLE, INTERRUPTED, BROKEN = "damaged", "mendable", "interrupted", "broken"


class Meeting:
    """The ranks of a process group (default: all); without torch.distributed, this process alone.

    A group whose backend is NCCL sends through the current CUDA device.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = 0, 1
        self._device = torch.device("cpu")
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if dist.get_backend(group) == dist.Backend.NCCL:
                self._device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def apart(cls, timeout: timedelta) -> Meeting:
        """Return a meeting of all ranks on a gloo group of its own, for a thread beside training. Every rank calls
        it."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timeout))

    def round(
        self, lost: str, act: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]] | None = None
    ) -> Any:
        """Call `act` on every rank, and `decide` with the results on rank 0. Return this rank's answer.

        lost: what failed if the round fails; the error begins with it.  decide: returns an answer for each rank; None
        answers None. Results and answers are JSON.

        Raises the error of `_raise` on every rank.
        """
        value, failure = _attempt(act)
        heard = self._gather(json.dumps([value, failure]).encode())
        content = b""
        contents: list[bytes] = []
        if self.rank == 0:
            said = [parse_json(each) for each in heard]
            failures = {rank: found for rank, (_, found) in enumerate(said) if found is not None}
            answers: Sequence[Any] = [None] * self.size
            if decide is not None and not failures:
                found, failure = _attempt(lambda: decide([value for value, _ in said]))
                failures, answers = ({0: failure}, answers) if failure is not None else ({}, found)
            contents = [json.dumps([answer, failures]).encode() for answer in answers]
        content = self._scatter(contents)
        answer, failures = parse_json(content)
        if failures:
            _raise(lost, {int(rank): (kind, text) for rank, (kind, text) in failures.items()})
        return answer

    def hand(self, content: torch.Tensor, *, source: int, target: int) -> None:
        """Copy bytes in host memory from one rank to another, `PART` at a time. Both call it, no other rank."""
        for part in content.split(PART):
            own = part.to(self._device)
            if self.rank == source:
                dist.send(own, group=self._group, group_dst=target)
            else:
                dist.recv(own, group=self._group, group_src=source)
                part.copy_(own) if own is not part else None

    def _gather(self, content: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, and nothing on the others."""
        if self.size == 1:
            return [content]
        length = torch.tensor([len(content)], device=self._device)
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self._group)
        own = self._padded(content, int(length))
        found = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, found, group=self._group, group_dst=0)
        return [_content(each) for each in found or ()]

    def _scatter(self, contents: Sequence[bytes]) -> bytes:
        """Return rank 0's message to this rank."""
        if self.size == 1:
            return contents[0]
        length = torch.tensor([max(map(len, contents), default=0)], device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        own = self._padded(b"", int(length))
        each = [self._padded(content, int(length)) for content in contents] or None
        dist.scatter(own, each, group=self._group, group_src=0)
        return _content(own)

    def _padded(self, content: bytes, length: int) -> torch.Tensor:
        """Return the content's length in eight bytes, the content, and zeros up to `length`."""
        buffer = bytearray(len(content).to_bytes(8, "little") + content.ljust(length, b"\0"))
        return torch.frombuffer(buffer, dtype=torch.uint8).to(self._device)


def _content(buffer: torch.Tensor) -> bytes:
    found = buffer.cpu().numpy().tobytes()
    return found[8 : 8 + int.from_bytes(found[:8], "little")]


def _attempt(act: Callable[[], Any]) -> tuple[Any, _Failure | None]:
    """Return the result of a call, or the error it raises."""
    try:
        return act(), None
    except DamageError as error:
        return None, (DAMAGED, str(error))
    except UserError as error:
        return None, (MENDABLE, str(error))
    except Exception as error:
        return None, (BROKEN, f"{type(error).__name__}: {str(error).strip() or 'no message'}")
    except KeyboardInterrupt:
        return None, (INTERRUPTED, "")


def _raise(lost: str, failures: dict[int, _Failure]) -> NoReturn:
    """Raise the error of the ranks that failed, by rank: the same text on every rank.

    KeyboardInterrupt if any was interrupted. DamageError or CheckpointError if every error is one, otherwise a
    RankError of the lowest rank with another error.
    """
    kinds = {kind for kind, _ in failures.values()}
    if INTERRUPTED in kinds:
        raise KeyboardInterrupt
    for rank, (kind, text) in sorted(failures.items()):
        if kind == BROKEN:
            raise RankError(f"{lost}: rank {rank} failed: {text}", rank=rank)
    texts = list(dict.fromkeys(text for _, (_, text) in sorted(failures.items())))
    raise (DamageError if kinds == {DAMAGED} else CheckpointError)(f"{lost}: {list_problems(texts)}")


def list_problems(problems: Sequence[str], limit: int = 8) -> str:
    """Return the first problems, one per line if there are several, and the number of further ones."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"\n  {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"\n  and {len(problems) - limit} more")
    return f"{len(problems)} problems{''.join(lines)}"
