"""`genrl train` for a policy in simulation: from a configuration to a trained policy in a run folder."""

from __future__ import annotations

import copy
import logging
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from genrl.config.plugins import beside
from genrl.config.vla import Diffusion, VLAConfig
from genrl.runtime.loop import Abandoned, Loop, begin, claim, make_accelerator, open_loop, say_end
from genrl.runtime.metrics import check_trackers
from genrl.runtime.pictures import save_png
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run
from genrl.runtime.signals import Stop, Watchdog
from genrl.vla.data.videos import contact_sheet, write_clips
from genrl.vla.evaluate import Candidate, Judged, evaluate, success_rates
from genrl.vla.policies.folder import FIRST_STEPS, load_first_steps, save_first_steps, save_policy
from genrl.vla.session import Session
from genrl.vla.setup import (
    critic_values,
    frames_of,
    freeze,
    load_trained,
    new_policy,
    noise_head_of,
    open_rollouts,
    open_tables,
    parameter_groups,
    policy_folder,
    sampler_of,
    side_by_side,
    untrained,
)
from genrl.vla.simulators.contract import Environment

FPS = 4
"""Of films, which have a frame for every decision."""

logger = logging.getLogger(__name__)


def train(config: VLAConfig, resume: Path | None = None) -> Path:
    """Train as `config` says, into its run folder, or go on in the folder `resume`; returns the folder.

    Every process of a distributed run calls this. Raises ConfigError or ValueError for what is wrong before work
    starts, SystemExit (130, 143) where the process was asked to end and has saved.
    """
    check_trackers(config.trackers)
    accelerator = make_accelerator(config.distributed.timeout_s)
    check_processes(config, accelerator.num_processes)
    set_seed(config.seed)
    with ExitStack() as stack:
        claimed = claim(stack, config.output, resume, accelerator)
        run, found = claimed.run, claimed.found
        policy, frames = open_policy(config)  # raises, before anything is written
        stop, watchdog, progress = begin(stack, claimed, config, accelerator, unit="decisions")
        session = open_session(config, accelerator, run, progress, watchdog, stop, policy.to(accelerator.device), stack)
        session.frames = frames
        begun = untrained(session.policy, session.frozen) if config.policy.path else None
        if found:
            session.loop.restore(found)
            if session.loop.memory.get("untrained", begun) != begun:
                raise ValueError(
                    f"policy.path: {config.policy.path} is not what the run began with: the encoder that is not "
                    "trained, the statistics, or the first denoising steps of DPPO are others, and checkpoints do not "
                    "hold them. Put back what was there, or begin a new run"
                )
        elif accelerator.is_main_process:
            save(session)  # what a checkpoint's weights belong to
        session.loop.memory["untrained"] = begun
        stack.enter_context(watchdog)
        try:
            _module(config).train(session, config.trainer)
        except Abandoned:
            logger.info("the running iteration is done again on resume")
        except (ValueError, RuntimeError):
            if accelerator.is_main_process and not found and not run.metrics.is_file():
                shutil.rmtree(run.folder / "policy")  # that of before: else the command, put right, would be refused
            raise
        finish(session)
    if stop.requested:
        raise SystemExit(stop.exit_code)
    return run.folder


def _module(config: VLAConfig) -> Any:
    """What the method runs."""
    return beside(sys.modules[type(config.trainer).__module__], "train")


def check_processes(config: VLAConfig, num_processes: int) -> None:
    """ValueError where environments cannot be shared out to the processes in whole groups."""
    config.trainer.refuse_processes(num_processes)
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
        policy = load_trained(config.policy.path, rename=config.policy.rename)
        if config.trainer.imitates == "always":
            frames = frames_of(config, policy)[0]
    elif config.trainer.makes_policy:
        policy = _module(config).new_policy(config)
    else:
        frames, words = frames_of(config, None)
        policy = new_policy(config, frames, words)
    heads = {"critic": critic_values(config, policy), "noise_head": noise_head_of(config)}
    policy = policy.with_heads(**heads, seed=config.seed)
    sampler_of(config, policy)  # raises, as do these; nothing is started before the first reset
    open_tables(config, policy, num_envs=1).close()
    if config.policy.path is not None and (policy_folder(Path(config.policy.path)) / FIRST_STEPS).is_dir():
        frozen_of(config, policy)
    freeze(config, policy)
    return policy, frames


def open_session(
    config: VLAConfig,
    accelerator: Accelerator,
    run: Run,
    progress: Progress,
    watchdog: Watchdog,
    stop: Stop,
    policy: Any,
    stack: ExitStack,
) -> Session:
    """Environments, optimiser and log of one process; `stack` closes them."""
    processes, rank = accelerator.num_processes, accelerator.process_index
    own = config.environment.num_envs // processes
    acts_there = config.environment.workers == "ray" and config.trainer.acts_on_actors
    opened = open_rollouts if acts_there else open_tables
    env = opened(config, policy, num_envs=own, group_size=config.environment.group_size)
    stack.callback(env.close)
    frozen = frozen_of(config, policy)
    settings, rates = config.optimizer, {"policy": config.optimizer.lr}
    if critic_values(config, policy):
        rates["critic"] = settings.critic_lr
    loop = open_loop(
        config, accelerator, policy, parameter_groups(policy, rates), rates, run, progress, watchdog, stop, stack
    )
    loop.evaluate = Judge(config, policy, frozen, loop, stack)
    return Session(config, loop, policy, frozen, env, first_slot=rank * own)


