"""Formulas of transformers against published ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.prediction.cost import FusedAttention, Kernel, Pass, Product, Transformer, Use, Work
from atoll.prediction.cost.implementation import DECODER, LLAMA, MEGATRON, Implementation
from atoll.prediction.cost.kernels import Exchange
from atoll.prediction.cost.layer import UNALIGNED

GPT3 = Transformer.gpt(layers=96, hidden=12288, heads=96, vocabulary=51200, positions=2048)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (Transformer.gpt(layers=12, hidden=768, heads=12, vocabulary=50257, positions=1024), 124_439_808),
        (Transformer.llama(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000), 6_738_415_616),
        (
            Transformer.llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256),
            8_030_261_248,
        ),
        (
            Transformer.llama(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocabulary=128256),
            405_853_388_800,
        ),
    ],
    ids=["GPT-2 small", "Llama 7B", "Llama 3 8B", "Llama 3 405B"],
)
def test_parameters_are_those_of_the_published_models(model: Transformer, parameters: int) -> None:
    assert model.parameters == parameters


def work(model: Transformer, at: int = 1, **use: object) -> Work:
    given: dict[str, object] = {"samples": 2, "sequence": 2048, "compute": "float16", **use}
    return model.workload.blocks[at].work(Use(**given))  # type: ignore[arg-type]


def flops(kernels: Iterable[Kernel]) -> float:
    return sum(each.flops for each in kernels if isinstance(each, Product | FusedAttention))


@pytest.mark.parametrize("tensor", [1, 8])
def test_operations_are_those_of_megatron(tensor: int) -> None:
    """96 B s l h² (1 + s / 6h + V / 16 l h) with all of a layer recomputed (arXiv 2104.04473, section 5.1)."""
    b, s, h, layers, vocabulary = 2, 2048, GPT3.hidden, GPT3.layers, GPT3.vocabulary
    expected = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    layer = work(GPT3, recompute="block", attention="eager", tensor=tensor)
    head = work(GPT3, -1, recompute="block", tensor=tensor)
    own = [flops((*each.forward, *each.backward, *each.weights)) for each in (layer, head)]
    assert tensor * (layers * own[0] + own[1]) == pytest.approx(expected, rel=1e-12)


def test_layers_split_by_outputs_alone_gather_each_of_them_and_keep_what_one_rank_keeps() -> None:
    """As models without a plan for tensor parallelism are run: GPT-2 in transformers."""
    model = replace(GPT3, implementation=replace(MEGATRON, splits="gathered"))
    one, two = work(model), work(model, tensor=2)
    assert two.kept == one.kept
    norms = 4 * GPT3.hidden
    assert 2 * (two.parameters - norms) == one.parameters - norms

    linear = 2.0 * 4096 * model.workload.blocks[1].matrices  # type: ignore[attr-defined]
    assert flops(one.forward) - flops(two.forward) == flops(one.backward) - flops(two.backward) == linear / 2
    assert flops(two.weights) == linear / 2

    outputs, inputs = 3 + 1 + 4 + 1, 1 + 1 + 1 + 4  # of queries, keys and values; their end; up; down
    element = 2 * 4096 * GPT3.hidden
    assert exchanged(two.forward) == {"all-gather": outputs * element}
    assert exchanged(two.backward) == {"all-reduce": inputs * element}
    assert exchanged(one.forward) == exchanged(one.backward) == {}

    again = work(model, tensor=2, recompute="block")
    assert exchanged(again.backward) == {**exchanged(two.forward), **exchanged(two.backward)}
    with pytest.raises(ConfigError, match="sequence_parallel"):
        work(model, tensor=2, sequence_parallel=True)


def exchanged(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Bytes by kind of collective."""
    found: dict[str, int] = {}
    for kernel in kernels:
        if isinstance(kernel, Exchange):
            found[kernel.kind] = found.get(kernel.kind, 0) + kernel.nbytes
    return found


def test_fused_causal_attention_takes_half_the_operations_and_the_backward_two_and_a_half_times_those() -> None:
    eager, flash = work(GPT3, attention="eager"), work(GPT3)
    scores = 4.0 * 2 * 2048**2 * GPT3.hidden
    assert flops(eager.forward) - flops(flash.forward) == pytest.approx(scores / 2)
    assert flops(eager.backward) - flops(flash.backward) == pytest.approx(2 * scores - 1.25 * scores)
    assert flops(eager.weights) == flops(flash.weights)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_are_those_of_korthikanti(tensor: int, parallel: bool) -> None:
    """s b h (10 + 24/t + 5 a s / h t), or s b h (34 / t + 5 a s / h t) with sequence parallelism (arXiv 2205.05198)."""
    b, s, h, a = 2, 2048, GPT3.hidden, GPT3.heads
    kept = work(GPT3, attention="eager", tensor=tensor, sequence_parallel=parallel).kept
    whole = (34 / tensor) if parallel else 10 + 24 / tensor
    assert kept == pytest.approx(s * b * h * (whole + 5 * a * s / (h * tensor)))
    selective = work(GPT3, attention="eager", tensor=tensor, sequence_parallel=parallel, recompute="selective")
    assert selective.kept == pytest.approx(s * b * h * whole)
    recomputed = work(GPT3, attention="eager", tensor=tensor, sequence_parallel=parallel, recompute="block")
    assert recomputed.kept == 2 * s * b * h // (tensor if parallel else 1)


def test_a_split_backward_keeps_inputs_and_gradients_of_linear_layers() -> None:
    b, s, h = 2, 2048, GPT3.hidden
    kept = work(GPT3).kept_for_weights
    inputs, gradients = h + h + h + 4 * h, 3 * h + h + 4 * h + h
    assert kept == 2 * b * s * (inputs + gradients)
    recomputed = work(GPT3, recompute="block").kept_for_weights
    assert recomputed == kept


