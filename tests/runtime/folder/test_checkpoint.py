"""Whatever happens during a save, a complete checkpoint is left, and readers never take a broken one."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.checkpoint import CheckpointError, latest, load, problem, save, steps, to_resume


def weights(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {"lora": {"a": torch.randn(16, 8, generator=generator), "b": torch.full((3,), float(step))}}


def save_step(folder: Path, step: int, keep: int = 2) -> Path:
    return save(folder, step, tensors=weights(step), state={"step": step, "lr": 0.1}, keep=keep, extra=write_adapter)


def write_adapter(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "config.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return [path.name for path in steps(folder)]


def assert_is_step(path: Path | None, step: int) -> None:
    assert path is not None
    loaded = load(path)
    assert loaded.step == step and loaded.state == {"step": step, "lr": 0.1}
    expected = weights(step)
    assert all(torch.equal(loaded.tensors["lora"][name], expected["lora"][name]) for name in expected["lora"])


def test_round_trip_and_rotation(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None and to_resume(tmp_path / "absent") is None
    assert problem(tmp_path / "absent") == "there is no such folder"
    for step in range(1, 6):
        path = save_step(tmp_path, step)
        assert (path / "adapter" / "config.json").read_text() == "{}"
        assert_is_step(latest(tmp_path), step)
    assert names(tmp_path) == ["step-000005", "step-000004"] and len(list(tmp_path.iterdir())) == 2
    before = (path / "lora.safetensors").stat().st_ino
    assert save_step(tmp_path, 5) == path  # it is saved once
    assert (path / "lora.safetensors").stat().st_ino == before
    with pytest.raises(CheckpointError, match="could not write checkpoint"):
        save_step(path / "lora.safetensors", 1)


def test_dtypes_views_ties_and_empty_tensors_keep_their_bits(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    named = {
        **{"bfloat16": torch.randn(3).bfloat16(), "uint8": torch.arange(5, dtype=torch.uint8)},
        **{"scalar": torch.tensor(3.5, dtype=torch.float64), "empty": torch.zeros(0, 2)},
        **{"transposed": base.T, "slice": base[:, 2:4], "tied": base, "tied too": base},
        **{"bool": torch.tensor([True, False]), "gradient": torch.ones(2, requires_grad=True)},
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    loaded = load(save(tmp_path, 1, tensors={"all": named, "none": {}}, state={}, keep=1))
    assert loaded.tensors["none"] == {}
    for name, tensor in named.items():
        read = loaded.tensors["all"][name]
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        bits, wanted = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (read, tensor))
        assert torch.equal(bits, wanted)


def test_a_damaged_folder_is_set_aside_by_its_step_and_not_counted_by_others(tmp_path: Path) -> None:
    for count in (1, 2):
        (save_step(tmp_path, 3) / "manifest.json").unlink()
        save_step(tmp_path, 3, keep=1)
        assert_is_step(latest(tmp_path), 3)
        assert len(list(tmp_path.glob("step-000003.damaged-*/lora.safetensors"))) == count
    save_step(tmp_path, 4, keep=1)
    assert len(list(tmp_path.iterdir())) == 3  # nobody deletes what cannot be read
    other = tmp_path / "other"
    for step in (1, 2, 3):
        path = save_step(other, step)
        if step == 2:
            (path / "state.json").write_text("{")
    assert names(other) == ["step-000003", "step-000002", "step-000001"]
    save_step(other, 4)
    assert names(other) == ["step-000004", "step-000003", "step-000002"]


def test_going_on_from_an_earlier_step_drops_the_given_up_future(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, keep=9)
    (tmp_path / "step-000004" / "lora.safetensors").write_bytes(b"broken")
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000009")  # broken or not, it lies in the future
    save_step(tmp_path, 3, keep=1)  # already there: nothing happens
    assert "step-000009" in names(tmp_path)
    (tmp_path / "step-000003" / "state.json").unlink()
    shutil.rmtree(tmp_path / "step-000009")
    save_step(tmp_path, 5, keep=9)
    save_step(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000004", "step-000003"]  # the damaged one stays


@pytest.mark.parametrize("ending", [r"rename:step-000003", r"rename:step-000003\.replaced-1\.tmp-\d+"])
def test_a_checkpoint_that_made_way_for_one_that_never_came_is_there_again(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 3)

    def end(point: str) -> None:
        if re.fullmatch(ending, point):
            raise KeyboardInterrupt  # nothing is tidied up, as after a kill

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "_fault", end)
        save(tmp_path, 3, tensors=weights(3), state={"step": 3, "lr": 0.1}, keep=1, replace=True)
    assert (tmp_path / "step-000003.replaced-1").is_dir()
    assert_is_step(to_resume(tmp_path), 3)
    assert not list(tmp_path.glob("*.replaced-1*"))


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "lora.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "lora.safetensors").write_bytes(data)


def rewrite(path: Path, **changes: object) -> None:
    """Another manifest, with a right checksum."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    manifest["checksum"] = checkpoint._checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def replace(path: Path, old: str, new: str) -> None:
    """The manifest with other words, and its old checksum."""
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, new))


