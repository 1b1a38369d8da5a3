"""Checkpoints: what is written by some cuts is read by any other, or nothing is changed and one error says why."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_crc32_options, set_crc32_options

from atoll.base._torch import CHECKPOINT_RECORDS, TORCH
from atoll.base.errors import AtollError, CheckpointError, DamageError, RankError, UnverifiedWarning
from atoll.runtime.checkpoint import (
    Archive,
    Piece,
    candidates,
    find,
    folders,
    is_complete,
    latest,
    load_pieces,
    prune,
    read_state,
    save,
    step_folder,
)
from atoll.runtime.checkpoint.meeting import list_problems
from atoll.runtime.checkpoint.opcodes import LARGEST_TUPLE, check_opcodes
from atoll.runtime.checkpoint.saving import without_crc32
from atoll.runtime.checkpoint.verify import verify
from atoll.testing.progress import run, wait_until

Path_ = tuple[str, ...]
WEIGHT = ("model", "layers.0.weight")
MOMENT = ("optim", "state", "layers.0.weight", "exp_avg")
STEP = ("optim", "state", "layers.0.weight", "step")


def example() -> dict[Path_, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        WEIGHT: torch.randn(5, 7, generator=generator),
        ("model", "layers.0.bias"): torch.randn(11, generator=generator),
        MOMENT: torch.randn(5, 7, generator=generator, dtype=torch.float64),
        STEP: torch.tensor(3.0),
    }


def pieces_of(tensors: Mapping[Path_, torch.Tensor], cuts: Sequence[int] = ()) -> list[Piece]:
    """All of `tensors` as pieces that share their storage, cut at the given elements."""
    pieces = []
    for path, tensor in tensors.items():
        inner = sorted({cut for cut in cuts if 0 < cut < tensor.numel()})
        bounds = [0, *inner, tensor.numel()]
        flat = tensor.view(-1)
        for start, stop in itertools.pairwise(bounds):
            pieces.append(Piece(path, tuple(tensor.shape), start, stop, flat[start:stop]))
    return pieces


def blank(tensors: Mapping[Path_, torch.Tensor], dtype: torch.dtype | None = None) -> dict[Path_, torch.Tensor]:
    return {path: torch.full_like(tensor, -7.0, dtype=dtype) for path, tensor in tensors.items()}


def assert_equal(found: Mapping[Path_, torch.Tensor], expected: Mapping[Path_, torch.Tensor]) -> None:
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = step_folder(tmp_path, 100)
    save(folder, pieces_of(example(), [3, 10, 24]), {"step": 100})
    return folder


@pytest.fixture
def unsealed(saved: Path) -> Path:
    """A checkpoint from before there were digests: what is changed in it has to be found without them."""
    return without_digests(saved)


def without_digests(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**document, "version": 1}))
    return folder


# Laws


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.slow
def test_any_cut_is_read_by_any_other(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    numel = math.prod(shape)
    cuts = st.lists(st.integers(0, max(numel, 1)), max_size=5)
    tensors = {("model", "a.b"): torch.arange(numel, dtype=torch.float32).view(shape)}
    found = blank(tensors)
    with tempfile.TemporaryDirectory() as root:
        save(Path(root) / "c", pieces_of(tensors, data.draw(cuts)), {})
        load_pieces(Path(root) / "c", pieces_of(found, data.draw(cuts)))
    assert_equal(found, tensors)


@settings(deadline=None, max_examples=20)
@given(start=st.integers(0, 35), length=st.integers(0, 35))
def test_a_rank_gets_its_own_range_alone(start: int, length: int) -> None:
    stop = min(35, start + length)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "c"
        save(folder, pieces_of(example(), [4, 20]), {})
        held = torch.full((35,), -7.0)
        load_pieces(folder, [Piece(WEIGHT, (5, 7), start, stop, held[start:stop])], strict=False)
    expected = torch.full((35,), -7.0)
    expected[start:stop] = example()[WEIGHT].view(-1)[start:stop]
    assert torch.equal(held, expected)


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"step": 3, "data": {"position": 12}, "schedule": [0.1, 1e-9], "groups": [{"names": ["a"], "lr": None}]}
    save(tmp_path / "c", [], state)
    assert load_pieces(tmp_path / "c", []) == state == read_state(tmp_path / "c")


def test_values_are_cast_to_the_dtype_of_the_piece(saved: Path) -> None:
    found = blank(example(), torch.bfloat16)
    load_pieces(saved, pieces_of(found, [9]))
    assert_equal(found, {path: tensor.bfloat16() for path, tensor in example().items()})


def test_a_parameter_that_requires_grad_is_saved_and_filled(tmp_path: Path) -> None:
    source = torch.nn.Parameter(torch.arange(6.0))
    target = torch.nn.Parameter(torch.zeros(6))
    save(tmp_path / "c", [Piece(("model", "w"), (2, 3), 0, 6, source)], {})
    load_pieces(tmp_path / "c", [Piece(("model", "w"), (2, 3), 0, 6, target)])
    assert torch.equal(source.detach(), target.detach())


def test_a_range_offered_twice_is_written_once(tmp_path: Path) -> None:
    tensors = example()
    save(tmp_path / "c", pieces_of(tensors, [3]) + pieces_of(tensors, [3]), {})
    assert len(Archive(tmp_path / "c").contents.tensors[".".join(WEIGHT)].chunks) == 3
    assert_equal(load_all(tmp_path / "c"), tensors)


def load_all(folder: Path) -> dict[Path_, torch.Tensor]:
    found = blank(example())
    load_pieces(folder, pieces_of(found))
    return found


# Plain torch reads it


def test_plain_torch_loads_it_in_one_process(saved: Path) -> None:
    tensors = example()
    state: dict[str, Any] = {
        "model": {path[1]: torch.zeros_like(tensors[path]) for path in list(tensors)[:2]},
        "optim": {
            "state": {
                "layers.0.weight": {"exp_avg": torch.zeros(5, 7, dtype=torch.float64), "step": torch.tensor(0.0)},
            }
        },
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=saved, no_dist=True)
    assert_nested(state)


def test_plain_torch_converts_it_to_one_file(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "all.pt")
    assert_nested(torch.load(tmp_path / "all.pt", weights_only=True))


def assert_nested(state: dict[str, Any]) -> None:
    tensors = example()
    assert set(state) == {"model", "optim"}
    assert set(state["model"]) == {"layers.0.weight", "layers.0.bias"}
    assert torch.equal(state["model"]["layers.0.weight"], tensors[WEIGHT])
    moments = state["optim"]["state"]["layers.0.weight"]
    assert torch.equal(moments["exp_avg"], tensors[MOMENT])
    assert torch.equal(moments["step"], tensors[STEP])


def test_no_machine_path_is_written(saved: Path) -> None:
    assert str(saved.parent).encode() not in (saved / ".metadata").read_bytes()


# Interrupted saves


def test_a_save_that_breaks_leaves_the_old_checkpoint(saved: Path) -> None:
    broken = [
        *pieces_of(example()),
        Piece(("model", "gone"), (4,), 0, 4, torch.empty(4, device="meta")),  # has no data to write
    ]
    with pytest.raises(RankError, match="rank 0 failed") as error:
        save(saved, broken, {"step": 101})
    assert error.value.rank == 0
    assert read_state(saved) == {"step": 100}
    assert_equal(load_all(saved), example())
    assert [path.name for path in sorted(saved.parent.iterdir())] == ["latest", "step-000100"]


@pytest.mark.slow
def test_a_process_killed_while_writing_leaves_the_old_checkpoint(saved: Path) -> None:
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from atoll.runtime.checkpoint import Piece, save

        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save(Path(sys.argv[1]), [Piece(("model", "w"), (100_000,), 0, 100_000, torch.ones(100_000))], {})
    """
    done = run([sys.executable, "-c", textwrap.dedent(code), saved])
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    leftover = saved.parent / ".saving-step-000100"
    assert leftover.is_dir()
    assert latest(saved.parent) == saved
    assert_equal(load_all(saved), example())
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_pieces(leftover, [])

    save(step_folder(saved.parent, 200), pieces_of(example()), {})
    assert not leftover.exists()


