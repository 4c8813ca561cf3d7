"""The embedded policies: sizes, what a context may and may not depend on, instructions, statistics."""

from __future__ import annotations

import pytest
import torch

from genrl.mdp.noise import keyed_noise
from genrl.vla.policies.embedded import TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.encoder import CLOUD, PICTURE, PointEncoder
from genrl.vla.policies.policy import ACTION, IMAGE, POINTS, SEEN, STATE, TOKENS, Inputs, rows, tokenise
from tests.vla.tiny_policies import FEELS, SEES, WORDS, diffusion, flow, frames


def observation(count: int = 5):
    return {name: value[:count] for name, value in frames().items() if name != ACTION}


@pytest.mark.parametrize("make", [lambda: flow(SEES, critic=1), lambda: diffusion(SEES, critic=1)])
def test_every_input_reaches_the_context_and_rows_are_independent(make) -> None:
    policy, seen = make(), observation()
    assert set(policy.inputs) == {STATE, IMAGE, TOKENS}
    context = policy.encode(seen)
    alone = policy.encode(rows(seen, torch.tensor([3])))
    for name, value in alone.items():
        torch.testing.assert_close(value, context[name][3:4], rtol=1e-5, atol=1e-5)
    longer = policy.encode(seen | {TOKENS: torch.nn.functional.pad(seen[TOKENS], (0, 3))})
    torch.testing.assert_close(longer["features"], context["features"])
    other = {
        STATE: seen[STATE] + 0.1,
        IMAGE: seen[IMAGE].flip(1).contiguous(),
        TOKENS: seen[TOKENS].roll(1, 0) if len(seen[TOKENS].unique(dim=0)) > 1 else seen[TOKENS] * 0,
    }
    for name in policy.inputs:
        changed = policy.encode(seen | {name: other[name]})
        assert (changed["features"] - context["features"]).abs().max() > 1e-4, name


def test_a_cloud_is_a_set_of_points() -> None:
    """Order and repetition do not matter, places do; the widths are 3D Diffusion Policy's."""
    torch.manual_seed(0)
    encoder, points = PointEncoder(), torch.randn(3, 20, 3)
    found = encoder(points)
    assert found.shape == (3, CLOUD) and [encoder.each[k].out_features for k in (0, 3, 6)] == [64, 128, 256]
    for same in (points[:, torch.randperm(20)], torch.cat([points, points[:, :7]], 1)):
        torch.testing.assert_close(encoder(same), found, rtol=1e-5, atol=1e-5)
    assert (encoder(points + 0.1) - found).abs().max() > 1e-2


@pytest.mark.parametrize(("inputs", "looked", "sees"), [(SEES, IMAGE, PICTURE), (FEELS, POINTS, CLOUD)])
def test_what_was_seen_takes_the_place_of_what_was_looked_at(inputs: Inputs, looked: str, sees: int) -> None:
    policy, shown = flow(inputs), rows(frames(points=14), torch.arange(5))
    assert policy.inputs == (STATE, looked, TOKENS) and policy.encoder.sees == sees
    seen = {
        SEEN: policy.encoder.see(shown, policy.encoder.hear(shown[TOKENS])),
        **{n: shown[n] for n in (STATE, TOKENS)},
    }
    assert torch.equal(policy.encode(seen)["prefix"], policy.encode(shown)["prefix"])
    moved = policy.encode(seen | {SEEN: seen[SEEN] + 1.0})
    assert (moved["prefix"] - policy.encode(shown)["prefix"]).abs().max() > 1e-3


def test_the_critic_leaves_the_encoder_alone_and_begins_at_zero() -> None:
    policy = flow(SEES, critic=1, stir=False)
    value = policy.value(policy.encode(observation()))
    assert value.shape == (5, 1) and value.abs().max() == 0
    policy = flow(SEES, critic=1)
    policy.value(policy.encode(observation())).sum().backward()
    assert all(p.grad is None for p in policy.encoder.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.value_head.parameters())
    with pytest.raises(ValueError, match="no critic"):
        flow().value({})


def test_time_and_context_change_the_velocity() -> None:
    policy = flow(SEES)
    context, x = policy.encode(observation()), keyed_noise((5, 4, 3), 0)
    now = policy.velocity(context, x, torch.full((5,), 0.5))
    assert now.shape == x.shape
    assert (policy.velocity(context, x, torch.full((5,), 0.75)) - now).abs().max() > 1e-3
    mixed = {name: value.flip(0) for name, value in context.items()}
    assert (policy.velocity(mixed, x, torch.full((5,), 0.5)) - now).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no noise head"):
        policy.velocity_and_noise(context, x, torch.full((5,), 0.5))


def test_a_context_noise_head_does_not_see_the_chunk_and_an_expert_one_does() -> None:
    """ReinFlow's std is a function of (observation, time), Flow-Noise's of the expert's state."""
    x, sigma = keyed_noise((5, 4, 3), 0), torch.full((5,), 0.5)
    for head, sees in (("context", False), ("expert", True)):
        policy = flow(SEES, noise_head=head)
        context = policy.encode(observation())
        raw, other = (policy.velocity_and_noise(context, chunk, sigma)[1] for chunk in (x, x + 1.0))
        assert torch.equal(raw, other) != sees
        assert torch.equal(policy.velocity_and_noise(context, x, sigma)[0], policy.velocity(context, x, sigma))


def test_actions_are_those_of_the_robot() -> None:
    policy, actions = flow(), frames()[ACTION]
    chunk = policy.normalised(actions)
    assert chunk.abs().max() <= 1 + 1e-6
    torch.testing.assert_close(policy.actions(chunk), actions)


def test_instructions_become_tokens_and_unknown_ones_are_refused() -> None:
    lines = ["put the red block in the far zone", "touch the blue block"]
    tokens = tokenise(lines, WORDS)
    assert tokens.shape == (2, 8)
    read = [" ".join(WORDS[number - 1] for number in row if number) for row in tokens.tolist()]
    assert read == lines
    with pytest.raises(ValueError, match="no instruction"):
        tokenise(["touch the blue block", " "], WORDS)
    with pytest.raises(ValueError, match="'gren'.*nearest one is 'green'"):
        tokenise(["touch the gren block"], WORDS)


def test_what_does_not_fit_is_refused() -> None:
    seen = observation()
    with pytest.raises(KeyError, match="observation.image"):
        flow(SEES).encode({name: value for name, value in seen.items() if name != IMAGE})
    with pytest.raises(ValueError, match="uint8"):
        flow(SEES).encode(seen | {IMAGE: seen[IMAGE].float()})
    shown = rows(frames(points=14), torch.arange(2))
    with pytest.raises(ValueError, match=r"environment_points must be \[B, 14, 3\], got \[2, 13, 3\]"):
        flow(FEELS).encode(shown | {POINTS: shown[POINTS][:, 1:]})
    with pytest.raises(ValueError, match=r"statistics of shape \[4\]"):
        TinyFlowVLA(TinyFlowConfig(Inputs(state=4, vocabulary=WORDS), 3, 4), flow().stats)
