"""SmolVLA: the published layout, LeRobot's own actions, replay, freezing, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from genrl.mdp.noise import keyed_noise
from genrl.vla.offline.imitation import matching_error
from genrl.vla.policies import smolvla
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.policy import STATE, TOKENS
from tests.conftest import GOLDEN
from tests.vla.published import LINES, SMOL_REAL, pi_observation, smol_folder, smol_shapes

SIGMA = torch.tensor([1.0, 0.5, 0.1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("smol")
    smol_folder(path)
    return path


def observation(policy, batch: int = 3) -> dict[str, Tensor]:
    return pi_observation(batch) | {TOKENS: policy.tokenise([LINES[n % 3] for n in range(batch)])}


def chunk(batch: int = 3) -> Tensor:
    return keyed_noise((batch, 6, 32), 0)


def test_the_layout_is_the_published_one(folder) -> None:
    """The real sizes, on no device. LeRobot counts 450,046,176 parameters in smolvla_base, and trains 99,880,992; in
    lerobot/smolvla_libero, whose file has 906,712,520 bytes, the backbone and the expert are bfloat16 but for what is
    no layer of transformers' own."""
    published = smol_shapes(SMOL_REAL)
    sizes = {key: math.prod(shape) for key, shape in published.items()}
    assert len(published) == 500 and sum(sizes.values()) == 450_046_176
    assert sum(size for key, size in sizes.items() if ".vlm." not in key) == 99_880_992
    cross = [key for key, shape in published.items() if "lm_expert" in key and shape == (320, 320)]
    single = sum(sizes[key] for key in published if key in cross or "vlm_with_expert" not in key)
    assert len(cross) == 16 and 0 < 906_712_520 - (2 * sum(sizes.values()) + 2 * single) < 100_000  # the header
    policy = load_policy(folder)
    vlm = smolvla._vlm_config(policy.folder, smolvla.PUBLISHED)
    vlm.text_config.vocab_size = 49280
    real = smolvla.SmolVLA(smolvla.SmolVLAConfig(), policy.robot, policy.prompts, vlm)
    wanted = {key.removeprefix("model."): shape for key, shape in published.items() if "lm_head" not in key}
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == wanted


def test_pictures_are_padded_above_and_left(folder) -> None:
    policy = load_policy(folder)
    seen = observation(policy)
    boxed = {name: functional.pad(v, (0, 0, 0, 0, 8, 0)) if "images" in name else v for name, v in seen.items()}
    ours, theirs = policy.encode(seen), policy.encode(boxed)
    assert boxed["observation.images.base_0_rgb"].shape == (3, 32, 32, 3)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gradients_reach_the_expert_and_the_state_and_not_what_is_frozen(folder, tmp_path) -> None:
    policy = load_policy(folder).with_heads(critic=1, noise_head="none", seed=0)
    seen, actions = observation(policy), policy.normalised(torch.randn(3, 6, 3))
    context = policy.encode(seen)
    matching_error(policy, context, actions, chunk(), SIGMA, None).square().mean().backward()
    policy.value(context).sum().backward()
    for name, parameter in policy.named_parameters():
        frozen = name.startswith("vlm_with_expert.vlm.")
        assert parameter.requires_grad != frozen and (parameter.grad is None) == frozen, name
        assert frozen or parameter.grad.abs().max() > 0, name
    smol_folder(tmp_path, train_state_proj=False)
    policy = load_policy(tmp_path)
    assert not any(value.requires_grad for value in policy.encode(seen).values())


def test_a_tied_head_is_the_embedding(folder, tmp_path) -> None:
    weights = smol_folder(tmp_path)
    weights["model.vlm_with_expert.vlm.lm_head.weight"] = weights.pop(
        "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
    )
    save_file(weights, tmp_path / "model.safetensors")
    ours, theirs = load_policy(tmp_path), load_policy(folder)
    seen = observation(ours)
    assert torch.equal(ours.encode(seen)["keys"], theirs.encode(seen)["keys"])


def test_it_acts_as_lerobots_own() -> None:
    """A folder that LeRobot 0.6.1 made, saved and acted with: ten Euler steps from its noise, to its robot's units."""
    place = GOLDEN / "lerobot_smolvla"
    with np.load(place / "ref.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    policy = load_policy(place)
    seen = {name: value for name, value in given.items() if name.startswith("observation")}
    seen |= {STATE: given["state"], TOKENS: policy.tokenise(LINES)}
    with torch.no_grad():
        context, x = policy.encode(seen), given["x"]
        for step in range(10):
            x = x - policy.velocity(context, x, torch.full((3,), 1 - step / 10)) / 10
    torch.testing.assert_close(x[..., :3], given["chunk"], rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.actions(x), given["acts"], rtol=0, atol=1e-5)


def test_weights_that_do_not_fit_are_refused(tmp_path) -> None:
    weights = smol_folder(tmp_path)
    name = "model.vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight"
    save_file(weights | {name: torch.zeros(32, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \[32, 48\], it needs \[32, 32\]"):
        load_policy(tmp_path)
