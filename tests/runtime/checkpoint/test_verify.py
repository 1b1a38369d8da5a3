"""Ranges of a file are checked where the manifest says that they are."""

from __future__ import annotations

from pathlib import Path

from atoll.base.digests import digest
from atoll.runtime.checkpoint.manifest import Manifest
from atoll.runtime.checkpoint.verify import _damage


def test_ranges_with_gaps_and_in_any_order_are_found_at_their_places(tmp_path: Path) -> None:
    """Torch aligns tensors, and nothing is said of the bytes between them."""
    content = bytearray(range(100))
    ranges = [
        (60, 40, digest(bytes(content[60:]))),
        (0, 10, digest(bytes(content[:10]))),
        (20, 5, digest(bytes(content[20:25]))),
    ]
    manifest = Manifest({}, {"a": ranges})
    path = tmp_path / "a"

    def damage() -> list[str]:
        path.write_bytes(content)
        return list(_damage(tmp_path, manifest))

    assert damage() == []
    content[15] ^= 1  # between
    assert damage() == []
    content[22] ^= 1
    (said,) = damage()
    assert said.startswith(f"{path}, 5 bytes from 20: ")
    content[22] ^= 1
    content += b"more"
    assert damage() == [f"{path} has 104 bytes, and 100 were written"]
    path.unlink()
    assert [each.startswith(f"{path} cannot be read: ") for each in _damage(tmp_path, manifest)] == [True]
