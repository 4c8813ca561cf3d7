"""One process of a run that trains a vision-language model: answers drawn, estimated together with those of the other
processes, and what is measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config.vlm import VLMConfig
from genrl.mdp.noise import generator
from genrl.runtime.loop import Loop
from genrl.vlm.data import Questions
from genrl.vlm.estimate import Estimate, estimate
from genrl.vlm.extras import Average, Needed, computed
from genrl.vlm.policy import Policy
from genrl.vlm.recipe import Preset
from genrl.vlm.rollout import Answers, draw, joined, order, padded, totals, worth
from genrl.vlm.token_batch import TokenBatch, micro_batches
from rewards.contract import Reward

SAMPLER_GAP = 0.1
"""Mean difference of log-probabilities between sampler and trainer above which something is wrong (spec 6.3)."""


PER_TOKEN = ("mask", "sampler", "old", "ref", "entropy", "masked_image", "ema", "answer_mask", "divergence")
"""Tensors [B, T]; others have a row's numbers."""


class Update(NamedTuple):
    """One optimiser step's share of an iteration.

    parts: int64 rows of this process, micro-batch by micro-batch. passes: those of the process that has most.
    rows, tokens, groups: of all processes together.
    """

    parts: list[Tensor]
    passes: int
    rows: int
    tokens: int
    groups: int


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
    preset: Preset
    need: Needed
    loop: Loop
    policy: Policy
    reference: Policy | None
    average: Average | None
    opened: Mapping[str, Reward]
    questions: Questions

    def draw(self) -> tuple[Answers, dict[str, float]]:
        """This process's groups of the iteration, and figures of all processes' answers, those left out included."""
        config, loop = self.config, self.loop
        wanted, processes = config.generation.prompts_per_iteration, loop.accelerator.num_processes
        share, rank = wanted // processes, loop.accelerator.process_index
        drawn: list[Answers] = []
        kept: list[Answers] = []
        mine: list[int] = [0] * processes
        for _ in range(1 + config.trainer.resample):
            loop.phase("answering", share * config.generation.group_size)
            first = loop.memory.get("questions", 0)
            numbers = order(len(self.questions), config.seed, first, wanted)[rank * share : (rank + 1) * share]
            with loop.timed("rollout"):
                found = draw(
                    self.policy,
                    config,
                    self.opened,
                    [self.questions[number] for number in numbers],
                    (config.seed, "answers", loop.iteration, first),
                    advance=loop.advance_or_leave,
                )
            loop.leave_if_asked()
            loop.memory["questions"] = first + wanted
            drawn.append(found)
            kept.append(found.chosen(worth(config, found)))
            mine = [a + b for a, b in zip(mine, gather_object([len(kept[-1].rows)]), strict=True)]
            if sum(mine) >= wanted:
                break
        # of more groups than wanted, the first of each process are left out last
        before, room = sum(mine[:rank]), wanted
        own = joined(kept)
        answers = own.chosen(list(range(max(0, min(mine[rank], room - before)))))
        return answers, self._answered(joined(drawn), len(drawn), min(sum(mine), wanted) / (wanted * len(drawn)))

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
        parts, updates = self._dealt(answers, counts)
        loop.phase("estimating", 0)
        with loop.timed("estimate"):
            mine: dict[str, Any] = computed(
                self.policy, self.reference, self.average, answers, parts, self.need, config, loop.iteration
            )
        mine |= {"mask": answers.mask, "sampler": answers.sampler_log_prob, "rewards": totals(config, answers.scores)}
        every = gather_object([{"tensors": mine, "prompts": [row.name for row in answers.rows]}])
        longest = max(one["tensors"]["mask"].shape[1] for one in every)
        whole = {
            name: torch.cat([padded(v, longest) if name in PER_TOKEN else v for v in values])
            for name in mine
            if (values := [one["tensors"][name] for one in every])
        }
        size = config.generation.group_size
        batch = TokenBatch(
            mask=whole.pop("mask"),
            group=torch.arange(sum(counts)).repeat_interleave(size),
            rewards=whole.pop("rewards"),
            old_log_prob=whole.pop("old"),
            sampler_log_prob=whole.pop("sampler"),
            ref_log_prob=whole.pop("ref", None),
            extra=whole,
        )
        prompts = [name for one in every for name in one["prompts"]]
        visits = {name: (int(n), float(m), float(s)) for name, (n, m, s) in loop.memory.get("visits", {}).items()}
        found = estimate(self.preset, batch, prompts=prompts, visits=visits)
        if found.visits:
            loop.memory["visits"] = {name: list(entry) for name, entry in found.visits.items()}
        gap = found.metrics["sampler_gap_mean"]
        if loop.iteration == 0 and not gap <= SAMPLER_GAP:
            raise RuntimeError(
                f"the trainer scores the sampler's tokens otherwise: log-probabilities differ by {gap:.3g} on average "
                "before any training. Look for another resizing of pictures, chat template, position ids or precision."
            )
        first = sum(counts[:rank]) * size
        own = found.batch.select(torch.arange(first, first + counts[rank] * size))
        length = answers.mask.shape[1]
        own = _cut(own, length)
        rows = torch.arange(counts[rank] * size)
        return Estimated(replace(own, extra={**own.extra, "row": rows}), found, updates)

    def _dealt(self, answers: Answers, counts: Sequence[int]) -> tuple[list[Tensor], list[Update]]:
        """This process's rows in micro-batches, and the updates that they belong to: whole groups each, in an order
        that the seed decides, the same for any number of processes."""
        config, rank, size = self.config, self.loop.accelerator.process_index, self.config.generation.group_size
        bare = TokenBatch(answers.mask, answers.group, extra={"row": torch.arange(len(answers.texts))})
        lengths = gather_object([answers.mask.sum(1).reshape(len(answers.rows), size).sum(1)])  # tokens of each group
        tokens = torch.cat(lengths)
        ends = torch.tensor(counts).cumsum(0)
        shuffled = torch.randperm(sum(counts), generator=generator(config.seed, "updates", self.loop.iteration))
        updates = []
        for some in shuffled.tensor_split(min(config.trainer.updates, sum(counts))):
            owner = torch.bucketize(some, ends, right=True)
            own = (some[owner == rank] - sum(counts[:rank])).sort().values
            rows = (own[:, None] * size + torch.arange(size)).flatten()
            micro = config.trainer.micro_batch or len(some) * size
            made = [p.extra["row"] for p in micro_batches(self.preset, bare.select(rows), micro)] if len(rows) else []
            updates.append(Update(made, 0, len(some) * size, int(tokens[some].sum()), len(some)))
        most = [max(lengths) for lengths in zip(*gather_object([[len(u.parts) for u in updates]]), strict=True)]
        updates = [update._replace(passes=passes) for update, passes in zip(updates, most, strict=True)]
        return [part for update in updates for part in update.parts], updates


def _cut(batch: TokenBatch, length: int) -> TokenBatch:
    """Without the padding that other processes' longer answers brought."""

    def short(value: Tensor | None) -> Tensor | None:
        return value[:, :length] if value is not None and value.dim() == 2 else value  # [B, 1] stays as it is

    return replace(
        batch,
        mask=batch.mask[:, :length],
        old_log_prob=short(batch.old_log_prob),
        sampler_log_prob=short(batch.sampler_log_prob),
        ref_log_prob=short(batch.ref_log_prob),
        advantage=short(batch.advantage),
        weight=short(batch.weight),
        extra={name: value[:, :length] if name in PER_TOKEN else value for name, value in batch.extra.items()},
    )
