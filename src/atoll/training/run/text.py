"""Text generation by a model that is split over ranks."""

from __future__ import annotations

import torch

from atoll.runtime.engine import Engine
from atoll.training.data import Tokenizer

TEMPERATURE = 0.8
CANDIDATES = 40


def generate(engine: Engine, tokenizer: Tokenizer, prompt: str, *, tokens: int, context: int, seed: int) -> str:
    """Return the prompt with at most `tokens` more, until a token that ends it. Every rank calls it and gets the same.

    context: maximum number of positions that the model sees. The last stage of the first data-parallel rank draws one
    of the 40 most likely tokens at temperature 0.8, and sends it to the others.
    """
    given = list(map(int, tokenizer.encode(prompt)))
    opening = list(tokenizer.opening)
    if not opening and not given:  # a model continues something: here the end of a document before
        opening = [tokenizer.end_of_text or 0]
    ids = [*opening, *given]
    generator = torch.Generator().manual_seed(seed)
    stops = tokenizer.stops
    speaks = engine.place.data == 0 and engine.place.tp == 0
    part = engine.plan.mesh.tensor if engine.plan.sequence_parallel else 1
    for _ in range(tokens):
        window = ids[-context:]
        padding = [0] * (-len(window) % part)  # after the position that is read, so it has no effect
        logits = engine.logits({"input_ids": torch.tensor([window + padding])})
        drawn = torch.zeros(1, dtype=torch.float64)
        if speaks and logits is not None:
            drawn[0] = _draw(logits[0, len(window) - 1, : tokenizer.size].float().cpu(), generator)
        token = int(engine.transport.total(drawn))
        if token in stops:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(opening) :])


def _draw(logits: torch.Tensor, generator: torch.Generator) -> int:
    best = torch.topk(logits, min(CANDIDATES, logits.numel()))
    chosen = torch.multinomial(torch.softmax(best.values / TEMPERATURE, dim=0), 1, generator=generator)
    return int(best.indices[chosen])
