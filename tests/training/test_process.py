"""What `atoll train` does before its ranks start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.training import process
from atoll.training.config import from_dict


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("nothing can be kept")])
def test_a_machine_that_cannot_be_measured_is_a_note_and_no_end(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(process, "machine_of", lambda config, ranks: SimpleNamespace(find=lambda: None))
    monkeypatch.setattr(process, "measure_here", fail)
    assert process._measure(from_dict({}), None) == 1
    assert f"note: seconds are not predicted: {error}" in capsys.readouterr().err
