"""ACT and Diffusion Policy: the published layouts, LeRobot's own chunks, chains and losses, new policies, whole runs,
replay, what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from genrl.config import ConfigError, load
from genrl.mdp import ddpm
from genrl.mdp.noise import generator, keyed_noise
from genrl.runtime.loop.progress import Progress
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.offline.imitation import imitation_loss, recorded_frames
from genrl.vla.policies import diffusion_policy, encoder
from genrl.vla.policies.act import ACT, ACTConfig
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import ACTION, STATE, PredictsActions, PredictsNoise, PredictsVelocity
from genrl.vla.rollout.sampling import ChunkNoise, Diffusion, Regression
from genrl.vla.setup import export, load_trained, sampler_of
from genrl.vla.train import judge_policy, open_policy, train
from tests.vla import published, vla_runs
from tests.vla.published import ACT_REAL, DIFFUSION_REAL
from tests.vla.published import diffusion_observation as observation

LEROBOT = Path(__file__).parents[2] / "fixtures" / "lerobot"
KINDS: dict[str, dict[str, Any]] = {"": {}, "pre_": {"pre_norm": True}, "plain_": {"use_vae": False}}
"""Prefix in act.npz: settings."""
ARGS = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "latent_dim": 4, "n_encoder_layers": 2}
NEW: dict[str, Any] = {"type": "act", "image_size": 0, "horizon": 4, "args": ARGS}
RUN: dict[str, Any] = {
    "policy": {"path": None, "new": NEW},
    "environment": {"tasks": ["touch the blue block"]},
    "demonstrations": {"expert": 16},
    "trainer": {"algorithm": "sft", "steps_per_iteration": 4, "batch_size": 16},
    "evaluation": {"every": 1},
}


@pytest.fixture(scope="module")
def act(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("act")
    published.act_folder(path)
    return path


def config(place: Path, **changes: Any) -> Any:
    path = place / "act.yaml"
    kind = changes.pop("sampler", "regression")
    tree = vla_runs.settings(place, **(RUN | changes)) | {"sampler": {"kind": kind}}
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return load(path)


def test_the_layout_is_the_published_one(act) -> None:
    """LeRobot counts 51,613,582 parameters of an ACT with its default sizes, one camera and fourteen joints; its frozen
    batch norms and the places of the VAE's tokens are no parameters."""
    listed = published.act_shapes(ACT_REAL)
    assert len(listed) == 234
    buffers = [k for k in listed if k.endswith("pos_enc") or (".backbone." in k and len(listed[k]) == 1)]
    assert sum(math.prod(shape) for key, shape in listed.items() if key not in buffers) == 51_613_582
    robot = load_policy(act).robot
    robot.widths, robot.action_dim = {STATE: 14}, 14
    with torch.device("meta"):
        real = ACT(ACTConfig(), robot)
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == listed


def of_lerobot(kind: str, prefix: str = "") -> dict[str, Tensor]:
    """What LeRobot 0.6.1 did with the same folder (benchmarks/lerobot_reference.py)."""
    with np.load(LEROBOT / f"{kind}.npz") as arrays:
        return {name.removeprefix(prefix): torch.from_numpy(arrays[name]) for name in arrays if name.startswith(prefix)}


