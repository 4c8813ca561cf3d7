"""From a configuration to the things of a run: the policy with its heads, its sampler, its environments."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.config import load
from genrl.mdp.noise import seeded
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.hub import local_folder
from genrl.runtime.folder.run import Run
from genrl.runtime.weights.weights import put_back, result
from genrl.vla.config.names import SAMPLERS
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.frames import data_statistics, frame_statistics
from genrl.vla.data.recordings import Steps
from genrl.vla.policies.folder import FIRST_STEPS, load_policy, policy_class, save_policy
from genrl.vla.policies.layers import is_adapter, merge, require_layers, with_lora
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import (
    ACTION,
    ENVIRONMENT,
    IMAGE,
    IMAGES,
    POINTS,
    STATE,
    Batch,
    Inputs,
    Policy,
    PredictsActions,
    PredictsNoise,
    PredictsTokens,
    PredictsVelocity,
    Statistics,
)
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import Sampler
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.tables import open_environment
from genrl_rewards.given import is_given, take

PREDICTIONS: dict[str, type[Any]] = {
    "velocity": PredictsVelocity,
    "noise": PredictsNoise,
    "tokens": PredictsTokens,
    "actions": PredictsActions,
}
"""What a policy predicts, by the name that samplers have for it. One may predict several."""


def sampler_of(config: VLAConfig, policy: Policy) -> Sampler:
    """The transition rule of a run. Raises ValueError where the policy cannot do it."""
    fitting, needed = [what for what, kind in PREDICTIONS.items() if isinstance(policy, kind)], config.sampler.predicts
    if needed not in fitting:
        kind, near = config.sampler.kind, " or ".join(SAMPLERS[what] for what in fitting)
        raise ValueError(f"sampler.kind: {kind} needs a policy that predicts {needed}; for this one write {near}")
    sampler: Sampler = config.sampler.made(policy, whole_chain=config.trainer.imitates == "always")
    return sampler


def critic_values(config: VLAConfig, policy: Policy) -> int:
    """How many values the critic gives; 0 without one."""
    return config.trainer.critic_values(policy.horizon)


def load_trained(
    path: str | Path,
    *,
    step: int | None = None,
    adapt: Adapt | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The policy of a folder (or hub id) as LeRobot saves it, of a script (`python:NAME`), or of a run: after `step`
    iterations, or of its newest checkpoint, whose adapters are merged into what the run began with. adapt: of a LeRobot
    folder.

    Raises ValueError for a run without such a checkpoint.
    """
    folder = Path(path) if is_given(str(path)) else local_folder(str(path))
    plain = not is_given(str(path)) and policy_folder(folder) == folder
    for field, key in (("padded_state", "padded_state"), ("oft", "oft"), ("stats", "statistics")):
        if not plain and getattr(adapt, field, None) is not None:
            raise ValueError(f"policy.{key}: {path} is no published folder and says itself how it is; leave it out")
    if is_given(str(path)):
        return take(str(path))
    if plain:
        return load_policy(folder, device=device, adapt=adapt)
    checkpoint_folder = checkpoint.latest(folder / "checkpoints")
    if not (folder / "policy").is_dir() or checkpoint_folder is None:
        raise ValueError(f"{folder}: the run holds no policy yet; it is there after the first checkpoint")
    if step is not None:
        checkpoint_folder = folder / "checkpoints" / f"step-{step:06d}"
        if reason := checkpoint.problem(checkpoint_folder):
            steps = ", ".join(
                str(int(folder_of_step.name.removeprefix("step-")))
                for folder_of_step in checkpoint.steps(checkpoint_folder.parent)
            )
            raise ValueError(f"{checkpoint_folder}: {reason}; checkpoints of {folder}: {steps}")
    saved = checkpoint.load(checkpoint_folder)
    weights = result(saved.tensors)
    if any(map(is_adapter, weights)):
        return _merged(folder, saved, weights).to(device)
    policy = load_policy(folder / "policy", device=device)
    put_back({name: p for name, p in policy.named_parameters() if name in weights}, weights, checkpoint_folder)
    return policy


def adapted(config: VLAConfig) -> Adapt | None:
    """What a configuration says of a LeRobot folder beside its path."""
    policy = config.policy
    stats = data_statistics(config) if policy.statistics == "data" else None
    if not policy.rename and policy.padded_state is None and policy.oft is None and stats is None:
        return None
    oft = None if policy.oft is None else policy.oft.model_dump(exclude_unset=True)
    return Adapt(rename=policy.rename, stats=stats, padded_state=policy.padded_state, oft=oft)


