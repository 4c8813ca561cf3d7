"""Checkpoints that several processes write (gloo): the promises of `test_checkpoint`, and any number of readers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.checkpoint import CheckpointError, latest, load, problem, steps
from genrl.runtime.weights import sharding
from genrl.runtime.weights.state import pack, unpack
from tests.run_folders import start_ranks, wait
from tests.runtime.weights import share_ranks


def run(place: Path, target: Callable[..., None], *arguments: object, count: int = 2) -> tuple[list[int | None], str]:
    """Exit codes and what was printed."""
    log = place / "log.txt"
    codes = wait(start_ranks(count, target, *arguments, log=log), 60)
    printed = "\n".join(path.read_text() for path in sorted(place.glob("log*")))
    for path in place.glob("log*"):
        path.unlink()
    return codes, printed


def saved(place: Path, *after: int, count: int = 2, groups: int = 1, size: int = 2**27, again: bool = False) -> Path:
    """The folder `place`/checkpoints with checkpoints after these steps, written by so many processes."""
    folder = place / "checkpoints"
    codes, printed = run(place, share_ranks.saves, str(folder), list(after), groups, size, again, count=count)
    assert codes == [0] * count, printed
    return folder


def assert_is_step(path: Path | None, step: int) -> None:
    assert path is not None
    loaded, wanted = load(path), share_ranks.wholes(step)
    assert loaded.step == step and loaded.state == share_ranks.STATE and loaded.tensors.keys() == wanted.keys()
    for stem, named in wanted.items():
        assert loaded.tensors[stem].keys() == named.keys()
        for name, tensor in named.items():
            actual = loaded.tensors[stem][name]
            assert actual.dtype == tensor.dtype and torch.equal(actual, tensor), (stem, name)


def files(path: Path) -> dict[str, int]:
    listed = json.loads((path / "manifest.json").read_text())["files"]
    return {name: entry["bytes"] for name, entry in listed.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "groups"), [(2, 1), (4, 2)])
def test_each_process_writes_its_shares_and_any_number_reads_them(tmp_path: Path, count: int, groups: int) -> None:
    """Some hold nothing of a tensor; of those that hold the same, one writes it."""
    path = saved(tmp_path, 1, count=count, groups=groups) / "step-000001"
    assert_is_step(path, 1)
    listed = files(path)
    own = sorted(name for name in listed if name.startswith("shards/weights/"))
    assert own == [f"shards/weights/shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, count + 1)]
    assert {name for name in listed if "/" not in name} == {"state.json", "optimizer.safetensors", "kept-a.safetensors"}
    held = [sum(tensor.numel() for tensor in load_file(path / name).values()) for name in own]
    assert sum(held) == sum(tensor.numel() for tensor in share_ranks.wholes(1)["weights"].values())
    assert max(held) < 0.7 * sum(held)
    codes, printed = run(tmp_path, share_ranks.reads, str(path), str(tmp_path), count=3)
    assert codes == [0] * 3, printed
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)] == [[], [], []]


@pytest.mark.slow
def test_large_shares_go_into_several_files(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, size=50) / "step-000001"
    assert_is_step(path, 1)
    assert len([name for name in files(path) if name.startswith("shards/weights/shard-00002")]) == 3


@pytest.mark.slow
def test_a_step_is_saved_once_or_replaced_and_older_ones_go(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, 2, 3)
    assert [path.name for path in steps(folder)] == ["step-000003", "step-000002"]
    before = (folder / "step-000003" / "state.json").stat().st_ino
    saved(tmp_path, 3)  # it is there: nobody waits for anybody
    assert (folder / "step-000003" / "state.json").stat().st_ino == before
    saved(tmp_path, 3, again=True)
    assert (folder / "step-000003" / "state.json").stat().st_ino != before
    assert_is_step(latest(folder), 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.slow
def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 1) / "step-000001"
    for name in files(path):
        content = (path / name).read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
            (path / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"not a complete checkpoint: {name}"):
                load(path)
        (path / name).unlink()
        assert problem(path) == f"{name} is missing"
        (path / name).write_bytes(content)
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace('"format": 3', '"format": 2'))
    assert "it says format 2, but was written as format 3" in str(problem(path))
    (path / "manifest.json").write_text(manifest)
    assert_is_step(path, 1)


def test_shares_are_on_disk_before_the_manifest_and_the_rename(tmp_path: Path) -> None:
    codes, printed = run(tmp_path, share_ranks.operations, str(tmp_path / "clean"), str(tmp_path))
    assert codes == [0, 0], printed
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert other == ["write:weights", "write:optimizer"]
    order = ["write:weights", "write:optimizer", "write:state.json", "write:manifest.json", "fsync:weights"]
    order += ["fsync:shards", "rename:step-000003"]
    assert sorted(order, key=main.index) == order


FAILURES = [(0, "write:optimizer"), (0, "write:manifest.json"), (0, "rename:step-000003"), (1, "write:optimizer")]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["full", "killed"])
def test_a_process_that_fails_or_dies_leaves_a_complete_checkpoint(tmp_path: Path, dies: bool) -> None:
    before = saved(tmp_path, 1, 2)
    for number, (rank, operation) in enumerate(FAILURES):
        place = tmp_path / f"{number}"
        folder = shutil.copytree(before, place / "checkpoints")
        codes, printed = run(place, share_ranks.fails, str(folder), rank, operation, dies)
        assert None not in codes and codes[rank] == (9 if dies else 1) and 0 not in codes, printed
        if not dies:
            assert "No space left on device" in printed and "Earlier checkpoints are intact" in printed
            assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
        if operation.startswith("write:optimizer") and not dies:
            assert printed.count(f"CheckpointError: could not write checkpoint {folder}") == 2  # both say so
            assert printed.count(f"process {rank}: [Errno 28]") >= 2
        assert_is_step(latest(folder), 2)
    saved(place, 4)  # the next save cleans up by itself
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000004"]


def test_files_of_another_machine_and_an_old_torch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = sharding._Writer(tmp_path, {}, lambda _: None)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(OSError, match="theirs, which another one wrote: all have to share the file system"):
        writer.finish(None, [[("mine", sharding.entry(tmp_path / "mine"))], [("theirs", {"bytes": 1})]])  # type: ignore
    sharding.check_torch()
    monkeypatch.setattr(sharding, "HuggingFaceStorageWriter", object)
    with pytest.raises(ValueError, match=r"distributed\.fsdp: torch .* cannot save weights"):
        sharding.check_torch()
    assert checkpoint.FORMAT == 2


# -- State survives the round trip through named tensors and JSON, bit for bit (optimisers': `test_optimizers`)
def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_trees_keep_their_types_and_bits() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0)}, 7: {}},
        **{"0": torch.ones(1), 0: torch.zeros(1), "a/b": torch.tensor([1])},
        "a": {"b": torch.tensor([2]), "$tuple": (1, [2.5, None]), "$tensor": "x"},
        "numbers": (0.1, 1e-300, -0.0, 2**70, True, float("inf")),
        "empty": [(), [], {}],
    }
    tensors, packed = pack(tree)
    assert equal(tree, unpack(tensors, json.loads(json.dumps(packed))))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), {(1, 2): 3}])
def test_what_cannot_be_stored_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="optimizer/what"):
        pack({"optimizer": {"what": value}})
