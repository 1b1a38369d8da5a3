"""Ranks that divide sequences train like one process: heads for positions, masks of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.base.errors import PlanError, RankError
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Ranks, Use
from atoll.prediction.cost.ranks import sent_inside
from atoll.runtime.models import Decoder, DecoderConfig, transformer_of
from atoll.runtime.models.attention import register_attention
from atoll.runtime.models.divided import _Probe
from atoll.runtime.models.part import SequencePart
from atoll.testing import run_ranks
from atoll.testing.parity import Case, reference, train_case, worst_difference
from tests.families import Family
from tests.mixtures import MIXTURES

IDS = 48
BASE = Case(intra=2, sequence=2, microbatches=4, steps=2)


@dataclass(frozen=True)
class Rows:
    """The built-in decoder on rows of some tokens. documents: their rows have several, separated by position ids."""

    tokens: int = 12
    documents: bool = False
    config: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(vocabulary=IDS, layers=4, hidden=16, heads=4, kv_heads=2, ffn=24)
    )

    def build(self) -> nn.Module:
        return Decoder(self.config)

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return rows_of(step, samples, self.tokens, documents=self.documents)


def rows_of(step: int, samples: int, tokens: int, *, documents: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 + step)
    ids, labels = (torch.randint(3, IDS, (samples, tokens), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    found = {"input_ids": ids, "labels": labels}
    if documents:
        begins = torch.rand(labels.shape, generator=generator) < 0.3
        begins[:, 0] = True
        at = torch.arange(tokens).expand(samples, -1)
        found["position_ids"] = at - torch.where(begins, at, 0).cummax(1).values
    return found


@dataclass(frozen=True)
class Texts:
    """A tiny model of a family on rows of documents, of more tokens than its windows."""

    family: Family
    tokens: int = 12
    documents: bool = True

    def build(self) -> nn.Module:
        return self.family.build()

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return rows_of(step, samples, self.tokens, documents=self.documents)


def problems_of(case: Case, histories: Sequence[Any], tolerance: float = 1e-10) -> Iterator[str]:
    wanted = reference(case)
    for rank, history in enumerate(histories):
        worst, where = worst_difference(history, wanted)
        if not worst <= tolerance:
            yield f"{words_of(case)}: rank {rank} differs by {worst:.3g} at {where}"
        if not history.parameters:
            yield f"{words_of(case)}: rank {rank} has no parameters"


def words_of(case: Case) -> str:
    """Return the settings of a case that are not the default."""
    plain = Case()
    return ", ".join(
        f"{each.name}={getattr(case, each.name)}"
        for each in fields(Case)
        if getattr(case, each.name) != getattr(plain, each.name)
    )


def train_each(cases: Sequence[Case]) -> list[Any]:
    return [train_case(case) for case in cases]


def assert_all(cases: Sequence[Case], tolerance: float = 1e-10) -> None:
    """Train each in one session of ranks, and compare each with the unsplit model."""
    ranks = run_ranks(train_each, cases[0].ranks, cases, timeout=180)
    found = [
        problem
        for at, case in enumerate(cases)
        for problem in problems_of(case, [rank[at] for rank in ranks], tolerance)
    ]
    assert not found, "\n".join(found)


TWO = [
    BASE,
    replace(BASE, microbatch=2, recompute="block"),
    replace(BASE, model=Rows(documents=True), recompute="selective"),
    replace(BASE, model=Rows(tokens=11, documents=True)),
    replace(BASE, model=Rows(tokens=13), compile="block-eager"),
    replace(BASE, model=MIXTURES["groups"], expert=2),
    replace(BASE, model=MIXTURES["softmax"], layout="GGG", reads_in_place=False),
    replace(BASE, host=HostState("update-on-host", activations=1.0), model=Rows(documents=True)),
    replace(BASE, optimizer="Muon", layout="IIG", model=MIXTURES["softmax"]),
]
FOUR: list[dict[str, Any]] = [
    {"intra": 4, "sequence": 4, "layout": "IIG"},
    {"intra": 4, "sequence": 2, "layout": "III"},
    {"intra": 4, "sequence": 4, "reads_in_place": False},
    {"inter": 2, "layout": "GGG"},
    {"pipeline": 2, "schedule": "zb-v"},
    {"pipeline": 2, "schedule": "breadth-first", "recompute": "block"},
    {"pipeline": 2, "vocabulary_parallel": True, "schedule": "zb-h1"},
    {"pipeline": 2, "post_validation": True, "schedule": "1f1b"},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True, "layout": "NGG"},
]


def _filled(case: Case, **changes: Any) -> Case:
    return replace(case, **{"model": Rows(documents=True), **changes})


@pytest.mark.slow
def test_two_ranks_divide_sequences() -> None:
    assert_all([case if case.model != BASE.model else replace(case, model=Rows()) for case in TWO])


@pytest.mark.slow
def test_four_ranks_divide_sequences_beside_other_axes() -> None:
    assert_all([_filled(BASE, **way) for way in FOUR])


@pytest.mark.slow
def test_mixtures_divide_sequences_and_experts() -> None:
    four = replace(BASE, intra=4, model=MIXTURES["groups"])
    assert_all(
        [
            replace(four, sequence=4, expert=2),
            replace(four, sequence=2, expert=4),
            replace(four, sequence=2, expert=2, expert_layout="NNG", layout="GGG"),
            replace(BASE, model=MIXTURES["groups"], pipeline=2, expert=2, schedule="zb-v"),
            replace(BASE, model=MIXTURES["groups"], tensor=2, expert=2),
        ]
    )


@pytest.mark.slow
@pytest.mark.wide(3)
@pytest.mark.parametrize("layout", [each.name for each in EFFECTIVE])
def test_every_layout_with_pipelines(layout: str) -> None:
    case = _filled(BASE, layout=layout, pipeline=2)
    assert_all([replace(case, schedule=schedule) for schedule in ("1f1b", "zb-v")])


FAMILIES: dict[str, tuple[tuple[tuple[str, Any], ...], float]] = {
    "llama": ((), 1e-10),
    "qwen3": ((), 1e-10),
    "mistral": ((), 1e-10),  # windows
    "gemma3_text": ((), 1e-5),  # windows in some layers; its norms of heads compute in fp32
    "gpt_oss": ((), 1e-10),  # sinks, windows, experts
    "deepseek_v3": ((), 1e-4),  # latent attention; its router computes in fp32
    "modernbert": ((), 1e-10),  # both ways, windows
}
"""Options and tolerance of each."""

OTHERS: dict[str, tuple[tuple[tuple[str, Any], ...], float]] = {
    "olmo3": ((), 1e-10),
    "cohere2": ((), 1e-6),
    "phi3": ((), 1e-10),
    "smollm3": ((), 1e-10),
    "gpt_neox": ((), 1e-10),
}


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_divide_sequences(name: str) -> None:
    pytest.importorskip("transformers")
    assert_family(name, *FAMILIES[name])


@pytest.mark.slow
@pytest.mark.wide(1)
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_divide_sequences(name: str) -> None:
    pytest.importorskip("transformers")
    assert_family(name, *OTHERS[name])


def assert_family(name: str, options: tuple[tuple[str, Any], ...], tolerance: float) -> None:
    padded = Family(name, options, padded=True)
    packed = Texts(Family(name, options), documents=name != "modernbert")
    assert_all([replace(BASE, model=padded), replace(BASE, model=packed)], tolerance)
    four = replace(BASE, intra=4, sequence=4, model=packed)  # of two heads of keys, for most
    assert_all(
        [four, replace(BASE, model=packed, pipeline=2, schedule="zb-v", recompute="block"), replace(four, sequence=2)],
        tolerance,
    )


REFUSED = {
    "gpt2": "fails in the model",
    "falcon": "relates positions",
    "bloom": "relates positions",
    "gptj": "relates positions",
    "mamba2": "positions",
    "llama4_text": "counts positions by itself",
    "deberta-v2": "relates positions",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_relate_positions_elsewhere_are_refused(name: str) -> None:
    pytest.importorskip("transformers")
    from atoll.runtime.models import adapter_for

    with torch.device("meta"):
        model = Family(name).build()
    with pytest.raises(PlanError, match=REFUSED[name]):
        adapter_for(model).divide_sequences(SequencePart(0, 2), 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (2, 4, 16, 8), (2, 8, 32)], ids=str)
def test_attention_of_other_shapes_is_refused_with_them(shape: tuple[int, ...]) -> None:
    """What a rank has of sequences of 16 positions are 8, in the dimension before the last."""
    probe = _Probe("Odd", SequencePart(0, 2), 8, 1, 2, SequencePart(0, 2), where="layer 3")
    fitting = torch.empty(2, 4, 8, 8, device="meta")
    assert [each.shape for each in probe.to_heads([fitting] * 3)] == [(2, 2, 16, 8)] * 3
    with pytest.raises(
        PlanError, match=r"layer 3 of Odd .*gives attention \[\(2, 4, 8, 8\), .*not \[batch, heads, S, w"
    ):
        probe.to_heads([fitting, torch.empty(shape, device="meta"), fitting])


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(PlanError, match="sequence = 3 does not divide intra = 4"):
        MeshShape(intra=4, sequence=3)
    with pytest.raises(RankError, match="does not divide the 2 query heads of the decoder"):
        assert_all([_filled(BASE, intra=4, sequence=4, tensor=1, model=Rows(config=_heads(2)))])
    with pytest.raises(RankError, match="not known how a SequentialAdapter computes a part"):
        assert_all([BASE])


def _heads(heads: int) -> DecoderConfig:
    return DecoderConfig(vocabulary=IDS, layers=2, hidden=16, heads=heads, kv_heads=heads, ffn=24)


def test_ranks_that_divide_sequences_have_the_same_share() -> None:
    mesh = MeshShape(pipeline=2, inter=2, intra=4, sequence=2)
    places = [mesh.place(rank) for rank in range(mesh.world)]
    assert mesh.shares == 4
    assert [place.share for place in places] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [place.sequence for place in places] == [0, 1] * 8
    assert places[3].peers("sequence") == (2, 3)
    assert places[13].peers("sequence") == (12, 13)
    assert {place.share: place.peers("sequence") for place in places[8:]} == {
        0: (8, 9), 1: (10, 11), 2: (12, 13), 3: (14, 15)
    }  # fmt: skip


@dataclass(frozen=True)
class Looked:
    """What a rank says of samples without training."""

    loss: float
    tokens: int
    logits: torch.Tensor | None


def look(case: Case) -> list[Looked]:
    engine = case.engine()
    found = []
    for length in (12, 11):
        batch = {name: value[:, :length] for name, value in case.share(engine, 0).items()}
        result = engine.evaluate(batch)
        logits = engine.logits({"input_ids": batch["input_ids"][:1]})
        found.append(Looked(result.loss_sum, result.tokens, logits))
    engine.close()
    return found


@pytest.mark.parametrize("model", [Rows(), Texts(Family("qwen3"), documents=False)], ids=["decoder", "qwen3"])
def test_evaluations_and_logits_are_of_whole_sequences(model: Any) -> None:
    pytest.importorskip("transformers")
    alone = run_ranks(look, 1, replace(BASE, intra=1, sequence=1, model=model))[0]
    for rank, seen in enumerate(run_ranks(look, 4, replace(BASE, pipeline=2, model=model))):
        for own, wanted in zip(seen, alone, strict=True):
            assert own.tokens == wanted.tokens
            assert own.loss == pytest.approx(wanted.loss, rel=1e-12)
            assert (own.logits is None) == (rank < 2)
            if own.logits is not None and wanted.logits is not None:
                assert own.logits.shape == wanted.logits.shape
                assert float((own.logits - wanted.logits).abs().max()) < 1e-10


@pytest.mark.slow
def test_low_rank_adapters_of_divided_sequences() -> None:
    pytest.importorskip("peft")
    model = Texts(Family("llama", lora=True))
    assert_all([replace(BASE, model=model), replace(BASE, model=model, layout="GGG", recompute="block")])


def counted(batch: dict[str, Any], part: SequencePart) -> int:
    return int((part.of_batch(batch)["labels"] != -100).sum())


def test_parts_of_a_batch_have_all_of_its_labels() -> None:
    batch = rows_of(0, 4, 12, documents=True) | {"weights": torch.ones(4), "kinds": torch.ones(4, 3)}
    parts = [SequencePart(at, 3) for at in range(3)]
    assert sum(counted(batch, part) for part in parts) == int((batch["labels"] != -100).sum())
    own = parts[1].of_batch(batch)
    assert torch.equal(own["position_ids"], batch["position_ids"][:, 4:8])
    assert own["weights"].shape == (4,)
    assert own["kinds"].shape == (4, 3)


def test_padding_does_not_count_and_is_a_document_of_its_own() -> None:
    part = SequencePart(0, 4)
    padded = part.padded(rows_of(0, 2, 11, documents=True), 4, attends_both_ways=False)
    assert {name: each.shape[1] for name, each in padded.items()} == {"input_ids": 12, "labels": 12, "position_ids": 12}
    assert padded["labels"][:, 11].tolist() == [-100, -100]
    assert padded["position_ids"][:, 11].tolist() == [0, 0]
    masked = part.padded(rows_of(0, 2, 11, documents=False), 4, attends_both_ways=True)
    assert masked["attention_mask"].sum(1).tolist() == [11, 11]
    with pytest.raises(PlanError, match="not known how colours of shape"):
        part.padded(rows_of(0, 2, 11, documents=False) | {"colours": torch.ones(2, 11)}, 4, attends_both_ways=False)


def bytes_exchanged(case: Case) -> tuple[int, dict[str, float]]:
    """What the first step sends between ranks that divide sequences, and what is predicted."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    sent = engine.transport.sent["sequence"]
    engine.close()
    use = Use(samples=case.microbatch, sequence=12, divide=case.sequence, compute="float32", recompute=case.recompute)
    workload = transformer_of(case.model.config).workload  # type: ignore[attr-defined]
    ranks = Ranks(workload, case.plan, use)
    predicted = {axis: nbytes for (axis, _), (_, nbytes) in sent_inside(ranks, engine.place.pp).items()}
    return sent, predicted


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_exchanged_is_predicted_to_the_byte(ranks: int, recompute: str) -> None:
    """Four ranks are more than the two heads of keys and values, which are then repeated."""
    case = replace(BASE, intra=ranks, sequence=ranks, model=Rows(), recompute=recompute, precision="fp32")
    for sent, predicted in run_ranks(bytes_exchanged, ranks, case):
        assert predicted == {"sequence": sent}


