"""The VAE in slices and tiles."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = Batch(
    ["a red star", "two blue dogs"],
    [(7, 0, 0), (7, 0, 1)],
    {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8},
)


def test_slices_and_tiles() -> None:
    """Slices are the whole up to rounding; small pictures are one tile: the same."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    with torch.no_grad():
        final = policy.roll_out(BATCH).final
        whole = policy.decode(BATCH, final)
        spare_vae(policy.pipe, tiled=True)
        assert torch.equal(policy.decode(BATCH, final), whole)
        policy.pipe.vae.tile_sample_min_size, policy.pipe.vae.tile_latent_min_size = 8, 4
        tiled = policy.decode(BATCH, final)
        assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
        policy.pipe.vae.disable_tiling()
        spare_vae(policy.pipe, sliced=True)
        sizes: list[int] = []
        policy.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        torch.testing.assert_close(policy.decode(BATCH, final), whole, atol=1e-5, rtol=0)
    assert sizes == [1, 1]


def test_what_a_pipeline_has_not_is_refused_by_the_key() -> None:
    pipe = FAMILIES["sd3"]().pipe
    del pipe.vae.use_slicing, pipe.vae.use_tiling
    with pytest.raises(ValueError, match=r"model.slice_vae: AutoencoderKL does not decode in slices"):
        spare_vae(pipe, sliced=True)
    with pytest.raises(ValueError, match=r"model.tile_vae: AutoencoderKL does not decode in tiles; write false"):
        spare_vae(pipe, tiled=True)
    pipe.register_modules(vae=None)
    with pytest.raises(ValueError, match=r"model.slice_vae: StableDiffusion3Pipeline has no VAE"):
        spare_vae(pipe, sliced=True)
