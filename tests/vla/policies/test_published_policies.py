"""Every published policy: folders come back, rows are independent, a replay is the sample, heads, what is refused;
and in a simulator: imitated on MiniTable, and reinforced from the folder of that run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.config import load
from genrl.mdp.noise import keyed_noise
from genrl.runtime.weights.weights import put_back
from genrl.vla.offline.imitation import matching_error
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.layers import is_adapter
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import IMAGE, TOKENS, rows
from genrl.vla.rollout.sampling import FlowSteps, LearnedNoise
from genrl.vla.setup import load_trained
from genrl.vla.train import open_policy, train
from tests.run_folders import assert_resumes, tiered
from tests.vla import openvla_folders, published, published_runs, vla_runs
from tests.vla.groot_folders import groot_folder, groot_observation, groot_weights
from tests.vla.published import LINES

HALF, OFT = torch.bfloat16, Adapt(oft={"chunk": 4})
SIGMA = torch.tensor([1.0, 0.5, 0.1])
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "pi0": lambda path: published.pi_folder(path, prefix="model.", dtype=HALF),
    "pi05": lambda path: published.pi_folder(path, adaptive=True, dtype=HALF),
    "smolvla": lambda path: published.smol_folder(path, dtype=HALF),
    "groot": lambda path: groot_folder(path, weights=groot_weights(dtype=HALF), groups=True),
    "diffusion": lambda path: published.diffusion_folder(path, cameras=2, use_separate_rgb_encoder_per_camera=True),
    "diffusion, one encoder": lambda path: published.diffusion_folder(path, cameras=2, groups=False),
    "act": published.act_folder,
    "act, norms first": lambda path: published.act_folder(path, pre_norm=True),
    "act, no vae": lambda path: published.act_folder(path, use_vae=False),
    "openvla": lambda path: openvla_folders.write(path, dtype=HALF, proprio=True),
    "openvla, a head": lambda path: openvla_folders.write(path, shards=3, dtype=HALF, head=True, proprio=True),
}
"""As they are published: bfloat16 where it can be."""
FLOWS = {"pi0": (6, 32), "pi05": (6, 32), "smolvla": (6, 32), "groot": (8, 12)}
"""Those that predict velocities, and the shape of their chunks."""

PALIGEMMA = "paligemma_with_expert.paligemma."
STAYS = {"pi0": PALIGEMMA, "pi05": PALIGEMMA, "smolvla": "vlm_with_expert.vlm.", "groot": "backbone."}
STAYS["diffusion"] = "diffusion.rgb_encoder."
"""Where the names of what is frozen begin."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {kind: tmp_path_factory.mktemp(kind) for kind in FLOWS}
    for kind, path in result.items():
        published_runs.MADE[kind](path)
    return result