@pytest.mark.parametrize("prefix", KINDS)
def test_it_acts_and_its_loss_is_as_lerobots_own(prefix: str, tmp_path) -> None:
    """The loss on a batch of which a part is padding, with LeRobot's noise in the latent."""
    published.act_folder(tmp_path, dropout=0.0, **KINDS[prefix])
    policy, given = load_policy(tmp_path), of_lerobot("act", prefix)
    with torch.no_grad():
        chunk = Regression().act(policy, policy.encode(published.act_observation()), torch.zeros(3, 8, 3))
    assert given["chunk"].std(0).mean() > 0.05 and given["chunk"].std(1).mean() > 0.05  # of rows, and of actions
    torch.testing.assert_close(chunk, given["chunk"], rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.actions(chunk), given["acts"], rtol=0, atol=1e-5)
    policy.loss_noise = lambda *_: {"latent": given["latent"], "dropout": torch.zeros(3, dtype=torch.int64)}
    shown = published.act_observation() | {ACTION: given["actions"], ACTION_IS_PAD: ~given["valid"]}
    recorded = recorded_frames(policy, shown, torch.arange(3), torch.Generator(), torch.ones(1))
    loss = imitation_loss(policy, recorded)
    torch.testing.assert_close(loss.float(), given["loss"], rtol=1e-5, atol=0)
    assert ("kld_loss" in given) == policy.config.use_vae
    if policy.config.use_vae:
        assert 10.0 * given["kld_loss"] > given["l1_loss"] > 0.1  # neither vanishes in the sum
    if prefix:
        return
    loss.backward()
    for name, parameter in policy.named_parameters():
        reached = "decoder.layers.0.self_attn" not in name  # it attends to zeros
        assert parameter.grad is not None and (parameter.grad.abs().max() > 0 or not reached or "bias" in name), name


def test_dropout_is_of_the_recorded_seed_and_of_training_alone(act) -> None:
    policy = load_policy(act)
    shown = published.act_observation() | {ACTION: torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0))}
    first = recorded_frames(policy, shown, torch.arange(3), generator(0, "x"), torch.ones(1))
    other = replace(first, tensors=first.tensors | {"noise/dropout": first["noise/dropout"] + 1})
    state = torch.get_rng_state()
    with torch.no_grad():
        losses = [float(imitation_loss(policy, given)) for given in (first, first, other)]
        chunks = [policy.regressed(policy.encode(published.act_observation())) for _ in range(2)]
    assert losses[0] == losses[1] != losses[2] and torch.equal(*chunks)
    assert not policy.training and torch.equal(state, torch.get_rng_state())


