"""ACT: the published layout, LeRobot's own chunks and losses, new policies, whole runs, what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from genrl.config import ConfigError, load
from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.runtime.loop.progress import Progress
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.offline.imitation import imitation_loss, recorded_frames
from genrl.vla.policies import encoder
from genrl.vla.policies.act import ACT, ACTConfig
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import ACTION, STATE, PredictsActions, PredictsNoise, PredictsVelocity
from genrl.vla.rollout.sampling import Regression
from genrl.vla.setup import export, load_trained, sampler_of
from genrl.vla.train import judge_policy, open_policy, train
from tests.vla import vla_runs
from tests.vla.published import ACT_REAL, act_folder, act_observation, act_shapes

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
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for prefix, settings in KINDS.items():
        found[prefix] = tmp_path_factory.mktemp("act")
        act_folder(found[prefix], **settings)
    return found


def config(place: Path, **changes: Any) -> Any:
    path = place / "act.yaml"
    kind = changes.pop("sampler", "regression")
    tree = vla_runs.settings(place, **(RUN | changes)) | {"sampler": {"kind": kind}}
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return load(path)


def test_the_layout_is_the_published_one(folders) -> None:
    """LeRobot counts 51,613,582 parameters of an ACT with its default sizes, one camera and fourteen joints; its frozen
    batch norms and the places of the VAE's tokens are no parameters."""
    published = act_shapes(ACT_REAL)
    assert len(published) == 234
    buffers = [k for k in published if k.endswith("pos_enc") or (".backbone." in k and len(published[k]) == 1)]
    assert sum(math.prod(shape) for key, shape in published.items() if key not in buffers) == 51_613_582
    robot = load_policy(folders[""]).robot
    robot.widths, robot.action_dim = {STATE: 14}, 14
    with torch.device("meta"):
        real = ACT(ACTConfig(), robot)
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == published


def of_lerobot(prefix: str) -> dict[str, Tensor]:
    """What LeRobot 0.6.1 did with the same folder (tests/fixtures/lerobot_reference.py)."""
    with np.load(LEROBOT / "act.npz") as arrays:
        return {name.removeprefix(prefix): torch.from_numpy(arrays[name]) for name in arrays if name.startswith(prefix)}


@pytest.mark.parametrize("prefix", KINDS)
def test_it_acts_as_lerobots_own(prefix: str, folders) -> None:
    policy, given = load_policy(folders[prefix]), of_lerobot(prefix)
    with torch.no_grad():
        chunk = Regression().act(policy, policy.encode(act_observation()), torch.zeros(3, 8, 3))
    assert given["chunk"].std(0).mean() > 0.05 and given["chunk"].std(1).mean() > 0.05  # of rows, and of actions
    torch.testing.assert_close(chunk, given["chunk"], rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.actions(chunk), given["acts"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", KINDS)
def test_its_loss_is_lerobots_own(prefix: str, tmp_path) -> None:
    act_folder(tmp_path, dropout=0.0, **KINDS[prefix])
    policy, given = load_policy(tmp_path), of_lerobot(prefix)
    policy.loss_noise = lambda *_: {"latent": given["latent"], "dropout": torch.zeros(3, dtype=torch.int64)}
    shown = act_observation() | {ACTION: given["actions"], ACTION_IS_PAD: ~given["valid"]}
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


def test_the_parts_of_the_processes_add_up(tmp_path) -> None:
    """The error over what was demonstrated, the divergence over the frames."""
    act_folder(tmp_path, dropout=0.0)
    policy = load_policy(tmp_path)
    shown = act_observation(9) | {ACTION: torch.randn(9, 8, 3, generator=torch.Generator().manual_seed(0))}
    shown[ACTION_IS_PAD] = torch.arange(8) >= 8 - 2 * (torch.arange(9) % 4)[:, None]
    index, bars = torch.arange(9), ddpm.cosine_alpha_bars(2)

    def loss(mine: slice) -> float:
        return float(imitation_loss(policy, recorded_frames(policy, shown, index, generator(0, "x"), bars, mine)))

    with torch.no_grad():
        whole = loss(slice(None))
        for processes in (2, 3):
            assert sum(loss(slice(k, None, processes)) for k in range(processes)) == pytest.approx(whole, rel=1e-5)


def test_dropout_is_of_the_recorded_seed_and_of_training_alone(folders) -> None:
    policy = load_policy(folders[""])
    shown = act_observation() | {ACTION: torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0))}
    first = recorded_frames(policy, shown, torch.arange(3), generator(0, "x"), torch.ones(1))
    other = replace(first, tensors=first.tensors | {"noise/dropout": first["noise/dropout"] + 1})
    state = torch.get_rng_state()
    with torch.no_grad():
        losses = [float(imitation_loss(policy, given)) for given in (first, first, other)]
        chunks = [policy.regressed(policy.encode(act_observation())) for _ in range(2)]
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
    assert {name for name, p in exported.named_parameters() if p.requires_grad} == vla_runs.moved(
        load_trained(again), before
    )


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
    monkeypatch.setattr(encoder, "find", lambda *told: asked.append(told) or tmp_path / "model.safetensors")
    new = NEW | {"image_size": 32, "args": ARGS | {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}}
    policy, _ = open_policy(config(tmp_path, policy={"path": None, "new": new}))
    save_policy(policy, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["pretrained_backbone_weights"] == "ResNet18_Weights.IMAGENET1K_V1"
    with torch.no_grad():
        wanted = own.forward_features(seen)
        for found in (policy, load_policy(tmp_path / "saved")):
            torch.testing.assert_close(found.model.backbone(seen), wanted, rtol=1e-4, atol=1e-4)
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


def test_reinforcement_refuses_it(folders, tmp_path) -> None:
    trainer, path = {"algorithm": "ppo"}, {"path": str(folders[""])}
    plain = {"demonstrations": None, "policy": path | {"new": None}}
    with pytest.raises(ConfigError, match="ppo cannot train a policy that predicts actions.*no likelihood; take sft"):
        config(tmp_path, trainer=trainer, **plain)
    found = config(tmp_path, trainer=trainer, sampler="flow_sde", **plain)
    policy = load_policy(folders[""])
    with pytest.raises(ValueError, match="predicts velocity; for this one write regression"):
        sampler_of(found, policy)
    with pytest.raises(ValueError, match="no likelihood, so nothing can reinforce it: use sft"):
        policy.with_heads(critic=1, noise_head="none", seed=0)
    assert isinstance(policy, PredictsActions) and not isinstance(policy, PredictsNoise | PredictsVelocity)
