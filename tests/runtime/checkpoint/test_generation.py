"""The file in which a rank keeps its state in host memory: what it has, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.digests import seal, unseal
from atoll.base.errors import DamageError
from atoll.plans.layouts import Box
from atoll.runtime.checkpoint import Generation, Piece
from atoll.runtime.checkpoint.generation import size_of_body, write_generation
from atoll.runtime.checkpoint.pieces import Claim

FACTS: dict[str, Any] = {
    "run": "a run",
    "plan": "a plan",
    "step": 8,
    "rank": 1,
    "replicas": [1, 3],
    "state": {"step": 8, "scaler": None, "groups": [{"lr": 0.1}], "caller": {"position": 64}},
    "identity": {"step": 8, "config": "that"},
}


def pieces(fill: float | None = None) -> list[Piece]:
    """A part of a matrix, a scalar, integers and nothing: values, or `fill` in other dtypes."""
    values = {
        ("model", "w"): torch.arange(5, dtype=torch.float64) / 3,
        ("optim", "state", "w", "step"): torch.tensor([8.0]),
        ("model", "count"): torch.arange(3),
        ("model", "empty"): torch.zeros(0),
    }
    if fill is not None:
        values = {path: torch.full_like(value, fill) for path, value in values.items()}
        values["optim", "state", "w", "step"] = torch.full((1,), fill, dtype=torch.float64)
    within = Box((6, 4), (2, 0), (2, 4))
    ranges = {("model", "w"): ((6, 4), 1, 6, within), ("optim", "state", "w", "step"): ((), 0, 1, None)}
    return [
        Piece(path, shape, start, stop, value, within=part)
        for path, value in values.items()
        for shape, start, stop, part in [ranges.get(path, ((value.numel() + 2,), 2, value.numel() + 2, None))]
    ]


def written(path: Path, **facts: Any) -> Path:
    offered = {piece.claim: piece for piece in pieces()}
    with path.open("wb") as file:
        file.truncate(3 * size_of_body(offered))  # of an older one, which was longer
    write_generation(path, offered, FACTS | facts)
    return path


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    return written(tmp_path / "step-000008")


def test_it_gives_back_every_bit_in_the_dtypes_that_are_asked_for(generation: Path) -> None:
    found = Generation(generation)
    found.verify()
    assert (found.run, found.plan, found.step, found.rank, found.replicas) == ("a run", "a plan", 8, 1, (1, 3))
    assert found.state == FACTS["state"]
    assert found.manifest is not None
    assert found.manifest.identity == {"step": 8, "config": "that", "run": "a run"}
    assert {name: tuple(each.size) for name, each in found.contents.tensors.items()} == {
        "model.w": (6, 4),
        "optim.state.w.step": (),
        "model.count": (5,),
        "model.empty": (2,),
    }
    asked = pieces(7.0)
    assert found.fill(generation, asked) == FACTS["state"]
    for got, wanted in zip(asked, pieces(), strict=True):
        assert got.tensor.tolist() == wanted.tensor.tolist()
    assert [each.tensor.dtype for each in asked] == [torch.float64, torch.float64, torch.int64, torch.float32]


def test_pieces_of_another_plan_are_refused_before_any_is_filled(generation: Path) -> None:
    found, (first, *others) = Generation(generation), pieces(7.0)
    moved = Piece(first.path, first.shape, 0, 5, first.tensor, within=first.within)
    with pytest.raises(DamageError, match=r"'model\.w' is not there"):
        found.fill(generation, [*others, moved])
    with pytest.raises(DamageError, match=r"'model\.w' is there, and not here"):
        found.fill(generation, others)
    assert all((each.tensor == 7.0).all() for each in [moved, *others])
    assert found.fill(generation, others, optional=("model.w",)) == FACTS["state"]


def test_a_changed_byte_of_a_piece_is_noticed(generation: Path) -> None:
    content = bytearray(generation.read_bytes())
    content[9] ^= 1
    generation.write_bytes(content)
    with pytest.raises(DamageError, match=r"step-000008: the digest does not match"):
        Generation(generation).verify()


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.pop(key)


def _with(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update(values)


def _piece(at: int, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(header: dict[str, Any]) -> None:
        header["pieces"][0][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((_without(key), f"'{key}'") for key in ("run", "plan", "step", "replicas", "state", "pieces", "digest")),
        (_with(version=2), "it has version 2"),
        (_with(algorithm="md5"), "with 'md5'"),
        (_with(run=3), "3 is no string"),
        (_with(step=-1), "-1 is not a whole number"),
        (_with(step=True), "True is not a whole number"),
        (_with(replicas=[0, 3]), r"rank 1 of \(0, 3\)"),
        (_with(replicas=[1, "3"]), "'3' is not a whole number"),
        (_with(size=1 << 40), "bytes of pieces, expected 1099511627776"),
        (_with(pieces=[[]]), "ValueError"),
        (_piece(0, [3]), "a piece"),
        (_piece(1, [6, -4]), "-4 is not a whole number"),
        (_piece(2, 7), "a piece"),
        (_piece(3, 9), "a piece"),
        (_piece(4, "Tensor"), "a piece"),
        (_piece(4, "nothing"), "AttributeError"),
        (_piece(7, 1), "at byte 1"),
        (_piece(7, 4096), "'model.w' ends at byte 4136 of"),
    ],
)
def test_a_header_that_is_not_one_is_refused_by_name(
    generation: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    content = generation.read_bytes()
    length = int.from_bytes(content[-8:], "little")
    header = unseal(content[-8 - length : -8])
    change(header)
    sealed = seal(header)
    generation.write_bytes(content[: -8 - length] + sealed + len(sealed).to_bytes(8, "little"))
    with pytest.raises(DamageError, match=words) as caught:
        Generation(generation)
    assert str(caught.value).startswith(f"{generation} cannot be read: ")


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_a_file_that_was_cut_is_refused(generation: Path, cut: int) -> None:
    generation.write_bytes(generation.read_bytes()[:-cut])
    with pytest.raises(DamageError, match="step-000008 cannot be read"):
        Generation(generation)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 100, b"\xff" * 100])
def test_any_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-000001").write_bytes(content)
    with pytest.raises(DamageError, match="step-000001 cannot be read"):
        Generation(tmp_path / "step-000001")


def test_a_state_that_json_cannot_express_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        written(tmp_path / "step-000008", state={"loss": float("nan")})


def test_words_of_a_claim_are_json(generation: Path) -> None:
    claims = [piece.claim for piece in pieces()]
    assert [Claim.of(json.loads(json.dumps(each.words))) for each in claims] == claims
