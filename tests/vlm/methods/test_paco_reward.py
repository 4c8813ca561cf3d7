"""PaCo-Reward's training: the weight of the first token, and the recipe for Qwen2.5-VL-7B in tiny form on pairs of a
user's own grids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.config import load
from genrl.playground.shapes import held_out
from genrl.playground.tasks.pairs import GRIDS, shown, write_pairs
from genrl.vlm.methods.sft.train import loss, recorded, token_weights
from genrl.vlm.rollout.data import tell
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints, vlm_runs

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "configs" / "vlm" / "paco_reward_7b.yaml"


def test_the_first_token_has_its_share() -> None:
    """Of a row of five tokens, of one of two, and of one that is all of its answer."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    weights = token_weights(mask, 0.1)
    assert weights[0].tolist() == pytest.approx([0.5, *[4.5 / 4] * 4])
    assert weights[1, :2].tolist() == pytest.approx([0.2, 1.8]) and weights[2, 0] == 1
    assert (weights * mask).sum(1).tolist() == pytest.approx([5, 2, 1]), "so many tokens as there are"


def test_the_loss_is_the_weighted_mean_over_the_tokens_of_all_answers(tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"algorithm": "sft", "target": "{answer} i see {answer}", "batch_size": 4}
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer=trainer | {"first_token_share": 0.3})) as run:
        run.enter()
        told = tell(run.policy, [run.questions[k] for k in range(4)], run.settings.target)
        tokens = int(told.mask.sum())
        found = loss(run.settings, run.policy, recorded(told, torch.arange(4), tokens=tokens))
        expected = 0.0
        for row, kept in zip(-found["log_prob"].detach(), told.mask, strict=True):
            nats = row[kept]
            expected += len(nats) * float(0.3 * nats[0] + 0.7 * nats[1:].mean()) / tokens
    assert float(found["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def grids(place: Path) -> Path:
    """Six grids of four cells of one colour each, in three sets."""
    place.mkdir()
    lines = []
    for number in range(6):
        Image.new("RGB", (56, 56), (40 * number, 80, 200)).save(place / f"{number}.png")
        row = {"image": f"{number}.png", "grid": "2x2", "prompt": f"colour {number}", "set": number // 2}
        lines.append(json.dumps(row))
    (place / "grids.jsonl").write_text("\n".join(lines) + "\n")
    return place / "grids.jsonl"


def test_pairs_of_grids_are_right_and_held_out(tmp_path: Path) -> None:
    write_pairs(grids(tmp_path / "grids"), tmp_path / "pairs", 300, held_out=0.3)
    seen = {}
    for name, number in (("train", 210), ("eval", 90)):
        found = [json.loads(line) for line in (tmp_path / "pairs" / f"{name}.jsonl").read_text().splitlines()]
        assert len(found) == number
        for row in found:
            first, second = (Image.open(tmp_path / "pairs" / one) for one in row["image"])
            assert first.size == (28, 28) and row["image"][0] != row["image"][1]
            assert (row["answer"] == "Yes") == (first.getpixel((3, 3)) == second.getpixel((3, 3)))
            assert row["first"] in row["prompt"]
        assert 0.35 < sum(row["answer"] == "Yes" for row in found) / number < 0.65
        seen[name] = {row[side] for row in found for side in ("first", "second")}
    assert len(seen["train"]) == 4 and len(seen["eval"]) == 2 and not seen["train"] & seen["eval"]
    with pytest.raises(ValueError, match="0 grids for eval.jsonl"):
        write_pairs(tmp_path / "grids" / "grids.jsonl", tmp_path / "none", 10, held_out=0.0)


def test_the_embedded_grids_of_a_split_are_not_those_of_the_other() -> None:
    """Every held-out grid has a combination that is held out, and no other grid has one."""
    grids = {split: [shown(split, grid) for grid in range(number)] for split, number in GRIDS.items()}
    assert not any(held_out(group) for groups in grids["train"] for group in groups)
    assert all(any(map(held_out, groups)) for groups in grids["eval"])
    assert not set(grids["train"]) & set(grids["eval"])
    assert all(one != other for one, other in zip(grids["train"][::2], grids["train"][1::2], strict=True))


@pytest.mark.slow
def test_the_recipe_trains_an_epoch(tmp_path: Path) -> None:
    write_pairs(grids(tmp_path / "grids"), tmp_path / "pairs", 24, held_out=0.3)
    tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model", layers=2)
    changes = [f"vlm.path={tmp_path / 'model'}", "vlm.dtype=float32", "task.max_pixels=1024", "trackers=[]"]
    changes += [f"task.{split}={tmp_path / 'pairs'}/{split}.jsonl" for split in ("train", "eval")]
    changes += ["trainer.batch_size=8", "trainer.micro_batch=4", "iterations=1", f"output={tmp_path / 'run'}"]
    changes += ["trainer.target='{answer}. {first} and {second}'", "evaluation.questions=4", "evaluation.blind=false"]
    found = rows(train(load(FILE, changes)))[-1]
    assert found["updates"] == 3 and found["grad_norm"] > 0 and 0 <= found["eval/accuracy_mean"] <= 1
