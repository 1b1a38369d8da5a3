"""Parts of tensors, and the names of their elements."""

from __future__ import annotations

import json

import pytest

from atoll.runtime.federation.elements import (
    ElementName,
    TensorPart,
    check_covered,
    is_part_of,
    manifest_of,
    names_of_elements,
    read_anchors,
    read_manifest,
)


def test_a_manifest_names_the_elements_of_all_ranks() -> None:
    first = {TensorPart("w", 0, 2): memoryview(b"12")}
    second = {TensorPart("w", 2, 5): memoryview(b"345"), TensorPart("b", 0, 1): memoryview(b"6")}
    names = read_manifest(manifest_of([*names_of_elements(first), *names_of_elements(second, rank=1)]))
    assert {part: (name.nbytes, name.rank) for part, name in names.items()} == {
        TensorPart("w", 0, 2): (2, 0),
        TensorPart("w", 2, 5): (3, 1),
        TensorPart("b", 0, 1): (1, 1),
    }
    assert names[TensorPart("w", 0, 2)] == ElementName(
        "6b51d431df5d7f141cbececcf79edf3dd861c3b4069f0b11661a3eefacbba918", 2, 0
    )


@pytest.mark.parametrize(
    "rows",
    [{}, [1], [["w", 0, 2, "12", 8]], [["w", 2, 2, "12", 8, 0]], [["w", 0, 2, "12", -1, 0]], [["w", -1, 2, "1", 8, 0]]],
)
def test_what_is_no_manifest_is_refused(rows: object) -> None:
    with pytest.raises(ValueError, match="a manifest"):
        read_manifest(json.dumps(rows).encode())


def test_elements_that_nobody_gives_are_named() -> None:
    own = [TensorPart("w", 2, 8), TensorPart("b", 0, 1)]
    given = [TensorPart("b", 0, 1), TensorPart("w", 5, 9), TensorPart("w", 0, 5)]
    check_covered(own, given)
    check_covered(own, [*given, TensorPart("w", 3, 4), TensorPart("v", 0, 9)])
    with pytest.raises(ValueError, match="does not have elements 4 to 7 of w"):
        check_covered(own, [TensorPart("w", 0, 4), TensorPart("w", 5, 9), TensorPart("b", 0, 1)])
    with pytest.raises(ValueError, match="does not have elements 0 to 0 of b"):
        check_covered(own, given[1:])


def test_parts_that_touch_do_not_overlap() -> None:
    own = [TensorPart("w", 2, 4)]
    assert is_part_of(TensorPart("w", 3, 9), own)
    assert is_part_of(TensorPart("w", 0, 3), own)
    assert not is_part_of(TensorPart("w", 4, 6), own)
    assert not is_part_of(TensorPart("w", 0, 2), own)
    assert not is_part_of(TensorPart("v", 2, 4), own)


@pytest.mark.parametrize(
    "rows", [{}, [], [[0, "[]"]], [[0, "[]"], [1]], [[0, "[]"], ["1", "[]"]], [[0, "[]"], [1, "{}"]]]
)
def test_what_is_no_anchors_is_refused(rows: object) -> None:
    """A peer with the secret must not end the thread that reads it."""
    found = read_anchors({"at": None, "fragments": [[0, "[]"], [-1, "[]"]]}, 2)
    assert found == (None, ((0, {}), (-1, {})))
    with pytest.raises(ValueError, match=r"anchors|a manifest"):
        read_anchors({"at": None, "fragments": rows}, 2)
    with pytest.raises(ValueError, match=r"anchors.at: record"):
        read_anchors({"at": rows, "fragments": [[0, "[]"], [-1, "[]"]]}, 2)
    with pytest.raises(ValueError, match="expected an object with at, fragments"):
        read_anchors(rows, 2)
