"""What a model.source names is looked for before anything is made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.training.config.load import from_dict
from atoll.training.models.pretrained import hugging_face_config
from atoll.training.models.sources import check_source
from atoll.training.process import Request, train


def source(name: str, **others: Any) -> Any:
    return from_dict({"model": {"source": name, **others}})


def test_what_exists_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("builtin", "transformers:llama", "transformers:gpt2", "transformers:data2vec-text", str(tmp_path)):
        check_source(source(name))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt2-xl", "'gpt2-xl' is no folder, and Atoll downloads nothing"),
        ("transformers:lama", "has no family 'lama'; did you mean llama or .* or .*docs/models.md"),
        ("transformers:", "has no family ''; docs/models.md lists"),
    ],
)
def test_what_does_not_exist_is_refused_in_few_words(name: str, says: str) -> None:
    """An unknown family was answered with the names of all 700."""
    with pytest.raises(ConfigError, match=says) as caught:
        check_source(source(name))
    assert len(str(caught.value)) < 300


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_source(source(str(tmp_path)))


def test_a_model_with_fewer_ids_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(vocab_size=100).save_pretrained(tmp_path)
    config = source(str(tmp_path))
    assert hugging_face_config(config, 100).vocab_size == hugging_face_config(config).vocab_size == 100
    with pytest.raises(ConfigError, match=r"knows 100 ids, and data\.tokenizer = .* needs 101; use the model's own"):
        hugging_face_config(config, 101)
    assert hugging_face_config(source("transformers:llama"), 101).vocab_size == 101


def test_no_tokenizer_is_trained_for_a_model_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("words " * 4000)
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\nsource = "{tmp_path}/gone"\n[data]\nsource = "{tmp_path}/text.txt"\ncache = "{tmp_path}/cache"\n'
        f'[run]\nfolder = "{tmp_path}/run"\n'
    )
    with pytest.raises(ConfigError, match="gone' is no folder"):
        train(Request(config))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "text.txt"]
