"""What the keys of a reward may not say together, told before anything is loaded."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from genrl.config import ConfigError, check_files, load
from genrl.config.folders import STEMS, weights_problem

BASE = """\
model: {{path: org/name}}
prompts: {{train: train.txt}}
trainer: {{algorithm: diffusion_nft}}
evaluation: {{every: 0}}
output: {folder}/run
rewards:
"""
REMOTE = "remote: 'http://127.0.0.1:1'"


def write(folder: Path, rewards: str) -> Path:
    (folder / "train.txt").write_text("a\nb\n")
    (folder / "c.yaml").write_text(BASE.format(folder=folder) + rewards + "\n")
    return folder / "c.yaml"


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for rewards, words in (
        ("  - {name: ocr, schedule: [[10, 0], [5, 1]]}", "rewards.0.schedule: the iterations must rise, found 10, 5"),
        ("  - {name: ocr, schedule: [[5, 0], [5, 1]]}", "must rise"),
        ("  - {name: ocr, gate: {reward: shape, at_least: 1}}\n  - {name: shapes}", "Did you mean 'shapes'"),
        ("  - {name: ocr, gate: {reward: ocr, at_least: 1}}", "no other reward is called 'ocr'"),
        ("  - {name: ocr, gate: {reward: shapes}}\n  - {name: shapes}", "at_least"),
        ("  - {name: ocr, normalize: grup}", "did you mean group"),
        (f"  - {{name: ocr, {REMOTE}, args: {{crop: ink}}}}", "rewards.0.args, rewards.0.remote: is a matter of"),
        (f"  - {{name: ocr, {REMOTE}, isolate: true}}", "is a matter of the server"),
        (f"  - {{name: ocr, {REMOTE}, outage: {{deadline_s: 600}}}}", "up to 600 s .* ended after 600 s"),
        (f"  - {{name: ocr, {REMOTE}, outage: {{policy: zero}}}}", "policy"),
        ("  - {name: ocr, batch_size: 0}", "batch_size"),
    ):
        with pytest.raises(ConfigError) as error:
            load(write(tmp_path, rewards))
        assert re.search(words, " ".join(str(error.value).split())), str(error.value)


def test_what_fits_is_kept(tmp_path: Path) -> None:
    rewards = f"""\
  - {{name: ocr, weight: 2, schedule: [[0, 0], [50, 1.0]], normalize: running, cache: 100}}
  - {{name: ocr, args: {{crop: ink}}, weight: -1, gate: {{reward: ocr, at_least: 0.5, otherwise: -1}}}}
  - {{name: pickscore, {REMOTE}, outage: {{policy: drop}}}}
  - {{name: './a/b.py:Mine', isolate: {tmp_path}}}"""
    config = load(write(tmp_path, rewards))
    assert config.reward_labels == ("ocr", "ocr-2", "pickscore", "Mine")
    assert config.rewards[0].schedule == ((0, 0.0), (50, 1.0)) and config.rewards[3].isolate == str(tmp_path)


def test_places_are_checked_on_disk_where_they_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes = check_files(load(write(tmp_path, f"  - {{name: known-there-only, {REMOTE}}}")))
    assert any("http://127.0.0.1:1 is asked when training starts" in note for note in notes)
    with pytest.raises(ConfigError, match="is not a virtual environment"):
        check_files(load(write(tmp_path, f"  - {{name: known-there-only, isolate: {tmp_path}}}")))
    with pytest.raises(ConfigError, match="unknown reward 'known-there-only'"):
        check_files(load(write(tmp_path, "  - {name: known-there-only, isolate: true}")))


def test_weights_of_rewards_that_cannot_be_loaded(tmp_path: Path) -> None:
    """For the true reason, by the rule of pipelines and language models; a file of one network too."""
    clip, weights = tmp_path / "clip", tmp_path / "clip" / "model.safetensors"
    shutil.copytree(Path(__file__).parents[2] / "assets" / "tiny-clip", clip)
    path = write(tmp_path, f"  - {{name: clipscore, args: {{model: {clip}}}}}")
    check_files(load(path))
    whole = weights.read_bytes()
    for damage, said in (
        (whole[:-1], "is cut"),
        (b"version https://git-lfs", "is a Git LFS pointer"),
        (None, "no weights"),
    ):
        weights.unlink() if damage is None else weights.write_bytes(damage)
        with pytest.raises(ConfigError, match=rf"rewards\.0\.args\.model: .*clip .*{said}"):
            check_files(load(path))
    weights.write_bytes(whole)
    (clip / "merges.txt").unlink(missing_ok=True)
    (clip / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="vocabulary"):
        check_files(load(path))


# -- Weight files by their headers: what the loaders refuse, the check refuses too, without loading anything
def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def written(entries: dict[str, Any], data: int) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def test_a_header_that_does_not_fit_its_file(tmp_path: Path) -> None:
    for entries, data, says in (
        ({"a": entry([2], 0, 8), "b": entry([8], 8, 16, "F8_E4M3")}, 16, None),
        ({"a": entry([], 0, 4)}, 4, None),
        ({"a": entry([4], 0, 8)}, 8, "is damaged: by its header"),
        ({"a": entry([1], 0, 8)}, 8, "is damaged: by its header"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "is damaged: by its header"),
        ({"a": entry([2], 0, 8), "b": entry([2], 16, 24)}, 24, "is damaged: by its header"),
        ({"a": entry([2], 0, 8)}, 11, "is damaged: by its header"),
        ({"a": entry([2], 0, 8)}, 5, "is cut: it has"),
        ({"__metadata__": {"format": "pt"}}, 0, "holds no weights"),
    ):
        file = tmp_path / f"{STEMS[0]}.safetensors"
        file.write_bytes(written(entries, data))
        problem = weights_problem(tmp_path)
        assert (problem is None) == (says is None) and (says or "") in (problem or "")
        if says is None or "damaged" in says:  # as the library itself has it
            try:
                with safe_open(file, framework="pt") as opened:
                    assert says is None and opened.keys()
            except Exception as error:  # noqa: BLE001 its own class
                assert says is not None, error


def test_a_link_whose_target_is_gone(tmp_path: Path) -> None:
    """As the hub's cache has it after files were deleted."""
    (tmp_path / f"{STEMS[0]}.safetensors").symlink_to(tmp_path / "blob")
    assert "a link whose target is gone" in (weights_problem(tmp_path) or "")
