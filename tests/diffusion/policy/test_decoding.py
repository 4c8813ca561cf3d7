"""The VAE between its uses: where it is when, and what it decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genrl.diffusion.config.sections import Offload
from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = Batch(
    ["a red star", "two blue dogs"],
    [(7, 0, 0), (7, 0, 1)],
    {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8},
)


def watched(vae: nn.Module, seen: list[str]) -> None:
    """There is one device here: what is asked of the VAE, in order."""
    to, decode = vae.to, vae.decode

    def noted_to(device: Any) -> nn.Module:
        seen.append(f"to {'the CPU' if device == 'cpu' else 'its device'}")
        return to(device)

    def noted_decode(*args: Any, **kwargs: Any) -> Any:
        seen.append("decode")
        return decode(*args, **kwargs)

    vae.to, vae.decode = noted_to, noted_decode  # type: ignore[method-assign]


def test_it_is_on_its_device_only_while_it_decodes() -> None:
    family = FAMILIES["sd3"]()
    policy = Policy(family.pipe)
    state = torch.randn(policy.state_shape(BATCH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = policy.decode(BATCH, state)
    seen: list[str] = []
    watched(family.pipe.vae, seen)
    spare_vae(family.pipe, offload=True)
    assert seen == ["to the CPU"]
    with torch.no_grad():
        policy.roll_out(BATCH)
        assert seen == ["to the CPU"]
        assert torch.equal(policy.decode(BATCH, state), wanted)
    assert seen == ["to the CPU", "to its device", "decode", "to the CPU"]


def test_pipelines_keep_their_device() -> None:
    """diffusers takes it from the first module, which may be the VAE that is away."""
    pipe = FAMILIES["sd3"]().pipe
    home = pipe._execution_device
    spare_vae(pipe, offload=True)
    pipe.vae.to("meta")
    assert pipe._execution_device == home and type(pipe).__name__ == "StableDiffusion3Pipeline"


def test_a_run_that_spares_its_vae_is_the_same(folder: Path, model: Path) -> None:
    plain = runs.config(folder, model, iterations=1)
    spared = plain.model.model_copy(update={"offload": Offload(vae="between")})
    other = plain.model_copy(update={"model": spared, "output": str(folder / "other")})
    assert runs.differences(train(plain), train(other)) == []


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
    with pytest.raises(ValueError, match=r"model.offload.vae: StableDiffusion3Pipeline has no VAE"):
        spare_vae(pipe, offload=True)
    with pytest.raises(ValueError, match=r"model.slice_vae: StableDiffusion3Pipeline has no VAE"):
        spare_vae(pipe, sliced=True)
