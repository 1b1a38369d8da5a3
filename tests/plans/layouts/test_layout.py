"""The 27 names, the 14 effective ones, aliases and domination."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import LayoutError
from atoll.plans.layouts import ALL_LAYOUTS, EFFECTIVE, LAYOUT_ALIASES, Layout, Level, published_memory, traffic


def test_picture_of_the_fourteen_effective_layouts() -> None:
    names = "NNN NNI NNG NII NIG NGG INI ING III IIG IGG GNG GIG GGG"
    assert " ".join(layout.name for layout in EFFECTIVE) == names
    assert len(ALL_LAYOUTS) == len(set(ALL_LAYOUTS)) == 27


def test_levels_are_read_in_the_order_parameter_gradient_optimizer() -> None:
    layout = Layout("NIG")
    assert (layout.parameters, layout.gradients, layout.optimizer) == (Level.N, Level.I, Level.G)
    assert str(layout) == "NIG"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ddp", "NNN"),
        ("zero-0", "NNN"),
        ("ZeRO-1", "NNG"),
        ("zero2", "NGG"),
        ("ZERO_3", "GGG"),
        ("FSDP", "GGG"),
        ("mics", "III"),
        (" hsdp ", "III"),
        ("iig", "IIG"),
        ("GnG", "GNG"),
    ],
)
def test_parse_takes_aliases_and_any_case(word: str, name: str) -> None:
    assert Layout.parse(word) == Layout(name)


def test_every_alias_comes_back_from_its_layout() -> None:
    for name, aliases in LAYOUT_ALIASES.items():
        assert Layout(name).aliases == aliases
        assert {Layout.parse(alias).name for alias in aliases} == {name}
    assert Layout("IIG").aliases == ()


@pytest.mark.parametrize("wrong", ["", "II", "IIGG", "IIX", "iig"])
def test_the_constructor_takes_exact_names_only(wrong: str) -> None:
    with pytest.raises(LayoutError, match="no layout"):
        Layout(wrong)


def test_an_unknown_word_names_the_nearest() -> None:
    with pytest.raises(LayoutError, match=r"no layout 'zer-2': did you mean 'zero-2'\?"):
        Layout.parse("zer-2")
    with pytest.raises(LayoutError, match="or one of ddp"):
        Layout.parse("pipeline")


@pytest.mark.parametrize(("name", "better"), [("GGN", "GGG"), ("INN", "INI"), ("NGI", "NGG"), ("GNI", "GNG")])
def test_a_dominated_layout_names_the_better_one(name: str, better: str) -> None:
    assert Layout(name).dominated_by == Layout(better)


@settings(deadline=None, max_examples=40)
@given(inter=st.integers(1, 6), intra=st.integers(1, 8), microbatches=st.integers(1, 12), share=st.floats(0.01, 1))
def test_the_dominating_layout_holds_and_sends_no_more(inter: int, intra: int, microbatches: int, share: float) -> None:
    parameters, trainable = 1e6, 1e6 * share
    for layout in ALL_LAYOUTS:
        better = layout.dominated_by
        assert (better is None) == layout.effective
        if better is None:
            continue
        assert better.effective
        sizes = {"inter": inter, "intra": intra}
        held, less = (
            published_memory(each, parameters=parameters, trainable=trainable, **sizes) for each in (layout, better)
        )
        assert less.total <= held.total
        volumes = {"parameters_bytes": parameters, "trainable_bytes": trainable, "microbatches": microbatches, **sizes}
        sent, fewer = traffic(layout, **volumes), traffic(better, **volumes)
        assert fewer.intra_bytes <= sent.intra_bytes * (1 + 1e-12)
        assert fewer.inter_bytes <= sent.inter_bytes * (1 + 1e-12)
