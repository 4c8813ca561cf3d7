"""One process of a run that trains a vision-language model: answers drawn, estimated together with those of the other
processes, and what is measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object

from genrl.config.vlm import VLMConfig
from genrl.runtime.loop import Loop
from genrl.vlm.methods.dealing import Update, dealt, everyones, ours
from genrl.vlm.methods.estimate import Estimate, estimate
from genrl.vlm.methods.extras import Average, computed
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.rollout import artefacts
from genrl.vlm.rollout.augment import augmented, gaps
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.passes import leave_out
from genrl.vlm.rollout.rollout import Answers, draw, joined, totals, worth
from genrl.vlm.rollout.synthesis import Synthesis
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.tasks.rows import Row
from rewards.contract import Reward

SAMPLER_GAP = 0.1
"""Mean difference of log-probabilities between sampler and trainer above which something is wrong (spec 6.3)."""


class Estimated(NamedTuple):
    """batch: this process's rows, with advantages and weights, `extra["row"]` their numbers; found: what `estimate`
    says of all of them; updates: how they are shared out."""

    batch: TokenBatch
    found: Estimate
    updates: list[Update]


@dataclass
class Session:
    """One process of one run. reference: the model before training where the loss reads it and there is no LoRA."""

    config: VLMConfig
    preset: Preset | None
    loop: Loop
    policy: Policy
    reference: Policy | None
    average: Average | None
    opened: Mapping[str, Reward]
    questions: Questions
    synthesis: Synthesis | None = None
    stage: int = -1
    """Whose questions and method these are; -1: none was entered."""
    baseline: Any = None
    """MusicRL's value function, a `music_rl.Baseline`."""

    @property
    def bounds(self) -> bool:
        """Whether the columns of the log-probabilities are estimates of a bound instead of tokens: BGPO."""
        return self.config.trainer.bounds

    @property
    def reads(self) -> frozenset[str]:
        """What the loss reads beside rewards and log-probabilities."""
        return frozenset() if self.preset is None else self.preset.reads

    def enter(self) -> None:
        """Take over questions and method of the stage that the iteration belongs to, where it is a new one."""
        whole = self.loop.settings
        assert isinstance(whole, VLMConfig)
        number, config = whole.at(self.loop.iteration)
        if number == self.stage:
            return
        self.stage, self.config, self.preset = number, config, config.trainer.recipe(config)
        self.questions = Questions(config, "train")
        leave_out(config, self.questions, self.policy, self.loop, number)

    def draw(self) -> tuple[Answers, dict[str, float]]:
        """This process's groups of the iteration, and figures of all processes' answers, those left out included."""
        self.enter()
        config, loop = self.config, self.loop
        wanted, processes = config.generation.prompts_per_iteration, loop.accelerator.num_processes
        share, rank = wanted // processes, loop.accelerator.process_index
        drawn: list[Answers] = []
        kept: list[Answers] = []
        mine: list[int] = [0] * processes
        memory: dict[str, Any] = {}  # what the iteration changes in the loop's, once it cannot be left any more
        described: Answers | None = None
        first = loop.memory.get("questions", 0)
        for _ in range(config.trainer.rounds):
            loop.phase("answering", share * config.generation.group_size)
            numbers = self.questions.asked(loop.iteration, first, wanted)[rank * share : (rank + 1) * share]
            rows = [self.questions[number] for number in numbers]
            if self.synthesis is not None:
                rows = self.synthesis.replaced(rows)
            with loop.timed("rollout"):
                found = self._ask(rows, "answers", loop.iteration, first)
                drawn.append(found)
                if config.augmentation is not None:
                    gap, memory = gaps(config, loop, found)
                    if gap is not None:
                        ask = partial(self._ask, iteration=loop.iteration, first=first)
                        found = augmented(config, found, gap, ask, loop.iteration)
                if self.synthesis is not None:
                    chosen = numbers[-self.synthesis.settings.questions :]
                    asked = [self.synthesis.described(number) for number in chosen]
                    described = self._ask(asked, "describe", loop.iteration, first)
            loop.leave_if_asked()
            first += wanted
            kept.append(found.chosen(worth(config, found)))
            mine = [a + b for a, b in zip(mine, gather_object([len(kept[-1].rows)]), strict=True)]
            if sum(mine) >= wanted:
                break
        loop.memory |= memory | {"questions": first}
        # of more groups than wanted, the first of each process are left out last
        before, room = sum(mine[:rank]), wanted
        own = joined(kept)
        answers = own.chosen(list(range(max(0, min(mine[rank], room - before)))))
        row = self._answered(joined(drawn), len(drawn), min(sum(mine), wanted) / (wanted * len(drawn)))
        if self.synthesis is not None and described is not None:
            paid, figures = self.synthesis.paid(drawn[0])
            self.synthesis.park(chosen, described)
            answers, row = joined([answers, *paid]), row | figures
        return answers, row

    def _ask(self, rows: Sequence[Row], key: str, iteration: int, first: int) -> Answers:
        """Groups of answers to these questions. key: of which kind, part of the samples' keys."""
        return (draw if self.config.vlm.output == "text" else artefacts.draw)(
            self.policy,
            self.config,
            self.opened,
            rows,
            (self.config.seed, key, iteration, first),
            advance=self.loop.advance_or_leave,
        )

    def _answered(self, drawn: Answers, rounds: int, share: float) -> dict[str, float]:
        config = self.config
        mine = {"tokens": drawn.mask.sum(1).double(), "cut": drawn.cut.double(), "total": totals(config, drawn.scores)}
        mine |= {f"reward/{label}": values for label, values in drawn.scores.items()}
        every = gather_object([mine])
        joint = {name: torch.cat([one[name] for one in every]) for name in mine}
        seconds = max(gather_object([self.loop.timings["rollout"]]))
        row = {
            "rollout/tokens_mean": float(joint["tokens"].mean()),
            "rollout/cut": float(joint["cut"].mean()),
            "rollout/rounds": float(rounds),
            "rollout/kept": share,
            "tokens_per_s": float(joint["tokens"].sum()) / seconds,
        }
        for name in ("total", *(f"reward/{label}" for label in drawn.scores)):
            label = "reward/total" if name == "total" else name
            scored = joint[name][~joint[name].isnan()]
            row[f"{label}_mean"] = float(scored.mean()) if len(scored) else float("nan")
            row[f"{label}_std"] = float(scored.std(correction=0)) if len(scored) else float("nan")
            if name != "total":
                row[f"{label}_failed"] = float(joint[name].isnan().sum())
        return row

    def estimate(self, answers: Answers) -> Estimated | None:
        """Advantages and weights of this process's answers, from those of all processes; None where there are none."""
        config, loop, rank = self.config, self.loop, self.loop.accelerator.process_index
        counts = gather_object([len(answers.rows)])
        if sum(counts) == 0:
            return None
        size, settings, preset = config.generation.group_size, cast(RecipeMethod, config.trainer), self.preset
        assert preset is not None, "the methods whose answers are estimated have one"
        updates = dealt(
            answers.mask,
            size,
            updates=settings.updates,
            micro=settings.micro_batch,
            seed=config.seed,
            loop=loop,
            whole_groups=preset.group_loss is not None,
        )
        parts = [part for update in updates for part in update.parts]
        loop.phase("estimating", 0)
        with loop.timed("estimate"):
            mine: dict[str, Any] = computed(
                self.policy, self.reference, self.average, answers, parts, self.reads, config, loop.iteration
            )
        mine |= {"mask": answers.mask, "rewards": totals(config, answers.scores)}
        if self.bounds:
            mine["mask"] = torch.ones(mine["old"].shape, dtype=torch.bool)
        else:
            mine["sampler"] = answers.sampler_log_prob
        whole = everyones(mine)
        batch = TokenBatch(
            mask=whole.pop("mask"),
            group=torch.arange(sum(counts)).repeat_interleave(size),
            rewards=whole.pop("rewards"),
            old_log_prob=whole.pop("old"),
            sampler_log_prob=whole.pop("sampler", None),
            ref_log_prob=whole.pop("ref", None),
            extra=whole,
        )
        prompts = [name for names in gather_object([[row.name for row in answers.rows]]) for name in names]
        visits = {name: (int(n), float(m), float(s)) for name, (n, m, s) in loop.memory.get("visits", {}).items()}
        found = estimate(preset, batch, prompts=prompts, visits=visits)
        if found.visits:
            loop.memory["visits"] = {name: list(entry) for name, entry in found.visits.items()}
        if loop.iteration == 0 and not self.bounds:
            check_gap(found.metrics["sampler_gap_mean"])
        own = ours(found.batch, [count * size for count in counts], rank, mine["mask"].shape[1])
        return Estimated(own, found, updates)


def check_gap(gap: float) -> None:
    """Raise RuntimeError where sampler and trainer do not see the same."""
    if not gap <= SAMPLER_GAP:
        raise RuntimeError(
            f"the trainer and the sampler assign different log-probabilities to the same tokens: {gap:.3g} apart on "
            "average before any training. Look for another resizing of pictures, chat template, position ids or "
            "precision."
        )
