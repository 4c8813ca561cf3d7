"""From a configuration to the things of a run: the policy with its heads, its sampler, its environments."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from genrl.config import load
from genrl.mdp import chains
from genrl.mdp.noise import seeded
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.weights.weights import put_back, result
from genrl.vla.config import sections as settings
from genrl.vla.config.files import is_recording
from genrl.vla.config.names import SAMPLERS, WORLDS
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import demonstrated, world_of
from genrl.vla.data.frames import Shown, episode_frames, frame_statistics
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.data.recordings import Steps, episodes_of, read_steps
from genrl.vla.policies.adapters import is_adapter, merge, with_lora
from genrl.vla.policies.encoder import Inputs
from genrl.vla.policies.folder import FIRST_STEPS, load_policy, policy_class, save_policy
from genrl.vla.policies.layers import require_layers
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import (
    ACTION,
    ENVIRONMENT,
    IMAGE,
    IMAGES,
    POINTS,
    STATE,
    TOKENS,
    Batch,
    NoiseHead,
    Policy,
    PredictsActions,
    PredictsNoise,
    PredictsTokens,
    PredictsVelocity,
    Statistics,
    tokenise,
    vocabulary,
)
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import Diffusion, FlowSteps, LearnedNoise, Regression, Sampler, Tokens
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.environments import open_environment
from genrl_rewards.given import is_given, take

PREDICTIONS: dict[str, type[Any]] = {
    "velocity": PredictsVelocity,
    "noise": PredictsNoise,
    "tokens": PredictsTokens,
    "actions": PredictsActions,
}
"""What a policy predicts, by the name that samplers have for it. One may predict several."""


def sampler_of(config: VLAConfig, policy: Policy, iteration: int = 0) -> Sampler:
    """The transition rule of an iteration. Raises ValueError where the policy cannot do it."""
    fitting, wanted = [what for what, kind in PREDICTIONS.items() if isinstance(policy, kind)], config.sampler.predicts
    if wanted not in fitting:
        kind, near = config.sampler.kind, " or ".join(SAMPLERS[what] for what in fitting)
        raise ValueError(f"sampler.kind: {kind} needs a policy that predicts {wanted}; for this one write {near}")
    match config.sampler:
        case settings.FlowSDE() as given:
            level = given.noise_level
            if given.anneal is not None:
                level = chains.annealed(level, given.anneal[0], given.anneal[1], iteration)
            kernel: Literal["flow_sde", "flow_cps"] = "flow_cps" if isinstance(given, settings.FlowCPS) else "flow_sde"
            return FlowSteps(kernel, given.steps, level, given.selection, given.count, given.skip_last)
        case settings.ReinFlow() as given:  # a FlowNoise, too
            clips: dict[str, Any] = {"mean_clip": 1.0, "noise_clip": 3.0, "last_clip": 1.0}
            return LearnedNoise(given.steps, given.low, given.high, reduction=given.reduction, **clips)
        case settings.FlowNoise() as given:
            return LearnedNoise(given.steps, given.low, given.high, reduction=given.reduction)
        case settings.Diffusion() as given:
            assert isinstance(policy, PredictsNoise)
            levels = policy.train_steps
            if given.steps > levels:
                raise ValueError(f"sampler.steps: the policy knows {levels} noise levels, {given.steps} are more")
            trained = given.steps if config.trainer.imitates == "always" else given.ft_denoising_steps
            return Diffusion(levels, given.steps, trained, given.floor)
        case settings.Tokens() as given:
            return Tokens(given.temperature)
        case settings.Regression():
            return Regression()


def noise_head_of(config: VLAConfig) -> NoiseHead:
    """Flow-Noise's head is on the expert, ReinFlow's beside it."""
    return "none" if config.trainer.imitates == "always" else config.sampler.noise_head


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
    """The policy of a folder as LeRobot saves it, of a script (`python:NAME`), or of a run: after `step` iterations, or
    of its newest checkpoint, whose adapters are merged into what the run began with. adapt: of a LeRobot folder.

    Raises ValueError for a run without such a checkpoint.
    """
    folder = Path(path)
    plain = not is_given(str(path)) and policy_folder(folder) == folder
    for key in ("padded_state", "oft"):
        if not plain and getattr(adapt, key, None) is not None:
            raise ValueError(f"policy.{key}: {path} is no published folder, and says itself how it is; write null")
    if is_given(str(path)):
        return take(str(path))
    if plain:
        return load_policy(folder, device=device, adapt=adapt)
    found = checkpoint.latest(folder / "checkpoints")
    if not (folder / "policy").is_dir() or found is None:
        raise ValueError(f"{folder}: the run holds no policy yet; it is there after the first checkpoint")
    if step is not None:
        found = folder / "checkpoints" / f"step-{step:06d}"
        if reason := checkpoint.problem(found):
            there = ", ".join(str(int(one.name.removeprefix("step-"))) for one in checkpoint.steps(found.parent))
            raise ValueError(f"{found}: {reason}; checkpoints of {folder}: {there}")
    saved = checkpoint.load(found)
    weights = result(saved.tensors)
    if any(map(is_adapter, weights)):
        return _merged(folder, saved, weights).to(device)
    policy = load_policy(folder / "policy", device=device)
    put_back({name: p for name, p in policy.named_parameters() if name in weights}, weights, found)
    return policy


def adapted(policy: settings.Policy) -> Adapt | None:
    """What a configuration says of a LeRobot folder beside its path."""
    if not policy.rename and policy.padded_state is None and policy.oft is None:
        return None
    oft = None if policy.oft is None else policy.oft.model_dump(exclude_unset=True)
    return Adapt(rename=policy.rename, padded_state=policy.padded_state, oft=oft)


def _merged(run: Path, saved: checkpoint.Loaded, adapters: Mapping[str, Tensor]) -> Any:
    """What the run began with, and the adapters of a checkpoint merged into it. Raises ValueError where the policy that
    it began with is another one by now."""
    config = load(Run(run).config)
    assert isinstance(config, VLAConfig) and config.policy.path is not None
    policy = load_trained(config.policy.path, adapt=adapted(config.policy))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy = with_own_heads(config, policy)
    choose_trained(config, policy)
    if saved.state["memory"].get("untrained") != untrained(policy, None):
        text = "is not what the run began with, and its checkpoints hold adapters alone; put back what was there"
        raise ValueError(f"{run}: policy.path: {config.policy.path} {text}")
    put_back({name: p for name, p in policy.named_parameters() if p.requires_grad}, adapters, run)
    merge(policy)
    for parameter in trained:
        parameter.requires_grad_(True)
    return policy


def with_own_heads(config: VLAConfig, policy: Any) -> Any:
    """The policy with the heads that the trainer needs."""
    heads = {"critic": critic_values(config, policy), "noise_head": noise_head_of(config)}
    return policy.with_heads(**heads, seed=config.seed)


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
    made = config.policy.new
    assert made is not None
    inputs = Inputs(
        state=frames[STATE].shape[-1],
        vocabulary=vocabulary,
        environment=0 if made.looks or ENVIRONMENT not in frames else frames[ENVIRONMENT].shape[-1],
        image=frames[IMAGE].shape[1] if made.image_size else 0,
        points=frames[POINTS].shape[1] if made.points else 0,
    )
    width = frames[ACTION].shape[-1]
    stats = {name: found for name, found in frame_statistics(frames).items() if name in {*inputs.keys, ACTION}}
    kind = policy_class(made.type)
    with seeded(config.seed, "policy"):
        return kind.new(inputs, width, stats, made)


def frames_of(config: VLAConfig, policy: Any) -> tuple[Batch, tuple[str, ...]]:
    """The frames that are imitated, for the policy (or for the new one that is to be made), and the words in them.

    Raises ValueError for an environment that has no expert, and for a data set without what the policy reads, clouds
    of points among it.
    """
    source = config.demonstrations
    reader = config.policy.new if policy is None else policy
    assert source is not None and reader is not None
    inputs = _read_by(config.policy.new) if policy is None else policy.inputs
    if source.dataset is not None and POINTS in inputs:
        raise ValueError("demonstrations.dataset: data sets hold no clouds of points; write demonstrations.expert: N")
    steps = recorded(config)
    if steps is not None:
        inputs = tuple(name for name in inputs if name != ENVIRONMENT or config.environment.proprioception)
        shown = _recorded(config, steps, inputs)
    elif source.dataset is not None:
        shown = _dataset(config, source.dataset, inputs)
    else:
        shown = _expert(config, reader.image_size, reader.points if POINTS in inputs else 0)
    words = vocabulary(shown.texts)
    told = partial(tokenise, words=words) if policy is None else policy.tokenise
    frames = episode_frames(shown.episodes, told, inputs=inputs, horizon=reader.horizon, rest=shown.rest)
    return frames, words


def _read_by(new: settings.NewPolicy | None) -> tuple[str, ...]:
    """What a new policy will read."""
    assert new is not None
    looks = {IMAGE: new.image_size, POINTS: new.points, STATE: True, ENVIRONMENT: not new.looks, TOKENS: True}
    return tuple(name for name, used in looks.items() if used)


def _dataset(config: VLAConfig, folder: str, inputs: Sequence[str]) -> Shown:
    assert config.demonstrations is not None
    dataset, camera = open_dataset(Path(folder)), config.demonstrations.camera
    name = config.environment.name
    world = world_of(config) if name in WORLDS.built_in else None
    columns = [camera if name == IMAGE else name for name in inputs if name != TOKENS]
    pictures = [name for name in columns if name == camera or name.startswith(IMAGES)]
    missing = [name for name in pictures if name not in dataset.cameras]
    if missing:
        key = "demonstrations.camera" if IMAGE in inputs else "policy.rename"
        raise ValueError(f"{key}: {folder} has no pictures named {missing}, only {dataset.cameras}")
    width = len(dataset.stats[ACTION]["mean"])
    if world is not None and width != world.action_dim:
        text = f"{folder} has actions of {width} numbers, {name}'s have {world.action_dim}"
        raise ValueError(f"demonstrations.dataset: {text}: give demonstrations of environment.name")
    # a policy may learn all that a world can say; elsewhere what the demonstrations say is all that is known
    texts = [*dataset.tasks.values(), *(() if world is None else world.known)]
    own = {camera: IMAGE} if IMAGE in inputs else {}
    episodes = (
        episode._replace(columns={own.get(key, key): value for key, value in episode.columns.items()})
        for episode in dataset.read([*columns, ACTION])
    )
    return Shown(texts, episodes, None if world is None else world.rest)


def recorded(config: VLAConfig) -> Steps | None:
    """The steps of `demonstrations.dataset`, where it is a file or folder of them, with the reward that the environment
    pays here; None elsewhere. Raises ValueError for what cannot be read."""
    source, env = config.demonstrations, config.environment
    if source is None or source.dataset is None or not is_recording(Path(source.dataset)):
        return None
    steps = read_steps(Path(source.dataset), success_key=env.success_key, cost_key=env.cost_key)
    return steps._replace(reward=steps.success.astype("float32")) if env.reward == "success" else steps


def check_recorded(config: VLAConfig, policy: Policy, steps: Steps) -> None:
    """Raises ValueError where the steps of a file are of another environment than the one that is named beside it, or
    the policy looks."""
    if any(name.startswith(IMAGE) or name == POINTS for name in policy.inputs):
        text = "files of steps hold neither pictures nor points; take a policy of states"
        raise ValueError(f"demonstrations.dataset: {text}")
    with closing(open_tables(config, policy, num_envs=1)) as env:
        seen, _ = env.reset(seed=0)
        shown = max(value.shape[1] for name, value in seen.items() if value.ndim == 2), env.action_dim
    held = steps.observation.shape[1], steps.action.shape[1]
    if held != shown:
        assert config.demonstrations is not None
        raise ValueError(
            f"demonstrations.dataset: {config.demonstrations.dataset} holds observations and actions of {held[0]} and "
            f"{held[1]} numbers, those of environment.name: {config.environment.name} have {shown[0]} and {shown[1]}"
        )


def _recorded(config: VLAConfig, steps: Steps, inputs: Sequence[str]) -> Shown:
    env = config.environment
    if any(name.startswith(IMAGE) for name in inputs):
        raise ValueError("demonstrations.dataset: files of steps hold no pictures; write policy.new.image_size: 0")
    if env.instruction is None:
        raise ValueError("environment.instruction: files of steps hold no sentences; write the one of the task")
    told = episodes_of(steps, instruction=env.instruction, proprioception=env.proprioception)
    return Shown([env.instruction], told, None)


def _expert(config: VLAConfig, image_size: int, points: int) -> Shown:
    assert config.demonstrations is not None and config.demonstrations.expert is not None
    env, count = config.environment, config.demonstrations.expert
    how: dict[str, Any] = {"seed": config.seed, "max_steps": env.max_steps, "image_size": image_size}
    return demonstrated(env.name, env.tasks or (), count, points=points, **how)


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
    wanted = simulation_of(config, policy, num_envs=num_envs, group_size=group_size)
    opened = open_environment(replace(wanted, workers="ray" if workers == "ray_simulators" else workers))
    if opened.max_steps is None:
        opened.close()
        name = config.environment.name
        raise ValueError(f"environment.max_steps: {name} has no time limit of its own; say after how many actions")
    return opened


def open_rollouts(config: VLAConfig, policy: nn.Module, *, num_envs: int, group_size: int) -> RayRollouts:
    """The environment of the configuration on Ray actors that act by themselves, on GPUs if the policy is on one."""
    wanted = simulation_of(config, policy, num_envs=num_envs, group_size=group_size)
    timeout = config.environment.timeout_s
    return RayRollouts(
        wanted,
        cuda=next(policy.parameters()).is_cuda,
        timeout_s=timeout,
        start_timeout_s=2.0 * timeout,
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
        worker_gb=math.inf if env.worker_gb is None else env.worker_gb,
        image_size=policy.image_size if IMAGE in policy.inputs or cameras else 0,
        points=policy.points if POINTS in policy.inputs else 0,
        cameras=cameras,
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
    parts |= {f"{name}.{key}": value for name, found in stats.items() for key, value in found.items()}
    if frozen is not None:
        own = {f"frozen.{name}": value for name, value in frozen.state_dict().items()}
        parts |= {name: value for name, value in own.items() if not name.startswith("frozen.value_")}
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(parts):
        first = parts[name].detach().flatten()[:4096].contiguous().cpu()
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def side_by_side(config: VLAConfig, episodes: int) -> int:
    """Environments that play so many episodes of an evaluation."""
    return max(1, min(episodes, config.evaluation.num_envs or config.environment.num_envs))


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