def test_a_checkpoint_between_two_renames_still_counts(saved: Path) -> None:
    parked = saved.with_name(".replaced-step-000100")
    saved.rename(parked)
    assert latest(saved.parent) == parked
    assert_equal(load_all(parked), example())

    save(step_folder(saved.parent, 200), pieces_of(example()), {})
    assert not parked.exists()
    assert is_complete(saved)


def test_saving_again_replaces(saved: Path) -> None:
    doubled = {path: 2 * tensor for path, tensor in example().items()}
    save(saved, pieces_of(doubled, [1]), {"step": 101})
    assert_equal(load_all(saved), doubled)
    assert read_state(saved) == {"step": 101}
    assert [path.name for path in sorted(saved.parent.iterdir())] == ["latest", "step-000100"]


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save(tmp_path / "mine", pieces_of(example()), {})
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_a_run_means_its_newest_checkpoint(tmp_path: Path, saved: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run / "checkpoints" / saved.name)
    newest = run / "checkpoints" / saved.name
    latest_file = run / "checkpoints" / "latest"
    latest_file.write_text(saved.name)
    for path in (run, run / "checkpoints", latest_file, newest):
        assert find(path) == newest
    assert find(tmp_path / "none") == tmp_path / "none"


def test_latest_and_prune(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    for step in (100, 200, 300, 150):
        save(step_folder(tmp_path, step), pieces_of(example()), {"step": step})
    assert latest(tmp_path) == step_folder(tmp_path, 150)

    for keep in range(9, 3, -1):
        prune(tmp_path, keep=keep)
        assert len(list(tmp_path.glob("step-*"))) == 4
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000150", "step-000300"]
    with pytest.raises(CheckpointError, match="at least 1"):
        prune(tmp_path, keep=0)


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_after_step_999_999_is_the_newest(tmp_path: Path, named: bool) -> None:
    """Its name is longer, and comes before the others' in the order of words."""
    steps = (999_998, 999_999, 1_000_000, 1_000_001, 20_000_000)
    for step in steps:
        save(step_folder(tmp_path, step), pieces_of(example()), {"step": step})
    if not named:
        (tmp_path / "latest").unlink()
    assert latest(tmp_path) == find(tmp_path) == step_folder(tmp_path, steps[-1])
    assert candidates(tmp_path) == tuple(step_folder(tmp_path, step) for step in reversed(steps))
    for keep in (4, 3, 2, 1):
        prune(tmp_path, keep=keep)
        assert steps_in(tmp_path) == list(steps[-keep:])


def saved_at(root: Path, hours: Mapping[int, float], losses: Mapping[int, float]) -> None:
    for step, hour in hours.items():
        identity = {"time": 1e9 + hour * 3600, "validation_loss": losses.get(step)}
        save(step_folder(root, step), pieces_of(example()), {}, identity=identity)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_those_of_the_lowest_loss_are_kept_too(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.5, 4: 1.2, 5: 1.2, 6: 2.0}
    for step in range(1, 8):
        saved_at(tmp_path, {step: 0.0}, losses)
        prune(tmp_path, keep=2, best=2)
    assert steps_in(tmp_path) == [4, 5, 6, 7]


def test_those_saved_for_their_loss_alone_push_no_other_out(tmp_path: Path) -> None:
    """A rollback relies on how far the newest ones reach back."""
    losses = {10: 3.0, 13: 2.0, 16: 1.5, 20: 1.6, 23: 1.0}
    for step, loss in losses.items():
        identity = {"validation_loss": loss, **({"extra": True} if step % 10 else {})}
        save(step_folder(tmp_path, step), pieces_of(example()), {}, identity=identity)
        prune(tmp_path, keep=2, best=1)
    assert steps_in(tmp_path) == [10, 20, 23]


@pytest.mark.parametrize("named", [b"\xff", b"../../etc", b"step-000100\n" * 100_000])
def test_latest_is_a_short_name(saved: Path, named: bytes) -> None:
    """All of the file was read, whatever its size."""
    (saved.parent / "latest").write_bytes(named)
    assert latest(saved.parent) == saved


@pytest.mark.parametrize("lost", ["state.json", ".metadata"])
def test_latest_passes_over_an_incomplete_folder(saved: Path, lost: str) -> None:
    newer = step_folder(saved.parent, 200)
    save(newer, pieces_of(example()), {})
    (newer / lost).unlink()
    assert latest(saved.parent) == saved
    with pytest.raises(CheckpointError, match=r"interrupted"):
        load_pieces(newer, pieces_of(blank(example())))


# Refusals


def test_everything_that_differs_is_named_and_nothing_is_touched(saved: Path) -> None:
    found = blank({WEIGHT: example()[WEIGHT], ("model", "more"): torch.zeros(2), STEP: torch.zeros(4)})
    before = {path: tensor.clone() for path, tensor in found.items()}
    with pytest.raises(CheckpointError) as error:
        load_pieces(saved, pieces_of(found))
    text = str(error.value)
    assert str(saved) in text
    assert "4 problems" in text
    assert "it lacks 'model.more' of shape (2,)" in text
    assert "'optim.state.layers.0.weight.step' has shape () there and (4,) here" in text
    assert "it has 'model.layers.0.bias', which this model does not have" in text
    assert "it has 'optim.state.layers.0.weight.exp_avg'" in text
    assert_equal(found, before)


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    save(tmp_path / "c", pieces_of({("model", f"w{number}"): torch.zeros(1) for number in range(20)}), {})
    with pytest.raises(CheckpointError, match="20 problems") as error:
        load_pieces(tmp_path / "c", [])
    assert "and 12 more" in str(error.value)


def test_not_strict_allows_what_nobody_asks_for_but_not_what_is_missing(saved: Path) -> None:
    load_pieces(saved, pieces_of({WEIGHT: torch.zeros(5, 7)}), strict=False)
    with pytest.raises(CheckpointError, match=r"it lacks 'model\.more'"):
        load_pieces(saved, pieces_of({("model", "more"): torch.zeros(1)}), strict=False)


def test_whole_numbers_are_not_made_from_floats(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is torch.float32 there and torch.int64 here"):
        load_pieces(saved, pieces_of({WEIGHT: torch.zeros(5, 7, dtype=torch.int64)}), strict=False)


def whole(path: Path_ = WEIGHT, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32) -> Piece:
    return Piece(path, shape, 0, 6, torch.zeros(6, dtype=dtype))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(WEIGHT, (6,), 0, 2, torch.zeros(2))], r"no rank offers elements 2..6"),
        ([Piece(WEIGHT, (6,), 2, 6, torch.zeros(4))], r"no rank offers elements 0..2"),
        ([whole(), Piece(WEIGHT, (6,), 2, 4, torch.zeros(2))], r"elements 2..6 are offered twice"),
        ([whole(), whole(shape=(2, 3))], r"more than one shape: \(2, 3\), \(6,\)"),
        ([whole(), whole(dtype=torch.float64)], r"more than one dtype"),
        ([whole(), whole(path=("model", "layers", "0", "weight"))], r"more than one path"),
    ],
)
def test_pieces_that_do_not_make_a_tensor_are_refused(tmp_path: Path, pieces: list[Piece], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "c", pieces, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (6,), 0, 6, torch.zeros(6)), "path"),
        ((WEIGHT, (6,), 0, 7, torch.zeros(7)), r"no range 0..7 in 6"),
        ((WEIGHT, (6,), 0, 5, torch.zeros(6)), r"needs a contiguous 1-D tensor of 5"),
        ((WEIGHT, (2, 3), 0, 6, torch.zeros(2, 3)), r"needs a contiguous 1-D tensor of 6"),
        ((WEIGHT, (6,), 0, 3, torch.zeros(6)[::2]), r"needs a contiguous 1-D tensor of 3"),
    ],
)
def test_a_piece_checks_itself(arguments: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Piece(*arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_state_must_be_json(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="must be JSON without NaN"):
        save(tmp_path / "c", pieces_of(example()), {"value": value})
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_pieces(tmp_path / "none", [])


def test_a_state_of_another_version_is_refused(unsealed: Path) -> None:
    (unsealed / "state.json").write_text(json.dumps({"version": 99, "state": {}}))
    with pytest.raises(CheckpointError, match="version 99"):
        load_pieces(unsealed, pieces_of(blank(example())))


@pytest.mark.parametrize("length", [0, 200, 3000])
def test_a_cut_off_file_is_named(unsealed: Path, length: int) -> None:
    file = next(unsealed.glob("*.distcp"))
    os.truncate(file, length)
    with pytest.raises(CheckpointError, match=file.name):
        load_pieces(unsealed, pieces_of(blank(example())))


def test_an_interruption_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "prepare_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "one", pieces_of(example()), {})


# Digests


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_of_a_box_is_found_by_who_reads_it_alone(saved: Path) -> None:
    """Without digests 43 of 100 flips in data files gave other values and no error."""
    file = next(saved.glob("*.distcp"))
    at = file.read_bytes().index(example()[MOMENT].numpy().tobytes()[14 * 8 : 21 * 8])
    flip(file, at)
    other = blank({WEIGHT: example()[WEIGHT]})
    load_pieces(saved, pieces_of(other), strict=False)
    assert_equal(other, {WEIGHT: example()[WEIGHT]})
    with pytest.raises(DamageError, match=rf"{file.name}, \d+ bytes from \d+: the digest does not match"):
        load_all(saved)


@pytest.mark.parametrize("name", ["state.json", ".metadata", "manifest.json"])
def test_any_other_byte_of_a_json_file_or_the_metadata_is_damage(saved: Path, name: str) -> None:
    for at in range(0, (saved / name).stat().st_size, 97):
        flip(saved / name, at)
        with pytest.raises(DamageError, match=name):
            load_all(saved)
        flip(saved / name, at)
    assert_equal(load_all(saved), example())


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("other", [1, [1], [1, 2], {1: 2}, {1: 2, 3: 4}, (), (1,)], ids=repr)
def test_tuples_are_counted_with_all_that_is_in_them(other: Any, protocol: int) -> None:
    """Beside a tuple of as many objects as may be, less 2, one more fits and two do not; a list or dict is one."""
    most = tuple([None] * (LARGEST_TUPLE - 3))
    weight = 1 + len(other) if isinstance(other, tuple) else 1
    check_opcodes(pickle.dumps((most, other) if weight == 1 else (most,), protocol))
    with pytest.raises(DamageError, match="a tuple of more than"):
        check_opcodes(pickle.dumps((most, other, None), protocol))


def test_of_a_checkpoint_that_cannot_be_opened_no_byte_is_verified(saved: Path) -> None:
    whole = verify(saved)
    assert whole.nbytes >= sum(tensor.nbytes for tensor in example().values())
    assert (whole.has_digests, whole.problems) == (True, ())
    for name in ("state.json", ".metadata"):
        flip(saved / name, 40)
        found = verify(saved)
        assert found.nbytes == 0
        (problem,) = found.problems
        assert name in problem
        flip(saved / name, 40)
    assert verify(saved) == whole


@pytest.mark.parametrize("before", [True, False])
def test_zip_records_have_no_checksum_of_torch_beside_the_digest(before: bool) -> None:
    """Only while a checkpoint is written, also if that fails: a user's own files are as the user has set them."""

    def write() -> None:
        with without_crc32():
            assert not get_crc32_options()
            raise OSError("full")

    was = get_crc32_options()
    set_crc32_options(before)
    try:
        with pytest.raises(OSError, match="full"):
            write()
        assert get_crc32_options() == before
    finally:
        set_crc32_options(was)


def test_files_of_another_checkpoint_are_damage(saved: Path) -> None:
    newer = step_folder(saved.parent, 200)
    save(newer, pieces_of({path: 2 * tensor for path, tensor in example().items()}, [3, 10, 24]), {"step": 200})
    for name in [path.name for path in saved.iterdir() if path.name != ".metadata"]:  # equal in both
        kept = (newer / name).read_bytes()
        (newer / name).write_bytes((saved / name).read_bytes())
        with pytest.raises(DamageError):
            load_all(newer)
        (newer / name).write_bytes(kept)


def test_a_missing_manifest_is_damage_and_a_checkpoint_from_before_there_were_any_is_not(saved: Path) -> None:
    (saved / "manifest.json").rename(saved / "kept")
    with pytest.raises(DamageError, match=r"manifest\.json is missing"):
        load_all(saved)
    (saved / "kept").rename(saved / "manifest.json")
    without_digests(saved)
    with pytest.warns(UnverifiedWarning, match="was not verified"):
        assert_equal(load_all(saved), example())


def test_a_save_leaves_torchs_own_checksums_as_they_were(saved: Path) -> None:
    assert torch.serialization.get_crc32_options()


def test_the_manifest_says_whose_the_checkpoint_is(tmp_path: Path) -> None:
    save(tmp_path / "c", pieces_of(example()), {}, identity={"step": 3, "run": "a"})
    manifest = Archive(tmp_path / "c").manifest
    assert manifest is not None
    assert manifest.identity == {"step": 3, "run": "a"}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "c").iterdir() if path.name != "manifest.json"}
    assert {name: sum(length for _, length, _ in ranges) for name, ranges in manifest.files.items()} == sizes


