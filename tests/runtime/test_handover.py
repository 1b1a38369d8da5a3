"""Weights to processes without an engine: of another world, of other sizes, and what is not a stream."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atoll.base.errors import RankError, RunError
from atoll.runtime.handover import StreamedTensor, copy_weights, give, take, weight_group
from atoll.runtime.rendezvous import LOOPBACK, host_store
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.pool import RankPool
from atoll.testing.tiny import TinyConfig

LIMIT = timedelta(minutes=10)


def train(case: Case, port: int, receivers: int) -> dict[str, Tensor]:
    """A rank of the trainer: rank 1 gives what it gets. Return the rank's own parameters."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    stream = engine.stream(to=1, dtype=torch.float32, bucket=4000)
    if engine.place.rank == 1:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
        give(stream, weight_group(store, 0, 1 + receivers, timeout=LIMIT))
    else:
        assert not list(stream)
    with engine.full_parameters() as values:
        own = {name: value.float() for name, value in values.items()}
    engine.close()
    return own


def sample(port: int, receivers: int) -> dict[str, Tensor]:
    """A process of the sampler."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
    group = weight_group(store, 1 + dist.get_rank(), 1 + receivers, timeout=LIMIT)
    return {name: tensor for name, _, _, tensor in take(group)}


@pytest.mark.parametrize("receivers", [1, 3])
def test_another_world_receives_what_is_streamed(receivers: int) -> None:
    store = host_store(LOOPBACK, 0)
    case = Case("GGG", pipeline=2, intra=2, model=TinyConfig(layers=3))
    with RankPool() as pool, ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(pool.run, sample, receivers, store.port, receivers, timeout=300)
        own = run_ranks(train, 4, case, store.port, receivers, timeout=300)
        found = sampled.result()
    every = {name: value for each in own for name, value in each.items()}
    for each in found:
        assert each.keys() == every.keys()
        assert all(torch.equal(each[name], value) for name, value in every.items())


def sample_in_parts(port: int, receivers: int) -> dict[str, Tensor]:
    """A process of a tensor-parallel sampler: it copies its own parts of some layers, and others whole."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
    group = weight_group(store, 1 + dist.get_rank(), 1 + receivers, timeout=LIMIT)
    model = TinyConfig(layers=3).build()
    styles = {
        f"{at}.{name}": style() for at in (1, 3) for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    model = parallelize_module(model, init_device_mesh("cpu", (receivers,)), styles)
    copied = copy_weights(take(group), model)
    found = model.state_dict()
    assert sorted(copied) == sorted(found)
    split = [value for value in found.values() if isinstance(value, DTensor)]
    assert any(value.to_local().numel() < value.numel() for value in split)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def test_a_tensor_parallel_world_copies_its_parts() -> None:
    store = host_store(LOOPBACK, 0)
    case = Case("GGG", pipeline=2, intra=2, model=TinyConfig(layers=3))
    with RankPool() as pool, ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(pool.run, sample_in_parts, 2, store.port, 2, timeout=300)
        own = run_ranks(train, 4, case, store.port, 2, timeout=300)
        found = sampled.result()
    every = {name: value for each in own for name, value in each.items()}
    for each in found:
        assert each.keys() == every.keys()
        assert all(torch.equal(each[name], value) for name, value in every.items())


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("weigth", torch.zeros(2, 3), r"weigth of shape \(2, 3\) has no place in Linear: it has none of this name"),
        ("weight", torch.zeros(3, 2), r"weight of shape \(3, 2\) has no place in Linear: it has one of \(2, 3\)"),
    ],
)
def test_what_a_model_has_no_place_for_is_refused(name: str, tensor: Tensor, said: str) -> None:
    with pytest.raises(RunError, match=said):
        copy_weights([of(name, tensor)], nn.Linear(3, 2))


def of(name: str, tensor: Tensor) -> StreamedTensor:
    return StreamedTensor(name, tensor.dtype, tensor.shape, tensor)


def exchange() -> list[str]:
    """Give tensors that share memory, that do not, without elements, without dimensions, of any dtype."""
    shared = torch.arange(24, dtype=torch.int32)
    given = [
        of("a", shared[8:]),
        of("b", shared[:4].view(2, 2)),
        of("c", torch.ones((), dtype=torch.bool)),
        of("d", torch.empty(0, 3, dtype=torch.bfloat16)),
        of("e", torch.arange(3.0).to(torch.float8_e4m3fn)),
        of("f", torch.tensor(2.0, dtype=torch.float64)),
    ]
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        give(given, group)
        return []
    found = list(take(group))
    for one, other in zip(given, found, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one.tensor.double(), other.tensor.double())
    return [each.name for each in found]


def test_any_tensors_of_one_world() -> None:
    assert run_ranks(exchange, 2) == [[], ["a", "b", "c", "d", "e", "f"]]


def deceive(rows: Any, nbytes: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        list(take(group))
        return
    options = dist.BroadcastOptions()
    options.rootRank = 0
    text = json.dumps(rows).encode()
    for tensor in (torch.tensor([len(text), nbytes]), torch.frombuffer(bytearray(text), dtype=torch.uint8)):
        group.broadcast([tensor], options).wait()


@pytest.mark.parametrize(
    "rows",
    [
        [["a", "float32", [3], 0]],  # twelve bytes of eight
        [["a", "float32", [-1], 0]],
        [["a", "float32", [1], 2]],  # not where a float32 may be
        [["a", "load", [1], 0]],
        [["a", "float32", [1.0], 0]],
        [["a", "float32"]],
        {"a": 1},
        7,
    ],
    ids=str,
)
def test_what_is_no_stream_is_refused(rows: Any) -> None:
    with pytest.raises(RankError, match="process 0 of the group gives no weights: its header is"):
        run_ranks(deceive, 2, rows, 8)


def test_a_header_has_a_limit() -> None:
    with pytest.raises(RankError, match="a header of"):
        run_ranks(deceive, 2, [["a", "float32", [1], 0]], -1)


def test_what_does_not_lie_in_a_piece_is_refused() -> None:
    with pytest.raises(RunError, match="a is not contiguous"):
        give([of("a", torch.ones(2, 2).T)], None)  # type: ignore[arg-type]