def _merged(run: Path, saved: checkpoint.Loaded, adapters: Mapping[str, Tensor]) -> Any:
    """What the run began with, and the adapters of a checkpoint merged into it. Raises ValueError where the policy that
    it began with is another one by now."""
    config = load(Run(run).config)
    assert isinstance(config, VLAConfig) and config.policy.path is not None
    policy = load_trained(config.policy.path, adapt=adapted(config))
    # What the policy itself trains, before adapters freeze it: the exported folder is to be as the original one was.
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy = with_own_heads(config, policy)
    choose_trained(config, policy)
    if saved.state["memory"].get("untrained") != untrained(policy, None):
        text = "is not what the run began with, and its checkpoints hold adapters alone; put back what was there"
        raise ValueError(f"{run}: policy.path: {config.policy.path} {text}")
    put_back({name: p for name, p in policy.named_parameters() if p.requires_grad}, adapters, run)
    for parameter in trained:  # in float32, whatever `policy.dtype`: half precision loses what adapters add
        parameter.data = parameter.data.float()
    merge(policy)
    for parameter in trained:
        parameter.requires_grad_(True)
    return policy


def with_own_heads(config: VLAConfig, policy: Any) -> Any:
    """The policy with the heads that the trainer needs, in evaluation mode: a replay is to see what was acted on."""
    noise_head = "none" if config.trainer.imitates == "always" else config.sampler.noise_head
    return policy.with_heads(critic=critic_values(config, policy), noise_head=noise_head, seed=config.seed).eval()


def policy_folder(path: Path) -> Path:
    """The folder of a run's policy; of a policy as LeRobot saves it, the folder itself."""
    return path / "policy" if (path / "run.json").is_file() else path


def export(run: Path, out: Path, step: int | None = None) -> Path:
    """The policy of a run's checkpoint as a folder in LeRobot's layout; DPPO's frozen half in its `first_steps`."""
    save_policy(load_trained(run, step=step), out)
    if (run / "policy" / FIRST_STEPS).is_dir():
        shutil.copytree(run / "policy" / FIRST_STEPS, out / FIRST_STEPS)
    return out


def new_policy(config: VLAConfig, frames: Batch, vocabulary: tuple[str, ...]) -> Any:
    """A small policy that fits the frames it is to imitate, with weights by the seed."""
    new = config.policy.new
    assert new is not None
    if new.image_size and (size := frames[IMAGE].shape[1:3]) and size[0] != size[1]:
        text = f"the pictures are {size[0]} x {size[1]} (height x width), and a new policy sees square ones"
        raise ValueError(f"demonstrations: {text}: crop or pad them, or begin with a published policy (policy.path)")
    inputs = Inputs(
        state=frames[STATE].shape[-1],
        vocabulary=vocabulary,
        environment=0 if new.looks or ENVIRONMENT not in frames else frames[ENVIRONMENT].shape[-1],
        image=frames[IMAGE].shape[1] if new.image_size else 0,
        points=frames[POINTS].shape[1] if new.points else 0,
    )
    width = frames[ACTION].shape[-1]
    stats = {name: stat for name, stat in frame_statistics(frames).items() if name in {*inputs.keys, ACTION}}
    kind = policy_class(new.type)
    with seeded(config.seed, "policy"):
        return kind.new(inputs, width, stats, new)


def check_recorded(config: VLAConfig, policy: Policy, steps: Steps) -> None:
    """Raises ValueError where the steps of a file are of another environment than the one that is named beside it, or
    the policy looks."""
    if any(name.startswith(IMAGE) or name == POINTS for name in policy.inputs):
        text = "files of steps hold neither pictures nor points; take a policy of states"
        raise ValueError(f"demonstrations.dataset: {text}")
    # The simulator says its sizes only once it is there.
    with closing(open_tables(config, policy, num_envs=1)) as env:
        observation, _ = env.reset(seed=0)
        live = max(value.shape[1] for name, value in observation.items() if value.ndim == 2), env.action_dim
    held = steps.observation.shape[1], steps.action.shape[1]
    if held != live:
        assert config.demonstrations is not None
        raise ValueError(
            f"demonstrations.dataset: {config.demonstrations.dataset} holds observations and actions of {held[0]} and "
            f"{held[1]} numbers, those of environment.name: {config.environment.name} have {live[0]} and {live[1]}"
        )


