"""One process of a run that trains a policy in simulation: rollouts, what they were like, evaluation, the folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import halvings, say_result
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.running import Advance, Ahead, Groups, TrainingRun, of_all
from genrl.runtime.loop.updating import CAUSES, require_on_policy
from genrl.runtime.show.pictures import save_png
from genrl.runtime.show.sheet import SHOWN, ContactSheet
from genrl.runtime.weights.sharding import unsharded
from genrl.runtime.weights.weights import Weights
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.videos import contact_sheet, write_clips
from genrl.vla.evaluate import Judged, Watched, evaluate, sheet_of, sheet_of_rollout, success_rates
from genrl.vla.methods.settings import Update
from genrl.vla.policies.folder import save_first_steps, save_policy
from genrl.vla.policies.policy import KeepsFeatures, Policy
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect, training_rows
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.sampling import Acting, Frozen
from genrl.vla.rollout.scores import context_of, episode_figures, importance_figures, of_first_episodes, weighed
from genrl.vla.setup import export, load_trained, longest_episode, open_tables, sampler_of, side_by_side
from genrl.vla.simulators.contract import Environment
from genrl.vla.simulators.tables import Simulators

FPS = 4
"""Of films, which have a frame for every decision."""
ON_POLICY = 1e-6
"""How far a log-probability may be from that of sampling where nothing was trained yet, as a part of the largest: no
more than rounding, as the same batch is computed again."""


class VLARun(TrainingRun[VLAConfig]):
    """One process of one run.

    frozen: DPPO's policy before fine-tuning, which does the first denoising steps; None for other samplers. env: this
    process's share of the environments, first_slot on. The stack closes what is opened later. frames: what supervised
    training imitates; None where it imitates nothing. begun: a fingerprint of what is not trained (`setup.untrained`);
    None for a new policy, which the folder holds. ahead: the rollouts that are collected while an iteration is trained.
    """

    def __init__(
        self,
        config: VLAConfig,
        process: Process,
        policy: Any,
        weights: Weights,
        groups: Groups,
        frozen: Any,
        env: Environment | RayRollouts,
        stack: ExitStack,
        *,
        first_slot: int = 0,
        frames: Any = None,
        begun: str | None = None,
        ahead: Ahead[Acted] | None = None,
    ) -> None:
        staleness, retries = config.environment.staleness, config.trainer.retries
        super().__init__(config, process, policy, weights, groups, staleness=staleness, retries=retries)
        self.frozen, self.env, self.stack, self.first_slot = frozen, env, stack, first_slot
        self.frames, self.begun, self.ahead = frames, begun, ahead
        self.judge: Callable[[int], dict[str, float]] | None = None
        """Another evaluation than that of the policy in its environment."""
        self.table: Any = None
        """The environment of evaluations: chosen, or made, when it is first needed, and kept."""
        self.preparation: dict[str, float] = {}
        """Figures of a method's preparation, logged with every iteration."""
        self._dropped, self._seconds, self._off = 0, 0.0, 0.0

    @property
    def acting(self) -> Acting:
        """The policy with its sampler."""
        return Acting(self.policy, sampler_of(self.config, self.policy))

    def begin(self, last_checkpoint: Path | None) -> None:
        """Write the policy that checkpoints belong to, or see that it is the one the run began with."""
        if last_checkpoint:
            if self.loop.memory.get("untrained", self.begun) != self.begun:
                raise ValueError(
                    f"policy.path: {self.config.policy.path} is not what the run began with: the encoder that is not "
                    "trained, the statistics, or the first denoising steps of DPPO are others, and checkpoints do not "
                    "hold them. Put back what was there, or begin a new run"
                )
        elif self.process.is_main:
            if not self.config.distributed.fsdp:  # else it was written when this process had all of it
                self.save_policy()
                self.stack.push(partial(remove_policy_of_failed_start, self.process))
        self.loop.memory["untrained"] = self.begun
        super().begin(last_checkpoint)
        if self.frames and not self.config.evaluation.every:  # else the first evaluation shows more
            self.note_sheet(lambda: self._sheet(Judged([], [], [], [], []), Watched()))

    def collect(self, settings: Update) -> ChunkRollout:
        """The rollout of this iteration, on this process."""
        with unsharded(self.policy):
            return self._collect(settings)

    def _collect(self, settings: Update) -> ChunkRollout:
        config, loop = self.config, self.loop
        one_episode = settings.first_episodes
        decisions = settings.rollout_decisions or longest_episode(self.env)
        if decisions is None and not one_episode:
            raise ValueError("trainer.decisions: with episodes: all, say how many; the simulator has no limit")
        loop.phase("acting", decisions or 0)
        plan = RolloutPlan(
            # With one episode per slot the rollout ends by itself; the number is never reached.
            decisions=decisions or 1_000_000,
            seed=config.seed,
            iteration=loop.iteration,
            one_episode=one_episode,
            first_slot=self.first_slot,
            keep_contexts=self.keeps_features,
        )
        self.note_weights()
        with loop.timed("rollout"):
            acted = self._here(plan) if self.ahead is None else self._ahead(self.ahead, plan)
        loop.timings["simulator"] = acted.waited_s
        self._dropped, self._seconds = acted.dropped, acted.seconds
        loop.check_stop()
        rollout = acted.rollout
        with self.drawing():
            # By parts: a matrix product of other rows may round differently, so only the batch that was sampled is
            # computed again.
            self._off = max(check_on_policy(self.policy, rollout, slots) for slots in acted.parts)
        if self.age:
            rollout = weighed(self.policy, rollout, settings, loop.fitting)
            loop.check_stop()
        return rollout

    def _here(self, plan: RolloutPlan) -> Acted:
        """The rollout, collected now."""
        acting = Acting(self.policy, sampler_of(self.config, self.policy), self.frozen)
        with self.drawing():
            return measured(self.env, self.acted, acting, plan, self.loop.advance_or_leave)

    def _ahead(self, ahead: Ahead[Acted], plan: RolloutPlan) -> Acted:
        """The rollout, collected by weights of before; those begin whose weights are there now."""
        assert self.versions is not None
        for iteration in self.coming():
            if iteration not in ahead.underway:  # actors are made for the first one, which is waited for: nothing moves
                acting = Acting(self.policy, sampler_of(self.config, self.policy), self.frozen)
                by_older = partial(self.acted, weights=self.versions.of(iteration))
                its_own = replace(plan, iteration=iteration)
                ahead.begin(iteration, partial(measured, self.env, by_older, acting, its_own))
        return ahead.take(plan.iteration, self.loop.advance_or_leave)

    @property
    def acted(self) -> Callable[..., ChunkRollout]:
        """`collect` in the environments of this process: here, or on its Ray actors."""
        return self.env.collect if isinstance(self.env, RayRollouts) else partial(collect, self.env)

    @cached_property
    def keeps_features(self) -> bool:
        """Whether what the frozen encoder computed in the rollout is used again in training. Not of a policy whose
        features are too big to keep, nor where the first denoising steps see by an encoder of their own."""
        if not (self.config.policy.frozen and isinstance(self.policy, KeepsFeatures)):
            return False
        if self.frozen is None:
            return True
        policy: Any = self.policy
        ours, other = policy.encoder.state_dict(), self.frozen.encoder.state_dict()
        return all(torch.equal(value, other[name].to(value)) for name, value in ours.items())

    def finish(self, rollout: ChunkRollout, figures: Mapping[str, float]) -> None:
        """End of an iteration: what the episodes were like, the figures of its updates, evaluation, checkpoint."""
        loop = self.loop
        every = gather_object([of_first_episodes(rollout)])
        steps = sum(part.steps for part in every)
        loop.memory["env_steps"] = loop.memory.get("env_steps", 0) + steps
        dropped, seconds, off = zip(*gather_object([(self._dropped, self._seconds, self._off)]), strict=True)
        with unsharded(self.policy):
            spread = exploration(self.policy, rollout, self.frozen, seed=self.config.seed)
            if not self.config.evaluation.every and not self.frames:
                who = self.acting._replace(frozen=self.frozen)
                self.note_sheet(lambda: sheet_of_rollout(who, rollout, self.config))
        row = dict(figures) | self.preparation | self.aged
        row |= episode_figures(every, by_group=self.config.environment.group_size > 1)
        row |= {
            "rollout/dropped": float(sum(dropped)),
            "rollout/env_steps": float(loop.memory["env_steps"]),
            "rollout/action_std": spread,
            "rollout/log_prob_off": max(off),
            "env_steps_per_s": steps / max(seconds),
            "lr": loop.lr,
        }
        if rollout.importance is not None:
            row |= importance_figures(rollout)
        loop.finish(row)

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Success and films of the policy as it is."""
        if self.judge is not None:
            return self.judge(iteration)
        judged = self.judged(iteration)
        if self.process.is_main:
            show(judged, self.process, iteration)
        return success_rates(judged)

    def look(self) -> ContactSheet:
        """Episodes without exploration. Raises ValueError for a policy that does not act by itself."""
        method = self.settings
        if method.acts_through:
            raise ValueError(
                f"trainer.algorithm: what {method.algorithm} trains acts through {method.acts_through}, which is not "
                "trained yet: there is nothing to look at before the first iteration"
            )
        settings = self.config.evaluation.model_copy(update={"episodes": SHOWN, "videos": SHOWN})
        self.loop.config = self.config.model_copy(update={"evaluation": settings})
        return self._sheet(*self._judged())

    def judged(self, iteration: int) -> Judged:
        """All episodes of the evaluation, in their order, shared out to the processes; the same in all of them."""
        judged, watched = self._judged()
        self.note_sheet(lambda: self._sheet(judged, watched))
        return judged

    def _sheet(self, judged: Judged, watched: Watched) -> ContactSheet:
        return sheet_of(self.policy, judged, watched, self.frames)

    def _judged(self) -> tuple[Judged, Watched]:
        config, settings = self.config, self.config.evaluation
        self.loop.phase("evaluating", settings.episodes)
        watched = Watched()
        with unsharded(self.policy):
            local = self.play(
                self.acting._replace(frozen=self.frozen),
                self.process.share(settings.episodes),
                clips=settings.videos if self.process.rank == 0 else 0,
                advance=self.loop.advance_or_leave,
                watch=watched,
            )
        return of_all(local).of(config.environment.success_key), watched

    def play(self, who: Acting, share: range, **how: Any) -> Judged:
        """These episodes of the evaluation, in the environments of training where they are here and enough: a rollout
        begins anew whatever was before it. how: of `evaluate`."""
        width = side_by_side(self.config, len(share), self.process.accelerator.num_processes)
        if self.table is None:
            enough = isinstance(self.env, Simulators) and width <= self.env.num_envs
            self.table = self.env if enough else open_tables(self.config, self.policy, num_envs=width)
            self.stack.callback(self.table.close)
        seed = self.config.evaluation.seed
        return evaluate(who, self.table, episodes=len(share), seed=seed, first=share.start, abreast=width, **how)

    def micro_batch_sizes(self) -> list[int]:
        """Decisions per pass of the policy, and the smaller numbers that can be taken: from those of a whole minibatch,
        of which any process may get more than its share."""
        settings = self.settings
        if not isinstance(settings, Update):
            return [settings.batch_size]  # its loss is a mean over the batch, which is sampled as a whole
        return halvings(settings.microbatch or settings.minibatch)

    def resize(self, size: int) -> None:
        """Give a pass so many decisions from here on."""
        trainer = self.settings.model_copy(update={"microbatch": size})
        self.loop.config = self.config.model_copy(update={"trainer": trainer})

    def save_policy(self) -> Path:
        """The policy's folder, with DPPO's frozen half."""
        folder, sampler = self.process.run.folder / "policy", self.config.sampler
        save_policy(self.policy, folder)
        if self.frozen is not None:
            save_first_steps(self.frozen, folder, sampler.steps, sampler.first_steps)
        return folder

    def conclude(self) -> None:
        """The end of a run, complete or not: the policy's folder, report, and where they are."""
        if self.config.distributed.fsdp:  # this process has a share; the checkpoint just written has the whole
            folder = self.process.run.folder / "policy"
            save_policy(load_trained(self.process.run.folder), folder)
        else:
            with self.loop.averaged():
                folder = self.save_policy()
        rows = read_metrics(self.process.run.metrics)
        result = f"the policy's folder: {folder}"
        run = self.process.run.folder
        say_result(
            self.loop, rows, "success", label="success", pictures="curves and films", result=result,
            best=run / "policy-best", write=partial(export, run),
        )  # fmt: skip


