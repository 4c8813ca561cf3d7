"""Whole runs: what a run folder holds, what does not change the numbers, what stops them, and that the reward rises."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from genrl.config import load
from genrl.diffusion import train as training
from genrl.diffusion.evaluate import high_frequencies, look_figures, moved_from, thumbnails_of
from genrl.diffusion.train import train
from genrl.runtime.folder.run import Run
from tests.diffusion import runs
from tests.diffusion.methods.watched import equal


def test_a_run_folder_is_complete(finished: Path) -> None:
    assert Path(load(finished / "config.yaml").output) == finished
    rows = runs.rows(finished)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/brightness_mean", "eval/redness_mean", "eval/redness/red_mean"} <= rows[0].keys() & rows[2].keys()
    assert {"reward/redness/blue_mean", "reward/total_mean", "grad_norm", "zero_std_ratio"} <= rows[1].keys()
    assert rows[1]["reward/total_mean"] == rows[1]["reward/brightness_mean"]  # weight 0 is only watched
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    for name in ("before_after.png", "step-000002-best-worst.png"):
        assert Image.open(finished / "samples" / name).width > 16
    report = (finished / "report.html").read_text()
    assert "brightness" in report and "<script src" not in report
    assert {path.name for path in Run(finished).lora.iterdir()} >= {"pytorch_lora_weights.safetensors", "README.md"}
    assert list(finished.rglob("events.out.tfevents*"))
    assert not list(finished.glob("heartbeat/*")) and not list(finished.glob("dumps/*"))  # of a run that ended well
    last = runs.last_state(finished).tensors
    assert any(not torch.equal(last["snapshot-average"][key], tensor) for key, tensor in last["weights"].items())


Runs = Callable[[str], Path]
BASES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"trainer": {"algorithm": "flow_grpo", "kl_weight": 0.01}},
    "nft": {"trainer": runs.NFT},
    "full": {"lora": None},
}
BUSY: dict[str, Any] = {"evaluation": {"every": 1, "num_inference_steps": 5, "guidance_scale": 3.0}}
BUSY |= {"checkpoint": {"every": 1}, "ema": {"decay": 0.5}}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
AHEAD: dict[str, Any] = {"offload": {"text_encoders": "encode_then_free"}}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "evaluated, saved and averaged": ("flow_grpo", {"sampling": {"score_in_background": True}} | BUSY),
    "nft, evaluated, saved and averaged": ("nft", BUSY),
    "checkpointing": ("flow_grpo", {"model": CHECKPOINTED}),
    "between": ("flow_grpo", {"model": CHECKPOINTED | {"offload": {"text_encoders": "between"}}}),
    "encode_then_free": ("flow_grpo", {"model": AHEAD}),
    "all weights": ("full", {"model": CHECKPOINTED | AHEAD}),
}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            runs.write_folder(folder)
            made[name] = train(runs.config(folder, model, **runs.QUIET, ema=None, **BASES[name]))
        return made[name]

    return base


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(("base", "changes"), SAME.values(), ids=SAME)
def test_the_numbers_stay_the_same(folder: Path, model: Path, plain: Runs, base: str, changes: dict[str, Any]) -> None:
    one = runs.last_state(plain(base)).tensors
    assert "snapshot-average" not in one
    run = train(runs.config(folder, model, **(runs.QUIET | {"ema": None} | BASES[base] | changes)))
    assert equal(one["weights"], runs.last_state(run).tensors["weights"])


def test_what_is_wrong_is_said_before_the_model_is_loaded(folder: Path, model: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(training, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    (folder / "wants.py").write_text(
        "def wants(images, colour):\n    return [0.0] * len(images)\n"
        "class Choosy:\n    def __call__(self, images, style): return images.mean(dim=(1, 2, 3))\n"
        "    def check_row(self, style):\n        if style != 'flat': raise ValueError(f'no style {style!r}')\n"
    )
    rows = [{"prompt": text, "style": "flat"} for text in runs.PROMPTS] + [{"prompt": "a", "style": "round"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    choosy = {"rewards": [{"name": f"{folder}/wants.py:Choosy"}], "evaluation": {"every": 0}}
    wrong = [
        ({"rewards": [{"name": f"{folder}/wants.py:wants"}]}, "asks for the column 'colour'"),
        ({"rewards": [{"name": "shapse"}]}, "unknown reward 'shapse'. Did you mean 'shapes'"),
        ({"rewards": [runs.reward(folder, "brightnes")]}, "has no 'brightnes'. Did you mean 'brightness'"),
        ({"prompts": {"train": str(folder / "trian.txt")}}, "did you mean .*train.txt"),
        (
            choosy | {"prompts": {"train": str(folder / "train.jsonl"), "eval": None}},
            rf"train.jsonl:{len(rows)}: reward 'Choosy': no style 'round'",
        ),
    ]
    for k, (changes, message) in enumerate(wrong):
        with pytest.raises(ValueError, match=message):
            train(runs.config(folder, model, output=str(folder / f"wrong-{k}"), **changes))


SECRETS = {"HF_TOKEN": "hf_PlantedTokenOne", "WANDB_API_KEY": "PlantedTokenTwo", "HOME_OF_SECRETS": "PlantedThree"}


def test_nothing_of_the_environment_is_written(folder: Path, model: Path, monkeypatch: Any, capfd: Any) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = train(runs.config(folder, model, trackers=["tensorboard"], evaluation={"every": 0}, iterations=1))
    info = json.loads((run / "run.json").read_text())
    assert set(info) == {"command", "seed", "processes", "started", "git_commit", "versions", "resumed", "contents"}
    printed = "".join(capfd.readouterr()).encode()
    assert b"no other was measured" in printed  # of the best, where nothing was evaluated
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert len(files) > 10
    for text in (*SECRETS, *SECRETS.values()):
        assert text.encode() not in printed
        assert not [path for path, content in files.items() if text.encode() in content]


@pytest.mark.slow
def test_a_newcomers_reward_trains_by_one_changed_line(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The reward of docs/rewards.md in the quickstart: the line of the page in place of the one that is there."""
    monkeypatch.chdir(root)
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    block = re.findall(r"```yaml\n(rewards:.*?\n)```", page, flags=re.S)[0]
    assert block.count("\n") == 1
    lines = (root / "configs" / "quickstart.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    changed = [block if line.startswith("rewards:") else line for line in lines]
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 1
    (tmp_path / "mine.yaml").write_text("".join(changed), encoding="utf-8")
    source, _, function = yaml.safe_load(block)["rewards"][0]["name"].partition(":")
    assert len((root / source).read_text().splitlines()) <= 15
    smaller = ["iterations=1", "evaluation.num_prompts=2", "sampling.group_size=4", "sampling.batch_size=4"]
    smaller += ["sampling.prompts_per_iteration=2", "economy.keep=2", "trainer.updates_per_iteration=1", "trackers=[]"]
    run = train(load(tmp_path / "mine.yaml", [*smaller, f"output={tmp_path}/run"]))
    before, after = runs.rows(run)
    assert 0 < after[f"reward/{function}_mean"] < 1 and after["grad_norm"] > 0
    assert all(0 < row[f"eval/{function}_mean"] < 1 for row in (before, after))


@pytest.mark.slow
def test_the_reward_rises(folder: Path, model: Path) -> None:
    """Brightness of a random decoder's pictures: by more than the spread of the first samples, in 20 iterations."""
    trainer = {"algorithm": "flow_grpo", "clip_range": 1e-2, "inner_epochs": 2, "updates_per_iteration": 2}
    changes = {"sampling": {"group_size": 16, "batch_size": 16}, "evaluation": {"every": 20}, "iterations": 20}
    changes |= {"optimizer": {"lr": 2e-2, "weight_decay": 0}, "checkpoint": {"every": 100}}
    rows = runs.rows(train(runs.config(folder, model, trainer=trainer, **changes)))
    spread = rows[1]["reward/total_std"]
    first, last = (sum(row["reward/total_mean"] for row in part) / 5 for part in (rows[1:6], rows[-5:]))
    assert last - first > spread
    assert rows[-1]["eval/total_mean"] - rows[0]["eval/total_mean"] > spread


def test_figures_of_held_out_pictures_that_no_reward_has() -> None:
    """Confetti has high frequencies and a slope has none; one picture for every noise has no diversity."""
    slope = torch.linspace(0, 1, 32).expand(2, 3, 32, 32)
    confetti = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert float(high_frequencies(slope)[0]) < 0.01 < 0.2 < float(high_frequencies(confetti)[1])
    video = torch.stack([slope, slope], 1)
    assert torch.allclose(high_frequencies(video), high_frequencies(slope))
    assert thumbnails_of(video).tolist() == thumbnails_of(slope).tolist()
    black, white = (thumbnails_of(torch.full((2, 3, 16, 16), value)) for value in (0.0, 1.0))
    assert moved_from(black, black) == 0.0 and moved_from(black, white) == pytest.approx(1.0)
    seen, none = torch.cat([black[:1], white, white[:1]]), torch.zeros(4)
    assert look_figures(seen, none, [0, 0, 2, 2])["eval/diversity"] == pytest.approx(0.5**0.5 / 2)
    assert look_figures(seen, none, [0, 1, 2, 2])["eval/diversity"] == 0.0
    assert "eval/diversity" not in look_figures(seen, none, [0, 1, 2, 3])