def test_a_new_policy_learns_is_saved_and_goes_on(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    run = train(config(tmp_path / "a", iterations=2, optimizer={"lr": 3e-3}))
    logged = [row["loss"] for row in vla_runs.rows(run) if "loss" in row]
    assert logged[1] < 0.7 * logged[0]
    written = json.loads((run / "policy" / "config.json").read_text())
    assert (written["type"], written["chunk_size"], written["dim_model"], written["kl_weight"]) == ("act", 4, 32, 10.0)
    export(run, tmp_path / "out")
    trained, exported = load_trained(run), load_policy(tmp_path / "out")
    assert vla_runs.moved(exported, vla_runs.weights(trained)) == set()
    further = config(tmp_path, policy={"path": str(tmp_path / "out"), "new": None, "freeze": "nothing"})
    judged = judge_policy(further, tmp_path / "out", Progress(1, enabled=False))
    assert len(judged.success) == 8 and judged.instruction == ["touch the blue block"] * 8
    again = train(further)
    before = vla_runs.weights(exported)
    trains = {name for name, p in exported.named_parameters() if p.requires_grad}
    assert trains == vla_runs.moved(load_trained(again), before)


def test_a_new_policy_begins_with_torchvisions_weights(tmp_path, monkeypatch) -> None:
    """By LeRobot's name of them. It sees as timm, whose copy of them is read; a saved one needs them no more."""
    timm = pytest.importorskip("timm")
    own, seen = timm.create_model("resnet18").eval(), torch.rand(2, 3, 64, 96)
    for module in own.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for numbers in (module.weight, module.bias, module.running_mean, module.running_var):
                torch.nn.init.uniform_(numbers, 0.5, 1.5)
    asked: list[Any] = []
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(encoder, "find", lambda *arguments: asked.append(arguments) or tmp_path / "model.safetensors")
    new = NEW | {"image_size": 32, "args": ARGS | {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}}
    policy, _ = open_policy(config(tmp_path, policy={"path": None, "new": new}))
    save_policy(policy, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["pretrained_backbone_weights"] == "ResNet18_Weights.IMAGENET1K_V1"
    with torch.no_grad():
        wanted = own.forward_features(seen)
        for actual in (policy, load_policy(tmp_path / "saved")):
            torch.testing.assert_close(actual.model.backbone(seen), wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.1
    key = "policy.new.args.pretrained_backbone_weights"
    assert asked == [("timm/resnet18.tv_in1k", ("model.safetensors",), key)]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"dim_modl": 64}, "policy.new.args: act has no 'dim_modl'; did you mean dim_model"),
        ({"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}, "must be null or, with pictures, ResNet18"),
        ({"dim_model": 30}, "policy.new.args: dim_model 30 must be a multiple of n_heads 8 and of 4"),
    ],
)
def test_settings_of_a_new_policy_are_refused(args: dict[str, Any], match: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=match):
        train(config(tmp_path, policy={"path": None, "new": {"type": "act", "image_size": 0, "args": args}}))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_reinforcement_refuses_it(act, tmp_path) -> None:
    changes = {"trainer": {"algorithm": "ppo"}, "demonstrations": None, "policy": {"path": str(act), "new": None}}
    with pytest.raises(ConfigError, match="ppo cannot train a policy that predicts actions.*no likelihood; take sft"):
        config(tmp_path, **changes)
    result, policy = config(tmp_path, sampler="flow_sde", **changes), load_policy(act)
    with pytest.raises(ValueError, match="predicts velocity; for this one write regression"):
        sampler_of(result, policy)
    with pytest.raises(ValueError, match="no likelihood, so nothing can reinforce it: use sft"):
        policy.with_heads(critic=1, noise_head="none", seed=0)
    assert isinstance(policy, PredictsActions) and not isinstance(policy, PredictsNoise | PredictsVelocity)


CAMERA = "observation.images.camera0"
TIMES = torch.tensor([99, 40, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("diffusion")
    published.diffusion_folder(path)
    return path


def chunk(batch: int = 3) -> Tensor:
    return keyed_noise((batch, 8, 3), 0)


def test_the_layout_of_diffusion_policy_is_the_published_one(folder) -> None:
    """LeRobot counts 262,709,026 parameters in diffusion_pusht: two observations of one camera and two numbers."""
    listed = published.diffusion_shapes(DIFFUSION_REAL)
    assert sum(math.prod(shape) for key, shape in listed.items() if "pos_grid" not in key) == 262_709_026
    robot = load_policy(folder).robot
    robot.widths, robot.action_dim = {STATE: 2}, 2
    real = diffusion_policy.DiffusionPolicy(diffusion_policy.DiffusionPolicyConfig(), robot, (96, 96))
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == listed


def test_the_whole_chain_is_lerobots_own(folder) -> None:
    """100 steps of DDPM with LeRobot's noise, its pictures and states prepared by its own processors; the chain of
    LeRobot begins one action earlier, and it returns the four that it executes."""
    policy, given = load_policy(folder), of_lerobot("diffusion")
    noise = given["noise"].float().roll(-1, 2).transpose(0, 1)
    sampler = Diffusion(100, 100, 100, floor=1e-12, noise_clip=1e9)
    with torch.no_grad():
        context = policy.encode(observation())
        taken = sampler.sample(policy, context, ChunkNoise(noise, torch.ones(3, 100, dtype=torch.bool)))
    assert given["chunk"].std() > 0.3 and (given["chunk"].abs() < 0.99).float().mean() > 0.5
    torch.testing.assert_close(taken.chunk[:, :4], given["chunk"], rtol=0, atol=5e-5)
    torch.testing.assert_close(policy.actions(taken.chunk)[:, :4], given["acts"], rtol=0, atol=1e-4)


def test_a_ddim_chain_is_lerobots_but_for_the_noise_of_a_clipped_action(folder) -> None:
    """LeRobot goes on with the noise that was predicted, DPPO (and `act`) with that of the action after its clip."""
    policy, given = load_policy(folder), of_lerobot("diffusion")
    start, grid = given["noise"][0].float().roll(-1, 1), ddpm.ddim_grid(ddpm.cosine_alpha_bars(100), 10)
    with torch.no_grad():
        context, x = policy.encode(observation()), start
        for k in range(10):
            noise = policy.noise(context, x, grid.timesteps[k].expand(3))
            bar, following = grid.alpha_bar[k].float(), grid.alpha_bar_next[k].float()
            action = ((x - (1 - bar).sqrt() * noise) / bar.sqrt()).clamp(-1, 1)
            x = following.sqrt() * action + (1 - following).sqrt() * noise
        own = Diffusion(100, 10, 10).act(policy, context, start)
    torch.testing.assert_close(x[:, :4], given["ddim_chunk"], rtol=0, atol=5e-5)
    assert (own[:, :4] - given["ddim_chunk"]).abs().max() > 0.1  # random weights clip at nearly every step


def test_pictures_are_resized_as_pillow_does_and_predicted_actions_are_noise(tmp_path, folder) -> None:
    published.diffusion_folder(tmp_path, resize_shape=[40, 37])
    policy = load_policy(tmp_path)
    policy.robot.modes[CAMERA] = "IDENTITY"
    seen = torch.randint(0, 256, (1, 60, 90, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    ours = policy._framed(policy.robot.picture({CAMERA: seen}, CAMERA, torch.device("cpu")))
    red = Image.fromarray(seen[0, :, :, 0].float().numpy() / 255.0).resize((37, 40), Image.Resampling.BILINEAR)
    torch.testing.assert_close(ours[0, 0], torch.from_numpy(np.array(red))[3:37, 0:36], rtol=1e-4, atol=1e-4)
    published.diffusion_folder(tmp_path, prediction_type="sample")
    policy, original = load_policy(tmp_path), load_policy(folder)
    context = policy.encode(observation())
    noise, action = policy.noise(context, chunk(), TIMES), original.noise(context, chunk(), TIMES)
    bar = ddpm.cosine_alpha_bars(100)[TIMES].float()[:, None, None]
    torch.testing.assert_close(bar.sqrt() * action + (1 - bar).sqrt() * noise, chunk(), rtol=1e-4, atol=1e-4)


def test_one_observation_stands_for_the_history_and_what_does_not_fit_is_refused(folder) -> None:
    policy, one = load_policy(folder), observation(history=None)
    twice = {name: torch.stack([value, value], 1) for name, value in one.items()}
    assert torch.equal(policy.encode(one)["features"], policy.encode(twice)["features"])
    moved = {name: value.clone() for name, value in twice.items()}
    moved[STATE][:, 0] += 1.0
    assert not torch.equal(policy.encode(one)["features"], policy.encode(moved)["features"])
    with pytest.raises(ValueError, match="reads 2 observations"):
        policy.encode({name: value[:, :1] for name, value in twice.items()})


def test_what_resizes_nothing_sees_pictures_of_its_own_size_alone(act, folder, tmp_path) -> None:
    """The second camera shows larger ones; so does the only one; and there is nothing to crop from."""
    larger = published.observed(("camera0", "camera1"), (40, 40), 3)
    text = r"camera. is 40 x 40 \(height x width\), and the policy of .* reads 36 x 40, and resizes nothing"
    with pytest.raises(ValueError, match=text.replace("camera.", "camera1")):
        load_policy(act).encode(published.act_observation() | {"observation.images.camera1": larger[CAMERA]})
    with pytest.raises(ValueError, match=text):
        load_policy(folder).encode(observation() | {CAMERA: larger[CAMERA][:, None].expand(-1, 2, -1, -1, -1)})
    published.diffusion_folder(tmp_path, crop_shape=[50, 36])
    with pytest.raises(ValueError, match=r"crop_shape \[50, 36\] is larger than the pictures, \[36, 40\]"):
        load_policy(tmp_path)