def observation(kind: str, policy: Any) -> dict[str, Tensor]:
    if kind.startswith("diffusion"):
        return published.diffusion_observation(cameras=2)
    if kind.startswith("act"):
        return published.act_observation()
    seen = openvla_folders.observation(3, state=3) if kind.startswith("openvla") else published.pi_observation(3)
    return (groot_observation(3) if kind == "groot" else seen) | {TOKENS: policy.tokenise(LINES)}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    """Same files, keys, tensors, dtypes, metadata, also of what is not used; what is trained is so in float32. Remote
    code is written back, never executed."""
    a, b = tmp_path / "a", tmp_path / "b"
    FOLDERS[kind](a)
    policy = load_policy(a, adapt=OFT if "openvla" in kind else None)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    save_policy(policy, b)
    names = {str(file.relative_to(a)) for file in a.rglob("*") if file.is_file()}
    written = {str(file.relative_to(b)) for file in b.rglob("*") if file.is_file()}
    assert written == names | ({"oft.json"} if "openvla" in kind else set())
    for name in (name for name in names if "tokenizer/" not in name):  # which transformers writes in its own words
        if name.endswith((".safetensors", ".pt")):
            read = load_file if name.endswith("s") else lambda file: torch.load(file, weights_only=True)
            before, after = read(a / name), read(b / name)
            assert before.keys() == after.keys(), name
            assert all(before[k].dtype == after[k].dtype and torch.equal(before[k], after[k]) for k in before), name
        if name.endswith(".safetensors"):
            with safe_open(a / name, "pt") as one, safe_open(b / name, "pt") as other:
                assert one.metadata() == other.metadata(), name
        elif name.endswith(".json"):
            assert json.loads((a / name).read_text()) == json.loads((b / name).read_text()), name
        elif not name.endswith(".pt"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    seen, again = observation(kind, policy), load_policy(b)
    contexts = [{k: v for k, v in p.encode(seen).items() if isinstance(v, Tensor)} for p in (policy, again)]
    assert contexts[0] and all(torch.equal(value, contexts[1][name]) for name, value in contexts[0].items())


OTHERS = yaml.safe_load((published.FILES / "other_architectures.yaml").read_text())


@pytest.mark.parametrize(("kind", "change", "message"), OTHERS)
def test_another_architecture_is_refused(kind: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((ValueError, OSError), match=message):
        load_policy(tmp_path, adapt=OFT if kind == "openvla" else None)


@pytest.mark.parametrize("kind", FLOWS)
def test_rows_are_independent_and_every_input_matters(kind: str, folders: dict[str, Path]) -> None:
    policy = load_policy(folders[kind]).with_heads(critic=1, noise_head="none", seed=0)
    seen, chunk = observation(kind, policy), keyed_noise((3, *FLOWS[kind]), 0)
    context = policy.encode(seen)
    together, values = policy.velocity(context, chunk, SIGMA), policy.value(context)
    one = torch.tensor([1])  # whose line is shorter than that of row 0
    for result in (policy.encode(rows(seen, one)), rows(context, one)):
        alone = policy.velocity(result, chunk[one], SIGMA[one])
        torch.testing.assert_close(alone, together[one], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(policy.value(result), values[one], rtol=1e-4, atol=1e-5)
    assert set(policy.inputs) == set(seen)
    for name, value in seen.items():
        moved = policy.encode(seen | {name: value.roll(1, 0)})
        assert (policy.velocity(moved, chunk, SIGMA) - together).abs().max() > 1e-4, name
        assert (policy.value(moved) - values).abs().max() > 1e-6, name
    longer = policy.encode(seen | {TOKENS: torch.nn.functional.pad(seen[TOKENS], (0, 7))})
    torch.testing.assert_close(policy.velocity(longer, chunk, SIGMA), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FLOWS)
def test_replay_is_the_sample_and_heads_are_saved_beside(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    policy = load_policy(folders[kind]).with_heads(critic=1, noise_head="expert", seed=0)
    seen, (horizon, width) = observation(kind, policy), FLOWS[kind]
    with torch.no_grad():
        context = policy.encode(seen)
    for sampler in (FlowSteps(steps=3), LearnedNoise(steps=3)):
        sampled = sampler.noise(policy, [torch.Generator().manual_seed(n) for n in range(3)])
        taken = sampler.sample(policy, context, sampled)
        again = sampler.replay(policy, policy.encode(seen), taken.states, taken.next_states, taken.step_index)
        assert torch.equal((again.log_prob - taken.log_prob).exp(), torch.ones_like(taken.log_prob))
        assert policy.actions(taken.chunk).shape == (3, horizon, 3)
    save_policy(policy, tmp_path)
    keys = [load_file(path / "model.safetensors").keys() for path in (tmp_path, folders[kind])]
    assert keys[0] == keys[1]
    saved, chunk = load_policy(tmp_path), keyed_noise((3, horizon, width), 0)
    assert saved.critic and torch.equal(saved.value(context), policy.value(context))
    noises = [p.velocity_and_noise(context, chunk, SIGMA)[1] for p in (policy, saved)]
    assert torch.equal(*noises) and noises[0].shape == chunk.shape
    with pytest.raises(ValueError, match="no noise head"):
        load_policy(folders[kind]).velocity_and_noise(context, chunk, SIGMA)


@pytest.mark.parametrize("kind", FLOWS)
def test_gradients_reach_the_expert_and_not_what_is_frozen(kind: str, folders: dict[str, Path]) -> None:
    policy, shape = load_policy(folders[kind]).with_heads(critic=1, noise_head="none", seed=0), FLOWS[kind]
    actions = policy.normalised(torch.randn(3, shape[0], 3))
    assert actions.shape == (3, *shape) and not actions[..., 3:].any()
    context = policy.encode(observation(kind, policy))
    matching_error(policy, context, actions, keyed_noise((3, *shape), 0), SIGMA, None).square().mean().backward()
    policy.value(context).sum().backward()
    for name, parameter in policy.named_parameters():
        frozen = name.startswith(STAYS[kind])
        assert parameter.requires_grad != frozen and (parameter.grad is None) == frozen, name
        assert frozen or kind.startswith("pi") or parameter.grad.abs().max() > 0, name


# -- Low-rank adapters of published policies: what they train, how a run goes on, the folder in which they are merged
LORA: dict[str, Any] = {"lora": {"rank": 2}}
FROZEN: dict[str, Any] = {"freeze": "encoder"}
MERGED = 2e-5
"""A sum of products in float32, taken in another order: of velocities up to 3.6. Largest seen: 2.1e-6."""


def velocity(policy: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    observation = {"observation.state": torch.randn(3, 3, generator=rng), TOKENS: policy.tokenise(LINES)}
    observation["observation.image"] = torch.randint(0, 256, (3, 32, 32, 3), generator=rng, dtype=torch.uint8)
    with torch.no_grad():
        result: torch.Tensor = policy.velocity(policy.encode(observation), keyed_noise((3, 6, 32), 0), torch.ones(3))
    return result


@pytest.mark.parametrize("kind", tiered(["pi0", "smolvla", "pi05"], ("smolvla",)))
def test_adapters_are_trained_and_merged_into_what_is_saved(kind: str, tmp_path: Path) -> None:
    config = published_runs.config(tmp_path, kind, policy=LORA, optimizer={"lr": 1e-2}, iterations=2)
    run = train(config)
    rows = vla_runs.rows(run)
    assert [row["rollout/log_prob_off"] for row in rows] == [0.0, 0.0] and rows[0]["updates"] == 2
    trained = vla_runs.last_state(run).tensors["weights"]
    adapters = {name for name in trained if is_adapter(name)}
    assert {name for name in trained if name not in adapters} == {n for n in trained if n.startswith("value_head.")}
    moved = {name.split(".lora_")[0] for name in adapters if "lora_B" in name and trained[name].abs().max() > 0}
    assert len(moved) == 2 * 4 * 4 - 2  # of four layers each; nothing reads what the language model's last one adds

    base, written = load_policy(tmp_path / "base"), load_policy(run / "policy")
    for name, value in base.state_dict().items():
        stays = name.removesuffix(".weight") not in moved and not name.startswith("value_head.")
        assert torch.equal(written.state_dict()[name], value) == stays, name
    live = open_policy(config)[0]
    put_back({name: p for name, p in live.named_parameters() if p.requires_grad}, trained, run)
    merged = load_trained(run)
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in written.state_dict().items())
    apart = (velocity(written) - velocity(live)).abs().max()
    assert apart < MERGED < 1e3 * MERGED < (velocity(base) - velocity(live)).abs().max()
    files = [load_file(folder / "model.safetensors") for folder in (tmp_path / "base", run / "policy")]
    assert files[0].keys() == files[1].keys()

    assert not torch.equal(velocity(load_trained(run, step=1)), velocity(merged))
    own = {name for name, p in base.named_parameters() if p.requires_grad}
    assert own == {name for name, p in merged.named_parameters() if p.requires_grad}
    more = published_runs.config(tmp_path, kind, policy={**LORA, "path": str(run)}, output=str(tmp_path / "more"))
    on = load_policy(train(more) / "policy")
    assert torch.equal(on.action_in_proj.weight, written.action_in_proj.weight)
    assert not torch.equal(velocity(on), velocity(written))


@pytest.mark.slow
def test_a_run_of_adapters_goes_on_to_the_bit(tmp_path: Path) -> None:
    policy = {**LORA, "gradient_checkpointing": True}
    config = published_runs.config(tmp_path, "smolvla", policy=policy, ema={"decay": 0.5}, iterations=2)
    assert_resumes(train, config, tmp_path)
    average = vla_runs.last_state(tmp_path / "run").tensors["snapshot-average"]
    assert any(map(is_adapter, average))


def test_a_policy_that_has_changed_is_not_merged_with(tmp_path: Path) -> None:
    run = train(published_runs.config(tmp_path, "pi0", policy=LORA))
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("action_in_proj.weight"))
    save_file(weights | {name: weights[name] + 1.0}, file)
    with pytest.raises(ValueError, match="is not what the run began with, and its checkpoints hold adapters alone"):
        load_trained(run)


def test_what_takes_no_adapters_is_refused_and_a_frozen_encoder_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy.lora: .* a TinyFlowVLA has none; leave it out"):
        open_policy(vla_runs.config(tmp_path, policy=LORA))
    with pytest.raises(ValueError, match="policy.gradient_checkpointing: .* a TinyFlowVLA has none; leave it out"):
        open_policy(vla_runs.config(tmp_path, policy={"gradient_checkpointing": True}))
    targets = {"lora": {"targets": ["q_prj"]}}
    with pytest.raises(ValueError, match=r"policy.lora.targets: no layer .* named \['q_prj'\]; there are .*'q_proj'"):
        open_policy(published_runs.config(tmp_path, "smolvla", policy=targets))
    policy = open_policy(published_runs.config(tmp_path / "pi0", "pi0", policy={**LORA, **FROZEN}))[0]
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    adapted = {name.split(".layers.")[0] for name in trained if is_adapter(name)}
    assert adapted == {"paligemma_with_expert.gemma_expert.model"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("pi0", LORA), ("pi05", FROZEN), ("smolvla", LORA)])
def test_what_is_not_trained_in_bfloat16(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Nothing else is; what is trained learns as in float32 within bfloat16's rounding, and the run resumes."""
    plain = published_runs.config(tmp_path, kind, policy=changes)
    config = published_runs.config(tmp_path, kind, policy={**changes, "dtype": "bfloat16"}, iterations=2)
    policy = open_policy(config)[0]
    held = {(parameter.requires_grad, parameter.dtype) for parameter in policy.parameters()}
    assert held == {(True, torch.float32), (False, torch.bfloat16)}
    result, exact = velocity(policy), velocity(open_policy(plain)[0])
    assert result.dtype == torch.float32 and not torch.equal(result, exact)
    assert (result - exact).norm() < 0.03 * exact.norm()
    assert_resumes(train, config, tmp_path)
    assert [row["rollout/log_prob_off"] for row in vla_runs.rows(tmp_path / "run") if row["step"]] == [0.0, 0.0]


SFT = {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 4}
PPO = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}
SDE, NOISE = {"kind": "flow_sde", "steps": 2}, {"kind": "flow_noise", "steps": 2}
DPPO = {"kind": "diffusion", "steps": 3, "ft_denoising_steps": 3}

REINFORCED = {"pi05": (NOISE, "chunk"), "smolvla": (NOISE, "action"), "groot": (SDE, "chunk"), "pi0": (SDE, "action")}
REINFORCED["diffusion"] = DPPO, "chunk"
"""Their samplers, and what their critics have values of."""


@pytest.mark.parametrize("kind", tiered(REINFORCED, ("diffusion", "groot")))
def test_it_imitates_and_is_reinforced_from_that_run(kind: str, tmp_path: Path) -> None:
    sampler, values = REINFORCED[kind]
    policy = published_runs.made(kind, tmp_path / "a")
    assert IMAGE in policy.inputs
    save_policy(policy, tmp_path / "base")
    common = {"environment": {"name": "minitable", "tasks": ["touch"], "num_envs": 4, "max_steps": 4, "chunk": 2}}
    common |= {"evaluation": {"every": 0, "episodes": 4, "videos": 0}, "trackers": [], "iterations": 1}

    def trained(name: str, path: str, **sections: Any) -> dict[str, torch.Tensor]:
        tree = common | sections | {"policy": {"path": path}, "sampler": sampler, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        train(load(tmp_path / f"{name}.yaml"))  # type: ignore[arg-type]
        result: dict[str, torch.Tensor] = dict(load_policy(tmp_path / name / "policy").named_parameters())
        return result

    base = dict(load_policy(tmp_path / "base").named_parameters())
    one = trained("sft", str(tmp_path / "base"), trainer=SFT, demonstrations={"expert": 4})
    how = {"values": values, "level": "action", "discount": "smdp"} if values == "action" else {}
    two = trained("ppo", str(tmp_path / "sft"), trainer={**PPO, **how})
    assert vla_runs.rows(tmp_path / "ppo")[-1]["rollout/log_prob_off"] == 0.0
    assert any("value_head" in name for name in two) and any("noise_head" in name for name in two) == (sampler is NOISE)
    frozen = STAYS[kind]
    assert any(name.startswith(frozen) for name in base)
    for name in base.keys() & two.keys():
        if "value_head" not in name:
            still = name.startswith(frozen)
            assert torch.equal(base[name], one[name]) == still and torch.equal(one[name], two[name]) == still, name
