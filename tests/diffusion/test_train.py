"""Whole runs: what a run folder holds, what does not change the numbers, and that rewards rise."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from genrl.config import Config, Optimizer, load
from genrl.config.schema import Offload
from genrl.diffusion import train as training
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.train import train
from genrl.runtime.guards import NonFiniteError, read_dump
from genrl.runtime.optimization import scheduled
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
NFT = {"algorithm": "diffusion_nft"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return runs.last_state(run).tensors["weights"]


def equal(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# -- the run folder --------------------------------------------------------------------------------------------------


def test_a_run_folder_is_complete(folder: Path, model: Path) -> None:
    extra = [runs.reward(folder, "brightness"), runs.reward(folder, "redness", weight=0.0)]
    config = runs.config(folder, model, rewards=extra, trackers=["tensorboard"], checkpoint={"every": 1, "keep": 2})
    run = train(config)
    assert run == Path(config.output)
    assert load(run / "config.yaml") == config
    rows = runs.rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/brightness_mean", "eval/redness_mean", "eval/redness/red_mean"} <= rows[0].keys() & rows[2].keys()
    assert {"reward/redness/blue_mean", "reward/total_mean", "grad_norm", "zero_std_ratio"} <= rows[1].keys()
    assert rows[1]["reward/total_mean"] == rows[1]["reward/brightness_mean"]  # weight 0 is only watched
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    for name in ("before_after.png", "step-000002-best-worst.png"):
        assert Image.open(run / "samples" / name).width > 16
    report = (run / "report.html").read_text()
    assert "brightness" in report and "<script src" not in report
    assert (run / "lora" / "pytorch_lora_weights.safetensors").is_file() and (run / "lora" / "README.md").is_file()
    assert list(run.rglob("events.out.tfevents*"))
    assert not list(run.glob("heartbeat/*")) and not list(run.glob("dumps/*"))  # of a run that ended well


def test_a_folder_in_use_is_refused(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, iterations=1, **QUIET)
    run = train(config)
    with pytest.raises(ValueError, match=f"go on with it by `genrl resume {run}`"):
        train(config)


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(folder: Path, model: Path) -> None:
    one, two, other = (
        train(runs.config(folder, model, output=str(folder / name), seed=seed))
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert runs.differences(one, two) == []
    assert not equal(one, other)
    lines = [[{**row, "x": 0} for row in runs.rows(run)] for run in (one, two)]
    assert json.dumps(lines[0]) == json.dumps(lines[1])  # byte for byte, but for times


# -- what may not change the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo", "kl_weight": 0.01}, NFT], ids=["flow_grpo", "nft"])
def test_evaluation_and_saving_do_not_disturb_training(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    common = {"trainer": trainer, "iterations": 3}
    quiet = train(runs.config(folder, model, output=str(folder / "quiet"), **common, **QUIET))
    busy = {"evaluation": {"every": 1, "num_inference_steps": 5, "guidance_scale": 3.0}, "checkpoint": {"every": 1}}
    assert equal(quiet, train(runs.config(folder, model, output=str(folder / "busy"), **common, **busy)))


@pytest.mark.parametrize(
    "setting",
    [
        {"gradient_checkpointing": True},
        {"offload": Offload(text_encoders="between", vae="between")},
        {"offload": Offload(text_encoders="encode_then_free")},
    ],
    ids=["checkpointing", "between", "encode_then_free"],
)
@pytest.mark.parametrize("lora", [runs.LORA, None], ids=["lora", "full"])
def test_saving_memory_does_not_change_the_numbers(
    folder: Path, model: Path, setting: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    def trained(name: str, **changes: Any) -> Path:
        config = runs.config(folder, model, lora=lora, output=str(folder / name), **QUIET)
        return train(config.model_copy(update={"model": config.model.model_copy(update=changes)}))

    assert equal(trained("plain"), trained("frugal", **setting))


def test_a_second_reward_of_weight_zero_changes_nothing(folder: Path, model: Path) -> None:
    one = train(runs.config(folder, model, output=str(folder / "one"), **QUIET))
    both = [runs.reward(folder, "redness", weight=0.0), runs.reward(folder, "brightness")]
    assert equal(one, train(runs.config(folder, model, output=str(folder / "two"), rewards=both, **QUIET)))


def test_the_average_is_only_watched(folder: Path, model: Path) -> None:
    one = train(runs.config(folder, model, output=str(folder / "one"), ema=None, **QUIET))
    two = train(runs.config(folder, model, output=str(folder / "two"), ema={"decay": 0.5}, **QUIET))
    assert equal(one, two)
    assert "snapshot-average" not in runs.last_state(one).tensors
    average = runs.last_state(two).tensors["snapshot-average"]
    assert any(not torch.equal(average[key], tensor) for key, tensor in weights(two).items())


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}], ids=["held", "autocast"])
def test_low_precision_trains_on_policy(folder: Path, model: Path, precision: dict[str, str]) -> None:
    config = runs.config(folder, model, iterations=2, evaluation={"every": 0})
    run = train(config.model_copy(update={"model": config.model.model_copy(update=precision)}))
    assert [row["ratio/max_abs_dev"] for row in runs.rows(run)] == [0.0, 0.0]
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}


@pytest.mark.parametrize("limit", [1e-4, 1e3])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(folder: Path, model: Path, limit: float) -> None:
    config = runs.config(folder, model, optimizer={"max_grad_norm": limit}, iterations=1, **QUIET)
    norms: list[float] = []
    with runs.opened(config) as run:
        step = run.loop.optimizer.step

        def watched() -> None:
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in run.weights.parameters)))
            step()

        run.loop.optimizer.step = watched  # type: ignore[method-assign, assignment]
        flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
    (row,) = runs.rows(Path(config.output))
    assert row["grad_norm"] > 1e-4  # as it was
    assert norms == pytest.approx([min(limit, row["grad_norm"])], rel=1e-2)


# -- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(folder: Path, model: Path, value: float) -> None:
    config = runs.config(folder, model, iterations=1, **QUIET)
    with runs.opened(config) as run:
        runs.spoil(run, lambda number: True, value)
        before = {key: p.detach().clone() for key, p in run.weights.named.items()}
        with pytest.raises(NonFiniteError, match="stopped before the update of step 0") as stopped:
            flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
        assert all(torch.equal(p, before[key]) for key, p in run.weights.named.items())
    assert stopped.value.dump is not None
    dump = read_dump(stopped.value.dump)
    assert dump.where == "loss" and not dump.checked["loss"].isfinite().any()
    assert dump.info["prompts"] and dump.batch["state"].isfinite().all()


def test_a_gradient_that_is_not_finite_stops_before_the_step(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, iterations=1, **QUIET)
    with runs.opened(config) as run:
        first = run.weights.parameters[0]
        first.register_hook(lambda gradient: gradient * math.nan)
        before = first.detach().clone()
        with pytest.raises(NonFiniteError, match="gradient is not finite") as stopped:
            flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
        assert torch.equal(first, before)
    assert stopped.value.dump is not None
    dump = read_dump(stopped.value.dump)
    assert dump.where == "gradient" and dump.checked["loss"].isfinite().all() and dump.batch["state"].isfinite().all()


def test_a_reward_that_fails_stops_the_run_with_its_traceback(folder: Path, model: Path) -> None:
    (folder / "bad.py").write_text("def bad(images):\n    raise OSError('the scorer is gone')\n")
    config = runs.config(folder, model, rewards=[{"name": f"{folder}/bad.py:bad"}], **QUIET)
    with pytest.raises(Exception, match="(?s)reward 'bad' raised for .*the scorer is gone"):
        train(config)


def test_what_is_wrong_is_said_before_the_model_is_loaded(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(training, "load_pipeline", never)
    (folder / "wants.py").write_text("def wants(images, colour):\n    return [0.0] * len(images)\n")
    wrong = [
        ({"rewards": [{"name": f"{folder}/wants.py:wants"}]}, "asks for the column 'colour'"),
        ({"rewards": [{"name": "shapse"}]}, "unknown reward 'shapse'. Did you mean 'shapes'"),
        ({"rewards": [runs.reward(folder, "brightnes")]}, "has no 'brightnes'. Did you mean 'brightness'"),
        ({"prompts": {"train": str(folder / "trian.txt")}}, "did you mean .*train.txt"),
    ]
    for k, (changes, message) in enumerate(wrong):
        with pytest.raises(ValueError, match=message):
            train(runs.config(folder, model, output=str(folder / f"wrong-{k}"), **changes))


def test_a_row_that_a_reward_cannot_read_is_named(folder: Path, model: Path) -> None:
    (folder / "choosy.py").write_text(
        "class Choosy:\n"
        "    def __call__(self, images, style): return images.mean(dim=(1, 2, 3))\n"
        "    def check_row(self, style):\n"
        "        if style != 'flat': raise ValueError(f'no style {style!r}')\n"
    )
    rows = [{"prompt": text, "style": "flat"} for text in runs.PROMPTS] + [{"prompt": "a", "style": "round"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward, prompts = {"name": f"{folder / 'choosy.py'}:Choosy"}, {"train": str(folder / "train.jsonl"), "eval": None}
    config = runs.config(folder, model, rewards=[reward], prompts=prompts, evaluation={"every": 0})
    with pytest.raises(ValueError, match=rf"train.jsonl:{len(rows)}: reward 'Choosy': no style 'round'"):
        train(config)


def test_an_argument_the_pipeline_does_not_take_is_named(folder: Path, model: Path) -> None:
    sampling = {"pipeline_args": {"max_sequence_lenght": 4}}
    config = runs.config(folder, model, sampling=sampling, **QUIET)
    for _ in range(2):  # a start that failed does not block the next one
        with pytest.raises(
            ValueError, match=r"pipeline_args\.max_sequence_lenght: .* did you mean max_sequence_length"
        ):
            train(config)


def test_a_model_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: .* could not be loaded as a diffusers pipeline"):
        train(runs.config(folder, folder / "nowhere", **QUIET))


# -- secrets ---------------------------------------------------------------------------------------------------------

SECRETS = {"HF_TOKEN": "hf_PlantedTokenOne", "WANDB_API_KEY": "PlantedTokenTwo", "HOME_OF_SECRETS": "PlantedThree"}


def test_nothing_of_the_environment_is_written(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = train(runs.config(folder, model, trackers=["tensorboard"]))
    info = json.loads((run / "run.json").read_text())
    assert set(info) == {"command", "seed", "processes", "started", "git_commit", "versions", "resumed"}
    printed = "".join(capfd.readouterr()).encode()
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert len(files) > 10
    for text in (*SECRETS, *SECRETS.values()):
        assert text.encode() not in printed
        assert not [path for path, content in files.items() if text.encode() in content]


# -- small functions -------------------------------------------------------------------------------------------------


def test_learning_rate_schedules() -> None:
    def rates(total: int = 10, **changes: Any) -> list[float]:
        return [scheduled(1.0, Optimizer(lr=1.0, **changes), step, total) for step in range(total)]

    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert rates(schedule="cosine") == pytest.approx([(1 + math.cos(math.pi * k / 10)) / 2 for k in range(10)])
    warmed = rates(schedule="linear", warmup_steps=2)
    assert warmed[:3] == [0.5, 1.0, 1.0] and warmed[-1] == pytest.approx(1 / 8)


def test_reward_labels_are_short_and_unique(folder: Path, model: Path) -> None:
    names = ["a/b.py:warm", "shapes", "c.py:warm", "d.py:warm"]
    config = runs.config(folder, model, rewards=[{"name": name} for name in names])
    assert config.reward_labels == ("warm", "shapes", "warm-2", "warm-3")


# -- a newcomer's reward ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_newcomers_reward_trains_by_one_changed_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of docs/rewards.md in the quickstart: the line of the page in place of the one that is there."""
    monkeypatch.chdir(root)
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(rewards:.*?\n)```", page, flags=re.S)
    assert blocks[0].count("\n") == 1
    lines = (root / "configs" / "quickstart.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    changed = [blocks[0] if line.startswith("rewards:") else line for line in lines]
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 1
    (tmp_path / "mine.yaml").write_text("".join(changed), encoding="utf-8")

    (name,) = (reward["name"] for reward in yaml.safe_load(blocks[0])["rewards"])
    source, _, function = name.partition(":")
    assert len((root / source).read_text().splitlines()) <= 15
    smaller = ["iterations=2", "evaluation.num_prompts=4", "sampling.group_size=4"]
    smaller += ["sampling.batch_size=8", "sampling.prompts_per_iteration=4", f"output={tmp_path}/run", "trackers=[]"]
    smaller += ["trainer.updates_per_iteration=2"]
    run = train(load(tmp_path / "mine.yaml", smaller))
    rows = runs.rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 < row[f"reward/{function}_mean"] < 1 for row in rows[1:])
    assert all(0 < row[f"eval/{function}_mean"] < 1 for row in (rows[0], rows[2]))
    assert rows[1]["grad_norm"] > 0


# -- it learns -------------------------------------------------------------------------------------------------------

LEARNERS: dict[str, dict[str, Any]] = {
    "flow_grpo": {
        "algorithm": "flow_grpo",
        "clip_range": 1e-2,
        "inner_epochs": 2,
        "updates_per_iteration": 2,
    },
    "diffusion_nft": {"algorithm": "diffusion_nft", "old_policy_decay": "none", "kl_weight": 0},
}


def learner(folder: Path, model: Path, name: str) -> Config:
    return runs.config(
        folder,
        model,
        trainer=LEARNERS[name],
        sampling={"prompts_per_iteration": 2, "group_size": 16, "batch_size": 16},
        optimizer={"lr": 2e-2, "weight_decay": 0},
        evaluation={"every": 20},
        checkpoint={"every": 100},
        iterations=20,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_the_reward_rises(folder: Path, model: Path, name: str) -> None:
    """Brightness of a random decoder's pictures: by more than the spread of the first samples, in 20 iterations."""
    rows = runs.rows(train(learner(folder, model, name)))
    spread = rows[1]["reward/total_std"]
    first, last = (sum(row["reward/total_mean"] for row in part) / 5 for part in (rows[1:6], rows[-5:]))
    assert last - first > spread
    assert rows[-1]["eval/total_mean"] - rows[0]["eval/total_mean"] > spread
