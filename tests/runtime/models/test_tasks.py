"""Heads of models of transformers: their losses, how they split, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.base.errors import ConfigError, PlanError
from atoll.runtime.models import adapter_for, count, initialise_block, shared_parameters
from atoll.runtime.models.hugging_face import HuggingFaceAdapter
from atoll.runtime.models.tasks import LABELS, SPAN
from atoll.testing.reference import named_parameters, start
from tests.families import Family
from tests.tasks import IMAGES, LISTENERS, TRANSLATORS, Headed

transformers = pytest.importorskip("transformers")


def in_pieces(adapter: Any, batch: dict[str, Any], begins: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The outputs by stages that begin at some blocks, and what passed: as it was given, and as it was taken."""
    hidden, passed = None, []
    for first, last in zip(begins, [*begins[1:], len(adapter.blocks())], strict=True):
        output = adapter.forward(first, last, hidden, batch)
        hidden = output.detach().requires_grad_()
        passed.append((output, hidden))
    return passed.pop()[0], passed


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


MODELS = [
    Headed("bert"),
    Headed("bert", problem="multi_label_classification"),
    Headed("llama", problem="regression"),
    Headed("bert", "tokens"),
    Headed("bert", "spans"),
    Headed("llama", "spans"),
    Headed("vit", "image"),
    Headed("bart", "translation"),
    Headed("t5", "translation"),
    Headed("whisper", "speech"),
]
IN_FP32 = {"llama": 1e-6, "t5": 1e-6}
"""Norms and softmax that are computed in fp32, where another scale of the loss shows."""


@pytest.mark.wide(3)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}-{model.head}-{model.problem}")
def test_every_cut_has_the_loss_and_the_gradients_of_transformers(model: Headed) -> None:
    torch.manual_seed(0)
    whole: Any = model.build().double().eval()
    batch = model.batch(0, 3)
    wanted = whole(**batch).loss
    wanted.backward()
    expected = gradients(whole)
    adapter = adapter_for(whole)
    output, passed = in_pieces(adapter, batch, [at for at, b in enumerate(adapter.blocks()) if not b.is_joined])
    loss: Any = adapter.loss(output, batch)
    total, counted = loss if isinstance(loss, tuple) else (loss, (batch["labels"] != -100).sum())
    (total / counted).backward()
    for given, taken in reversed(passed):
        given.backward(torch.zeros_like(given) if taken.grad is None else taken.grad)
    bound = IN_FP32.get(model.name, 1e-7 if model.head == "tokens" else 1e-12)
    assert float((total / counted).detach()) == pytest.approx(float(wanted.detach()), abs=bound)
    found = gradients(whole)
    assert found.keys() >= expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), rtol=0, atol=bound)


