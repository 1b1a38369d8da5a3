"""Values of a config that follow from others."""

from __future__ import annotations

import pytest

from atoll.training.config import from_dict


@pytest.mark.parametrize(
    ("data", "how", "rule"),
    [
        ({}, "blocks", "split"),
        ({"format": "chat"}, "documents", "drop"),
        ({"packing": "pad"}, "pad", "split"),
        ({"packing": "documents", "too_long": "truncate"}, "documents", "truncate"),
        ({"format": "chat", "packing": "pad", "too_long": "split"}, "pad", "split"),
    ],
    ids=str,
)
def test_text_is_packed_in_blocks_and_conversations_are_not_joined(data: dict[str, str], how: str, rule: str) -> None:
    found = from_dict({"data": {"source": "records.jsonl", **data}}).data
    assert (found.how, found.rule) == (how, rule)