def judge_policy(config: VLAConfig, model: Path, progress: Progress) -> Judged:
    """The evaluation of the configuration, of another policy than the one it trains.

    Raises ValueError for methods whose policy does not act by itself.
    """
    if config.trainer.acts_through:
        raise ValueError(
            f"{model}: what {config.trainer.algorithm} trains acts through {config.trainer.acts_through}, "
            "which a policy's folder does not hold: see the evaluations of its run, metrics.jsonl"
        )
    policy, settings = _on_device(config, model), config.evaluation
    with ExitStack() as stack:
        env = open_tables(config, policy, num_envs=side_by_side(config, settings.episodes))
        stack.callback(env.close)
        progress.phase("evaluating", settings.episodes)
        return evaluate(
            Candidate(policy, sampler_of(config, policy, config.iterations), _first_steps(config, model)),
            env,
            episodes=settings.episodes,
            seed=settings.seed,
            clips=settings.videos,
            advance=progress.advance,
        )


def _on_device(config: VLAConfig, model: Path) -> Any:
    return load_trained(model, rename=config.policy.rename).to(_device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _first_steps(config: VLAConfig, model: Path) -> Any:
    """Of DPPO: who does the first denoising steps, that of the folder, or what the configuration begins with.

    Raises ValueError for a policy that does the last steps, and not as many as the configuration says.
    """
    if not isinstance(config.sampler, Diffusion) or config.trainer.whole_chain:
        return None
    done = config.sampler.steps, config.sampler.ft_denoising_steps
    found = load_first_steps(policy_folder(model), *done, device=_device())
    if found or config.policy.path is None or not fine_tunes_last(config):
        return found
    return _on_device(config, Path(config.policy.path))


def fine_tunes_last(config: VLAConfig) -> bool:
    """Whether a run trains the last denoising steps only, and another policy does the first ones (DPPO)."""
    sampler = config.sampler
    trains = isinstance(sampler, Diffusion) and sampler.ft_denoising_steps < sampler.steps
    return trains and not config.trainer.whole_chain


def frozen_of(config: VLAConfig, policy: Any) -> Any:
    """DPPO's policy before fine-tuning, where it does the first denoising steps; else None. One that was fine-tuned
    before goes on with that which has done them; ValueError where it was on another part of the chain, or the whole is
    to be trained now."""
    if not isinstance(config.sampler, Diffusion) or config.trainer.whole_chain:
        return None
    begun = None
    if config.policy.path is not None:
        done = config.sampler.steps, config.sampler.ft_denoising_steps
        begun = load_first_steps(policy_folder(Path(config.policy.path)), *done)
    if not fine_tunes_last(config):
        return None
    if begun is None:
        return copy.deepcopy(policy).requires_grad_(False)
    own, other = policy.encoder.state_dict(), begun.encoder.state_dict()
    if config.policy.frozen and config.policy.keep_features:
        if not all(torch.equal(value.cpu(), other[name].to(value.dtype)) for name, value in own.items()):
            raise ValueError(
                "policy.keep_features: the first denoising steps have an encoder of their own; write false"
            )
    return begun.to(next(policy.parameters()).device).requires_grad_(False)


def show(found: Judged, run: Run, iteration: int) -> None:
    """Films of an evaluation in videos/step-..., and their contact sheet among the samples."""
    if found.clips:
        name = f"step-{iteration:06d}"
        write_clips(run.videos / name, found.clips, fps=FPS)
        save_png(contact_sheet(found.clips), run.samples / f"{name}.png")


@dataclass
class Judge:
    """Evaluation of the policy as it is, shared out to the processes. The stack closes its environments."""

    config: VLAConfig
    policy: Any
    frozen: Any
    loop: Loop
    stack: ExitStack
    env: Environment | None = None
    """Made when it is first needed, and kept."""

    def __call__(self, iteration: int) -> dict[str, float]:
        found = self.judge(iteration)
        if self.loop.is_main:
            show(found, self.loop.run, iteration)
        return success_rates(found)

    def judge(self, iteration: int) -> Judged:
        """All episodes, in their order; the same in all processes."""
        config, settings, accelerator = self.config, self.config.evaluation, self.loop.accelerator
        processes, rank = accelerator.num_processes, accelerator.process_index
        shares = [len(part) for part in np.array_split(np.arange(settings.episodes), processes)]
        if self.env is None:
            self.env = open_tables(config, self.policy, num_envs=side_by_side(config, shares[rank]))
            self.stack.callback(self.env.close)
        self.loop.phase("evaluating", settings.episodes)
        mine = evaluate(
            Candidate(self.policy, sampler_of(config, self.policy, iteration), self.frozen),
            self.env,
            episodes=shares[rank],
            seed=settings.seed,
            first=sum(shares[:rank]),
            clips=settings.videos if rank == 0 else 0,
            advance=self.loop.advance_or_leave,
        )
        joined = Judged([], [], [], [], [])
        for part in gather_object([mine]):
            joined = joined.joined(part)
        return joined


def save(session: Session) -> Path:
    """The policy's folder, with DPPO's frozen half."""
    folder, sampler = session.loop.run.folder / "policy", session.config.sampler
    save_policy(session.policy, folder)
    if session.frozen is not None and isinstance(sampler, Diffusion):
        save_first_steps(session.frozen, folder, sampler.steps, sampler.ft_denoising_steps)
    return folder


def finish(session: Session) -> None:
    """The end of a run, complete or not: last checkpoint, the policy's folder, report, and where they are."""
    loop = session.loop
    loop.save()
    if not loop.is_main:
        return
    folder = save(session)
    say_end(loop, "success", pictures="curves and films", result=f"the policy, in LeRobot's layout: {folder}")
