"""Workloads from models: what is counted is what is kept, and what the formulas say."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import FusedAttention, Kernel, Pass, Product, Ranks, Use, Work, Workload
from atoll.prediction.cost.kernels import Exchange
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Adapter, Decoder, DecoderConfig, adapter_for, count, transformer_of
from atoll.runtime.models.operations import kernel_of
from atoll.testing.tiny import TinyConfig
from tests.families import family_config

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "tie_word_embeddings": True},
    "qwen2": {**SIZES, "num_key_value_heads": 4},
    "qwen3": GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "gpt_neox": SIZES,
    "bert": SIZES,
}
DECODER = DecoderConfig(vocabulary=100, layers=3, hidden=64, heads=4, kv_heads=2, ffn=176)


def config_of(family: str, **options: Any) -> Any:
    if family == "decoder":
        return replace(DECODER, **options)
    return transformers.AutoConfig.for_model(family, **{**FAMILIES.get(family, GROUPED), **options})


def model_of(config: Any, device: str = "meta") -> nn.Module:
    kind = transformers.AutoModelForMaskedLM if config is not None and _is_masked(config) else None
    with torch.device(device):
        if isinstance(config, DecoderConfig):
            return Decoder(config)
        model: nn.Module = (kind or transformers.AutoModelForCausalLM).from_config(config)
        return model.train()


def _is_masked(config: Any) -> bool:
    return getattr(config, "model_type", None) == "bert"


def use_of(**options: Any) -> Use:
    return Use(**{"samples": 2, "sequence": 16, **options})


def flops(kernels: Iterable[Kernel]) -> float:
    return sum(each.flops for each in kernels if isinstance(each, Product | FusedAttention))


# ---- against real runs


class Kept:
    """Storages that a real forward keeps, by address."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.strangers = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.strangers and storage.nbytes():
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def really_kept(adapter: Adapter, run: range, hidden: Tensor) -> tuple[int, int]:
    """Bytes that blocks keep for the backward, and bytes of the gradients of their linear layers' outputs."""
    blocks = [adapter.blocks()[at].module for at in run]
    rows = hidden.shape[:2]
    batch = {"input_ids": torch.zeros(rows, dtype=torch.long), "labels": torch.zeros(rows, dtype=torch.long)}
    kept = Kept([*batch.values(), *(each for block in blocks for each in (*block.parameters(), *block.buffers()))])
    gradients = Kept([])

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        others = [each for each in (*args, *kwargs.values()) if each is not hidden]
        flat = [each for value in others for each in (value if isinstance(value, tuple) else (value,))]
        kept.strangers |= {each.untyped_storage().data_ptr() for each in flat if isinstance(each, Tensor)}

    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    linears = [each for block in blocks for each in block.modules() if type(each) is nn.Linear]
    handles += [each.register_full_backward_hook(lambda _, __, out: void(gradients.add(out[0]))) for each in linears]
    kept.add(hidden)
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        output = adapter.forward(run.start, run.stop, hidden, batch)
        if run.stop == len(adapter.blocks()):
            kept.add(output)
            output = adapter.loss(output, batch)
    output.backward(torch.ones_like(output))
    for handle in handles:
        handle.remove()
    return kept.nbytes, gradients.nbytes


def void(_: object) -> None:
    """Nothing, which leaves gradients as they are."""


REAL = [
    ("decoder", "float32", {}),
    ("decoder", "bfloat16", {"kv_heads": 4}),
    ("llama", "float32", {"attn_implementation": "eager"}),
    ("llama", "bfloat16", {"attn_implementation": "sdpa"}),
    ("llama", "bfloat16", {"attn_implementation": "eager"}),
    ("qwen3", "bfloat16", {"attn_implementation": "sdpa"}),
    ("gpt2", "float32", {"attn_implementation": "eager"}),
    ("gpt2", "float32", {"attn_implementation": "sdpa", "attn_pdrop": 0.0}),
    ("bert", "float32", {"attn_implementation": "eager"}),
    ("gpt_neox", "float32", {"attn_implementation": "sdpa"}),
]


