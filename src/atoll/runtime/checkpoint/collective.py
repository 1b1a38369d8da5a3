"""What a save and a load share: whether there are other ranks, and one error on all of them.

Distributed Checkpoint gathers what its hooks raise and raises it everywhere, pickled. An exception
that does not survive pickling would break the gathering itself and leave the other ranks waiting,
so every hook runs under `picklable`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from atoll.errors import CheckpointError, DamageError, RankError, RunError, UserError


def alone() -> bool:
    """Whether this process has no other ranks to agree with."""
    return not (dist.is_available() and dist.is_initialized())


@contextmanager
def quiet() -> Iterator[None]:
    """Alone, Distributed Checkpoint warns that it is used without torch.distributed: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def picklable() -> Iterator[None]:
    """Turn any exception into a CheckpointError (the user's to mend) or a RunError, made of text alone."""
    try:
        yield
    except DamageError as error:
        raise DamageError(str(error)) from error
    except UserError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:
        text = str(error).strip() or "no message"
        raise RunError(f"{type(error).__name__}: {text}") from error


def raise_everywhere(failure: CheckpointException, doing: str) -> NoReturn:
    """Raise what the ranks gathered: the same text on each of them.

    DamageError or CheckpointError if every failing rank says so, otherwise a RankError of the lowest rank that broke.
    An interruption (Ctrl-C on one rank) is passed on as itself.
    """
    errors = {rank: failure.failures[rank][0] for rank in sorted(failure.failures)}
    for error in errors.values():
        if not isinstance(error, Exception):
            raise error from failure
    broken = {rank: error for rank, error in errors.items() if not isinstance(error, UserError)}
    if broken:
        rank, error = next(iter(broken.items()))
        raise RankError(f"{doing}: rank {rank} failed: {error}", rank=rank) from failure
    texts = list(dict.fromkeys(str(error) for error in errors.values()))
    kind = DamageError if all(isinstance(error, DamageError) for error in errors.values()) else CheckpointError
    raise kind(f"{doing}: {listing(texts)}") from failure


def listing(problems: Sequence[str], limit: int = 8) -> str:
    """The first problems, one a line if there are several, and how many more there are."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"\n  {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"\n  and {len(problems) - limit} more")
    return f"{len(problems)} problems{''.join(lines)}"
