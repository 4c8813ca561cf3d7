"""Whether a pipeline can be called as configured, before anything is drawn."""

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from genrl.config import ConfigError, check_files, load
from genrl.data.prompts import Prompt
from genrl.diffusion.config.files import pipeline_class
from genrl.diffusion.config.sections import Model, Sampling
from genrl.diffusion.files import lora_files
from genrl.diffusion.policy import adapters
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import call_arguments, check_inputs
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES, saved


def test_others_are_refused_by_section_and_key_and_a_call_that_takes_anything_is_left_to_itself() -> None:
    sd3, ltx = (FAMILIES[name]().pipe for name in ("sd3", "ltx"))
    for pipe, sampling, says in (
        (sd3, {"num_frames": 5}, r"^sampling\.num_frames: StableDiffusion3Pipeline .* set it to null"),
        (ltx, {"pipeline_args": {"gidance_rescale": 0.5}}, r"^sampling\.pipeline_args\.gidance_rescale: LTX.* remove"),
        (sd3, {"pipeline_args": {"max_sequence_len": 8}}, r"did you mean max_sequence_length\?"),
        (sd3, {"pipeline_args": {"self": 1}}, r"pipeline_args\.self"),
    ):
        with pytest.raises(ValueError, match=says):
            check_call_arguments(pipe, call_arguments(Sampling(**sampling)))

    class Unguided(DiffusionPipeline):
        def __call__(self, prompt: str, num_inference_steps: int) -> None: ...

    class Open(DiffusionPipeline):
        def __call__(self, prompt: str, **kwargs: object) -> None: ...

    with pytest.raises(ValueError, match=r"^evaluation\.guidance_scale: Unguided .* it takes num_inference_steps$"):
        check_call_arguments(Unguided(), ["num_inference_steps", "guidance_scale"], "evaluation")
    check_call_arguments(Open(), ["guidance_scale"])


def test_a_pipeline_of_ones_own_is_loaded_by_its_class(model: Path, tmp_path: Path) -> None:
    """Also the folder that it saved, whose class no library has."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from diffusers import StableDiffusion3Pipeline\nclass Mine(StableDiffusion3Pipeline): ...\nother = 3\n"
    )
    own = {"pipeline": f"{mine}:Mine"}
    pipe = load_pipeline(Model(path=str(model), **own))
    pipe.save_pretrained(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    assert type(pipe).__name__ == type(load_pipeline(Model(path=saved, **own))).__name__ == "Mine"
    with pytest.raises(ValueError, match="model.path: .*saved' could not be loaded"):
        load_pipeline(Model(path=saved))
    with pytest.raises(ValueError, match="mine.py:other is no pipeline: derive a class from one of diffusers'"):
        pipeline_class(Model(path=saved, pipeline=f"{mine}:other"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "has no picture in 'a'"),
        (["one.png", "two.png"], "a: is a list; a row gives one picture"),
        ({"bytes": b""}, "a: is an object; a row gives one picture"),
        ("clip.mp4", "a: 'clip.mp4' is a video; a row gives one picture"),
        ("absent.png", "a: no such file absent.png"),
    ],
)
def test_a_row_without_its_one_picture_is_named(value: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"sampling.inputs.image: p.jsonl:3 {why}"):
        check_inputs({"image": "a"}, [Prompt("x", {"a": value}, 3)], "p.jsonl")


def shipped(recipe: str) -> dict[str, Any]:
    return load(Path(__file__).parents[3] / "configs" / "diffusion" / f"{recipe}.yaml").model.scheduler


def test_lightning_on_sdxl_runs_the_timesteps_of_its_card(tmp_path: Path) -> None:
    """Also where the checkpoint's file does not say the setting: DDIM's default would take its place."""
    path = saved("sdxl", tmp_path)
    settings = path / "scheduler" / "scheduler_config.json"
    held = json.loads(settings.read_text())
    for spacing in ("leading", None):
        settings.write_text(json.dumps({k: v for k, v in held.items() if k != "timestep_spacing" or spacing}))
        pipe = load_pipeline(Model(path=str(path), scheduler=shipped("sdxl_lightning_flow_grpo")))
        assert type(pipe.scheduler) is EulerDiscreteScheduler
        pipe.scheduler.set_timesteps(4)
        own, policy = pipe.scheduler.timesteps.tolist(), Policy(pipe)
        with torch.no_grad():
            recorded = policy.roll_out(FAMILIES["sdxl"]().batch())
        assert recorded.sigmas.tolist() == own == [999, 749, 499, 249]


def test_lightning_on_qwen_image_runs_the_shift_of_its_card(tmp_path: Path) -> None:
    family, settings = FAMILIES["qwen_image"](), shipped("qwen_image_lightning_diffusion_nft")
    assert settings["base_shift"] == math.log(3)
    policy = Policy(load_pipeline(Model(path=str(saved("qwen_image", tmp_path)), scheduler=settings)))
    with torch.no_grad():
        sigmas = policy.roll_out(family.batch()).sigmas
    even = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    torch.testing.assert_close(sigmas, 3 * even / (1 + 2 * even))


def test_what_the_scheduler_has_not(folder: Path, tmp_path: Path, model: Path) -> None:
    ddim = {"trainer": {"algorithm": "flow_grpo", "kernel": "ddim", "noise_level": 1.0}}
    no_karras = r"use_karras_sigmas: DDIM, which takes the place of EulerDiscreteScheduler"
    for path, settings, says, sections in (
        (model, {"shft": 3.0}, r"shft: .*has no such setting; did you mean shift\?", {}),
        (saved("sdxl", tmp_path), {"use_karras_sigmas": True}, no_karras, ddim),
    ):
        asked = runs.config(folder, path, model={"scheduler": settings}, **sections)
        with pytest.raises(ConfigError, match=rf"model\.scheduler\.{says}"):
            check_files(asked)
        with pytest.raises(ValueError, match=rf"model\.scheduler\.{says}"):
            load_pipeline(asked.model)


def test_a_run_and_its_card(folder: Path, model: Path) -> None:
    changed = {"path": str(model), "scheduler": {"shift": 5.0}}
    run = train(runs.config(folder, model, model=changed, iterations=1))
    card = (run / "lora" / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("pipe.scheduler = ")]
    pipe = DiffusionPipeline.from_pretrained(model)
    exec(line, {"pipe": pipe})
    assert pipe.scheduler.config.shift == 5.0 and type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert runs.rows(run)[1]["ratio/max_abs_dev"] == 0.0


def test_one_file_of_several_on_the_hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, or it has a standard name, or there is one alone; peft's settings come with peft's file."""
    files, fetched = ["pytorch_lora_weights.safetensors", "b.safetensors", "x/c.safetensors"], []

    def fetch(name: str, file: str) -> str:
        fetched.append(f"{name}/{file}")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert lora_files.locate("org/name").name == "pytorch_lora_weights.safetensors"
    assert lora_files.locate("org/name:x/c.safetensors").name == "c.safetensors"
    files[:] = ["adapter_model.safetensors"]
    lora_files.locate("org/name")
    assert fetched[2:] == ["org/name/adapter_model.safetensors", "org/name/adapter_config.json"]
    files[:] = ["a.safetensors", "b.safetensors"]
    with pytest.raises(ValueError, match="has 2 files .*: write org/name:FILE to say which"):
        lora_files.locate("org/name")
    with pytest.raises(ValueError, match="a hub id is written org/name, or org/name:file.safetensors"):
        adapters.load_lora(load_pipeline(Model(path=str(model))), "org/name:file.bin")
