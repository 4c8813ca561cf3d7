"""Whether a pipeline can be called as configured, before anything is drawn."""

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

from genrl.config import ConfigError, check_files, load
from genrl.diffusion.config.files import _settings_in_memory
from genrl.diffusion.config.sections import Model, Sampling
from genrl.diffusion.policy import adapters, lora_files
from genrl.diffusion.policy.apart import require_apart
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.scheduler import Request, as_policy_head
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import call_arguments
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.policy.test_families import batch_of


@pytest.mark.parametrize(
    ("family", "sampling", "says"),
    [
        ("sd3", {"num_frames": 5}, r"^sampling\.num_frames: StableDiffusion3Pipeline .* set it to null"),
        (
            "ltx",
            {"pipeline_args": {"gidance_rescale": 0.5}},
            r"^sampling\.pipeline_args\.gidance_rescale: LTX.* remove",
        ),
        ("sd3", {"pipeline_args": {"max_sequence_len": 8}}, r"did you mean max_sequence_length\?"),
        ("flux", {"pipeline_args": {"true_cfg": 8.0}}, r"did you mean true_cfg_scale\?"),
        ("sd3", {"pipeline_args": {"qqq": 8.0}}, r"remove it; it takes clip_skip, guidance_scale, height, "),
        ("sd3", {"pipeline_args": {"self": 1}}, r"pipeline_args\.self"),
    ],
)
def test_others_are_refused_by_their_key(family: str, sampling: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_call_arguments(FAMILIES[family]().pipe, call_arguments(Sampling(**sampling)))


def test_the_section_is_named() -> None:
    class Unguided(DiffusionPipeline):
        def __call__(self, prompt: str, num_inference_steps: int) -> None: ...

    with pytest.raises(ValueError, match=r"^evaluation\.guidance_scale: Unguided .* it takes num_inference_steps$"):
        check_call_arguments(Unguided(), ["num_inference_steps", "guidance_scale"], "evaluation")


def test_a_call_that_takes_anything_is_left_to_itself() -> None:
    class Open(DiffusionPipeline):
        def __call__(self, prompt: str, **kwargs: object) -> None: ...

    check_call_arguments(Open(), ["guidance_scale"])


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """A pickle may run code as it is read."""
    FAMILIES["sd3"]().pipe.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert not list((tmp_path / "pickled" / "transformer").glob("*.safetensors"))
    with pytest.raises(ValueError, match="pickled weights alone .*model.use_safetensors: false takes them"):
        load_pipeline(Model(path=str(tmp_path / "pickled")))


ROOT = Path(__file__).parents[3]


def saved(name: str, folder: Path) -> Path:
    FAMILIES[name]().pipe.save_pretrained(folder / name)
    return folder / name


def shipped(recipe: str) -> dict[str, Any]:
    return load(ROOT / "configs" / "diffusion" / f"{recipe}.yaml").model.scheduler


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
            recorded = policy.roll_out(batch_of(FAMILIES["sdxl"]()))
        assert recorded.sigmas.tolist() == own == [999, 749, 499, 249]


def test_lightning_on_qwen_image_runs_the_shift_of_its_card(tmp_path: Path) -> None:
    family = FAMILIES["qwen_image"]()
    family.pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        {**family.pipe.scheduler.config, "use_dynamic_shifting": True, "shift_terminal": 0.02}
    )
    family.pipe.save_pretrained(tmp_path / "model")
    settings = shipped("qwen_image_lightning_diffusion_nft")
    assert settings["base_shift"] == math.log(3)
    policy = Policy(load_pipeline(Model(path=str(tmp_path / "model"), scheduler=settings)))
    with torch.no_grad():
        sigmas = policy.roll_out(batch_of(family)).sigmas
    even = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    torch.testing.assert_close(sigmas, 3 * even / (1 + 2 * even))


