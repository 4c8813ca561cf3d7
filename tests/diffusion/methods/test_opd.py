"""On-policy distillation: golden losses, the KL in terms of velocities, teachers by their LoRA, column and guidance."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.config.errors import ConfigError
from genrl.config.run_config import check_files
from genrl.diffusion.methods.opd.settings import OPD
from genrl.diffusion.methods.opd.train import distance
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.methods.watched import QUIET, run
from tests.golden_cases import Arrays


@pytest.mark.parametrize(("weight", "name"), [("exact", "exact"), ("no_dt", "without_dt"), ("unit", "ode")])
def test_golden(golden: Any, weight: Any, name: str) -> None:
    data = Arrays(golden("diffusion_opd"))
    mean = data.given("mean").requires_grad_()
    std = data.given("transition_std").expand(len(mean), 1, 1)
    step = SimpleNamespace(sigma=data.given("sigma"), sigma_next=data.given("sigma_next"))
    new: Any = SimpleNamespace(mean=mean, std=std, step=step)
    loss = distance(OPD(weight=weight), new, data.given("teacher_mean")).mean()
    data.check(f"loss_{name}", loss.detach())
    data.check(f"grad_{name}", torch.autograd.grad(loss, mean)[0])


OWN: dict[str, Any] = {"algorithm": "opd"}


def test_the_model_itself_teaches_nothing_and_under_guidance_something(folder: Path, model: Path) -> None:
    seen = run(runs.config(folder, model, trainer=OWN, iterations=1, **QUIET))
    assert seen.rows[0]["distill"] == 0
    assert all(not bool(g.any()) for g in seen.updates[0].gradient.values())
    guided = {**OWN, "teachers": {"teacher": {"guidance": 3.0}}, "weight": "unit", "noise_level": 1e-6}
    rows = run(runs.config(folder, model, trainer=guided, iterations=12, **QUIET)).rows
    assert 0 < rows[-1]["distill"] < 0.8 * rows[0]["distill"]


@pytest.fixture
def taught(folder: Path, model: Path) -> dict[str, Any]:
    """Two LoRAs of other ranks than the student's, and prompts that say whose they are."""
    for name, rank in (("a", 2), ("b", 8)):
        own = {"output": str(folder / name), "lora": {"rank": rank, "alpha": 2 * rank}, "iterations": 1}
        train(runs.config(folder, model, optimizer={"lr": 0.05}, **QUIET, **own))
    rows = [{"prompt": text, "teacher": "ab"[k % 2]} for k, text in enumerate(runs.PROMPTS)]
    (folder / "routed.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    teachers = {name: {"lora": str(folder / name / "lora")} for name in "ab"}
    prompts = {"train": str(folder / "routed.jsonl")}
    return {"trainer": {**OWN, "teachers": teachers}, "prompts": prompts}


def test_each_row_has_its_own_teacher(folder: Path, model: Path, taught: dict[str, Any]) -> None:
    """A student that begins as one of them is at no distance from that one, and at some from the other."""
    begun = {"lora": {"from": str(folder / "a" / "lora")}}
    (row,) = run(runs.config(folder, model, iterations=1, **QUIET, **taught, **begun)).rows
    assert row["distill/a"] == pytest.approx(0, abs=1e-9) and row["distill/b"] > 1e-6
    assert row["distill"] == pytest.approx((row["distill/a"] + row["distill/b"]) / 2)


def test_a_run_goes_on_with_the_same_teachers_alone(folder: Path, model: Path, taught: dict[str, Any]) -> None:
    whole = train(runs.config(folder, model, evaluation={"every": 0}, **taught))
    again = runs.resumed(whole, folder, 1)
    assert runs.differences(whole, again) == []
    kept = [name for name in runs.last_state(whole).tensors["weights"] if "teacher" in name]
    assert kept == []
    shutil.copytree(folder / "a" / "lora", folder / "b" / "lora", dirs_exist_ok=True)
    (folder / "other").mkdir()
    with pytest.raises(ValueError, match="b: the checkpoint was taught by other files"):
        runs.resumed(whole, folder / "other", 1)


def test_what_cannot_be_taught_is_said_before(folder: Path, model: Path, taught: dict[str, Any]) -> None:
    (folder / "routed.jsonl").write_text('{"prompt": "a cat", "teacher": "c"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1 has teacher: 'c', which is none of the teachers a, b"):
        check_files(runs.config(folder, model, **taught), {})