@pytest.mark.wide(2)
@pytest.mark.parametrize(("family", "compute", "options"), REAL, ids=[f"{a}-{b}-{len(c)}" for a, b, c in REAL])
def test_what_is_counted_is_what_a_real_run_keeps(family: str, compute: str, options: dict[str, Any]) -> None:
    config = config_of(family, **options)
    model = model_of(config, "cpu").to(getattr(torch, compute))
    attention = "eager" if options.get("attn_implementation") == "eager" else "flash"
    workload = count(model, device="cpu")
    works = [block.work(use_of(compute=compute, attention=attention)) for block in workload.blocks]
    adapter, layers = adapter_for(model), workload.layers
    for run in (range(layers.start, layers.start + 1), range(layers.stop, len(works))):
        hidden = torch.randn(2, 16, 64, dtype=getattr(torch, compute)).requires_grad_()
        kept, pending = really_kept(adapter, run, hidden)
        assert sum(works[at].kept for at in run) == kept
        assert sum(each.nbytes for at in run for each in works[at].pending) == pending


# ---- against formulas


def parts(workload: Workload, use: Use) -> Iterator[tuple[str, list[Work]]]:
    """Works of the embedding, a layer and the head, each of which may be several blocks."""
    works, layers = [block.work(use) for block in workload.blocks], workload.layers
    yield "embedding", works[: layers.start]
    yield "first layer", works[layers.start : layers.start + 1]
    yield "last layer", works[layers.stop - 1 : layers.stop]
    yield "head", works[layers.stop :]


def measures(works: list[Work]) -> dict[str, float]:
    def of(kind: str) -> int:
        return sum(each.nbytes for work in works for each in getattr(work, kind))

    return {
        "parameters": sum(work.parameters for work in works),
        "matrices": sum(work.matrices for work in works),
        "saved": of("saved"),
        "again": of("again"),
        "pending": of("pending"),
        "until the loss": sum(work.kept_for_loss for work in works),
        "until W": sum(work.kept_for_weights for work in works),
        "wire": works[-1].wire,
        "loss": works[-1].loss,
        "F": flops(kernel for work in works for kernel in work.forward),
        "I": flops(kernel for work in works for kernel in work.backward),
        "W": flops(kernel for work in works for kernel in work.weights),
    }


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [*product(FAMILIES, ["flash", "eager"]), ("decoder", "flash")])
def test_formulas_agree_with_counting_to_the_byte(family: str, attention: str) -> None:
    config = config_of(family)
    counted, formulas = count(model_of(config)), transformer_of(config).workload
    assert counted.shared == formulas.shared
    ways = product([(1, 8), (2, 16)], ["bfloat16", "float32"], ["none", "selective", "block"])
    for (samples, sequence), compute, recompute in ways:
        use = Use(samples=samples, sequence=sequence, compute=compute, recompute=recompute, attention=attention)  # type: ignore[arg-type]
        both = zip(parts(counted, use), parts(formulas, use), strict=True)
        for (name, found), (_, expected) in both:
            assert measures(found) == measures(expected), (name, use)


@pytest.mark.slow
@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("family", "attention", "compute"),
    [
        (*each, compute)
        for each in [("decoder", "flash"), *product(["llama", "qwen3", "gpt_neox", "bert"], ["flash", "eager"])]
        for compute in ("bfloat16", "float32")
    ],
)
def test_formulas_of_divided_sequences_agree_with_counting_to_the_byte(
    family: str, attention: str, compute: str
) -> None:
    """Four ranks are more than there are heads of keys in most; one sample of one such head is no copy of it."""
    config = config_of(family)
    counted, formulas = count(model_of(config)), transformer_of(config).workload
    for divide, recompute in product((2, 4), ("none", "selective", "block")):
        options = {"compute": compute, "recompute": recompute, "attention": attention, "divide": divide}
        use = Use(samples=2, sequence=16, **options)  # type: ignore[arg-type]
        for (name, found), (_, expected) in zip(parts(counted, use), parts(formulas, use), strict=True):
            assert measures(found) == measures(expected), (name, use)
            assert sent(found) == sent(expected), (name, use)