def leave_the_folder(path: Path) -> None:
    (path.parent / "outside").write_text("x")
    outside = {"bytes": 1, "sha256": checkpoint.sharding.sha256(path.parent / "outside")}
    rewrite(path, files=json.loads((path / "manifest.json").read_text())["files"] | {"../outside": outside})


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: os.truncate(path / "lora.safetensors", 40), "lora.safetensors has 40 bytes"),
    (flip_a_bit, "lora.safetensors was altered"),
    (lambda path: (path / "adapter" / "config.json").unlink(), "adapter/config.json is missing"),
    (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda path: os.truncate(path / "manifest.json", 50), "manifest.json cannot be read"),
    (lambda path: rewrite(path, format=99), "format 99"),
    (lambda path: replace(path, '"format": 2', '"format": 3'), "it says format 3, but was written as format 2"),
    (leave_the_folder, "../outside is missing"),
    (lambda path: rewrite(path, files={}), "does not list state.json"),
    (lambda path: replace(path, '"lora.safetensors"', '"lara.safetensors"'), "its checksum is not that of its conte"),
    (lambda path: rewrite(path, step=7), "it belongs to step 7"),
]
"""What happens to a checkpoint, and why it is no complete one then."""


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(
    tmp_path: Path, caplog: Any, damage: Callable[[Path], None], reason: str
) -> None:
    save_step(tmp_path, 1)
    damaged = save_step(tmp_path, 2)
    damage(damaged)
    assert_is_step(latest(tmp_path), 1)
    assert str(damaged) in caplog.text and reason in caplog.text
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load(damaged)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGES[:5]])
def test_a_run_does_not_go_on_where_nothing_can_be_read(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for step in (1, 2):
        damage(save_step(tmp_path, step))
    before = content(tmp_path)
    said = r"nothing was changed:\n  step-000002: .*\n  step-000001: .*\n.*output=FOLDER"
    with pytest.raises(ValueError, match=said):
        to_resume(tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize(("version", "says"), [(99, "update genrl"), (1, "resume with that")])
def test_another_versions_checkpoint_is_not_passed_over(tmp_path: Path, version: int, says: str) -> None:
    save_step(tmp_path, 1)
    rewrite(save_step(tmp_path, 2), format=version)
    with pytest.raises(ValueError, match=f"step-000002 cannot be read: it is of format {version}.*{says}"):
        to_resume(tmp_path)
    rewrite(tmp_path / "step-000002", format=2)
    assert_is_step(to_resume(tmp_path), 2)


def test_no_flipped_bit_of_a_manifest_goes_unseen(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    manifest = save_step(tmp_path, 2) / "manifest.json"
    whole, chance = manifest.read_bytes(), random.Random(0)
    for _ in range(200):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        manifest.write_bytes(data)
        result = to_resume(tmp_path)
        try:
            same = json.loads(bytes(data)) == json.loads(whole)  # a space became a line break, ...
        except ValueError:
            same = False
        assert_is_step(result, 2 if same else 1)


def points_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file operations of the save of step 3 into a folder with steps 1 and 2, in order."""
    seen: list[str] = []
    prepare(folder)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fault", seen.append)
        save_step(folder, 3, keep=1)
    return seen


def prepare(folder: Path) -> None:
    """Two complete checkpoints and what an interrupted save left behind."""
    for step in (1, 2):
        save_step(folder, step, keep=2)
    (folder / "step-000003.tmp-1").mkdir()
    (folder / "step-000003").mkdir()  # damaged: it is set aside


def complete_and_leftovers(folder: Path) -> list[str]:
    """All that is in a folder but the damaged one of `prepare`, under one name or the other."""
    spared = {"step-000003.damaged-1"} | ({"step-000003"} if problem(folder / "step-000003") else set())
    return [entry.name for entry in folder.iterdir() if entry.name not in spared]


def test_everything_is_on_disk_before_the_rename_and_nothing_is_deleted_before(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """What no kill can show, because the page cache survives it: the order that a power cut needs."""
    points = points_of_a_save(tmp_path, monkeypatch)
    committed = points.index("rename:step-000003")
    before, after = points[:committed], points[committed + 1 :]
    written = {point.partition(":")[2] for point in before if point.startswith("write:")}
    assert written == {"lora.safetensors", "state.json", "manifest.json"}
    temporary = f"step-000003.tmp-{os.getpid()}"
    for name in [*written, "config.json", "adapter", temporary]:
        assert f"fsync:{name}" in before
    synced = [before.index(f"fsync:{name}") for name in ("lora.safetensors", "config.json")]
    assert before.index("write:manifest.json") > max(synced)
    last = len(before) - 2  # at the very last the damaged folder of that name is set aside
    assert before.index(f"fsync:{temporary}", before.index("write:manifest.json")) == last
    assert after[0] == f"fsync:{tmp_path.name}"
    doomed = [f"step-00000{step}.tmp-{os.getpid()}" for step in (2, 1)]
    assert after[1:] == [f"{point}:{name}" for name in doomed for point in ("rename", "rmtree")]


@pytest.mark.parametrize("killed", [False, True], ids=["fails", "is killed"])
def test_whatever_file_operation_ends_a_save_a_complete_checkpoint_is_left(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error, or by the death of the process, a forked child's here, which has no chance to clean up."""
    points = points_of_a_save(tmp_path / "clean", monkeypatch)
    kinds = {point.partition(":")[0] for point in points}
    assert kinds == {"mkdir", "write", "fsync", "rename", "rmtree"} and len(points) >= 15
    committed = points.index("rename:step-000003")
    for ending, point in enumerate(points):
        folder = tmp_path / f"{ending}"
        prepare(folder)
        count = iter(range(len(points) + 9))

        def end(here: str, count: Iterator[int] = count, ending: int = ending) -> None:
            if next(count) == ending:
                if killed:
                    os._exit(9)
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_fault", end)
            if killed:
                if (child := os.fork()) == 0:
                    save_step(folder, 3, keep=1)
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            elif ending <= committed + 1:  # up to the sync of the parent
                with pytest.raises(CheckpointError, match="No space left.*MiB free there.*Earlier checkpoints"):
                    save_step(folder, 3, keep=1)
            else:  # a deletion that fails costs space only
                save_step(folder, 3, keep=1)
        assert_is_step(latest(folder), 3 if ending > committed else 2)
        save_step(folder, 4, keep=1)  # the next save cleans up by itself
        assert complete_and_leftovers(folder) == ["step-000004"], point
