"""`genrl train` for a policy in simulation: what of the frame is its own."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from genrl.config.plugins import beside
from genrl.runtime.folder import checkpoint
from genrl.runtime.loop import frame
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.replay import Reopened
from genrl.runtime.loop.running import Ahead
from genrl.runtime.weights.devices import default_device
from genrl.runtime.weights.sharding import Sharding, check_torch, in_step
from genrl.runtime.weights.weights import Weights
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import frames_of, recorded
from genrl.vla.data.frames import check_spread
from genrl.vla.evaluate import Judged, evaluate
from genrl.vla.policies.folder import FIRST_STEPS, load_first_steps, save_policy
from genrl.vla.policies.layers import compute_again, hold, require_layers
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import Acted, VLARun, remove_policy_of_failed_start
from genrl.vla.setup import (
    adapted,
    check_recorded,
    choose_trained,
    critic_values,
    load_trained,
    new_policy,
    open_rollouts,
    open_tables,
    parameter_groups,
    policy_folder,
    sampler_of,
    side_by_side,
    untrained,
    with_own_heads,
)


def train(config: VLAConfig, resume: Path | None = None) -> Path:
    """Train a policy in simulation (`frame.train`)."""
    return frame.train(config, resume)


def _module(config: VLAConfig) -> Any:
    """What the method runs."""
    return beside(sys.modules[type(config.trainer).__module__], "train")


def check_processes(config: VLAConfig, num_processes: int) -> None:
    """ValueError where environments cannot be shared out to the processes in whole groups, or weights not in shards."""
    if config.distributed.fsdp and num_processes == 1:
        raise ValueError("distributed.fsdp: there is one process, nothing to shard over; use --nproc or write false")
    if config.trains_shards:
        check_torch()
    if config.trainer.one_process and num_processes > 1:
        raise ValueError(f"trainer.algorithm: {config.trainer.algorithm} runs in one process, not in {num_processes}")
    groups = config.environment.num_envs // config.environment.group_size
    if groups % num_processes:
        raise ValueError(
            f"environment.num_envs: {groups} groups of {config.environment.group_size} environments cannot be shared "
            f"out evenly to {num_processes} processes"
        )


def open_policy(config: VLAConfig) -> tuple[Any, Any]:
    """The policy with the heads that the trainer needs, and the frames to imitate (None, where it imitates none)."""
    frames = None
    if config.policy.path is not None:
        policy = load_trained(config.policy.path, adapt=adapted(config))
        if config.trainer.imitates == "always":
            frames = frames_of(config, policy)[0]
            check_spread(policy, frames)
    elif config.trainer.imitates == "never":
        policy = _module(config).new_policy(config)
    else:
        frames, words = frames_of(config, None)
        policy = new_policy(config, frames, words)
    policy = with_own_heads(config, policy)
    sampler_of(config, policy)  # raises, as do these; nothing is started before the first reset
    open_tables(config, policy, num_envs=1).close()
    # Only to see that its first steps fit this sampler, before simulators are started.
    if config.policy.path is not None and (policy_folder(Path(config.policy.path)) / FIRST_STEPS).is_dir():
        frozen_of(config, policy)
    choose_trained(config, policy)
    if config.distributed.fsdp:
        require_layers(policy, "distributed.fsdp")
    if config.policy.gradient_checkpointing:
        require_layers(policy, "policy.gradient_checkpointing")
        compute_again(policy)
    return policy, frames


def prepare(config: VLAConfig, accelerator: Accelerator) -> tuple[Any, Any]:
    """The policy and the frames to imitate: what is wrong with them is said before anything is written."""
    policy, frames = open_policy(config)
    steps = recorded(config)
    if steps is not None:
        check_recorded(config, policy, steps)
    return policy, frames


def open_run(config: VLAConfig, process: Process, prepared: tuple[Any, Any], stack: ExitStack) -> VLARun:
    """Environments, optimiser and log of one process; `stack` closes them."""
    policy, frames = prepared
    if not config.distributed.fsdp:  # else its layers come to the device one at a time
        policy = policy.to(process.accelerator.device)
    processes = process.accelerator.num_processes
    local_envs = config.environment.num_envs // processes
    # Methods that only evaluate in the simulators have no use for copies of the policy on other machines.
    acts_there = config.environment.workers == "ray" and "actors" in config.trainer.takes
    opened = open_rollouts if acts_there else open_tables
    env = opened(config, policy, num_envs=local_envs, group_size=config.environment.group_size)
    stack.callback(env.close)
    rates = {"policy": config.optimizer.lr}
    if critic_values(config, policy):
        rates["critic"] = config.optimizer.critic_lr
    # A copy of the weights before the first update: afterwards these are nowhere any more.
    frozen = frozen_of(config, policy)
    begun = untrained(policy, frozen) if config.policy.path else None
    if config.distributed.fsdp:
        sharding = Sharding.over(config.distributed.fsdp, process.accelerator.device)
        if process.is_main and not checkpoint.steps(process.run.checkpoints):  # else one of them is complete (`claim`)
            save_policy(policy, process.run.folder / "policy")
            stack.push(partial(remove_policy_of_failed_start, process))
        hold(policy, sharding, adapters=config.policy.lora is not None)
    ahead: Ahead[Acted] | None = None
    if config.environment.staleness and isinstance(env, RayRollouts):
        ahead = Ahead()
        stack.callback(ahead.close)
    named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    weights = Weights(named, is_lora=config.policy.lora is not None, in_step=in_step(policy))
    groups = parameter_groups(policy, rates)
    first = process.rank * local_envs
    return VLARun(
        config, process, policy, weights, groups, frozen, env, stack,
        first_slot=first, frames=frames, begun=begun, ahead=ahead,
    )  # fmt: skip


def reopen(config: VLAConfig, device: str, iteration: int) -> Reopened:
    """The policy as a run trains it, with the sampler of that iteration."""
    policy = open_policy(config)[0].to(device)
    weights = Weights({name: p for name, p in policy.named_parameters() if p.requires_grad})
    acting = Acting(policy, sampler_of(config, policy))
    return Reopened(acting, weights, {"policy": policy}, lambda info, tensors: None)


def judge_policy(config: VLAConfig, model: Path, progress: Progress, step: int | None = None) -> Judged:
    """The evaluation of the configuration, of another policy than the one it trains; of a run after `step` iterations.

    Raises ValueError for methods whose policy does not act by itself.
    """
    if config.trainer.acts_through:
        raise ValueError(
            f"{model}: what {config.trainer.algorithm} trains acts through {config.trainer.acts_through}, "
            "which a policy's folder does not hold: see the evaluations of its run, metrics.jsonl"
        )
    policy, settings = _on_device(config, model, step), config.evaluation
    with ExitStack() as stack:
        env = open_tables(config, policy, num_envs=side_by_side(config, settings.episodes))
        stack.callback(env.close)
        progress.phase("evaluating", settings.episodes)
        return evaluate(
            Acting(policy, sampler_of(config, policy), _first_steps(config, model)),
            env,
            episodes=settings.episodes,
            seed=settings.seed,
            clips=settings.videos,
            advance=progress.advance,
        ).of(config.environment.success_key)


def _on_device(config: VLAConfig, model: Path, step: int | None = None) -> Any:
    adapt = adapted(config) if policy_folder(model) == model else None  # a run's policy says itself how it is
    return load_trained(model, step=step, adapt=adapt).to(default_device())


def _first_steps(config: VLAConfig, model: Path) -> Any:
    """The policy that does DPPO's first denoising steps: that of the folder, or what the configuration begins with.

    Raises ValueError for a policy that does the last steps, and not as many as the configuration says.
    """
    if config.trainer.imitates == "always":
        return None
    sampler = config.sampler
    first_steps = load_first_steps(policy_folder(model), sampler.steps, sampler.first_steps, device=default_device())
    if first_steps or config.policy.path is None or not sampler.first_steps:
        return first_steps
    return _on_device(config, Path(config.policy.path))


def frozen_of(config: VLAConfig, policy: Any) -> Any:
    """DPPO's policy before fine-tuning, where it does the first denoising steps; else None. One that was fine-tuned
    before goes on with that which has done them; ValueError where it was on another part of the chain, or the whole is
    to be trained now."""
    if config.trainer.imitates == "always":
        return None
    begun, sampler = None, config.sampler
    if config.policy.path is not None:
        begun = load_first_steps(policy_folder(Path(config.policy.path)), sampler.steps, sampler.first_steps)
    if not sampler.first_steps:
        return None
    if begun is None:
        return copy.deepcopy(policy).requires_grad_(False)
    return begun.to(next(policy.parameters()).device).requires_grad_(False)


KIND = frame.Kind(
    "decisions", check_processes, prepare, open_run, reopen, "lower trainer.microbatch, or environment.num_envs"
)
