"""What a generated text begins with, what the model sees of it, and how its tokens are drawn."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.training.run.text import CANDIDATES, TEMPERATURE, _draw, generate

SIZE = 60
END = 7


class Numbers:
    """A tokenizer of numbers, written with blanks between them."""

    size = SIZE

    def __init__(
        self, *, opening: tuple[int, ...] = (), end_of_text: int | None = None, stops: tuple[int, ...] = ()
    ) -> None:
        self.opening, self.end_of_text, self.stops = opening, end_of_text, stops

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Counting:
    """An engine whose model counts: the next token is the last one plus 1. It notes what the model is given.

    logits of tokens that the tokenizer does not have are larger still, as padded rows of a vocabulary may be.
    """

    def __init__(self, *, tensor: int = 1, sequence_parallel: bool = False, data: int = 0, others: int = 0) -> None:
        self.place = SimpleNamespace(data=data, tp=0)
        self.plan = SimpleNamespace(mesh=SimpleNamespace(tensor=tensor), sequence_parallel=sequence_parallel)
        self.transport = SimpleNamespace(total=lambda own: own + others)
        self.seen: list[list[int]] = []

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        self.seen.append(ids[0].tolist())
        found = torch.zeros(*ids.shape, SIZE + 4)
        found.scatter_(2, (ids + 1)[..., None], 1e4)
        found[..., SIZE:] = 1e5
        return found


def written(engine: Any, tokenizer: Any, prompt: str, *, tokens: int = 3, context: int = 100, seed: int = 0) -> str:
    return generate(engine, tokenizer, prompt, tokens=tokens, context=context, seed=seed)


def test_a_prompt_is_continued() -> None:
    engine = Counting()
    assert written(engine, Numbers(), "3 4") == "3 4 5 6 7"
    assert engine.seen == [[3, 4], [3, 4, 5], [3, 4, 5, 6]]


@pytest.mark.parametrize(("prompt", "shown"), [("3", "3 4 5 6"), ("", "2 3 4")])
def test_the_model_sees_what_a_document_opens_with_and_the_text_does_not_have_it(prompt: str, shown: str) -> None:
    engine = Counting()
    assert written(engine, Numbers(opening=(0, 1), end_of_text=END), prompt) == shown
    assert engine.seen[0] == [0, 1, *Numbers().encode(prompt)]


@pytest.mark.parametrize(("end", "first"), [(END, END), (0, 0), (None, 0)])
def test_an_empty_prompt_begins_after_the_end_of_a_document(end: int | None, first: int) -> None:
    """Its token was shown as the first of the text: <|endoftext|>."""
    engine = Counting()
    assert written(engine, Numbers(end_of_text=end), "") == f"{first + 1} {first + 2} {first + 3}"
    assert engine.seen[0] == [first]


def test_the_model_sees_the_last_positions_of_its_context() -> None:
    engine = Counting()
    assert written(engine, Numbers(), "1 2 3", context=2) == "1 2 3 4 5 6"
    assert engine.seen == [[2, 3], [3, 4], [4, 5]]


def test_sequence_parallel_ranks_get_parts_of_equal_length_and_padding_is_not_continued() -> None:
    engine = Counting(tensor=4, sequence_parallel=True)
    assert written(engine, Numbers(), "1 2 3") == "1 2 3 4 5 6"
    assert engine.seen == [[1, 2, 3, 0], [1, 2, 3, 4], [1, 2, 3, 4, 5, 0, 0, 0]]
    engine = Counting(tensor=4)
    written(engine, Numbers(), "1 2 3")
    assert engine.seen[0] == [1, 2, 3]


def test_a_stop_ends_the_text_and_is_not_in_it() -> None:
    engine = Counting()
    assert written(engine, Numbers(stops=(6, 9)), "3", tokens=10) == "3 4 5"
    assert len(engine.seen) == 3


def test_every_rank_takes_the_token_of_the_one_that_draws() -> None:
    """A rank of another replica adds nothing to what is sent."""
    assert written(Counting(data=1, others=11), Numbers(), "3", tokens=2) == "3 11 11"


def test_samples_are_drawn_of_the_likeliest_at_the_temperature() -> None:
    """Of two candidates a nat apart, and forty that are out of the question, as often as the temperature says."""
    logits = torch.full((CANDIDATES + 2,), -1e4)
    logits[7], logits[3] = 1.0, 0.0
    generator = torch.Generator().manual_seed(0)
    drawn = [_draw(logits, generator) for _ in range(2000)]
    assert set(drawn) == {3, 7}
    wanted = 1 / (1 + math.exp(-1 / TEMPERATURE))
    assert drawn.count(7) / 2000 == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 2000))


def test_no_more_candidates_than_there_are() -> None:
    """Forty, each of which is drawn, where more are as likely."""
    flat = torch.zeros(500)
    flat[:CANDIDATES] = 0.5
    generator = torch.Generator().manual_seed(0)
    drawn = {_draw(flat, generator) for _ in range(1000)}
    assert drawn == set(range(CANDIDATES))
    assert len(drawn) == 40
    assert _draw(torch.zeros(1), generator) == 0


class Level(Counting):
    """A model that finds every token as likely, whatever came before."""

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros(*batch["input_ids"].shape, SIZE)


def test_a_seed_gives_one_text() -> None:
    one, same, other = (written(Level(), Numbers(), "0", tokens=50, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
