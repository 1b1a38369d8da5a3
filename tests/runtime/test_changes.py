"""Weights that processes hold: what of them travels, that both sides have equal bits afterwards, and versions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.base.errors import RankError, RunError
from atoll.runtime.changes import HeldWeights
from atoll.runtime.handover import StreamedTensor, WeightForm, WeightPart, give, take, weight_group
from atoll.runtime.rendezvous import LOOPBACK, host_store
from atoll.runtime.vllm_worker import WeightReceiver
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.pool import RankPool
from atoll.testing.tiny import TinyConfig

LIMIT = timedelta(minutes=10)
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


def of(name: str, tensor: Tensor) -> StreamedTensor:
    return StreamedTensor(name, tensor.dtype, tensor.shape, tensor)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def pass_on(giver: HeldWeights, taker: HeldWeights, weights: list[StreamedTensor]) -> list[WeightPart]:
    """Give weights from one to the other, through headers and bytes, and return what travels."""
    found = []
    for parts, memory in giver.messages(weights):
        copy = memory.clone()  # the receiver's own
        for part in parts:
            read = WeightPart.of(part.to_json(), copy.numel())
            assert read == part
            shown = taker.take(read, copy)
            assert shown.tensor is taker.weights[part.name]
            found.append(part)
    return found


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_both_sides_hold_what_was_streamed(data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    sizes = data.draw(st.lists(st.sampled_from([(), (0,), (1,), (7, 3), (40, 50), (300,)]), min_size=1, max_size=4))
    kinds = [data.draw(st.sampled_from(DTYPES)) for _ in sizes]
    now = [
        torch.randint(2, size, generator=draw).to(kind)
        if kind in (torch.int64, torch.bool)
        else torch.randn(size, generator=draw).to(kind)
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    giver, taker = HeldWeights(), HeldWeights()
    for _ in range(data.draw(st.integers(1, 4))):
        weights = [of(str(at), each.clone()) for at, each in enumerate(now)]
        if data.draw(st.booleans()) and len({each.dtype for each in now}) == 1:  # in one piece of memory, as a bucket
            flat = torch.cat([each.reshape(-1) for each in now])
            views = zip(flat.split([each.numel() for each in now]), sizes, strict=True)
            weights = [of(str(at), view.view(size)) for at, (view, size) in enumerate(views)]
        pass_on(giver, taker, weights)
        for at, each in enumerate(now):
            assert bits(giver.weights[str(at)]) == bits(taker.weights[str(at)]) == bits(each)
        fresh = HeldWeights({str(at): each.clone() for at, each in enumerate(now)})
        assert giver.digest == taker.digest == fresh.digest
        share = data.draw(st.sampled_from([0.0, 0.004, 0.1, 0.6, 1.0]))
        for each in now:
            where = torch.rand(each.shape, generator=draw) < share
            each[where] = (each[where].to(torch.float64) + 1.0).to(each.dtype)


@pytest.mark.parametrize(
    ("changed", "form"), [(1, WeightForm.NUMBERS), (30, WeightForm.NUMBERS), (40, WeightForm.BITS), (995, None)]
)
def test_the_form_of_the_fewest_bytes_travels(changed: int, form: WeightForm | None) -> None:
    """With 1000 elements of two bytes an index takes four bytes, and a bit for each element 125."""
    old = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = old.clone()
    new[torch.randperm(1000, generator=torch.Generator().manual_seed(2))[:changed]] += 1.0
    giver, taker = HeldWeights(), HeldWeights()
    assert [part.form for part in pass_on(giver, taker, [of("a", old)])] == [WeightForm.WHOLE]
    (part,) = pass_on(giver, taker, [of("a", new)])
    assert part.form == (form or WeightForm.WHOLE)
    assert part.nbytes <= min(2000, 125 + 3 + 2 * changed, 6 * changed + 12)
    assert pass_on(giver, taker, [of("a", new.clone())]) == []
    assert giver.digest == taker.digest


def test_the_sign_of_zero_and_nan_are_bits() -> None:
    giver, taker = HeldWeights(), HeldWeights()
    pass_on(giver, taker, [of("a", torch.tensor([0.0, float("nan"), 1.0] * 20))])
    assert pass_on(giver, taker, [of("a", torch.tensor([0.0, float("nan"), 1.0] * 20))]) == []
    assert len(pass_on(giver, taker, [of("a", torch.tensor([-0.0, float("nan"), 1.0] * 20))])) == 1
    assert torch.signbit(taker.weights["a"][0])


def test_versions_tell_names_values_places_and_dtypes_apart() -> None:
    value = torch.arange(6.0)
    other = [
        {"b": value},
        {"a": value.flip(0)},
        {"a": value.view(2, 3)},
        {"a": value.double()},
        {"a": value + 1e-6},
        {"a": value, "c": torch.zeros(0)},
    ]
    found = [HeldWeights(each).digest for each in ({"a": value}, *other)]
    assert len(set(found)) == len(found)
    assert HeldWeights({"a": value, "b": value}).digest == HeldWeights({"b": value, "a": value.clone()}).digest


def test_what_is_held_may_be_cleared_and_has_a_new_shape() -> None:
    giver, taker = HeldWeights(), HeldWeights()
    pass_on(giver, taker, [of("a", torch.ones(4)), of("b", torch.ones(2))])
    assert [part.form for part in pass_on(giver, taker, [of("a", torch.ones(2, 2))])] == [WeightForm.WHOLE]
    giver.clear()
    taker.clear()
    assert giver.digest == taker.digest == HeldWeights().digest
    assert [part.name for part in pass_on(giver, taker, [of("b", torch.ones(2))])] == ["b"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (WeightPart("b", torch.float32, torch.Size([4]), 0, WeightForm.NUMBERS, 1), "which is not held"),
        (WeightPart("a", torch.float32, torch.Size([5]), 0, WeightForm.NUMBERS, 1), "which is not held"),
        (WeightPart("a", torch.float32, torch.Size([4]), 0, WeightForm.NUMBERS, 1), "does not have"),  # number 7
        (WeightPart("a", torch.float32, torch.Size([4]), 0, WeightForm.BITS, 2), "does not have"),  # three bits
    ],
)
def test_changes_that_do_not_fit_are_refused(part: WeightPart, said: str) -> None:
    held = HeldWeights({"a": torch.zeros(4)})
    before = held.digest
    memory = torch.zeros(64, dtype=torch.uint8)
    memory[0] = 7
    with pytest.raises(RunError, match=said):
        held.take(part, memory)
    assert held.digest == before
    assert not held.weights["a"].any()


def test_elements_of_sixteen_bytes_are_refused() -> None:
    with pytest.raises(RunError, match="an element has 16 bytes"):
        HeldWeights({"a": torch.zeros(2, dtype=torch.complex128)})


# ---- between processes

CASE = Case("GGG", pipeline=2, intra=2, lr=1e-4, model=TinyConfig(layers=3))
TIMES = 3


def train(port: int, size: int) -> tuple[list[int], dict[str, Tensor]]:
    """A rank of the trainer: the first gives changes. Return the bytes that it gave, and its own parameters."""
    engine = CASE.engine()
    given, held, group = [], HeldWeights(), None
    if engine.place.rank == 0:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
        group = weight_group(store, 0, size, timeout=LIMIT)
    for step in range(TIMES):
        stream = engine.stream(to=0, dtype=torch.bfloat16, bucket=4000)
        if group is None:
            assert not list(stream)
        else:
            given.append(give(stream, group, held=held))
        engine.step(CASE.share(engine, step))
    held.clear()  # the other side still holds something
    stream = engine.stream(to=0, dtype=torch.bfloat16)
    if group is None:
        list(stream)
    else:
        with pytest.raises(RunError, match="different versions"):
            give(stream, group, held=held)
    stream = engine.stream(to=0, dtype=torch.bfloat16)
    if group is None:
        list(stream)
    else:
        given.append(give(stream, group, held=held))
    with engine.full_parameters() as values:
        own = {name: value.bfloat16() for name, value in values.items()}
    engine.close()
    return given, own


def hold(port: int, size: int) -> tuple[list[int], dict[str, Tensor]]:
    """A process of the sampler."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
    group = weight_group(store, 1 + dist.get_rank(), size, timeout=LIMIT)
    held = HeldWeights()
    came = [len(list(take(group, held=held))) for _ in range(TIMES)]
    with pytest.raises(RunError, match="clear what is held on all of them"):
        list(take(group, held=held))
    held.clear()
    came.append(len(list(take(group, held=held))))
    return came, held.weights


