"""GR00T N1.7: LeRobot's layout, its numbers, what a row depends on, replay, freezing, what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.mdp.levels import flow_times
from genrl.mdp.noise import keyed_noise
from genrl.vla.config.sections import PolicyLoRA
from genrl.vla.policies import groot
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.groot_folder import PUBLISHED, backbone_config, base_sizes
from genrl.vla.policies.layers import compute_again, is_adapter, with_lora
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import TOKENS
from tests.vla.groot_folders import CAMERAS, REAL, groot_folder, groot_observation, groot_shapes
from tests.vla.published import LINES

REFERENCE = Path(__file__).parents[2] / "fixtures" / "lerobot" / "groot.npz"
SIGMA = torch.tensor([1.0, 0.5, 0.1])
KINDS = {
    "": {},
    "base_": {"groups": True, "embodiment_tag": "libero_sim", "action_decode_transform": "libero"},
    "area_": {"eye": {"use_albumentations": True, "letter_box_transform": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("groot")
    groot_folder(path)
    return path


def observation(policy, batch: int = 3) -> dict[str, Tensor]:
    return groot_observation(batch) | {TOKENS: policy.tokenise([LINES[n % 3] for n in range(batch)])}


def chunk(batch: int = 3) -> Tensor:
    return keyed_noise((batch, 8, 12), 0)


def test_the_layout_is_lerobots(folder) -> None:
    """The real sizes, on no device. LeRobot's own GR00TN17 on the meta device has these names and shapes, the embedding
    under its two names: 3,144,016,000 parameters, 1,620,515,968 of them in the action head."""
    published = groot_shapes(REAL)
    sizes = {key: math.prod(shape) for key, shape in published.items()}
    assert len(published) == 1030 and sum(sizes.values()) == 3_144_016_000
    assert sum(size for key, size in sizes.items() if ".action_head." in key) == 1_620_515_968
    policy = load_policy(folder)
    read = policy.folder
    read.config["base_model_path"] = "/cache/models--nvidia--GR00T-N1.7-3B/snapshots/1"  # where NVIDIA trained
    measures = base_sizes(read)
    read.config["base_model_path"] = f"{PUBLISHED}-3B"
    assert base_sizes(read) == measures
    vlm = backbone_config(read, measures)
    real = groot.Groot(measures, policy.robot, policy.prompts, policy.eye, vlm, 0)
    wanted = {groot.own_name(key): shape for key, shape in published.items() if "language_model.norm" not in key}
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_and_learns_as_lerobots_own(kind: str, tmp_path) -> None:
    """One velocity and a chunk of four Euler steps from LeRobot's noise, to its robot's units, and its loss. Pictures
    that OpenCV resizes may differ by a level of 255."""
    with np.load(REFERENCE) as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    theirs = {name: given[kind + name] for name in ("first", "chunk", "acts", "loss")}
    groot_folder(tmp_path, **KINDS[kind])
    policy, off = load_policy(tmp_path), 1e-4 if kind == "area_" else 5e-6
    with torch.no_grad():
        context, x = policy.encode(observation(policy)), given["x"]
        torch.testing.assert_close(-policy.velocity(context, x, torch.ones(3)), theirs["first"], rtol=0, atol=off)
        for step in range(4):
            x = x - policy.velocity(context, x, torch.full((3,), 1 - step / 4)) / 4
        torch.testing.assert_close(x[..., :3], theirs["chunk"], rtol=0, atol=off)
        torch.testing.assert_close(policy.actions(x), theirs["acts"], rtol=0, atol=off)
        actions = given["actions"].clone()
        if policy.robot.gripper is not None:
            actions[..., 2] = 1.0 - 2.0 * actions[..., 2]  # LeRobot's data have the gripper as 0 and 1
        sampled = {"noise": given["x"], "level": 1.0 - given["time"]}
        errors = policy.errors(context, policy.normalised(actions), given["valid"], sampled).actions
    torch.testing.assert_close(errors.sum() / given["valid"].sum(), theirs["loss"], rtol=1e-4, atol=0)


def _after_noise() -> torch.Generator:
    rng = torch.Generator().manual_seed(0)
    torch.randn(3, 8, 12, generator=rng)
    return rng


def test_adapters_are_in_the_head_and_layers_are_computed_again(folder, tmp_path) -> None:
    policy = load_policy(folder)
    with_lora(policy, PolicyLoRA(rank=2, alpha=2.0), seed=0)
    adapters = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    assert len(adapters) == (4 + 2) * 4 * 2 and all(is_adapter(name) and ".attn1.to_" in name for name in adapters)
    seen, grads = observation(policy), []
    with torch.no_grad():
        for name, parameter in adapters.items():
            if "lora_B" in name:
                parameter += 0.1
    for again in (lambda _: None, compute_again):
        again(policy)
        output = policy.velocity(policy.encode(seen), chunk(), SIGMA)
        grads.append(torch.autograd.grad(output.square().sum(), list(adapters.values())))
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*grads, strict=True))
    save_policy(policy, tmp_path)
    merged = load_policy(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    ours, theirs, before = (p.velocity(p.encode(seen), chunk(), SIGMA) for p in (policy, merged, load_policy(folder)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3


def test_what_is_imitated_with_which_noise_and_which_parts_are_trained(tmp_path, folder) -> None:
    groot_folder(tmp_path, chunk_size=4)
    policy = load_policy(tmp_path)
    actions, sampled = policy.normalised(torch.randn(3, 8, 3)), policy.loss_noise(3, torch.Generator().manual_seed(0))
    context, whole = policy.encode(observation(policy)), torch.ones(3, 8, dtype=torch.bool)
    with torch.no_grad():
        result = policy.errors(context, actions, whole, sampled).actions
        other = policy.errors(context, actions + (torch.arange(8) >= 4)[:, None], whole, sampled).actions
    assert torch.equal(result, other) and not result[:, 4:].any() and result[:, :4].all()
    sampled = load_policy(folder).loss_noise(3, torch.Generator().manual_seed(0))
    assert torch.equal(sampled["level"], flow_times(3, _after_noise()))
    groot_folder(tmp_path, tune_projector=False, tune_vlln=False, tune_top_llm_layers=1, tune_visual=True)
    policy = load_policy(tmp_path)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    begins = ("backbone.visual.", "backbone.language_model.layers.2.", "action_head.model.")
    assert trained == {name for name, _ in policy.named_parameters() if name.startswith(begins)}


def test_units_cameras_and_words(folder, tmp_path) -> None:
    policy = load_policy(folder)
    assert list(policy.robot.pictures) == list(CAMERAS)
    actions = torch.tensor([[0.1, -0.2, 0.3], [9.0, -9.0, 9.0]])
    back = policy.actions(policy.normalised(actions))
    low, high = (policy.stats["action"][name] for name in ("min", "max"))
    torch.testing.assert_close(back, torch.maximum(torch.minimum(actions, high), low))
    assert policy.normalised(actions)[:, 3:].abs().max() == 0
    same = policy.tokenise(["Touch, the BLUE block!"])
    assert torch.equal(same, policy.tokenise(["touch the blue block"])) and same.shape == (1, 70)
    groot_folder(tmp_path, **KINDS["base_"])
    libero = load_policy(tmp_path)
    sides = torch.tensor([[0.1, 0.2, -1.0], [0.1, 0.2, 1.0]])
    torch.testing.assert_close(libero.actions(libero.normalised(sides)), sides)
    widths = {"observation.state": 5, "action": 3}
    stats = {name: {"min": -torch.ones(n), "max": torch.ones(n)} for name, n in widths.items()}
    adapt = Adapt(rename={"observation.image": CAMERAS[1]}, stats=stats)
    one = load_policy(folder, adapt=adapt)
    assert one.inputs == ("observation.state", "observation.image", TOKENS)
    torch.testing.assert_close(one.normalised(torch.full((3,), 0.5))[:3], torch.full((3,), 0.5))
    assert (one.tokenise(LINES) == 5).sum(1).tolist() == [1, 1, 1]


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    weights = groot_folder(tmp_path)
    file = tmp_path / "policy_preprocessor.json"
    steps = json.loads(file.read_text())
    for changes, match in (
        ({"embodiment_tag": "new_embodimnt"}, "is not in the mapping; the nearest one is 'new_embodiment'"),
        ({"video_modality_keys": ["top"]}, r"none of its cameras .* policy.rename"),
    ):
        changed = json.loads(file.read_text())
        next(s for s in changed["steps"] if "pack_inputs" in s["registry_name"])["config"] |= changes
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=match):
            load_policy(tmp_path)
        file.write_text(json.dumps(steps))
    short = {key: value for key, value in weights.items() if ".transformer_blocks.3." not in key}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="keys are missing"):
        load_policy(tmp_path)
    groot_folder(tmp_path / "base", groups=True)
    file = tmp_path / "base" / "policy_postprocessor.json"
    file.write_text(file.read_text().replace('"ABSOLUTE"', '"RELATIVE"'))
    with pytest.raises(ValueError, match=r"'arm' are relative to the state.*use_relative_actions: false"):
        load_policy(tmp_path / "base")