def choose_trained(config: VLAConfig, policy: Any) -> None:
    """Take what sees and reads out of training, and all but adapters and heads, where the run asks for it; and hold the
    rest in the numbers that it asks for.

    Raises ValueError for a policy that takes no adapters, or has no layers.
    """
    if config.policy.frozen:
        policy.encoder.requires_grad_(False)
    if config.policy.lora is not None:
        require_layers(policy, "policy.lora")
        with_lora(policy, config.policy.lora, config.seed)
    if config.policy.dtype is not None:
        require_layers(policy, "policy.dtype")
        for parameter in policy.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, config.policy.dtype))


def open_tables(config: VLAConfig, policy: Policy, *, num_envs: int, group_size: int = 1) -> Environment:
    """The environment of the configuration, showing what the policy reads."""
    workers = config.environment.workers
    simulation = simulation_of(config, policy, num_envs=num_envs, group_size=group_size)
    opened = open_environment(replace(simulation, workers="ray" if workers == "ray_simulators" else workers))
    # Without a limit a policy that fails would keep a rollout going for ever.
    if opened.max_steps is None:
        opened.close()
        name = config.environment.name
        raise ValueError(f"environment.max_steps: {name} has no time limit of its own; say after how many actions")
    return opened


def open_rollouts(config: VLAConfig, policy: nn.Module, *, num_envs: int, group_size: int) -> RayRollouts:
    """The environment of the configuration on Ray actors that act by themselves, on GPUs if the policy is on one."""
    simulation = simulation_of(config, policy, num_envs=num_envs, group_size=group_size)
    return RayRollouts(
        simulation,
        cuda=next(policy.parameters()).is_cuda,
        timeout_s=simulation.timeout_s,
        start_timeout_s=simulation.start_timeout_s,
        tf32=config.tf32,
    )


def simulation_of(config: VLAConfig, policy: Any, *, num_envs: int, group_size: int) -> Simulation:
    """What is simulated, in this process. Raises ValueError for more actions than a chunk has."""
    env = config.environment
    cameras = tuple(name.removeprefix(IMAGES) for name in policy.inputs if name.startswith(IMAGES))
    chunk = policy.horizon if env.chunk is None else env.chunk
    if chunk > policy.horizon:
        raise ValueError(f"environment.chunk: {chunk} actions cannot be executed of chunks of {policy.horizon}")
    return Simulation(
        env.name,
        num_envs=num_envs,
        chunk=chunk,
        tasks=env.tasks or (),
        group_size=group_size,
        timeout_s=env.timeout_s,
        start_timeout_s=2.0 * env.timeout_s,
        image_size=policy.image_size if IMAGE in policy.inputs or cameras else 0,
        points=policy.points if POINTS in policy.inputs else 0,
        cameras=cameras,
        left_empty=tuple(name.removeprefix(IMAGES) for name in getattr(policy, "left_empty", ())),
        max_steps=env.max_steps,
        seed=config.evaluation.seed,  # which starts there are; which of them a rollout takes is the run's
        reward=env.reward,
        goals=env.goals,
        instruction=env.instruction or "",
        success_key=env.success_key,
        cost_key=env.cost_key,
        proprioception=env.proprioception,
        settings=env.args,
    )


def untrained(policy: Any, frozen: nn.Module | None) -> str:
    """A fingerprint of what a run begins with and its checkpoints do not hold: parameters without gradient, statistics,
    and the policy that does DPPO's first steps. Of every tensor the first numbers: another training moves them all."""
    stats: Statistics = policy.stats
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    parts = {name: value for name, value in policy.state_dict().items() if name not in trained}
    parts |= {f"{name}.{key}": value for name, stat in stats.items() for key, value in stat.items()}
    if frozen is not None:
        frozen_state = {f"frozen.{name}": value for name, value in frozen.state_dict().items()}
        parts |= {name: value for name, value in frozen_state.items() if not name.startswith("frozen.value_")}
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(parts):
        first = parts[name].detach().flatten()[:4096].contiguous().cpu()
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def side_by_side(config: VLAConfig, episodes: int, processes: int = 1) -> int:
    """Environments of each process that play so many episodes of its part of an evaluation."""
    return max(1, min(episodes, (config.evaluation.num_envs or config.environment.num_envs) // processes))


def longest_episode(env: Environment | RayRollouts) -> int | None:
    """Decisions of the longest episode; None where the simulator does not say."""
    return None if env.max_steps is None else -(-env.max_steps // env.chunk)


def parameter_groups(policy: nn.Module, rates: Mapping[str, float]) -> dict[str, tuple[list[nn.Parameter], float]]:
    """The trained parameters and their rates by group, the critic's (in modules named value_...) apart."""
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            groups["critic" if name.startswith("value_") and "critic" in groups else "policy"].append(parameter)
    return {name: (group, rates[name]) for name, group in groups.items() if group}
