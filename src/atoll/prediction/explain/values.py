"""An explanation as plain values: the output of `atoll explain --json`."""

from __future__ import annotations

from typing import Any

from atoll.prediction.cost.summary import bytes_of, summary
from atoll.prediction.explain.alternative import Alternative, fullest
from atoll.prediction.explain.explanation import Explanation, Measured
from atoll.prediction.explain.questions import QuestionAnswer


def values(explanation: Explanation) -> dict[str, Any]:
    """Return the JSON object documented in docs/cli.md."""
    prediction = explanation.prediction
    return {
        "prediction": summary(prediction),
        "ranks": [
            {
                "rank": each.rank,
                "during": None if each.during is None else str(each.during),
                "peak": bytes_of(each.held),
                "blocks": list(each.blocks),
                "state": [
                    {
                        "of": own.name,
                        "elements": own.elements,
                        "parameters": own.parameters,
                        "gradients": own.gradients,
                        "optimizer": own.optimizer,
                    }
                    for own in each.state
                ],
                "in_flight": [
                    {"stage": own.stage, "microbatches": own.microbatches, "bytes": own.nbytes}
                    for own in each.in_flight
                ],
                "links": [
                    {
                        "axis": use.axis,
                        "what": use.kind,
                        "times": use.times,
                        "bytes": use.nbytes,
                        "seconds": use.seconds,
                    }
                    for use in explanation.links(each.rank)
                ],
            }
            for each in explanation.holdings
        ],
        "resources": [{"name": each.name, "saved_seconds": each.saved} for each in explanation.resources],
        "layouts": [
            {
                **of_alternative(row.alternative),
                "intra_bytes": row.travel.intra if row.travel else None,
                "inter_bytes": row.travel.inter if row.travel else None,
                "busy_seconds": row.travel.seconds if row.travel else None,
                "hidden": row.travel.hidden if row.travel else None,
            }
            for row in explanation.layouts
        ],
        "undone": [each.name for each in explanation.undone],
        "alternatives": [of_alternative(each) for each in explanation.others],
        "situations": [of_alternative(each) for each in explanation.situations],
        "measured": None if explanation.measured is None else _measured(explanation.measured),
    }


def of_alternative(each: Alternative) -> dict[str, Any]:
    """Return an alternative and its differences; null if it is refused."""
    found = each.prediction
    return {
        "choice": each.choice,
        "value": each.value,
        "was": each.was,
        "refusal": each.refusal or None,
        "seconds": None if found is None else found.seconds,
        "tokens_per_second": None if found is None else found.tokens_a_second,
        "fits": None if found is None else each.fits,
        "margin_bytes": None if found is None else each.margin,
        "peak": None if found is None else bytes_of(fullest(found)),
        "difference": None
        if found is None
        else {"seconds": each.seconds, "parts": dict(each.parts), "cause": each.cause, "bytes": each.nbytes},
    }


def of_answer(found: QuestionAnswer) -> dict[str, Any]:
    """Return a question with its answer."""
    return {
        "key": found.key,
        "question": found.question,
        "sentences": list(found.sentences),
        "alternatives": [of_alternative(each) for each in found.alternatives],
    }


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "seconds": measured.seconds,
        "parts": [
            {"rank": rank, "part": part, "predicted": predicted, "measured": seconds}
            for rank, parts in enumerate(measured.parts)
            for part, (predicted, seconds) in parts.items()
        ],
        "peaks": list(measured.peaks),
        "memory": measured.memory,
    }
