"""The embedded policies: sizes, what a context may and may not depend on, instructions, statistics."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config.plugins import import_file
from genrl.mdp.noise import keyed_noise
from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies.embedded import TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.encoder import CLOUD, PICTURE, PointEncoder
from genrl.vla.policies.folder import load_policy, policy_class
from genrl.vla.policies.layers import compute_again
from genrl.vla.policies.policy import ACTION, IMAGE, POINTS, SEEN, STATE, TOKENS, Inputs, rows, tokenise
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import train
from tests.vla import published_runs, vla_runs
from tests.vla.published import LINES, pi_observation
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
    other = {STATE: seen[STATE] + 0.1, IMAGE: seen[IMAGE].flip(1).contiguous(), TOKENS: seen[TOKENS] * 0}
    for name in policy.inputs:
        changed = policy.encode(seen | {name: other[name]})
        assert (changed["features"] - context["features"]).abs().max() > 1e-4, name


def test_a_cloud_is_a_set_of_points() -> None:
    """Order and repetition do not matter, places do; the widths are 3D Diffusion Policy's."""
    torch.manual_seed(0)
    encoder, points = PointEncoder(), torch.randn(3, 20, 3)
    result = encoder(points)
    assert result.shape == (3, CLOUD) and [encoder.each[k].out_features for k in (0, 3, 6)] == [64, 128, 256]
    for same in (points[:, torch.randperm(20)], torch.cat([points, points[:, :7]], 1)):
        torch.testing.assert_close(encoder(same), result, rtol=1e-5, atol=1e-5)
    assert (encoder(points + 0.1) - result).abs().max() > 1e-2


@pytest.mark.parametrize(("inputs", "looked", "sees"), [(SEES, IMAGE, PICTURE), (FEELS, POINTS, CLOUD)])
def test_what_was_seen_takes_the_place_of_what_was_looked_at(inputs: Inputs, looked: str, sees: int) -> None:
    policy, shown = flow(inputs), rows(frames(points=14), torch.arange(5))
    assert policy.inputs == (STATE, looked, TOKENS) and policy.encoder.sees == sees
    seen = {SEEN: policy.encoder.see(shown, policy.encoder.hear(shown[TOKENS]))}
    seen |= {name: shown[name] for name in (STATE, TOKENS)}
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


def test_time_and_context_change_the_velocity_and_a_context_noise_head_does_not_see_the_chunk() -> None:
    """ReinFlow's std is a function of (observation, time), Flow-Noise's of the expert's state."""
    x, sigma = keyed_noise((5, 4, 3), 0), torch.full((5,), 0.5)
    for head, sees in (("context", False), ("expert", True)):
        policy = flow(SEES, noise_head=head)
        context = policy.encode(observation())
        raw, other = (policy.velocity_and_noise(context, chunk, sigma)[1] for chunk in (x, x + 1.0))
        assert torch.equal(raw, other) != sees
        now = policy.velocity(context, x, sigma)
        assert now.shape == x.shape and torch.equal(policy.velocity_and_noise(context, x, sigma)[0], now)
        mixed = {name: value.flip(0) for name, value in context.items()}
        for changed in (policy.velocity(context, x, 1.5 * sigma), policy.velocity(mixed, x, sigma)):
            assert (changed - now).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no noise head"):
        flow(SEES).velocity_and_noise(context, x, sigma)


def test_instructions_become_tokens_and_what_does_not_fit_is_refused() -> None:
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
    lines = ["put the red block in the far zone", "touch the blue block"]
    tokens = tokenise(lines, WORDS)
    assert tokens.shape == (2, 8)
    read = [" ".join(WORDS[number - 1] for number in row if number) for row in tokens.tolist()]
    assert read == lines
    with pytest.raises(ValueError, match="no instruction"):
        tokenise(["touch the blue block", " "], WORDS)
    with pytest.raises(ValueError, match="'gren'.*nearest one is 'green'"):
        tokenise(["touch the gren block"], WORDS)


