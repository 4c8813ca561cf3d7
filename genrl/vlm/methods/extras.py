"""What a recipe reads beside log-probabilities and rewards (`Preset.reads`): further forwards of the same tokens, and
numbers in texts, of this process's answers, without gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.token_weights import group_divergence, min_p_log_prob
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.folder import gathered
from genrl.vlm.policies.log_probs import IMPOSSIBLE
from genrl.vlm.policies.pictures import Change, degraded, masked, with_pictures
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.recipe.surrogates import LowProbability
from genrl.vlm.rollout.rollout import Answers, greedy_label, is_right, totals
from genrl_rewards.scorers.texts.expected import number_in
from genrl_rewards.scorers.texts.verifiable import answer_in

CHUNK = 64
"""Tokens whose whole distributions exist at a time."""
MASKED, PATCH = 0.5, 14
"""VPPO: share of patches that are black in the masked picture, and the side of one in pixels."""


class Average:
    """Moving average of the trained weights: `average <- d average + (1 - d) weights` every few optimiser steps."""

    def __init__(self, model: nn.Module, decay: float, every: int) -> None:
        self.model, self.decay, self.every, self.steps = model, decay, every, 0
        self.values = {
            # In float32: half a percent of a bfloat16 weight's change is below its spacing.
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._trained()
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def step(self) -> None:
        """After an optimiser step."""
        self.steps += 1
        if self.steps % self.every == 0:
            for name, parameter in self._trained():
                self.values[name].lerp_(parameter.detach().to(self.values[name].dtype), 1 - self.decay)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the model has the average's weights."""
        trained = {name: p.data for name, p in self._trained()}
        for name, parameter in self._trained():
            parameter.data = self.values[name].to(parameter.dtype)
        try:
            yield
        finally:
            for name, parameter in self._trained():
                parameter.data = trained[name]

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.values = {name: value.clone() for name, value in state["values"].items()}
        self.steps = state["steps"]


def changed_prompts(policy: Policy, answers: Answers, change: Change, *keys: int | str) -> list[Encoded]:
    """The questions with changed pictures, each by random numbers of its own."""
    return [
        policy.encode(with_pictures(row.prompt, change, np.random.default_rng(derive_seed(*keys, row.name))))
        for row in answers.rows
    ]