@pytest.mark.parametrize("part", ["BartEncoder", "BartDecoder"])
def test_a_stack_that_draws_numbers_for_layers_that_it_never_skips(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past bug: before transformers 5.23 each layer in training compared a random number with a layerdrop of 0, and no
    encoder with a decoder but T5 could be split."""
    kind = getattr(transformers.models.bart.modeling_bart, part)
    forward = kind.forward

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not self.training or torch.rand([]) >= self.layerdrop
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", drawing)
    model = Headed("bart", "translation").build()
    assert len(adapter_for(model).blocks()) > 5
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("model", [Headed("bart", "translation"), Headed("t5", "translation")], ids=lambda m: m.name)
def test_an_encoder_and_its_decoder_on_one_stage(model: Headed) -> None:
    """The gradient of what all layers of the decoder take is whole without a cut, too."""
    torch.manual_seed(0)
    whole: Any = model.build().double().eval()
    batch = model.batch(0, 3)
    whole(**batch).loss.backward()
    expected = gradients(whole)
    adapter = adapter_for(whole)
    output, _ = in_pieces(adapter, batch, [0])
    (adapter.loss(output, batch) / (batch["labels"] != -100).sum()).backward()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


def test_answers_outside_of_the_sequence_do_not_count() -> None:
    model = Headed("bert", "spans")
    adapter = adapter_for(model.build().double())
    batch = model.batch(0, 3)
    outputs = torch.randn(3, 6, 2, dtype=torch.float64)
    batch["start_positions"], batch["end_positions"] = torch.tensor([1, 6, -100]), torch.tensor([2, 3, 4])
    total, counted = adapter.loss(outputs, batch)
    scores = outputs[0].log_softmax(0)
    assert int(counted) == 1
    assert float(total) == pytest.approx(-float(scores[1, 0] + scores[2, 1]) / 2)


HEADS = [
    *MODELS,
    Headed("bert", problem="regression"),
    Headed("vit", "image", problem="multi_label_classification"),
    Family("llama"),
    Family("bert"),
]


@pytest.mark.wide(18)
@pytest.mark.parametrize("model", HEADS, ids=lambda model: "-".join(map(str, vars_of(model))))
@pytest.mark.parametrize("seed", range(3))
def test_labels_of_minus_100_count_in_no_task(model: Any, seed: int) -> None:
    """Neither in the sum, nor in the number, nor in a gradient: the sum is that of what is left, one by one."""
    adapter = adapter_for(model.build().double())
    draw = torch.Generator().manual_seed(seed)
    batch = model.batch(seed, 4)
    keys = [key for key in LABELS if key in batch]
    shape = batch[keys[0]].shape
    whole = {key: torch.where(batch[key] == -100, 1, batch[key]) for key in keys}
    if keys == list(SPAN):
        whole = {key: value.clamp(max=5) for key, value in whole.items()}
    outputs = torch.randn(*outputs_of(model, adapter, batch).shape, generator=draw, dtype=torch.float64)

    def loss(keep: Tensor) -> tuple[float, int, Tensor]:
        given = outputs.clone().requires_grad_()
        # One end of an answer is enough: the first, the last, or both.
        ends = keys if seed == 2 else keys[-seed:][:1]
        hidden = {key: torch.where(keep, value, -100) if key in ends else value for key, value in whole.items()}
        found: Any = adapter.loss(given, {**batch, **hidden})
        total, counted = found if isinstance(found, tuple) else (found, (hidden[ends[0]] != -100).sum())
        total.backward()
        assert given.grad is not None
        return float(total.detach()), int(counted), given.grad

    keep = torch.rand(shape, generator=draw) < 0.6
    keep.view(-1)[:2] = torch.tensor([True, False])
    total, counted, gradient = loss(keep)
    assert counted == int(keep.sum())
    alone = []
    for at in keep.view(-1).nonzero().view(-1).tolist():
        one = torch.zeros(keep.numel(), dtype=torch.bool)
        one[at] = True
        alone.append(loss(one.view(shape)))
        assert alone[-1][1] == 1
    assert total == pytest.approx(sum(each for each, *_ in alone), rel=1e-12)
    torch.testing.assert_close(gradient, torch.stack([each for *_, each in alone]).sum(0))
    by_label = gradient.ne(0).view(*shape, -1).any(-1)
    assert torch.equal(by_label, keep)
    total, counted, gradient = loss(torch.zeros(shape, dtype=torch.bool))
    assert (total, counted) == (0.0, 0)
    assert not gradient.any()


def vars_of(model: Any) -> tuple[Any, ...]:
    return tuple(filter(None, (model.name, getattr(model, "head", ""), getattr(model, "problem", ""))))


def outputs_of(model: Any, adapter: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found: Tensor = in_pieces(adapter, batch, [0])[0]
    return found


@pytest.mark.parametrize(
    ("problem", "labels", "words"),
    [
        (None, torch.zeros(3, 2, dtype=torch.long), "single_label_classification takes an integer for each sample"),
        (None, torch.zeros(3), r"labels of torch.float32 and shape \(3,\).*multi_label"),
        ("regression", torch.zeros(3, 5), "regression takes a number for each output"),
    ],
)
def test_labels_of_another_kind_are_refused(problem: str | None, labels: Tensor, words: str) -> None:
    model = Headed("bert", problem=problem)
    adapter = adapter_for(model.build())
    with pytest.raises(PlanError, match=words):
        adapter.loss(torch.zeros(3, 1 if problem == "regression" else 5), {"labels": labels})


def test_what_the_model_reads_must_be_in_the_batch() -> None:
    with pytest.raises(PlanError, match="the batch has no pixel_values, which ViTForImageClassification reads, only"):
        adapter_for(Headed("vit", "image").build()).forward(0, 1, None, {"labels": torch.zeros(2)})
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(PlanError, match="BartForConditionalGeneration needs labels or decoder_input_ids"):
        adapter_for(Headed("bart", "translation").build()).forward(0, 4, None, {"input_ids": ids})


def test_a_decoder_has_the_encoder_beside_it() -> None:
    """What passes is the encoder's output in front of the decoder's hidden state."""
    adapter = adapter_for(Headed("bart", "translation").build().eval())
    batch = Headed("bart", "translation").batch(0, 3)
    names = [block.name for block in adapter.blocks()]
    cut = names.index("model.decoder.layers.1")
    assert adapter.forward(0, names.index("model.decoder.embed_tokens"), None, batch).shape == (3, 6, 16)
    assert adapter.forward(0, cut, None, batch).shape == (3, 6 + 4, 16)


@pytest.mark.wide(5)
@pytest.mark.parametrize("name", [*TRANSLATORS, *LISTENERS])
def test_shared_weights_have_the_names_of_the_models_files(name: str) -> None:
    with torch.device("meta"):
        model: Any = Headed(name, "speech" if name in LISTENERS else "translation").build()
    named = [pair[0] for block in HuggingFaceAdapter(model).blocks() for pair in block.named_parameters()]
    tied = model.all_tied_weights_keys
    assert {name for name, _ in model.named_parameters() if name not in tied} <= set(named)


STARTED = [
    Headed("modernbert"),
    *(Headed(name, "image") for name in IMAGES),
    *(Headed(name, "translation") for name in TRANSLATORS),
    *(Headed(name, "speech") for name in LISTENERS),
]
"""With tokens and positions that are parameters of their own, and with rules of the outermost class."""


@pytest.mark.wide(6)
@pytest.mark.parametrize("model", STARTED, ids=lambda model: model.name)
def test_a_model_starts_as_transformers_starts_it(model: Headed) -> None:
    """What transformers sets to the same under any seed is equal, what it draws is spread as much; block by block on
    meta, as a stage makes it, and as the reference does without Atoll."""
    draws = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        draws.append(named_parameters(model.build()))
    wanted = named_parameters(start(model, 3))
    with torch.device("meta"):
        built = model.build()
    adapter = adapter_for(built)
    shared = shared_parameters(adapter)
    built.to_empty(device="cpu")
    for block in adapter.blocks():
        initialise_block(adapter, block, 3, shared=shared)
    pairs = [pair for block in adapter.blocks() for pair in block.named_parameters()]
    got = {name: parameter.detach() for name, parameter in pairs if name not in shared}
    assert got.keys() == wanted.keys() == draws[0].keys()
    for name, value in got.items():
        assert torch.equal(value, wanted[name]), name
        one, other = draws[0][name].detach(), draws[1][name].detach()
        is_drawn = one != other
        assert torch.equal(value[~is_drawn], one[~is_drawn]), name
        if is_drawn.sum() > 1:
            numbers = int(is_drawn.sum())
            spread = torch.log(value[is_drawn].std() / torch.cat([one[is_drawn], other[is_drawn]]).std())
            assert abs(float(spread)) < 5 * (0.75 / numbers) ** 0.5, name  # five standard deviations, of normal values


@pytest.mark.parametrize("model", [Headed("bert"), Headed("vit", "image"), Headed("t5", "translation")])
def test_costs_are_those_of_language_models(model: Headed) -> None:
    with torch.device("meta"):
        built = model.build()
    with pytest.raises(ConfigError, match=f"the costs of a {type(built).__name__} are not known"):
        count(built)
