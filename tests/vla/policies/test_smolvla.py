"""SmolVLA: the published layout, a recomputation of all of it in plain formulas, replay, freezing, what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from genrl.mdp.noise import keyed_noise
from genrl.vla.methods.imitation import flow_matching_loss
from genrl.vla.policies import smolvla
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import STATE, TOKENS, rows
from genrl.vla.rollout.sampling import FlowSteps, LearnedNoise, chunk_noise, replay, sample
from tests.conftest import GOLDEN
from tests.vla.published import LINES, SMOL_REAL, SMOL_TINY, pi_observation, random_weights, smol_folder, smol_shapes

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_comes_back_as_it_was(dtype: torch.dtype, tmp_path) -> None:
    smol_folder(tmp_path / "a", weights=random_weights(smol_shapes(SMOL_TINY), dtype=dtype))
    policy = load_policy(tmp_path / "a")
    save_policy(policy, tmp_path / "b")
    for file in (tmp_path / "a").glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "b" / file.name)
        assert before.keys() == after.keys()
        assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    for file in [*(tmp_path / "a").glob("*.json"), tmp_path / "a" / "vlm" / "config.json"]:
        name = file.relative_to(tmp_path / "a")
        assert json.loads(file.read_text()) == json.loads((tmp_path / "b" / name).read_text())
    ours, theirs = observation(policy), load_policy(tmp_path / "b")
    velocities = [p.velocity(p.encode(ours), chunk(), SIGMA) for p in (policy, theirs)]
    assert torch.equal(*velocities) and velocities[0].dtype == torch.float32


def whole_velocity(policy, weights: dict[str, Tensor], seen: dict[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """Backbone and expert side by side, every token in one pass of each layer, plain formulas."""
    device = torch.device("cpu")
    numbers = functional.pad(policy.robot.vector(seen, STATE, device), (0, 27))
    embedded, there = policy._embed(seen, device)

    def linear(name: str, value: Tensor) -> Tensor:
        return functional.linear(value, weights[f"model.{name}.weight"], weights.get(f"model.{name}.bias"))

    def norm(name: str, value: Tensor) -> Tensor:
        unit = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return unit * weights[f"model.{name}.weight"]

    def turn(value: Tensor, position: Tensor) -> Tensor:
        angle = position[:, :, None, None] / 10_000 ** (torch.arange(8) / 8)
        pair = torch.complex(value[..., :8], value[..., 8:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        score = torch.einsum("bthd,bshd->bhts", q, k) / 4.0
        weight = score.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("bhts,bshd->bthd", weight, v).flatten(2)

    def mlp(own: str, value: Tensor) -> Tensor:
        return linear(
            own + "down_proj", functional.silu(linear(own + "gate_proj", value)) * linear(own + "up_proj", value)
        )

    period = 4e-3 * 1e3 ** torch.linspace(0, 1, 24, dtype=torch.float64)
    angle = 2 * torch.pi * sigma.double()[:, None] / period
    time = torch.cat([angle.sin(), angle.cos()], 1).float()
    hidden = torch.cat([linear("action_in_proj", x), time[:, None].expand(-1, 6, -1)], 2)
    hidden = linear("action_time_mlp_out", functional.silu(linear("action_time_mlp_in", hidden)))
    prefix = torch.cat([embedded, linear("state_proj", numbers)[:, None]], 1)
    valid = torch.cat([there, there.new_ones(3, 1)], 1)
    order = torch.tensor([0] * embedded.shape[1] + [1] + list(range(2, 8)))
    all_there = torch.cat([valid, valid.new_ones(3, 6)], 1)
    mask = (order[None, :] <= order[:, None]) & all_there[:, None]
    position, count = all_there.cumsum(1) - 1, prefix.shape[1]
    for n in range(4):
        own, expert = (f"vlm_with_expert.{stack}.layers.{n}." for stack in ("vlm.model.text_model", "lm_expert"))
        inner, asks = norm(own + "input_layernorm", prefix), norm(expert + "input_layernorm", hidden)
        q, k, v = (linear(f"{own}self_attn.{p}_proj", inner).unflatten(-1, (-1, 16)) for p in "qkv")
        q, k = turn(q, position[:, :count]), turn(k, position[:, :count])
        asked = linear(expert + "self_attn.q_proj", asks).unflatten(-1, (4, 16))
        if n % 2 == 0:
            keys, values = (linear(f"{expert}self_attn.{p}_proj", asks).unflatten(-1, (2, 16)) for p in "kv")
            keys = torch.cat([k, turn(keys, position[:, count:])], 1)
            found = attention(turn(asked, position[:, count:]), keys, torch.cat([v, values], 1), mask[:, count:])
        else:
            keys, values = (
                linear(f"{expert}self_attn.{p}_proj", old.flatten(2)).unflatten(-1, (2, 16))
                for p, old in zip("kv", (k, v), strict=True)
            )
            found = attention(turn(asked, torch.arange(6).expand(3, 6)), keys, values, mask[:, count:, :count])
        prefix = prefix + linear(own + "self_attn.o_proj", attention(q, k, v, mask[:, :count, :count]))
        prefix = prefix + mlp(own + "mlp.", norm(own + "post_attention_layernorm", prefix))
        hidden = hidden + linear(expert + "self_attn.o_proj", found)
        hidden = hidden + mlp(expert + "mlp.", norm(expert + "post_attention_layernorm", hidden))
    return linear("action_out_proj", norm("vlm_with_expert.lm_expert.norm", hidden))


def test_one_context_and_k_velocities_are_k_full_passes(folder) -> None:
    policy, weights = load_policy(folder), load_file(folder / "model.safetensors")
    seen = observation(policy)
    context = policy.encode(seen)
    for at in (SIGMA, torch.full((3,), 0.3)):
        whole = whole_velocity(policy, weights, seen, chunk(), at)
        assert whole.abs().mean() > 0.1
        torch.testing.assert_close(policy.velocity(context, chunk(), at), whole, rtol=1e-4, atol=1e-5)


def test_the_embedding_is_scaled(folder) -> None:
    policy, weights = load_policy(folder), load_file(folder / "model.safetensors")
    seen = observation(policy)
    x, valid = policy._embed(seen, torch.device("cpu"))
    table = weights["model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"]
    assert x.shape == (3, 2 + 12, 64) and valid.sum(1).tolist() == [2 + 9, 2 + 5, 2 + 5]
    torch.testing.assert_close(x[:, 2:], table[seen[TOKENS]] * 8.0)
    assert x[:, :2].abs().mean() > 1.0


def test_rows_are_independent_and_every_input_matters(folder) -> None:
    policy = load_policy(folder).with_heads(critic=1, noise_head="none", seed=0)
    seen = observation(policy)
    context = policy.encode(seen)
    together, values = policy.velocity(context, chunk(), SIGMA), policy.value(context)
    for row in range(3):
        one = torch.tensor([row])
        for found in (policy.encode(rows(seen, one)), rows(context, one)):
            alone = policy.velocity(found, chunk()[one], SIGMA[one])
            torch.testing.assert_close(alone, together[one], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(policy.value(found), values[one], rtol=1e-4, atol=1e-5)
    assert set(policy.inputs) == set(seen)
    for name, value in seen.items():
        moved = policy.encode(seen | {name: value.roll(1, 0)})
        assert (policy.velocity(moved, chunk(), SIGMA) - together).flatten(1).abs().amax(1).min() > 1e-4, name
        assert (policy.value(moved) - values).abs().min() > 1e-6, name


def test_padding_of_the_prompt_does_not_matter(folder) -> None:
    policy = load_policy(folder)
    seen = observation(policy)
    longer = seen | {TOKENS: functional.pad(seen[TOKENS], (0, 7))}
    ours, theirs = (policy.velocity(policy.encode(s), chunk(), SIGMA) for s in (seen, longer))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_pictures_are_padded_above_and_left(folder) -> None:
    policy = load_policy(folder)
    seen = observation(policy)
    boxed = {name: functional.pad(v, (0, 0, 0, 0, 8, 0)) if "images" in name else v for name, v in seen.items()}
    ours, theirs = policy.encode(seen), policy.encode(boxed)
    assert boxed["observation.images.base_0_rgb"].shape == (3, 32, 32, 3)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_actions_are_causal(folder) -> None:
    """A later action has no effect on the velocity of an earlier one, but an earlier one has on a later."""
    policy = load_policy(folder)
    context = policy.encode(observation(policy))
    other = chunk().clone()
    other[:, 3] += 1.0
    moved = (policy.velocity(context, other, SIGMA) - policy.velocity(context, chunk(), SIGMA)).abs().amax(2)
    assert moved[:, :3].max() == 0 and moved[:, 3:].min() > 1e-5


def test_replay_is_the_sample(folder) -> None:
    policy = load_policy(folder).with_heads(critic=0, noise_head="expert", seed=0)
    seen = observation(policy)
    with torch.no_grad():
        context = policy.encode(seen)
    for sampler in (FlowSteps(steps=3), LearnedNoise(steps=3)):
        drawn = chunk_noise(sampler, policy, [torch.Generator().manual_seed(n) for n in range(3)])
        taken = sample(policy, sampler, context, drawn)
        again = replay(policy, sampler, policy.encode(seen), taken.states, taken.next_states, taken.step_index)
        assert torch.equal((again.log_prob - taken.log_prob).exp(), torch.ones_like(taken.log_prob))
        assert policy.actions(taken.chunk).shape == (3, 6, 3)


def test_gradients_reach_the_expert_and_the_state_and_not_what_is_frozen(folder, tmp_path) -> None:
    policy = load_policy(folder).with_heads(critic=1, noise_head="none", seed=0)
    seen, actions = observation(policy), policy.normalised(torch.randn(3, 6, 3))
    context = policy.encode(seen)
    flow_matching_loss(policy, context, actions, chunk(), SIGMA).backward()
    policy.value(context).sum().backward()
    for name, parameter in policy.named_parameters():
        frozen = name.startswith("vlm_with_expert.vlm.")
        assert parameter.requires_grad != frozen and (parameter.grad is None) == frozen, name
        assert frozen or parameter.grad.abs().max() > 0, name
    smol_folder(tmp_path, train_state_proj=False)
    policy = load_policy(tmp_path)
    assert not any(value.requires_grad for value in policy.encode(seen).values())


def test_new_heads_are_saved_beside_the_published_weights(folder, tmp_path) -> None:
    policy = load_policy(folder).with_heads(critic=1, noise_head="expert", seed=0)
    save_policy(policy, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = load_policy(tmp_path)
    context = policy.encode(observation(policy))
    assert again.critic and torch.equal(again.value(context), policy.value(context))
    ours, theirs = (p.velocity_and_noise(context, chunk(), SIGMA)[1] for p in (policy, again))
    assert torch.equal(ours, theirs)


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


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    weights = smol_folder(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    for changes, match in (
        (
            {"num_vlm_layers": 2},
            r"lm_expert has 4 layers, bigger than the 2|text_model has 4 layers, bigger than the 2",
        ),
        ({"add_image_special_tokens": True}, "must be false"),
        ({"num_expert_layers": 2}, "num_expert_layers must be that of the backbone"),
        ({"expert_width_multiplier": 0.5}, r"has shape \[.*it needs"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=match):
            load_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good | {"vlm_model_name": "no/such-backbone"}))
    with pytest.raises(OSError, match=r"put the config.json of the backbone 'no/such-backbone'"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good))
    name = "model.vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight"
    save_file(weights | {name: torch.zeros(32, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \[32, 48\], it needs \[32, 32\]"):
        load_policy(tmp_path)
