"""Files of a run's folder at another start."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.training.output.folder import RunFolder, read_records


def test_another_start_keeps_records_up_to_its_step_and_nothing_of_the_plan_before(tmp_path: Path) -> None:
    """Predictions and timings of an earlier start may be of another plan."""
    folder = RunFolder(tmp_path)
    of_a_start = (folder.prediction, folder.cluster, folder.timing, folder.timeline, folder.calibration)
    for path in (*of_a_start, folder.config, folder.identity):
        path.write_text("{}")
    for path in (folder.metrics, folder.validation):
        path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)) + '{"step": 9')
    folder.rewind(3)
    assert not any(path.exists() for path in of_a_start)
    assert folder.config.exists()
    assert folder.identity.exists()
    for path in (folder.metrics, folder.validation):
        assert [record["step"] for record in read_records(path)] == [0, 1, 2, 3]
        assert path.read_text().endswith("}\n")
