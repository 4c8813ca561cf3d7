"""States from pictures, in every family with an autoencoder; where there is no way back it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from genrl.diffusion.policy.decoding import encode
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

KEYS = [(7, 0, 0), (7, 0, 1)]
ASSETS = Path(__file__).parents[3] / "assets"


@pytest.mark.parametrize("name", ["tiny-t2i", "tiny-sd"])
def test_pictures_come_back(name: str) -> None:
    """From samples of the model to pictures, to states, to pictures."""
    policy = Policy(DiffusionPipeline.from_pretrained(ASSETS / name))
    batch = Batch(["a red star", "a blue circle"], KEYS, {"num_inference_steps": 4, "guidance_scale": 1.0})
    with torch.no_grad():
        images = policy.decode(batch, policy.roll_out(batch).final)
        again = policy.decode(batch, encode(policy, batch, images))
    assert float((again - images).abs().mean()) < 0.05


def test_an_autoencoder_that_does_not_give_pictures_back_is_refused() -> None:
    """Random weights."""
    family = FAMILIES["sd3"]()
    policy = Policy(family.pipe)
    batch = Batch(["a", "b"], KEYS, {"num_inference_steps": 3, **family.call})
    with torch.no_grad():
        pictures = policy.decode(batch, torch.zeros(policy.state_shape(batch)))
    striped = torch.zeros_like(pictures)
    striped[..., ::2] = 1.0
    with pytest.raises(ValueError, match=r"come back changed, by 0\.[1-9]"):
        encode(policy, batch, striped)
    with pytest.raises(ValueError, match=r"encodes pictures of 8 x 8 to .* but StableDiffusion3Pipeline decodes"):
        encode(policy, batch, striped[..., :8, :8])
    assert "decode" not in vars(policy.pipe.vae)