def test_a_state_nested_too_deeply_is_damage(unsealed: Path) -> None:
    (unsealed / "state.json").write_text('{"version": 1, "state": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(DamageError, match="nested too deeply"):
        read_state(unsealed)


NEST = b"2\x86"  # DUP, TUPLE2: a tuple of the last object twice
NESTS = b"".join(b"h%ch%c\x86\x94" % (at, at) for at in range(60))  # the same from the memo
BOMBS = {
    "a tuple of two tuples of two tuples, printed": b"\x80\x04)" + NEST * 25 + b".",
    "the same as a key, hashed": b"\x80\x04})\x94" + NESTS + b"Ns.",
    "a place in a memo of 34 gigabytes": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a long text that is not there": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "a number of a million digits": b"\x80\x04\x8b" + (500_000).to_bytes(4, "little") + b"\x01" * 500_000 + b".",
    "sets": b"\x80\x04\x8f.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_metadata_that_would_take_long_or_much_is_refused_at_once(unsealed: Path, bomb: str) -> None:
    """Fifty-three bytes took minutes."""
    (unsealed / ".metadata").write_bytes(BOMBS[bomb])
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamageError, match=r"\.metadata"):
        load_all(unsealed)
    assert time.thread_time() - began < 10.0  # of processor time
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_what_plain_torch_writes_passes_in_every_protocol(unsealed: Path) -> None:
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    for protocol in (2, 3, 4, 5):
        (unsealed / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
        with pytest.warns(UnverifiedWarning):
            assert_equal(load_all(unsealed), example())


# Hostile files


class Trap:
    """Pickles as a call that creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")  # io.open; from Python 3.12 on, its module is _io


def test_metadata_that_would_run_code_is_refused(unsealed: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (unsealed / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(CheckpointError, match=r"names _?io\.open, which no checkpoint needs"):
        load_pieces(unsealed, pieces_of(blank(example())))
    assert not trap.exists()
    pickle.loads((unsealed / ".metadata").read_bytes()).close()
    assert trap.exists()  # the trap works on whoever unpickles it


def test_a_trap_deep_inside_honest_metadata_is_refused(unsealed: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    metadata.planner_data["model.layers.0.bias"] = Trap(tmp_path / "sprung")
    (unsealed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"io\.open"):
        load_pieces(unsealed, pieces_of(blank(example())))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("file", ["../outside.distcp", "/etc/hostname", "..", ".metadata", "a\\b", "a\0b", ""])
def test_files_outside_the_folder_are_refused(unsealed: Path, file: str) -> None:
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = file
    (unsealed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not a plain name of a file in the folder"):
        load_pieces(unsealed, pieces_of(blank(example())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.chunks.pop(), r"boxes hold 28 of 35 elements"),
        (lambda tensor: tensor.chunks.append(tensor.chunks[0]), r"boxes hold 38 of 35 elements"),
        (lambda tensor: setattr(tensor.chunks[-1], "offsets", torch.Size((0, 0))), r"boxes overlap"),
        (lambda tensor: setattr(tensor.chunks[-1], "offsets", torch.Size((5, 0))), r"is not inside \(5, 7\)"),
        (lambda tensor: setattr(tensor, "size", [5, 7]), r"size of .* is \[5, 7\]"),
    ],
)
def test_metadata_that_does_not_add_up_is_refused(unsealed: Path, change: Any, message: str) -> None:
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    change(metadata.state_dict_metadata[".".join(WEIGHT)])
    (unsealed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        load_pieces(unsealed, pieces_of(blank(example())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("there", [True, False])
def test_a_box_of_another_dtype_than_its_tensor_is_refused(unsealed: Path, dtype: torch.dtype, there: bool) -> None:
    """Though its shape is right, and copying would cast it. The metadata is wrong, or the box."""
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    name = ".".join(WEIGHT)
    tensor = metadata.state_dict_metadata[name]
    if there:
        tensor.properties.dtype = dtype
    else:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                content = io.BytesIO()
                torch.save(torch.ones(tensor.chunks[index.index].sizes, dtype=dtype), content)
                file = unsealed / f"box-{index.index}.distcp"
                file.write_bytes(content.getvalue())
                info.relative_path, info.offset, info.length = file.name, 0, len(content.getvalue())
    (unsealed / ".metadata").write_bytes(pickle.dumps(metadata))
    wanted = blank(example())
    if there and not dtype.is_floating_point:
        wanted[WEIGHT] = torch.zeros(wanted[WEIGHT].shape, dtype=dtype)  # else the kinds differ, which is found before
    words = rf"has {torch.float32 if there else dtype} .* where the metadata says {dtype if there else torch.float32}"
    with pytest.raises(DamageError, match=words):
        load_pieces(unsealed, pieces_of(wanted), strict=False)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.zeros(2)}, "when": Path("x")}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / "state.json").write_text('{"version": 1, "state": {}}')
    with pytest.raises(CheckpointError, match="'when' is a pickled object"):
        load_pieces(tmp_path / "c", pieces_of({("model", "w"): torch.zeros(2)}))


def test_a_trap_in_place_of_a_tensor_is_refused(unsealed: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save({"x": Trap(tmp_path / "sprung")}, content)
    metadata = dcp.FileSystemReader(unsealed).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "trap.distcp", 0, len(content.getvalue())
    (unsealed / "trap.distcp").write_bytes(content.getvalue())
    (unsealed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"trap\.distcp"):
        load_pieces(unsealed, pieces_of(blank(example())))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_changed_byte_of_metadata_gives_the_values_or_a_checkpoint_error(at: int, value: int) -> None:
    tensors = {WEIGHT: torch.arange(6.0).view(2, 3)}
    found = blank(tensors)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "c"
        save(folder, pieces_of(tensors, [2]), {})
        without_digests(folder)
        content = bytearray((folder / ".metadata").read_bytes())
        content[at % len(content)] = value
        (folder / ".metadata").write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedWarning)
            try:
                load_pieces(folder, pieces_of(found))
            except CheckpointError:
                return
    assert_equal(found, tensors)


# Several ranks


def run_ranks(function: Any, world: int, root: Path) -> list[Any]:
    """Run `function(rank, root)` on `world` gloo ranks; what each returned, or the text of its error."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank_main, args=(function, rank, world, root), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        wait_until(lambda: not any(process.is_alive() for process in processes))
    finally:
        for process in processes:
            process.kill()
    return [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(world)]


def _rank_main(function: Any, rank: int, world: int, root: Path) -> None:
    store = dist.FileStore(str(root / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = function(rank, root)
    (root / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def error_of(action: Any) -> list[str]:
    """Kind and text of the Atoll error that `action` raises."""
    try:
        action()
    except AtollError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def share(rank: int, tensors: Mapping[Path_, torch.Tensor], cuts: Sequence[int]) -> list[Piece]:
    """The pieces of `tensors` dealt to four ranks, the cuts deciding the ranges."""
    return pieces_of(tensors, cuts)[rank::4]


REPLICATED = ("model", "replicated")


def big() -> dict[Path_, torch.Tensor]:
    """Eight tensors of 40 kB that every rank holds."""
    return {(*REPLICATED, str(number)): torch.full((10_000,), float(number)) for number in range(8)}


def _on_four_ranks(rank: int, root: Path) -> dict[str, Any]:
    folder = step_folder(root, 1)
    save(folder, share(rank, example(), [2, 5, 8, 21]) + pieces_of(big()), {"step": 1, "rank": rank})

    found = blank(example())
    state = load_pieces(folder, share(rank, found, [1, 3, 30]) + pieces_of(blank(big())))
    mine = share(rank, example(), [1, 3, 30])
    held = share(rank, found, [1, 3, 30])
    right = all(torch.equal(one.tensor, other.tensor) for one, other in zip(mine, held, strict=True))

    gone = Piece(("model", "gone"), (4,), rank, rank + 1, torch.empty(1, device="meta" if rank == 2 else "cpu"))
    gap = Piece(("model", "gap"), (4,), rank, rank + 1, torch.ones(1))
    nothing = blank({("model", f"missing-{rank}"): torch.zeros(3)})
    whole_file = pieces_of(blank(example() | big()))
    return {
        "state": state,
        "right": right,
        "broken": error_of(lambda: save(folder, [gone], {"step": 2})),
        "gap": error_of(lambda: save(folder, [gap] if rank != 1 else [], {"step": 2})),
        "missing": error_of(lambda: load_pieces(folder, whole_file + (pieces_of(nothing) if rank in (1, 3) else []))),
        "none": error_of(lambda: load_pieces(root / "none", [])),
    }


@pytest.mark.wide(0)
def test_four_ranks(tmp_path: Path) -> None:
    results = run_ranks(_on_four_ranks, 4, tmp_path)
    folder = step_folder(tmp_path, 1)
    assert [result["right"] for result in results] == [True] * 4
    assert [result["state"] for result in results] == [{"step": 1, "rank": 0}] * 4

    # replicas are written once, and the ranks share the work
    assert len(Archive(folder).contents.tensors["model.replicated.0"].chunks) == 1
    sizes = [file.stat().st_size for file in sorted(folder.glob("*.distcp"))]
    assert len(sizes) == 4
    assert all(80_000 < size < 100_000 for size in sizes), sizes

    # every rank raises the same, and the checkpoint is what it was
    for what in ("broken", "gap", "missing", "none"):
        assert len({tuple(result[what]) for result in results}) == 1, what
    assert results[0]["broken"][0] == "RankError"
    assert "rank 2 failed" in results[0]["broken"][1]
    assert results[0]["gap"][0] == "CheckpointError"
    assert "no rank offers elements 1..2" in results[0]["gap"][1]
    assert "'model.missing-1'" in results[0]["missing"][1]
    assert "'model.missing-3'" in results[0]["missing"][1]
    assert "no checkpoint at" in results[0]["none"][1]
    found = blank(example() | big())
    assert load_pieces(folder, pieces_of(found, [17])) == {"step": 1, "rank": 0}
    assert_equal(found, example() | big())


def _on_two_ranks(rank: int, root: Path) -> dict[str, Any]:
    # boxes that are no flat ranges: columns, written by plain torch
    mesh = init_device_mesh("cpu", (2,))
    columns = DTensor.from_local(
        example()[WEIGHT][:, rank * 4 : rank * 4 + 4 - rank], mesh, [Shard(1)], shape=torch.Size((5, 7)), stride=(7, 1)
    )
    dcp.save({"model": {"layers.0.weight": columns}}, checkpoint_id=root / "columns")
    if rank == 0:
        (root / "columns" / "state.json").write_text('{"version": 1, "state": {}}')
    dist.barrier()
    found = blank({WEIGHT: example()[WEIGHT]})
    load_pieces(root / "columns", pieces_of(found, [16])[rank : rank + 1])
    start, stop = (0, 16) if rank == 0 else (16, 35)
    right = torch.equal(found[WEIGHT].view(-1)[start:stop], example()[WEIGHT].view(-1)[start:stop])

    # a full disk on one rank: its files may not grow
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    large = Piece(("model", "large"), (2, 100_000), rank * 100_000, (rank + 1) * 100_000, torch.ones(100_000))
    full = error_of(lambda: save(step_folder(root, 1), [large], {}))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = sorted(path.name for path in root.iterdir())
    dist.barrier()
    save(step_folder(root, 1), [large], {})
    return {"right": right, "full": full, "after": after, "saved": is_complete(step_folder(root, 1))}


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    results = run_ranks(_on_two_ranks, 2, tmp_path)
    assert [result["right"] for result in results] == [True, True]
    assert results[0]["full"] == results[1]["full"]
    assert results[0]["full"][0] == "RankError"
    assert "rank 1 failed" in results[0]["full"][1]
    assert "step-000001" not in results[1]["after"]
    assert [result["saved"] for result in results] == [True, True]


# Private names of torch


def test_private_names_are_there_in_the_supported_torch(saved: Path) -> None:
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    first, end = (tuple(int(part) for part in version.split(".")) for version in TORCH)
    assert first <= installed < end
    for module, name in CHECKPOINT_RECORDS:
        if module != "pathlib._local":
            assert hasattr(import_module(module), name), (module, name)
    assert Archive(saved).contents.tensors.keys() == {".".join(path) for path in example()}


def test_one_problem_is_said_in_place_and_several_are_listed() -> None:
    assert list_problems(["a is missing"]) == "a is missing"
    assert list_problems(["a", "b"]) == "2 problems\n  a\n  b"
    assert list_problems(["a", "b", "c"], limit=2) == "3 problems\n  a\n  b\n  and 1 more"


def test_an_empty_range_says_something_of_a_tensor_without_elements_alone() -> None:
    assert not Piece(WEIGHT, (6,), 2, 2, torch.empty(0)).claim.says_something
    assert Piece(WEIGHT, (6,), 2, 3, torch.empty(1)).claim.says_something
    assert Piece(WEIGHT, (0, 4), 0, 0, torch.empty(0)).claim.says_something