def test_a_chunked_loss_keeps_no_logits() -> None:
    whole, chunked = work(GPT3, -1), work(GPT3, -1, chunks=8)
    logits = 2 * 2048 * GPT3.vocabulary
    assert whole.kept - chunked.kept == 4 * logits - 2 * 2 * 2048 * GPT3.hidden
    assert chunked.peak == (4 + 2) * logits // 8
    assert flops((*whole.forward, *whole.backward, *whole.weights)) == pytest.approx(
        flops((*chunked.forward, *chunked.backward, *chunked.weights))
    )
    assert work(GPT3, -1, loss="fused").kept == whole.kept - 2 * logits


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads = 96 cannot be split evenly over tensor = 5 ranks"):
        work(GPT3, tensor=5)
    grouped = Transformer.llama(layers=1, hidden=64, heads=8, kv_heads=2, ffn=96, vocabulary=100, width=3)
    with pytest.raises(ConfigError, match="kv_heads x width = 6 cannot be split evenly over tensor = 4 ranks"):
        work(grouped, tensor=4)


def test_megatrons_softmax_is_one_kernel_for_a_multiple_of_four() -> None:
    """Two heads of a sample are not; two samples make it one again."""
    sizes = Transformer.gpt(layers=1, hidden=1024, heads=16, vocabulary=50304, positions=1024)

    def kernels(samples: int) -> int:
        use = Use(samples=samples, sequence=1024, tensor=8, compute="float16", attention="eager")
        work = sizes.workload.blocks[1].work(use)
        return sum(each.kernels for each in work.forward if isinstance(each, Pass))

    assert kernels(1) == kernels(2) + 4


@pytest.mark.parametrize(("compute", "nbytes"), [("float32", 4), ("bfloat16", 4 + 2), ("float64", 4 + 8)])
def test_a_softmax_in_fp32_is_kept_beside_its_cast(compute: str, nbytes: int) -> None:
    """As torch saves it: the softmax for its own backward, and the cast for that of the product with the values. In
    fp32 the cast is the same tensor."""
    sizes = Transformer.llama(layers=1, hidden=64, heads=4, ffn=96, vocabulary=100)
    scores = 2 * 4 * 32**2
    kept = {
        (attention, softmax): work(
            replace(sizes, implementation=replace(LLAMA, softmax=softmax)),
            sequence=32,
            compute=compute,
            attention=attention,
        ).kept
        for attention in ("eager", "flash")
        for softmax in ("fp32", "compute")
    }
    item = {"float32": 4, "bfloat16": 2, "float64": 8}[compute]
    log_sums = max(4, item) * 2 * 4 * 32
    assert kept["eager", "fp32"] - (kept["flash", "fp32"] - log_sums) == nbytes * scores
    assert kept["eager", "compute"] - (kept["flash", "compute"] - log_sums) == item * scores

    hidden = torch.randn(2, 4, 32, 32, dtype=getattr(torch, compute), requires_grad=True)
    values = torch.randn(2, 4, 32, 16, dtype=hidden.dtype)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = hidden.softmax(-1, dtype=torch.float32).to(hidden.dtype) @ values.requires_grad_()
    assert sum(saved.values()) - values.nbytes == nbytes * scores, out.shape


def test_heads_that_begin_off_16_bytes_are_not_taken_by_tensor_cores() -> None:
    """14336 over 128 heads is 112 elements of two bytes, 13824 over 128 is 108; Atoll's own attention is not judged."""

    def shares(hidden: int, implementation: Implementation = MEGATRON) -> set[float]:
        sizes = Transformer.gpt(layers=1, hidden=hidden, heads=128, vocabulary=50304, positions=1024)
        sizes = replace(sizes, implementation=implementation)
        work = sizes.workload.blocks[1].work(Use(samples=1, sequence=1024, compute="float16", attention="eager"))
        kernels = (*work.forward, *work.backward)
        return {each.share for each in kernels if isinstance(each, Product) and each.count > 1}

    assert shares(14336) == {1.0}
    assert shares(13824) == {UNALIGNED}
    assert shares(13824, DECODER) == {1.0}


def test_bert_has_the_parameters_of_both_of_its_heads() -> None:
    # BERT large for pre-training in transformers has 336,226,108. Megatron's differs by types and by one norm.
    large = Transformer.bert(layers=24, hidden=1024, heads=16, vocabulary=30522, positions=512)
    assert large.parameters == 336_226_108 - 2 * 1024 - 2 * 1024


def test_slices_of_layers_alone_keep_keys_and_values_of_the_whole_sequence() -> None:
    model = Transformer.llama(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=256)
    sliced = [work(model, at, slice=(0, 512)).keys for at in range(len(model.workload.blocks))]
    layer = 2 * 2 * 2048 * 2 * 2 * 16  # bytes, samples, positions, keys and values, heads, width
    assert sliced == [0, layer, layer, 0]
    assert [work(model, at).keys for at in range(len(model.workload.blocks))] == [0] * 4


def test_an_eager_loss_of_logits_in_half_precision_casts_them_and_keeps_two_gradients() -> None:
    """Of 4096 tokens and 256 ids in fp32: the cast in F; in I the gradients of the log-softmax and of its input."""
    model = Transformer.decoder(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=256)
    precise = 4 * 2 * 2048 * 256
    half, single = (work(model, -1, loss="eager", compute=compute) for compute in ("float16", "float32"))
    assert (half.peak, half.loss) == (precise, 2 * precise)
    assert (single.peak, single.loss) == (0, 2 * precise)