def remove_policy_of_failed_start(process: Process, kind: type[BaseException] | None, *_: object) -> None:
    """Remove the policy: else the command, put right, would be refused because of the folder."""
    run = process.run
    # After the first row the folder holds a run, whatever ends it.
    failed = kind is not None and issubclass(kind, ValueError | RuntimeError)
    if failed and process.has_folder and not run.metrics.is_file():
        shutil.rmtree(run.folder / "policy")


class Acted(NamedTuple):
    """A rollout; parts: the slots that were sampled in one batch; waited_s: of the simulators; dropped: episodes;
    seconds: that it took."""

    rollout: ChunkRollout
    parts: list[Tensor]
    waited_s: float
    dropped: int
    seconds: float


def measured(
    env: Any, collect: Callable[..., ChunkRollout], acting: Acting, plan: RolloutPlan, advance: Advance
) -> Acted:
    """What `collect` collects in an environment, and what it took."""
    started, waited, dropped = time.perf_counter(), env.waited_s, env.dropped
    rollout = collect(acting.policy, acting.sampler, plan, frozen=acting.frozen, advance=partial(advance, 1))
    parts = env.parts if isinstance(env, RayRollouts) else [torch.arange(len(rollout.group))]
    seconds = time.perf_counter() - started
    if env.dropped > dropped and not rollout.valid.any():
        raise RuntimeError(
            f"all {env.dropped - dropped} episodes of the rollout were lost by their simulators, which raise or end: "
            "nothing was acted, so nothing can be learnt"
        )
    return Acted(rollout, parts, env.waited_s - waited, env.dropped - dropped, seconds)


