"""The mixture of experts of the built-in decoder: against a dense formulation, transformers, and one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.prediction.cost import FusedAttention, Product, Use
from atoll.runtime.models import (
    Decoder,
    DecoderAdapter,
    DecoderConfig,
    MixtureConfig,
    count,
    initialise_model,
    transformer_of,
)
from atoll.runtime.models.mixture import Experts, FeedForward, MixtureFeedForward, Router
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig

HIDDEN, FFN = 12, 10
PLAIN = MixtureConfig(experts=6)
FULL = MixtureConfig(
    experts=8,
    experts_per_token=3,
    expert_ffn=6,
    shared_experts=2,
    scoring="sigmoid",
    route_scale=2.5,
    groups=4,
    groups_per_token=2,
    selection_bias=True,
)
UNNORMALISED = MixtureConfig(experts=5, experts_per_token=1, normalise_weights=False)


def _states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 7, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))


def _mixture(config: MixtureConfig, dtype: torch.dtype = torch.float64) -> MixtureFeedForward:
    torch.manual_seed(2)
    made = MixtureFeedForward(HIDDEN, FFN, config).to(dtype)
    if made.router.selection_bias is not None:
        made.router.selection_bias.normal_(std=0.3)
    return made


def _dense(mixture: MixtureFeedForward, hidden: Tensor, config: MixtureConfig) -> Tensor:
    """Every expert for every token, times a matrix of weights that is zero where an expert is not chosen."""
    router, experts = mixture.router, mixture.experts
    logits = hidden @ router.weight.T
    scores = (
        torch.sigmoid(logits) if config.scoring == "sigmoid" else torch.exp(logits) / logits.exp().sum(-1)[..., None]
    )
    bias = torch.zeros(config.experts) if router.selection_bias is None else router.selection_bias
    size = config.experts // config.groups
    chosen = torch.zeros_like(scores)
    for at in torch.cartesian_prod(*map(torch.arange, scores.shape[:-1])).tolist():
        wanted = (scores[tuple(at)] + bias).tolist()
        runs = [range(size * group, size * (group + 1)) for group in range(config.groups)]
        runs.sort(key=lambda run: -sum(sorted(wanted[each] for each in run)[-2:]))
        reachable = [each for run in runs[: config.groups_per_token] for each in run]
        for each in sorted(reachable, key=lambda each: -wanted[each])[: config.experts_per_token]:
            chosen[(*at, each)] = 1
    weights = scores * chosen
    if config.normalise_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden)
    for each in range(config.experts):
        gate, up = (hidden @ experts.gate_up_proj[each].T).chunk(2, -1)
        out = out + config.route_scale * weights[..., each, None] * (F.silu(gate) * up @ experts.down_proj[each].T)
    return out if mixture.shared is None else out + mixture.shared(hidden)


@pytest.mark.parametrize("config", [PLAIN, FULL, UNNORMALISED])
def test_output_and_gradients_equal_a_dense_formulation(config: MixtureConfig) -> None:
    mixture, hidden = _mixture(config), _states().requires_grad_()
    wanted = [hidden, *mixture.parameters()]
    outputs = mixture(hidden), _dense(mixture, hidden, config)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-13)
    target = torch.randn(hidden.shape, dtype=hidden.dtype, generator=torch.Generator().manual_seed(3))
    sparse, dense = (torch.autograd.grad((output * target).sum(), wanted) for output in outputs)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-12)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    experts = Experts(4, HIDDEN, FFN).double()
    index = torch.tensor([[0, 2], [2, 0], [0, 2]])
    hidden = _states()[0, :3]
    experts(hidden, index, torch.full((3, 2), 0.5, dtype=torch.float64)).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert not parameter.grad[[1, 3]].any()
        assert parameter.grad[[0, 2]].any()
    none = experts(hidden[:0], index[:0], torch.ones(0, 2, dtype=torch.float64))
    assert all(not grad.any() for grad in torch.autograd.grad(none.sum(), list(experts.parameters())))


def test_bf16_states_are_routed_in_fp32() -> None:
    mixture, hidden = _mixture(FULL, torch.bfloat16), _states(torch.bfloat16)
    routing = mixture.router(hidden.flatten(0, 1))
    assert routing.top_k_weights.dtype == routing.scores.dtype == torch.float32
    output = mixture(hidden)
    assert output.dtype == torch.bfloat16
    precise = mixture.double()
    torch.testing.assert_close(output.double(), precise(hidden.double()), rtol=0.05, atol=0.02)


def _copy_experts(mixture: MixtureFeedForward, block: Any) -> None:
    with torch.no_grad():
        block.gate.weight.copy_(mixture.router.weight)
        block.experts.gate_up_proj.copy_(mixture.experts.gate_up_proj)
        block.experts.down_proj.copy_(mixture.experts.down_proj)


def test_equals_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = transformers.MixtralConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=6)
    mixture, block = _mixture(PLAIN, torch.float32), MixtralSparseMoeBlock(sizes)
    _copy_experts(mixture, block)
    hidden = _states(torch.float32)
    torch.testing.assert_close(mixture(hidden), block(hidden), rtol=0, atol=1e-6)


def test_equals_deepseek_v3() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    sizes = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=6,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    mixture, block = _mixture(FULL, torch.float32), DeepseekV3MoE(sizes)
    _copy_experts(mixture, block)
    assert mixture.router.selection_bias is not None
    assert mixture.shared is not None
    block.gate.e_score_correction_bias.copy_(mixture.router.selection_bias)
    for name in ("gate", "up", "down"):
        getattr(block.shared_experts, f"{name}_proj").weight = getattr(mixture.shared, name).weight
    hidden = _states(torch.float32)
    torch.testing.assert_close(mixture(hidden), block(hidden), rtol=0, atol=1e-6)


# ---- in the decoder

SMALL = DecoderConfig(
    vocabulary=19,
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    mixture=dataclasses.replace(FULL, dense_layers=1),
)


@dataclasses.dataclass(frozen=True)
class Small:
    """The built-in decoder with a mixture as a recipe."""

    config: DecoderConfig = SMALL

    def build(self) -> Decoder:
        return Decoder(self.config)

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        return TinyConfig(vocabulary=self.config.vocabulary).batch(step, samples)

    def initialise(self, name: str, module: nn.Module) -> None:
        shrunk = 0.02 / (2 * self.config.layers) ** 0.5
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = key == "down_proj" or name.endswith((".attention.output", ".down"))
                parameter.normal_(std=shrunk if residual else 0.02)


@pytest.mark.wide(1)
@pytest.mark.parametrize(("layout", "schedule"), [("GGG", "1f1b"), ("NNG", "1f1b"), ("GGG", "zb-v"), ("NNG", "zb-v")])
def test_four_ranks_equal_one_process(layout: str, schedule: str) -> None:
    assert_parity(Case(layout=layout, pipeline=2, intra=2, schedule=schedule, steps=2, model=Small()))


@pytest.mark.wide(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_equal_one_process(sequence_parallel: bool) -> None:
    case = Case(tensor=2, microbatches=2, steps=2, model=Small(), sequence_parallel=sequence_parallel)
    assert_parity(case)


def test_initial_values_have_the_decoders_deviation() -> None:
    model = Decoder(SMALL)
    initialise_model(DecoderAdapter(model), seed=3)
    mixed, dense = model.layers[1].feed_forward, model.layers[0].feed_forward
    assert isinstance(mixed, MixtureFeedForward)
    assert isinstance(dense, FeedForward)
    assert mixed.experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.1)
    assert mixed.experts.down_proj.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert mixed.shared is not None
    assert mixed.shared.down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.2)
    assert not model.get_buffer("layers.1.feed_forward.router.selection_bias").any()


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_counted_work_is_that_of_the_chosen_experts(recompute: str) -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    work = count(model).blocks[2].work(Use(samples=3, sequence=5, recompute=recompute))
    tokens, hidden, inner = 15, 16, 6
    attention = tokens * hidden * (2 * 16 + 2 * 8)
    routed = tokens * hidden * 8 + 3 * 3 * tokens * hidden * inner
    shared = 3 * tokens * hidden * 2 * inner
    flops = {
        name: sum(each.flops for each in getattr(work, name) if isinstance(each, Product))
        for name in ("forward", "backward", "weights")
    }
    # The weights of linears alone wait for W.
    again = attention + routed + shared if recompute == "block" else 0
    assert flops["forward"] == 2 * (attention + routed + shared)
    assert flops["backward"] == 2 * (attention + 2 * routed + shared + again)
    assert flops["weights"] == 2 * (attention + shared)
    assert sum(isinstance(each, FusedAttention) for each in work.forward) == 1
    assert work.parameters == sum(each.numel() for each in model.layers[1].parameters())


def test_formulas_count_as_many_operations_and_parameters() -> None:
    use = Use(samples=2, sequence=16)
    with torch.device("meta"):
        counted = [block.work(use) for block in count(Decoder(SMALL)).blocks]
    by_formula = [block.work(use) for block in transformer_of(SMALL).workload.blocks]
    for one, other in zip(counted, by_formula, strict=True):
        assert one.parameters == other.parameters
        for phases in (("forward",), ("backward", "weights")):
            flops = [
                sum(each.flops for name in phases for each in getattr(work, name) if isinstance(each, Product))
                for work in (one, other)
            ]
            assert flops[0] == flops[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts = 0: must be at least 1"),
        ({"expert_ffn": 0}, "expert_ffn = 0: must be at least 1"),
        ({"groups": 3}, "experts = 8 is not a multiple of groups = 3"),
        ({"groups": 8}, "experts / groups = 8 / 8 = 1"),
        ({"groups_per_token": 5}, "groups_per_token = 5 is more than groups = 4"),
        ({"experts_per_token": 5}, "more than the 4 experts among which a token chooses"),
        ({"experts_per_token": 1}, "every weight would be 1"),
        ({"scoring": "tanh"}, "scoring = 'tanh': must be 'softmax' or 'sigmoid'"),
        ({"route_scale": 0.0}, "route_scale = 0.0: must be positive"),
    ],
)
def test_impossible_mixtures_are_refused_with_their_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        dataclasses.replace(FULL, **changes)
    assert message in str(caught.value)


def test_a_mixture_needs_a_layer() -> None:
    with pytest.raises(PlanError, match="dense_layers = 4 of 4 layers leaves no layer for experts"):
        dataclasses.replace(SMALL, mixture=dataclasses.replace(FULL, dense_layers=4))


def test_the_choice_has_no_gradient_but_the_weights_have() -> None:
    router = Router(HIDDEN, UNNORMALISED).double()
    routing = router(_states()[0])
    assert not routing.top_k_index.is_floating_point()
    routing.top_k_weights.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.any()