# -- Policies of a file outside the package: trained, saved, loaded, evaluated and resumed as those that are built in
SOURCE = """
from dataclasses import dataclass

from torch import nn

from genrl.vla.policies.embedded import EmbeddedConfig, EmbeddedPolicy


@dataclass(frozen=True)
class WideConfig(EmbeddedConfig):
    width: int = 8


class Wide(EmbeddedPolicy):
    Config = WideConfig

    def __init__(self, config, stats):
        super().__init__(config, stats)
        self.body = nn.Linear(self.encoder.size, config.horizon * config.action_dim)

    def velocity(self, context, x, sigma):
        return self.body(context["features"]).view(x.shape)


class Dreamer:
    def encode(self, observation): ...


number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def imitated(place: Path, name: str, sampler: str = "flow_sde", **new: Any) -> VLAConfig:
    sft = {**vla_runs.SFT, "policy": {"path": None, "new": {"type": name, "image_size": 0, **new}}}
    return vla_runs.config(place, sampler=sampler, iterations=2, **sft)


def test_what_it_cannot_do_is_told_before_anything_is_written(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sampler.kind: diffusion needs a policy that predicts noise"):
        train(imitated(tmp_path, f"{file}:Wide", "diffusion"))
    with pytest.raises(ValueError, match=r"policy.new.args: .*Wide has no \['wide'\]; it has \['width'\]"):
        train(imitated(tmp_path, f"{file}:Wide", args={"wide": 3}))
    with pytest.raises(ValueError, match="has no noise head; choose a sampler that learns no noise"):
        run = train(imitated(tmp_path, f"{file}:Wide"))
        train(vla_runs.config(tmp_path, sampler="reinflow", policy={"path": str(run)}, output=str(tmp_path / "b")))
    assert not (tmp_path / "b" / "policy").exists()
    for name, message in (
        (f"{file}:Dreamer", "Dreamer has no tokenise, normalised, actions, with_heads, save, load"),
        (f"{file}:number", "number is no class"),
        (f"{file}:Widde", "did you mean Wide"),
        ("smol_vla", "did you mean smolvla"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_class(name)


def test_an_installed_policy_and_an_installed_simulator(
    file: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {
        "genrl.policies": EntryPoint("linear", "own_package:Wide", "genrl.policies"),
        "genrl.simulators": EntryPoint("corners", "own_package:make", "genrl.simulators"),
    }
    kind = policy_class(f"{file}:Wide")
    simulator = import_file(root / "docs" / "example_simulator.py")
    package = ModuleType("own_package")
    package.Wide, package.make = kind, simulator.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_package", package)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [result[group]] if group in result else [])
    config = imitated(tmp_path, "linear")
    assert config.policy.new is not None and policy_class(config.policy.new.type) is kind
    env = open_environment(Simulation("corners", num_envs=2, chunk=2, tasks=("red",), max_steps=9))
    observation, _ = env.reset(seed=0)
    assert env.task_description == ["go to the red corner"] * 2 and observation["agent_pos"].shape == (2, 2)
    env.close()


# -- Layers whose activations are computed again in the backward pass, and what is refused
def passed(policy: Any) -> tuple[dict[str, Tensor], int]:
    """Outputs and gradients of an encoding, two denoising steps, the heads; bytes that the graph keeps."""
    held = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    observation = pi_observation(3) | {TOKENS: policy.tokenise(LINES)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = dict(policy.encode(observation))
        for step, sigma in enumerate((1.0, 0.5)):
            outputs = policy.velocity_and_noise(result, keyed_noise((3, 6, 32), step), torch.full((3,), sigma))
            result |= {f"velocity-{step}": outputs[0], f"noise-{step}": outputs[1]}
        result["value"] = policy.value(result)
        loss = sum(value.float().square().mean() for name, value in result.items() if name != "valid")
    loss.backward()  # type: ignore[union-attr]
    gradients = {f"gradient/{name}": p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {**result, **gradients}, sum(kept.values())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("pi0", torch.float32), ("pi05", torch.bfloat16), ("smolvla", torch.float32), ("smolvla", torch.bfloat16)],
)
def test_computing_again_gives_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = published_runs.ALL if dtype == torch.float32 else {"train_expert_only": True}
    published_runs.MADE[kind](tmp_path, dtype=dtype, **settings)
    result = []
    for again in (False, True):
        policy = load_policy(tmp_path).with_heads(critic=1, noise_head="expert", seed=0)
        if again:
            compute_again(policy)
        result.append(passed(policy))
    (kept, most), (computed, least) = result
    assert kept.keys() == computed.keys() and sum(name.startswith("gradient/") for name in kept) > 40
    for name, value in kept.items():
        assert torch.equal(computed[name], value), name
    assert least < 0.5 * most