def derived() -> type[nn.Module]:
    """An attention class whose forward is its parent's, in another file."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    class Derived(GptOssAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Derived


def test_a_family_keeps_its_own_attention_in_models_that_nobody_divides() -> None:
    """Past bug: the file of a derived class was asked, which may have none, or another one."""
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss

    with pytest.MonkeyPatch.context() as patch:
        model = Family("gpt_oss").build().double().eval()
        model.config._attn_implementation = "eager"
        ids = torch.arange(6)[None]
        with torch.no_grad():
            before = model(ids).logits
            register_attention()
            for layer in model.model.layers:
                layer.self_attn.__class__ = derived()
            assert torch.equal(model(ids).logits, before)
            patch.setattr(modeling_gpt_oss, "eager_attention_forward", lambda *_, **__: None)
            with pytest.raises(TypeError):
                model(ids)


MIXING: dict[str, Any] = {
    "roll": lambda hidden: hidden.roll(1, 1),
    "flip": lambda hidden: hidden.flip(1),
    "cumsum": lambda hidden: hidden.cumsum(1),
    "softmax": lambda hidden: hidden.softmax(1),
    "sort": lambda hidden: hidden.sort(dim=1, stable=True).values,
    "topk of tokens": lambda hidden: hidden.flatten(0, 1).topk(hidden.shape[0] * hidden.shape[1], 0).values,
    "mean": lambda hidden: hidden - hidden.mean(1, keepdim=True),
    "mean of tokens": lambda hidden: hidden - hidden.flatten(0, 1).mean(0),
    "shift": lambda hidden: torch.cat([hidden[:, :1], hidden[:, :-1]], 1),
    "scores": lambda hidden: hidden @ hidden.transpose(1, 2) @ hidden,
    "positions": lambda hidden: hidden + torch.arange(hidden.shape[1], device=hidden.device)[:, None],
}


@pytest.mark.parametrize("name", MIXING)
def test_the_probe_finds_what_relates_positions_outside_of_attention(name: str) -> None:
    pytest.importorskip("transformers")
    from atoll.runtime.models import adapter_for

    with torch.device("meta"):
        model: Any = Family("llama").build()
    adapter: Any = adapter_for(model)
    adapter.divide_sequences(SequencePart(0, 2), 1)
    model.model.layers[1].mlp.forward = MIXING[name]
    with pytest.raises(PlanError, match=r"layer 1 of LlamaForCausalLM .*only attention may relate positions"):
        adapter.divide_sequences(SequencePart(0, 2), 1)
