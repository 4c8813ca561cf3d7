"""Whether a pipeline can be called as configured, before anything is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import DiffusionPipeline

from genrl.config import Model, Sampling
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.rollout.rollout import call_arguments
from tests.diffusion.families import FAMILIES


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


def test_pickled_weights_are_refused_unless_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    """A pickle may run code as it is read."""
    FAMILIES["sd3"]().pipe.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert not list((tmp_path / "pickled" / "transformer").glob("*.safetensors"))
    with pytest.raises(ValueError, match="safetensors.*model.use_safetensors: false takes pickled weights"):
        load_pipeline(Model(path=str(tmp_path / "pickled")))
