"""What pipelines and schedulers from outside do, found before the first iteration."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from genrl.diffusion.before import require_apart
from genrl.diffusion.config.files import _settings_in_memory
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.scheduler import Request, as_policy_head
from genrl.diffusion.policy.trajectory import Batch
from tests.diffusion.families import FAMILIES


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
    with pytest.raises(ValueError, match=r"test_apart.Negated, is not that of a flow: .*the other sign"):
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
