"""Documents in pieces, and the tokens of those that are chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.training.data import encoding
from atoll.training.data.split import ranges_of
from atoll.training.data.tokenizer import ByteTokenizer


def test_long_documents_are_cut_behind_line_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that joins no characters across a line break gives the tokens of the whole document. A line that is
    longer than a piece is cut where the piece ends."""
    monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", 8)
    texts = ["one\ntwo\nthree\n", "short", "a line without end\nand more", "\n" * 9, ""]
    pieces = list(encoding._pieces(texts))
    assert pieces[:5] == [
        ("one\ntwo\n", False),
        ("three\n", True),
        ("short", True),
        ("a line w", False),
        ("ithout e", False),
    ]
    assert "".join(piece for piece, _ in pieces) == "".join(texts)
    assert sum(is_last for _, is_last in pieces) == len(texts)
    assert max(len(piece) for piece, _ in pieces) <= 8


def test_tokens_of_a_document_in_pieces_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, found = ["one\ntwo\nthree\n", "", "a line without end\nand more"], []
    for size in (1000, 8):
        monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", size)
        path = tmp_path / f"{size}.bin"
        lengths = encoding._encode_texts(texts, ByteTokenizer(), path, np.dtype(np.uint16))
        found.append((lengths, np.fromfile(path, np.uint16).tolist()))
    assert found[0] == found[1]
    assert found[0][0] == [len(text) for text in texts]


def test_neighbours_are_one_range_and_documents_without_tokens_are_none() -> None:
    sizes = np.array([3, 0, 2, 4, 0, 1])

    def ranges(*chosen: int) -> tuple[tuple[int, int], ...]:
        return ranges_of(sizes, np.isin(np.arange(6), chosen))

    assert ranges(0, 1, 2) == ((0, 5),)
    assert ranges(0, 3, 5) == ((0, 3), (5, 9), (9, 10))
    assert ranges(1) == ranges(4) == ranges(1, 4) == ranges() == ()
    assert ranges(1, 3) == ((5, 9),)