def sent(works: list[Work]) -> dict[str, float]:
    """Bytes of exchanges."""
    return {
        kind: sum(kernel.nbytes for work in works for kernel in getattr(work, kind) if isinstance(kernel, Exchange))
        for kind in ("forward", "backward")
    }


def test_a_model_of_70_billion_parameters_is_counted_in_seconds() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = transformers.LlamaConfig(num_key_value_heads=8, vocab_size=128256, **sizes)
    model = model_of(config)
    begin = time.process_time()
    workload = count(model)
    works = [block.work(Use(samples=1, sequence=8192)) for block in workload.blocks]
    assert time.process_time() - begin < 10
    assert sum(work.parameters for work in works) == 70_553_706_496 == transformer_of(config).parameters
    assert workload.blocks[0]._counts.counted == 3  # type: ignore[attr-defined]
    assert all(work is works[1] for work in works[1:81])


def test_sizes_from_a_configuration_need_no_model() -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    config = transformers.LlamaConfig(num_key_value_heads=8, vocab_size=128256, **sizes)
    assert transformer_of(config).parameters == 405_853_388_800
    assert transformer_of(transformers.GPT2Config()).parameters == 124_439_808
    assert transformer_of(transformers.BertConfig()).parameters == 109_514_298


# ---- kinds of models


def test_experts_count_by_those_that_a_token_uses() -> None:
    config = config_of("mixtral", num_local_experts=8, num_experts_per_tok=2)
    works = [block.work(use_of()) for block in count(model_of(config)).blocks]
    tokens, hidden, ffn = 32, 64, 176
    attention = hidden * 4 * 24 * 2 + hidden * 2 * 24 * 2
    active = attention + hidden * 8 + 2 * 3 * hidden * ffn
    products = [kernel for kernel in works[1].forward if isinstance(kernel, Product)]
    assert flops(products) == 2 * tokens * active
    assert works[1].parameters == attention + hidden * 8 + 8 * 3 * hidden * ffn + 2 * hidden
    assert works[1].matrices == attention, "experts are no linear layers, so their gradients are made in I"


def test_layers_that_differ_are_counted_apart() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in (0.1, 0.1, 0.3)]
    model = nn.Sequential(nn.Embedding(10, 8), *layers, nn.Linear(8, 10))
    workload = count(model)
    works = [block.work(use_of()) for block in workload.blocks]
    assert workload.layers == range(1, 4)
    assert workload.blocks[0]._counts.counted == 4  # type: ignore[attr-defined]
    assert works[1] is works[2]
    assert works[1] == works[3], "another rate saves as much"


def test_a_weights_gradient_is_a_product_over_the_tokens() -> None:
    """Input width x tokens times tokens x output width, the last layer first."""
    layers = [nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(2)]
    work = count(nn.Sequential(nn.Embedding(10, 8), *layers, nn.Linear(8, 10))).blocks[1].work(use_of())
    assert list(work.weights) == [Product(24, 32, 8), Product(8, 32, 24)]


def test_operations_between_blocks_and_the_loss_count_with_the_block_before() -> None:
    """GPT-2 adds the positions of one sequence to two of tokens, and drops elements by a mask of a byte each; a cross
    entropy reads logits in bf16, writes them in fp32, and again their log-softmax, of which it picks one a token."""
    works = [block.work(use_of()) for block in count(model_of(config_of("gpt2"))).blocks]
    logits, hidden = 2 * 16 * 100, 2 * 16 * 64
    _, *added = (each.nbytes for each in works[1].forward if isinstance(each, Pass))
    assert added == [2 * (hidden + hidden / 2 + hidden), 2 * (hidden + hidden) + hidden]
    loss = [each.nbytes for each in works[-1].forward if isinstance(each, Pass)]
    assert loss[:2] == [(2 + 4) * logits, (4 + 4) * logits]
    assert len(loss) == 3
    assert loss[2] < 16 * 2 * 16


