"""What a supply knows of the tokenizer that it is given."""

from __future__ import annotations

from pathlib import Path

from atoll.training.data.supply import content_of
from atoll.training.data.tokenizer import train_bpe


def test_a_tokenizer_is_known_by_its_file_wherever_it_is(tmp_path: Path) -> None:
    """A folder's is that of its tokenizer.json: notes beside it do not count."""
    words, others = (train_bpe([text * 20], 300).to_json() for text in ("the cat sat ", "on another mat "))
    folder, other = tmp_path / "a", tmp_path / "b"
    for path in (folder, other):
        path.mkdir()
        (path / "tokenizer.json").write_text(words)
    (other / "README.md").write_text("other")
    assert content_of(str(folder)) == content_of(str(other)) == content_of(str(folder / "tokenizer.json"))
    (other / "tokenizer.json").write_text(others)
    assert content_of(str(folder)) != content_of(str(other))
    assert content_of("bytes") == "bytes"