@torch.no_grad()
def replayed(
    policy: Policy,
    answers: Answers,
    parts: Sequence[Tensor],
    temperature: float,
    *,
    prompts: Sequence[Encoded] | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities, entropies) of all answers, [B, T] on the CPU, computed part by part (int64 rows); as wide as
    the policy's log-probabilities are, which may be estimates of a bound (BGPO). prompts: others than those that the
    answers are trained under, one for each question."""
    prompts, of_row = answers.asked if prompts is None else (prompts, answers.group)
    width = policy.samples or answers.tokens.shape[1]
    log_probs = torch.zeros(len(answers.tokens), width)
    entropies = torch.zeros(log_probs.shape) if entropy else None
    with gathered(policy):
        for rows in parts:
            replay = policy.log_probs(
                prompts,
                answers.tokens[rows],
                answers.mask[rows],
                group=of_row[rows],
                temperature=temperature,
                entropy=entropy,
            )
            log_probs[rows] = replay.log_prob.float().cpu()
            if entropies is not None and replay.entropy is not None:
                entropies[rows] = replay.entropy.float().cpu()
    return log_probs, entropies


def computed(
    policy: Policy,
    reference: Policy | None,
    average: Average | None,
    answers: Answers,
    parts: Sequence[Tensor],
    reads: Set[str],
    config: VLMConfig,
    iteration: int,
) -> dict[str, Tensor]:
    """Tensors of this process's answers by name: `old` and `ref` where they are read, and those of
    `TokenBatch.extra`."""
    temperature, tensors = config.generation.temperature, dict[str, Tensor]()
    if reads & {"old", "entropy"}:
        old, entropy = replayed(policy, answers, parts, temperature, entropy="entropy" in reads)
        tensors = {"old": old} | ({} if entropy is None else {"entropy": entropy})
    if "ref" in reads:
        if reference is not None:
            tensors["ref"] = replayed(reference, answers, parts, temperature)[0]
        else:
            with policy.reference():
                tensors["ref"] = replayed(policy, answers, parts, temperature)[0]
    if "proxy" in reads:
        tensors["proxy"] = without_noise(policy, answers, parts, temperature)
    if "masked_image" in reads:
        change = masked(MASKED, PATCH)
        changed = changed_prompts(policy, answers, change, config.seed, "masked", iteration)
        tensors["masked_image"] = replayed(policy, answers, parts, temperature, prompts=changed)[0]
    if "ema" in reads and average is not None:
        with average.weights():
            tensors["ema"] = replayed(policy, answers, parts, temperature)[0]
        tokens = zip(answers.tokens, answers.mask, strict=True)
        tensors["answer_mask"] = torch.stack([answer_tokens(policy, *row) for row in tokens])
        tensors["accuracy"] = answers.scores[config.reward_labels[0]].nan_to_num(nan=0.0)
    if "reference_probability" in reads:
        tensors["reference_probability"] = reference_probability(policy, answers, parts)
    if "divergence" in reads:
        with gathered(policy):
            rows = divergence(policy, answers, temperature)
        tensors["divergence"] = rows[answers.group]
    if "step" in reads:
        shaped: Any = policy
        tensors["step"] = shaped.kinds(answers.tokens)[1].cpu()
    return tensors | counted(answers, reads, config, iteration)


def counted(answers: Answers, reads: Set[str], config: VLMConfig, iteration: int) -> dict[str, Tensor]:
    """Tensors of this process's answers by name, as of `TokenBatch.extra`, for which no model is asked."""
    tensors: dict[str, Tensor] = {}
    if "right" in reads:
        first = answers.scores[config.reward_labels[0]]
        right = is_right(config, first).double()
        tensors["right"] = right.masked_fill(first.isnan(), math.nan)
    if "ids" in reads:
        tensors["ids"] = answers.tokens
    if "task" in reads:
        # numbers by name, which are the same in every process
        column = config.trainer.recipe(config).advantage.task
        names = [str(row.columns[column]) for row in answers.rows]
        tensors["task"] = torch.tensor([derive_seed("task", name) for name in names])[answers.group]
    if "greedy" in reads:
        tensors["greedy"] = totals(
            config, {label: answers.scores[greedy_label(label)] for label in config.reward_labels}
        )
    if "draw" in reads:
        shape, keys = (answers.mask.shape[1], answers.size), (config.seed, "draw", iteration)
        # Keyed by question, and by token before answer: which tokens Clip-Cov takes must not depend on the processes,
        # whose answers are padded to different lengths.
        draws = [torch.rand(shape, generator=generator(*keys, row.name)) for row in answers.rows]
        tensors["draw"] = torch.cat(draws, 1).T
    if "scores" in reads:
        numbers = [number_in(answer_in(text) or "") for text in answers.texts]
        tensors["scores"] = torch.tensor([math.nan if n is None else n for n in numbers], dtype=torch.float64)
    if "step" in reads:
        coarse = {label: answers.scores[f"{label}/coarse"] for label in config.reward_labels}
        tensors |= {"high": totals(config, coarse), "low": totals(config, answers.scores)}
    if "components" in reads:
        tensors["components"] = torch.stack([answers.scores[label] for label in config.reward_labels], 1)
        weights = torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64)
        tensors["component_weights"] = weights.repeat(len(tensors["components"]), 1)
    return tensors


@torch.no_grad()
def without_noise(policy: Policy, answers: Answers, parts: Sequence[Tensor], temperature: float) -> Tensor:
    """Log-probabilities [B, T] of the answers' tokens under the policy without its least likely tokens: Lp-Reg."""
    log_probs = torch.zeros(answers.mask.shape)
    head, (prompts, of_row) = policy.model.get_output_embeddings(), answers.asked
    with gathered(policy):
        for rows in parts:
            mask = answers.mask[rows]
            replay = policy.log_probs(prompts, answers.tokens[rows], mask, group=of_row[rows], temperature=temperature)
            states, tokens = (
                replay.states[mask.to(replay.states.device)],
                answers.tokens[rows][mask].to(replay.states.device),
            )
            values = [
                min_p_log_prob(allowed_logits(policy, head(part), temperature), chosen, kappa=LowProbability.noise)
                for part, chosen in zip(states.split(CHUNK), tokens.split(CHUNK), strict=True)
            ]
            log_probs[rows] = torch.zeros(mask.shape).masked_scatter(mask, torch.cat(values).float().cpu())
    return log_probs