def test_what_the_scheduler_has_not(folder: Path, tmp_path: Path, model: Path) -> None:
    def refused(path: Path, settings: dict[str, Any], says: str, **sections: Any) -> None:
        asked = runs.config(folder, path, model={"path": str(path), "scheduler": settings}, **sections)
        with pytest.raises(ConfigError, match=says):
            check_files(asked)
        with pytest.raises(ValueError, match=says):
            load_pipeline(asked.model)

    refused(model, {"shft": 3.0}, r"model\.scheduler\.shft: .*has no such setting; did you mean shift\?")
    ddim = {"algorithm": "flow_grpo", "kernel": "ddim", "noise_level": 1.0}
    says = r"model\.scheduler\.use_karras_sigmas: DDIM, which takes the place of EulerDiscreteScheduler"
    refused(saved("sdxl", tmp_path), {"use_karras_sigmas": True}, says, trainer=ddim)


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


# -- What pipelines and schedulers from outside do, found before the first iteration


def two(family: Any) -> Batch:
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(2)]
    call = family.call | {"num_inference_steps": 2}
    return Batch(["a cat", "a dog"], [("x", 0), ("x", 1)], call, inputs={"image": pictures})


def test_pictures_of_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["flux_kontext"]()
    policy = Policy(family.pipe)
    batch = two(family)
    require_apart(policy, batch)
    mixed = type(family.pipe).prepare_latents

    def leaking(self: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        return mixed(self, image + image.flip(0), *args, **kwargs)

    monkeypatch.setattr(type(family.pipe), "prepare_latents", leaking)
    with pytest.raises(ValueError, match=r"the picture of one sample changes another .*write sampling.batch_size: 1"):
        require_apart(Policy(FAMILIES["flux_kontext"]().pipe), batch)


@pytest.mark.parametrize("name", ["per_token_timesteps", "omega"])
def test_a_step_with_arguments_that_no_kernel_has_is_refused(name: str) -> None:
    """LTXCondition steps with `-noise_pred` and times of its own: dropped, the model is trained on the other sign."""
    head: Any = as_policy_head(FAMILIES["sd3"]().pipe.scheduler)
    head.request = Request(on_step=lambda step: step.state)
    head.set_timesteps(3)
    head.latents_dtype = torch.float32
    state = head.hold(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=f"steps its scheduler with {name}, which the step of no kernel has"):
        head.step(state, head.timesteps[0], state, **{name: torch.ones(1)})


class Subclassed(FlowMatchEulerDiscreteScheduler):
    """A class of one's own that steps as its parent."""


class Negated(FlowMatchEulerDiscreteScheduler):
    def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(-model_output, *args, **kwargs)


@pytest.mark.parametrize("changes", [{}, {"use_dynamic_shifting": True}, {"invert_sigmas": True}, {"shift": 3.0}])
def test_the_step_of_a_scheduler_from_outside_is_compared_with_a_flow_s(changes: dict[str, Any]) -> None:
    as_policy_head(Subclassed(**changes))
    with pytest.raises(ValueError, match=r"test_loading.Negated, is not that of a flow: .*the other sign"):
        as_policy_head(Negated(**changes))


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError("bad"), KeyError("bad"), IndexError("bad")])
def test_what_diffusers_raises_is_told_with_the_pipeline(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    family = FAMILIES["sd3"]()

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise error

    policy = Policy(family.pipe)
    batch = Batch(["a cat"], [("x", 0)], family.call | {"num_inference_steps": 2, "height": 17})
    with pytest.raises(ValueError, match=r"StableDiffusion3Pipeline cannot be called so; diffusers ends in ValueError"):
        policy.roll_out(batch, stop=1)
    monkeypatch.setattr(type(family.pipe), "check_inputs", raising)
    with pytest.raises(ValueError, match=f"cannot be called so; diffusers ends in {type(error).__name__}"):
        policy.roll_out(batch, stop=1)


def test_a_scheduler_that_was_made_in_python_has_a_class() -> None:
    """Its settings lack `_class_name`, which only loading writes."""
    pipe = FAMILIES["sd3"]().pipe
    pipe.scheduler = type(pipe.scheduler)()
    assert _settings_in_memory(pipe, "scheduler/scheduler_config.json")["_class_name"] == type(pipe.scheduler).__name__
