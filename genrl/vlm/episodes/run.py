"""One process of a run that learns from episodes: what was acted out, estimated together with the other processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.running import of_all
from genrl.runtime.show.pictures import save_samples
from genrl.runtime.show.sheet import SHOWN, ContactSheet
from genrl.vlm.common import Estimated, VLMRun, open_reference
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.engines.generation import Sampling, answering
from genrl.vlm.environments.hosts import open_host
from genrl.vlm.episodes.critic import Rows, ValueHead, credit_of, explained_variance, replay, rows_of, spread, turns_of
from genrl.vlm.episodes.episodes import Decision, Episode, Table, Walk, play, walk
from genrl.vlm.episodes.evaluate import SEEDS, Judged, acted_figures, figures_of, judge, sheet_of
from genrl.vlm.methods.episodes.settings import Critic, Episodes
from genrl.vlm.policies.folder import gathered
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.advantages import CriticAdvantage, SemiOnline
from genrl.vlm.recipe.preset import Preset


@dataclass(frozen=True)
class Acted:
    """What this process acted out in an iteration. With a critic, walk, and kept int64 [R]: of each row, which of the
    K E steps it is (lost ones are no rows); else totals: returns [R] of whole episodes, NaN of those that were lost,
    whose rows have no tokens, and played: their decisions."""

    rows: Rows
    walk: Walk | None = None
    kept: Tensor | None = None
    totals: Tensor | None = None
    played: list[list[Decision]] = field(default_factory=list)


class Actor(NamedTuple):
    """What a loss is called with: the policy, and the critic where there is one."""

    policy: Policy
    critic: ValueHead | None


class EpisodesRun(VLMRun):
    """One process of a run that acts; critic: of vl_dac and poad. held_out: the environments of evaluations."""

    preset: Preset
    result: ClassVar[tuple[str, str]] = ("success", "curves and pictures")

    def __init__(
        self,
        config: VLMConfig,
        process: Process,
        policy: Policy,
        reference: Policy | None,
        environment: Settings,
        critic: ValueHead | None,
        table: Table,
        held_out: Table,
    ) -> None:
        groups = {"policy": (policy.parameters, config.optimizer.lr)}
        if critic is not None:
            rate = (cast(Episodes, config.trainer).critic or Critic()).lr
            groups["critic"] = [p for p in critic.parameters() if p.requires_grad], rate
        super().__init__(config, process, policy, reference, groups, {}, retries=config.trainer.fit_batch)
        self.environment, self.critic, self.table, self.held_out = environment, critic, table, held_out
        self.begun: dict[int, int] = {}
        """With a critic: how many episodes each of this process's slots has begun."""

    @property
    def actor(self) -> Actor:
        """What the loss is called with."""
        return Actor(self.policy, self.critic)

    @property
    def settings(self) -> Episodes:
        """Settings of the method."""
        return cast(Episodes, self.config.trainer)

    @property
    def size(self) -> int:
        """Rows that are compared with each other: episodes from one start, or, with a critic, none."""
        return 1 if self.critic is not None else self.config.generation.group_size

    @property
    def slots(self) -> list[int]:
        """Slots of this process."""
        if self.critic is not None:
            return list(self.process.share(self.environment.parallel))
        groups, size = self.process.share(self.config.generation.prompts_per_iteration), self.size
        return list(range(groups.start * size, groups.stop * size))

    def begin(self, last_checkpoint: Path | None) -> None:
        """Play the episodes again in the middle of which the checkpoint was written. Raises RuntimeError as `Table`."""
        if last_checkpoint:
            self.restore()
        if self.critic is not None:
            self.loop.keep("critic", self.critic)
        super().begin(last_checkpoint)

    def forget(self) -> None:
        """Go back to the episodes that were going on when the iteration began, which is undone, as are its steps."""
        super().forget()
        self.restore()

    def restore(self) -> None:
        """Play the episodes again that the loop's memory holds. Raises RuntimeError as `Table`."""
        # the memory of a checkpoint is that of all processes
        slots = set(self.slots)
        self.begun = {slot: count for slot, count in self.loop.memory.get("begun", []) if slot in slots}
        self.table.restore([saved for saved in self.loop.memory.get("episodes", []) if saved[0] in slots])

    def remember(self, row: Mapping[str, float]) -> None:
        """How many steps were made (`row`: the iteration's metrics), and the episodes that go on in the next one."""
        self.loop.memory["env_steps"] = row["rollout/env_steps"]
        # Episodes with a critic go on across iterations; without one they end within theirs.
        if self.critic is not None:
            local = {"begun": [list(entry) for entry in self.begun.items()], "episodes": self.table.state()}
            for name, entries in local.items():
                self.loop.memory[name] = [entry for every in gather_object([entries]) for entry in every]

    def act(self) -> tuple[Acted, dict[str, float]]:
        """An iteration's steps or episodes, and figures of those of all processes."""
        config, loop, slots = self.config, self.loop, self.slots
        sampling = Sampling(config.generation.max_new_tokens, config.generation.temperature)
        keys, critic = (config.seed, "act"), self.critic is not None
        self.note_weights()
        loop.phase("acting", len(slots) * (self.environment.steps if critic else 1))
        with loop.timed("rollout"), self.drawing():
            if critic:
                steps, watch = self.environment.steps, loop.advance_or_leave
                done = walk(self.policy, self.table, slots, steps, self._next_seed, sampling, keys, watch=watch)
                decisions = [decision for step in done.decisions for decision in step]
                # that an environment was lost is not the policy's doing: nothing of such a step is trained
                alive = [place for place, decision in enumerate(decisions) if not decision.lost]
                self._check_alive(len(alive))
                rows = rows_of([[decisions[place]] for place in alive])
                acted, ended = Acted(rows, done, torch.tensor(alive)), done.ended
            else:
                groups = self._groups(sampling, keys)
                played, ended = [groups[slot][0] for slot in slots], [groups[slot][1] for slot in slots]
                decisions = [decision for row in played for decision in row]
                worths = [math.nan if decision.lost else decision.total for decision in ended]
                totals = torch.tensor(worths, dtype=torch.float64)
                self._check_alive(sum(not decision.lost for decision in ended))
                rows = rows_of(played)
                acted = Acted(
                    replace(rows, place=rows.place.masked_fill(totals.isnan()[:, None], -1)),
                    totals=totals,
                    played=played,
                )
        loop.check_stop()
        self.note_sheet(lambda: sheet_of(ended or list(self.table.episodes.values())))
        before, seconds = loop.memory.get("env_steps", 0.0), loop.timings["rollout"]
        return acted, acted_figures(decisions, ended, before, seconds)

    def look(self) -> ContactSheet:
        """Episodes as in training."""
        sampling = Sampling(self.config.generation.max_new_tokens, self.config.generation.temperature)
        seeds = {slot: derive_seed(self.config.seed, "look", slot) % SEEDS for slot in range(SHOWN)}
        with answering(self.policy):
            play(self.policy, self.table, seeds, "train", sampling, (self.config.seed, "look"))
        return sheet_of([self.table.episodes[slot] for slot in seeds])

    def _check_alive(self, left: int) -> None:
        """left: steps or episodes of this process that were not lost. Raises RuntimeError, in all processes alike,
        where nothing is left to learn from: of any process's steps, or of all episodes."""
        counts = gather_object([left])
        if not (min(counts) if self.critic is not None else sum(counts)):
            where = "" if sum(counts) == 0 else f" of process {counts.index(0)}"
            raise RuntimeError(f"{self.environment.name}: all environments{where} hung or died in one iteration")

    def _next_seed(self, slot: int) -> int:
        # Counted per slot, and kept in checkpoints: the next episode of a slot is the same after a resume.
        self.begun[slot] = self.begun.get(slot, 0) + 1
        return derive_seed(self.config.seed, "episode", slot, self.begun[slot]) % SEEDS

    def _groups(self, sampling: Sampling, keys: Sequence[int | str]) -> dict[int, tuple[list[Decision], Episode]]:
        """Decisions and episode of each slot. UI-S1: a group whose turns' returns hardly differ is played again."""
        choice, left = self.preset.advantage, self.slots
        by_slot: dict[int, tuple[list[Decision], Episode]] = {}
        for attempt in range(choice.rounds if isinstance(choice, SemiOnline) else 1):
            seeds = {slot: self._start(slot // self.size, attempt) for slot in left}
            watch = self.loop.advance_or_leave
            played = play(self.policy, self.table, seeds, "train", sampling, keys, watch=watch)
            # a group that is played again replaces itself: the first try is never trained on
            by_slot |= {
                slot: (decisions, self.table.episodes[slot]) for slot, decisions in zip(left, played, strict=True)
            }
            if isinstance(choice, SemiOnline):
                groups = [left[k : k + self.size] for k in range(0, len(left), self.size)]
                left = [
                    s for some in groups if spread([by_slot[s][0] for s in some], choice) < choice.spread for s in some
                ]
            if not left:
                break
        return by_slot

    def _start(self, group: int, attempt: int = 0) -> int:
        # The first try has the key that it has without retries, so that those change no other run.
        attempts = [attempt] if attempt else []
        return derive_seed(self.config.seed, "start", self.loop.iteration, group, *attempts) % SEEDS

    def estimate(self, acted: Acted) -> tuple[Estimated, dict[str, float]]:
        """Advantages and weights of this process's rows from those of all processes, and figures of the critic."""
        loop, rows = self.loop, acted.rows
        mask = rows.place >= 0
        updates = self.updates(mask, self.size)
        loop.phase("estimating", 0)
        with loop.timed("estimate"), loop.fitting(), gathered(self.policy), gathered(self.reference):
            local = self._computed(acted, [part for update in updates for part in update.parts])
        loop.check_stop()
        ready = self.estimated(local | {"mask": mask, "sampler": rows.laid(rows.sampler)}, self.size, updates)
        row = {} if self.critic is None else {"critic/explained_variance": explained_variance(ready.estimate.batch)}
        return ready, row

    @torch.no_grad()
    def _computed(self, acted: Acted, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors of this process's rows: old and reference log-probabilities, entropies, and rewards or credit."""
        rows, temperature = acted.rows, self.config.generation.temperature
        by_turn = {name: torch.zeros(rows.mask.shape) for name in ("old", "ref", "entropy", "value")}
        for part in parts:
            turns = rows.of(part)
            now = replay(self.policy, rows, turns, temperature, entropy="entropy" in self.preset.reads)
            by_turn["old"][turns] = now.log_prob.float().cpu()
            if now.entropy is not None:
                by_turn["entropy"][turns] = now.entropy.float().cpu()
            if self.critic is not None:
                by_turn["value"][turns] = self.critic(now.states).cpu()
            if self.reference is not None:
                by_turn["ref"][turns] = replay(self.reference, rows, turns, temperature).log_prob.float().cpu()
            elif "ref" in self.preset.reads:
                with self.policy.reference():
                    by_turn["ref"][turns] = replay(self.policy, rows, turns, temperature).log_prob.float().cpu()
        values = by_turn.pop("value")
        reads = self.preset.reads | {"old"}
        tensors = {name: rows.laid(each) for name, each in by_turn.items() if name in reads}
        if acted.walk is None:
            assert acted.totals is not None
            by_name = turns_of(rows, acted.played) if "turn" in reads else {}
            tensors |= {name: each for name, each in by_name.items() if name in reads}
            return tensors | {"rewards": acted.totals}
        assert acted.kept is not None
        choice = self.preset.advantage
        assert isinstance(choice, CriticAdvantage) and self.critic is not None
        size = self.settings.micro_batch
        credit = credit_of(self.policy, self.critic, choice, acted.walk, acted.kept, values, rows.mask, size)
        by_token = credit.advantages.dim() == 2
        return tensors | {
            "credit": credit.advantages[acted.kept],
            "returns": credit.returns[acted.kept],
            "old_value": values if by_token else values[:, 0],
        }

    def evaluated(self, iteration: int) -> dict[str, float]:
        """The most probable answers in held-out episodes; at the ends of the run with black pictures, too."""
        judged = self._acted(blind=False)
        row = figures_of(judged)
        if iteration in (0, self.config.iterations) and self.config.evaluation.blind:
            blind = figures_of(self._acted(blind=True))["eval/success_mean"]
            row["eval/success_blind"] = blind
            if iteration == 0:
                self.warn_blind(row["eval/success_mean"], blind, "episodes succeed")
        if self.process.is_main and judged.films:
            scores = {"success": [episode["success"] for episode in judged.episodes[: len(judged.films)]]}
            pictures, texts = [film for film, _ in judged.films], [text for _, text in judged.films]
            sheet = save_samples(self.process.run.samples, iteration, pictures, texts, scores)
            self.process.log.log_picture(iteration, "samples/grid", sheet)
        return row

    def _acted(self, *, blind: bool) -> Judged:
        number = self.config.evaluation.questions
        self.loop.phase("evaluating", number)
        with answering(self.policy):
            local = judge(
                self.policy,
                self.config,
                self.held_out,
                self.process.share(number),
                blind=blind,
                films=6 if self.process.is_main and not blind else 0,
                advance=self.loop.advance_or_leave,
            )
        return of_all(local)

    def rows_at_most(self) -> int:
        """The rows that a process has in an update."""
        generation = self.config.generation
        groups = -(-generation.prompts_per_iteration // self.settings.updates)
        slots = min(len(self.slots), groups * generation.group_size)
        return slots * (1 if self.critic is None else self.environment.steps)


def settings_of(config: VLMConfig) -> Settings:
    """The section `environment`, which is there."""
    assert config.environment is not None
    return config.environment


def check_environment(config: VLMConfig, policy: Policy) -> None:
    """ValueError for an environment that cannot be opened, or whose first prompt does not fit into the model."""
    settings = settings_of(config)
    host = open_host(settings)
    try:
        table = Table(settings, host)
        table.begin({0: 0}, "train")
        policy.check_room([policy.encode(table.prompt(0))], config.generation.max_new_tokens)
    finally:
        host.close()


def critic_of(config: VLMConfig, policy: Policy) -> ValueHead | None:
    """The value function, where the method has one."""
    method = cast(Episodes, config.trainer)
    if not method.with_critic:
        return None
    width = policy.model.config.get_text_config().hidden_size
    module, _, name = method.critic_class.partition(":")
    kind: Any = getattr(import_module(module), name)
    critic: ValueHead = kind(width, (method.critic or Critic()).hidden, config.seed).to(policy.device)
    return critic


def open_run(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> EpisodesRun:
    """What one process trains with: environments, reference, critic, optimiser, log; `stack` closes them."""
    settings, reference = settings_of(config), open_reference(config, process, policy)
    critic = critic_of(config, policy)
    tables = []
    for _ in range(2):  # of training, whose episodes go on, and of evaluation
        host = open_host(settings)
        stack.callback(host.close)
        tables.append(Table(settings, host))
    return EpisodesRun(config, process, policy, reference, settings, critic, *tables)