def allowed_logits(policy: Policy, logits: Tensor, temperature: float) -> Tensor:
    """Logits [..., V] as the policy samples by them, in float32 or more: what stands for pictures is impossible."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return wide.index_fill(-1, policy.forbidden, IMPOSSIBLE)


def degraded_prompts(policy: Policy, answers: Answers, config: VLMConfig, iteration: int) -> list[Encoded]:
    """The questions with degraded pictures."""
    return changed_prompts(policy, answers, degraded, config.seed, "degraded", iteration)


@torch.no_grad()
def reference_probability(policy: Policy, answers: Answers, parts: Sequence[Tensor]) -> Tensor:
    """Mean probability of the tokens of the right answer, the column `answer`, float64 [B, 2]: after the reasoning of
    each row, 0 where it has no `<answer`, and after none. RLPR (arXiv 2506.18254)."""
    probability = torch.zeros(len(answers.texts), 2, dtype=torch.float64)
    first = torch.arange(0, len(answers.texts), answers.size)
    with gathered(policy):
        for rows in parts:
            probability[rows, 0] = likely(policy, answers, rows, after_reasoning=True)
        for rows in first.split(max(1, *map(len, parts), 1)):
            probability[rows, 1] = likely(policy, answers, rows, after_reasoning=False)
    probability[:, 1] = probability[first, 1].repeat_interleave(answers.size)
    return probability


def likely(policy: Policy, answers: Answers, rows: Tensor, *, after_reasoning: bool) -> Tensor:
    """Mean probability of the right answer's tokens in the place of these rows' own, [n]; 0 without such a place."""
    tokens, scored = [], []
    for k, number in zip(rows.tolist(), answers.group[rows].tolist(), strict=True):
        row, said = answers.rows[number], answers.tokens[k][answers.mask[k]]
        text = f"<answer> {row.columns['answer']} </answer>"
        right = answer_ids(row.prompt, text, policy.processor, policy.stop_ids)
        before = reasoning(policy, said) if after_reasoning else said[:0]
        tokens.append(torch.cat([said[:0] if before is None else before, right]))
        place = answer_tokens(policy, tokens[-1], torch.ones_like(tokens[-1]).bool())
        scored.append(place & (before is not None))
    mask = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True).bool()
    padded, kept = pad_sequence(tokens, batch_first=True), pad_sequence(scored, batch_first=True)
    log_prob = policy.log_probs(answers.prompts, padded, mask, group=answers.group[rows]).log_prob.double().cpu()
    return (log_prob.exp() * kept).sum(1) / kept.sum(1).clamp(min=1)


def reasoning(policy: Policy, tokens: Tensor) -> Tensor | None:
    """The tokens before the one in which the last `<answer` begins; None without one."""
    pieces = [policy.tokenizer.decode([token]) for token in tokens.tolist()]
    begin, ends = "".join(pieces).rfind("<answer"), np.cumsum([len(piece) for piece in pieces])
    return None if begin < 0 else tokens[: int((ends <= begin).sum())]


def answer_tokens(policy: Policy, tokens: Tensor, mask: Tensor) -> Tensor:
    """Which tokens [T] stand between the last `<answer>` and its end: GRPO-CARE reads how likely they are."""
    # Token by token: a token may lie across the tag, and characters are the only places that both have.
    pieces = [policy.tokenizer.decode([token]) for token in tokens[mask].tolist()]
    text, inside = "".join(pieces), torch.zeros(len(tokens), dtype=torch.bool)
    begin = text.rfind("<answer>")
    if begin < 0:
        return inside
    end = text.find("</answer>", begin)
    low, high, place = begin + len("<answer>"), end if end >= 0 else len(text), 0
    positions = mask.nonzero()[:, 0].tolist()
    for position, piece in zip(positions, pieces, strict=True):
        # A token that lies across the tag is no part of the answer.
        inside[position] = place >= low and place + len(piece) <= high and bool(piece)
        place += len(piece)
    return inside


@torch.no_grad()
def divergence(policy: Policy, answers: Answers, temperature: float, *, chunk: int = 16) -> Tensor:
    """`token_weights.group_divergence` of the answers to each prompt, [N, T] on the CPU, groups one by one.

    Whole distributions [G, chunk, V] exist for `chunk` positions at a time, without the forbidden ids.
    """
    tokens, mask, group = answers.tokens, answers.mask, answers.group
    head, divergences = policy.model.get_output_embeddings(), []
    ids = torch.arange(len(head.weight), device=policy.device)
    allowed = ids[~torch.isin(ids, policy.forbidden)]
    for number in range(len(answers.prompts)):
        at = (group == number).nonzero()[:, 0]
        valid = mask[at].to(policy.device).bool()
        chosen = torch.where(valid, tokens[at].to(policy.device), policy.pad_id)
        hidden, _, _ = policy.shared(answers.prompts, chosen, group[at])
        parts = []
        for start in range(0, tokens.shape[1], chunk):
            logits = head(hidden[:, start : start + chunk])[..., allowed].float() / temperature
            same = torch.zeros(len(at), dtype=torch.int64)
            parts.append(group_divergence(logits.log_softmax(-1), valid[:, start : start + chunk], same)[0])
        divergences.append(torch.cat(parts).cpu())
    return torch.stack(divergences)
