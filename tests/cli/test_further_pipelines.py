"""Whole runs of pipelines with a way of their own, as a user types them: inpainting, and one without a LoRA loader."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import get_peft_model_state_dict
from PIL import Image

from tests import run_folders
from tests.cli.commands import SMALL, run, words
from tests.diffusion import tiny_parts as parts
from tests.diffusion.families import FAMILIES
from tests.diffusion.starting_families import mask

pytestmark = pytest.mark.slow


def write(folder: Path, family: str, sampling: dict[str, Any], **model: Any) -> None:
    """run.yaml: two iterations on a pipeline of this family, saved as `model`."""
    FAMILIES[family]().pipe.save_pretrained(folder / "model")
    tree = yaml.safe_load(SMALL) | {"trainer": {"algorithm": "flow_grpo"}, "optimizer": {"lr": 1e-2}, "iterations": 2}
    tree |= {"model": {"path": "./model", "lora": {"rank": 2, "alpha": 4}, **model}}
    tree |= {"prompts": {"train": "rows.jsonl", "eval": "held_out.jsonl"}, "evaluation": {"every": 2, "num_prompts": 2}}
    sizes = {"num_inference_steps": 4, "prompts_per_iteration": 2, "group_size": 2, "batch_size": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree | {"sampling": sizes | sampling}))
    rows = []
    for k, picture in enumerate([*parts.pictures(), *parts.pictures()]):
        picture.rotate(180 * (k // 2)).save(folder / f"{k}.png")
        rows.append(json.dumps({"prompt": f"a star {k}", "picture": f"{k}.png", "mask": "mask.png"}))
    mask(16).save(folder / "mask.png")
    (folder / "rows.jsonl").write_text("\n".join(rows[:2]))
    (folder / "held_out.jsonl").write_text("\n".join(rows[2:]))


def train_and_resume() -> Path:
    """Checked, trained; and gone on with from its first iteration, to the same bits."""
    run("check", "run.yaml")
    run("train", "run.yaml")
    made, again = Path("runs/run"), Path("runs/again")
    shutil.copytree(made, again)
    shutil.rmtree(again / "checkpoints" / "step-000002")
    run("resume", str(again))
    assert run_folders.differences(made, again) == []
    rows = run_folders.rows(made)
    assert [row["ratio/max_abs_dev"] for row in rows[1:]] == [0.0, 0.0]
    assert all(row["updates"] > 0 and row["grad_norm"] > 0 for row in rows[1:])
    return made


def check_card(made: Path, loads: str, **inputs: Any) -> None:
    """The code of an exported adapter's card runs in plain diffusers and loads as many numbers as were trained: its
    picture is another one than without the line `loads`."""
    run("export", str(made), "--out", "out")
    card = Path("out/README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("THIS_FOLDER", "out")
    for name in inputs:
        code = code.replace(f"{name}=...,", f"{name}={name},")
    (line,) = [line for line in code.splitlines() if loads in line]
    pictures = []
    for text in (code, code.replace(line, "")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            names = dict(inputs)
            exec(text, names)
        pictures.append(np.asarray(names["images"][0], dtype=float))
        denoiser: Any = names["pipe"].transformer
        held = getattr(denoiser, "peft_config", {})
        assert len(held) == (1 if text is code else 0)
        if held:
            (adapter,) = held
            result = get_peft_model_state_dict(denoiser, adapter_name=adapter)
            trained = run_folders.last_state(made).tensors["weights"]
            assert sum(t.numel() for t in result.values()) == sum(t.numel() for t in trained.values())
    assert np.abs(pictures[0] - pictures[1]).max() > 0


def test_inpainting(folder: Path) -> None:
    call = {"inputs": {"image": "picture", "mask_image": "mask"}, "height": 16, "width": 16, "guidance_scale": 3.5}
    write(folder, "flux_inpaint", call | {"pipeline_args": {"strength": 1.0, "max_sequence_length": 16}})
    made = train_and_resume()
    evaluated = run_folders.rows(made)[-1]["eval/brightness_mean"]
    assert f"eval/brightness_mean {evaluated:.4f}" in words(run("eval", str(made)))
    refused = words(run("sample", str(made), "--prompt", "a star", code=2))
    assert "sampling.inputs.image: python:prompts:1 has no column 'picture'" in refused
    assert "2 pictures" in run("sample", str(made), "--prompts", "held_out.jsonl", "--out", "drawn")
    pictures = {"image": Image.open("0.png"), "mask_image": Image.open("mask.png")}
    check_card(made, "pipe.load_lora_weights", **pictures)


def test_without_a_lora_loader(folder: Path) -> None:
    call = {"height": 16, "width": 16, "guidance_scale": 5.0, "pipeline_args": {"max_sequence_length": 16}}
    write(folder, "bria", call)
    made = train_and_resume()
    check_card(made, 'pipe.transformer.load_lora_adapter("out"')
    run("sample", str(made), "--prompt", "a star", "--out", "drawn")
    same = ("--height", "16", "--width", "16", "--num-inference-steps", "4", "--guidance-scale", "5")
    run("sample", "model", "--prompt", "a star", "--out", "base", *same, "max_sequence_length=16")
    sampled, base = (np.asarray(Image.open(f"{name}/00000.png")) for name in ("drawn", "base"))
    assert sampled.shape == base.shape and (sampled != base).any()
    assert "eval/brightness_mean" in run("eval", str(made))