def test_a_sampler_takes_changes_and_refuses_those_of_another_version() -> None:
    store = host_store(LOOPBACK, 0)
    with RankPool() as pool, ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(pool.run, hold, 2, store.port, 3, timeout=300)
        trained = run_ranks(train, 4, store.port, 3, timeout=300)
        found = sampled.result()
    given = trained[0][0]
    assert max(given[1:TIMES]) < 0.7 * given[0]  # a step of 1e-4 leaves most elements of bf16 as they were
    assert given[TIMES] == given[0]
    every = {name: value for _, own in trained for name, value in own.items()}
    for came, weights in found:
        assert came[0] == came[TIMES] == len(weights)
        assert weights.keys() == every.keys()
        assert all(torch.equal(weights[name], value) for name, value in every.items())


def without() -> None:
    """Rank 0 gives a change, as if all held what it is of, and rank 1 takes it without holding anything."""
    group: Any = dist.group.WORLD
    if group.rank() == 0:
        held = HeldWeights()
        list(held.messages([of("a", torch.zeros(100))]))
        parts, memory = next(held.messages([of("a", torch.arange(100) // 99 * 1.0)]))
        assert parts[0].form == WeightForm.NUMBERS
        given = SimpleNamespace(messages=lambda weights: [(parts, memory)], digest="00" * 32)
        give([], SimpleNamespace(rank=group.rank, broadcast=group.broadcast, allreduce=_all_agree), held=given)
    else:
        group.broadcast([torch.empty(32, dtype=torch.uint8)], dist.BroadcastOptions()).wait()
        list(take(group))


def _all_agree(tensors: list[Tensor], options: Any) -> Any:
    return SimpleNamespace(wait=lambda: None)


def test_changes_need_what_is_held() -> None:
    with pytest.raises(RankError, match="gives changes: take them with what is `held`"):
        run_ranks(without, 2)


# ---- in a worker of vLLM


class Worker:
    """An imitation of `vllm.v1.worker.gpu_worker.Worker`, with the attributes that the extension uses."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.loaded: dict[str, Tensor] = {}
        self.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))

    def _load(self, weights: Any) -> set[str]:
        """As models of vLLM do: from pairs, some or all, and a model's own part of each."""
        found = {name: tensor.clone() for name, tensor in weights}
        self.loaded |= found
        return set(found)


class ExtendedWorker(Worker, WeightReceiver):
    """As vLLM makes it: the class of `worker_extension_cls` becomes a base of the worker's."""


def serve(port: int, size: int, changes: bool) -> tuple[list[int], dict[str, Tensor]]:
    worker = ExtendedWorker(dist.get_rank())
    with pytest.raises(RunError, match="call meet_trainer first"):
        worker.take_weights()
    worker.meet_trainer(LOOPBACK, port, 1, size)
    found = [worker.take_weights(changes=changes) for _ in range(2)]
    return found, worker.loaded


def provide(port: int, size: int, changes: bool) -> dict[str, Tensor]:
    group = weight_group(dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT), 0, size, timeout=LIMIT)
    held = HeldWeights() if changes else None
    first = {"a": torch.ones(100), "b": torch.arange(3.0)}
    second = {**first, "a": torch.ones(100).index_fill(0, torch.tensor([5]), 2.0)}
    for weights in (first, second):
        give([of(name, tensor.clone()) for name, tensor in weights.items()], group, held=held)
    return second


@pytest.mark.parametrize("changes", [False, True])
def test_workers_of_vllm_load_what_they_take(changes: bool) -> None:
    store = host_store(LOOPBACK, 0)
    with RankPool() as pool, ThreadPoolExecutor(1) as thread:
        served = thread.submit(pool.run, serve, 2, store.port, 3, changes, timeout=300)
        (wanted,) = run_ranks(provide, 1, store.port, 3, changes, timeout=300)
        for found, loaded in served.result():
            assert found == [2, 1 if changes else 2]
            assert loaded.keys() == wanted.keys()
            assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