def test_frozen_weights_have_no_gradients() -> None:
    model = model_of(DECODER)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.feed_forward.requires_grad_(False)  # type: ignore[union-attr]
    work = count(model).blocks[2].work(use_of())
    trained = count(model_of(DECODER)).blocks[2].work(use_of())
    assert work.parameters == trained.parameters
    assert trained.matrices - work.matrices == 3 * 64 * 176
    assert flops(trained.weights) - flops(work.weights) == 2 * 32 * 3 * 64 * 176
    assert flops(trained.backward) == flops(work.backward)
    assert work.kept_for_weights < trained.kept_for_weights


def test_what_nothing_trains_before_keeps_nothing() -> None:
    model = TinyConfig(trained=(4, 5)).build()
    works = [block.work(use_of()) for block in count(model).blocks]
    assert [work.kept for work in works[:4]] == [0, 0, 0, 0]
    assert all(work.backward == work.weights == () for work in works[:4])
    assert works[4].kept > 0 < len(works[4].weights)


def test_a_model_stays_as_it_is() -> None:
    config = config_of("llama", attn_implementation="sdpa")
    model = model_of(config, "cpu").eval()
    before = {name: (id(each), each.dtype, each.device) for name, each in model.named_parameters()}
    buffers = {name: id(each) for name, each in model.named_buffers()}
    ids = torch.arange(12).view(2, 6)
    logits = model(input_ids=ids).logits
    count(model).blocks[1].work(use_of(attention="eager", recompute="selective"))
    assert {name: (id(each), each.dtype, each.device) for name, each in model.named_parameters()} == before
    assert {name: id(each) for name, each in model.named_buffers()} == buffers
    assert not any(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, logits)


@pytest.mark.wide(1)
@pytest.mark.parametrize("family", ["decoder", "llama", "gpt2", "bert"])
def test_programs_of_a_counted_workload_are_those_of_the_model(family: str) -> None:
    schedule = schedules.build("zb-h1", ranks=2, microbatches=4)
    plan = Plan(MeshShape(2, 2, 2), Layout("IIG"), schedule, 1)
    config = config_of(family)
    ranks = Ranks(count(model_of(config)), plan, use_of(compute="float32"))
    for rank in range(2):
        real = describe_rank(lambda: model_of(config), plan, rank).program
        assert ranks.programs.ranks[rank].instructions == real.instructions
        assert ranks.programs.ranks[rank].shape.units == real.shape.units


# ---- kernels


def kernel(name: str, *arguments: Any) -> Kernel | None:
    operation = getattr(torch.ops.aten, name).default
    return kernel_of(operation, arguments, operation(*arguments))


def test_kernels_of_operations() -> None:
    left, right = torch.zeros(3, 4, device="meta"), torch.zeros(4, 5, device="meta")
    assert kernel("mm", left, right) == Product(3, 4, 5)
    assert kernel("addmm", torch.zeros(5, device="meta"), left, right) == Product(3, 4, 5)
    assert kernel("bmm", left.expand(2, 3, 4), right.expand(2, 4, 5)) == Product(3, 4, 5, 2)
    assert kernel("t", left) is None
    assert kernel("empty_like", left) is None
    assert kernel("relu", left) == Pass(2.0 * 4 * 12)
    assert kernel("relu_", left) == Pass(2.0 * 4 * 12)
    ids = torch.zeros(7, dtype=torch.long, device="meta")
    table = torch.zeros(1000, 2, device="meta")
    assert kernel("embedding", table, ids) == Pass(2.0 * 4 * 14 + 8 * 7), "a table is not read whole"
    image, filters = torch.zeros(2, 6, 10, device="meta"), torch.zeros(6, 1, 3, device="meta")
    assert kernel("convolution", image, filters, None, [1], [1], [1], False, [0], 6) == Product(20, 3, 1, 6)