def show(judged: Judged, process: Process, iteration: int) -> None:
    """Films of an evaluation in videos/step-..., their contact sheet among the samples, and both in the trackers."""
    if judged.clips:
        name = f"step-{iteration:06d}"
        for file in write_clips(process.run.videos / name, judged.clips, fps=FPS):
            if file.suffix == ".gif":
                process.log.log_video(iteration, f"videos/{file.stem}", file)
        sheet = contact_sheet(judged.clips)
        save_png(sheet, process.run.samples / f"{name}.png")
        process.log.log_picture(iteration, "samples/grid", sheet)


@torch.no_grad()
def check_on_policy(policy: Any, rollout: ChunkRollout, slots: Tensor) -> float:
    """Largest difference of log-probability of some slots' first decisions between now and when they were sampled.

    Raises RuntimeError beyond rounding: before the first update the ratio is 1, and anything else is dropout, another
    normalisation, old weights, or a sampler that does not do what is scored (ReinFlow as released). slots: those that
    were sampled in one batch, so that equal weights give equal bits.
    """
    rows = training_rows(rollout, slots)
    context = context_of(policy, rows.observation, rows.context)
    replay = rollout.sampler.replay(policy, context, rows.states, rows.next_states, rows.step_index)
    off = float((replay.log_prob.cpu() - rows.log_prob).abs().max())
    allowed = ON_POLICY * max(1.0, float(rows.log_prob.abs().max()))
    require_on_policy(off, allowed, "the log-probability of a sampled chunk", causes=CAUSES)
    return off


@torch.no_grad()
def exploration(policy: Policy, rollout: ChunkRollout, frozen: Any, *, seed: int, slots: int = 32) -> float:
    """Standard deviation that the sampled steps give the executed action, in the policy's units: over eight chunks from
    the same initial noise, for the first observations of some slots."""
    rows = training_rows(rollout, torch.arange(min(slots, rollout.valid.shape[1])))
    context = context_of(policy, rows.observation, rows.context)
    before = None if frozen is None else Frozen(frozen, frozen.encode(rows.observation))
    chunks, first = [], None
    for k in range(8):
        rngs = [generator(seed, "exploration", k, row) for row in range(len(rows.states))]
        random = rollout.sampler.noise(policy, rngs, generator(seed, "exploration", k))
        first = random.noise[:, :1] if first is None else first
        # The initial noise is the same in all eight: what differs is what the sampled steps add, which is what is
        # explored.
        noise = torch.cat([first, random.noise[:, 1:]], 1)
        chunks.append(rollout.sampler.sample(policy, context, random._replace(noise=noise), frozen=before).chunk)
    size = rollout.rewards.shape[-1]
    return float(torch.stack(chunks)[:, :, :size, : rollout.action_dim].std(0).mean())