# ---- families without fused attention


def meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(family_config(family))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "codegen", "gemma2", "gpt_oss", "gptj", "mamba2", "mpt"])
def test_a_model_is_counted_with_the_attention_that_it_has(family: str) -> None:
    """transformers refuses fused attention for them; without a name in the use they are counted as they run."""
    counted = count(meta(family))
    layers = [counted.blocks[at] for at in counted.layers]
    assert all(layer.work(use_of()).kept > 0 for layer in layers)
    if family != "mamba2":  # which has none
        assert [layer.work(use_of()) for layer in layers] == [layer.work(use_of(attention="eager")) for layer in layers]


def test_a_model_that_was_built_with_eager_attention_is_counted_with_it() -> None:
    eager, fused = (count(model_of(config_of("llama", attn_implementation=each))) for each in ("eager", "sdpa"))
    named = fused.blocks[1].work(use_of(attention="eager"))
    assert eager.blocks[1].work(use_of()) == named != fused.blocks[1].work(use_of())


# ---- refusals


def test_what_is_not_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    block = count(model_of(DECODER)).blocks[1]
    with pytest.raises(ConfigError, match=r"tensor = 2: .* without tensor parallelism"):
        block.work(use_of(tensor=2))
    with pytest.raises(ConfigError, match="loss = 'fused': a model is counted"):
        block.work(use_of(loss="fused"))
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", False)  # 5.17 says that it does
    model = model_of(config_of("gemma2"))
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM has no attention = 'flash'"):
        count(model).blocks[1].work(use_of(attention="flash"))


class Counting(nn.Module):
    """Does as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        """As often as the largest value says."""
        return hidden * self.weight * int(hidden.max())


def test_a_block_that_needs_values_is_refused_by_name() -> None:
    workload = count(nn.Sequential(nn.Embedding(10, 8), Counting(), nn.Linear(8, 10)))
    with pytest.raises(ConfigError, match="1 of Sequential cannot be counted in bfloat16: a forward and backward"):
        workload.blocks[0].work(use_of())


def test_parameters_that_layers_share_are_refused() -> None:
    inner = nn.Linear(8, 8)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Sequential(inner), nn.Sequential(inner), nn.Linear(8, 10))
    with pytest.raises(ConfigError, match=r"blocks 1, 2 share a parameter of \(8, 8\)"):
        count(model)


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_a_block_that_makes_its_result_alone_has_no_transient_bytes(recompute: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    head = count(model).blocks[-1].work(Use(samples=1, sequence=4, compute="float32", recompute=recompute))  # type: ignore[arg-type]
    assert (head.peak, head.loss) == (0, 4 * 4 * 16 * 2)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_formulas_know_how_many_tensors_an_activation_saves(name: str) -> None:
    """Besides what it reads and what it returns."""
    given, saved = torch.randn(4, 8, requires_grad=True) * 1.0, list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(each), each)[1], lambda each: each):
        result = transformers.activations.ACT2FN[name](given)
    known = {each.data_ptr() for each in (given, result)}
    count = len({each.data_ptr() for each in saved if each.shape == given.shape} - known)
    assert transformer_of(config_of("gpt2", activation_function=name)).implementation.results == count


def test_sizes_of_other_families_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no formulas for 'falcon': they are known for llama, mistral, .*bert"):
        transformer_of(transformers.FalconConfig())
    with pytest.raises(ConfigError, match="no formulas for llama with hidden_act = 'gelu'"):
        transformer_of(config_of("llama", hidden_act="gelu"))
    with pytest.raises(ConfigError, match="activation 'relu'"):
        transformer_of(config_of("gpt2", activation_function="relu"))
    with pytest.raises(ConfigError, match="dropout must be on everywhere or nowhere"):
        transformer_of(config_of("gpt2", attn_pdrop=0.0))
