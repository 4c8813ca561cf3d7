"""Completions from a policy, token by token: prompts and images computed once, shared by their groups.

A sample is a function of the weights, its prompt and its key: each has uniform numbers of its own, one per token, and
the token is where the number falls in the cumulated probabilities. What else is in the batch enters by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.vlm.policies.contract import chosen, uniforms
from genrl.vlm.policies.folder import gathered
from genrl.vlm.policies.log_probs import IMPOSSIBLE
from genrl.vlm.policies.policy import Encoded, Policy

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the most probable token each time, for evaluation; its log-probabilities are at temperature 1.

    stop_ids: further tokens that end an answer, beside the policy's own.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completions:
    """n answers to each of N prompts, B = N n rows, those of a prompt together.

    tokens int64 [B, T]; mask bool [B, T]: the answer, its stop token included; log_prob float32 [B, T]: of the sampler
    (at its temperature, without the forbidden ids), 0 where masked; group int64 [B]: number of the prompt;
    finish: per row, "stop", or "length" where `max_new_tokens` cut it; texts: without special tokens.
    """

    tokens: Tensor
    mask: Tensor
    log_prob: Tensor
    group: Tensor
    finish: list[Finish]
    texts: list[str]


def uses_engine(policy: Any) -> bool:
    """Whether an engine with a copy of its weights answers for the policy."""
    return getattr(policy, "sampler", None) is not None


def answering(policy: Any) -> AbstractContextManager[None]:
    """Within the block the policy's engine has its weights (`Sampler.ready`), or, where the policy samples itself, this
    process has all of them (`gathered`). All processes enter it together."""
    context: AbstractContextManager[None] = policy.sampler.ready() if uses_engine(policy) else gathered(policy)
    return context


def weights_changed(policy: Any) -> None:
    """Tell an engine with a copy of the weights, where there is one, outside of an optimiser's steps."""
    if uses_engine(policy):
        policy.sampler.stepped()


@torch.no_grad()
def generate(
    policy: Policy, prompts: Sequence[Encoded], n: int, sampling: Sampling, keys: Sequence[Sequence[int | str]]
) -> Completions:
    """n answers to each prompt, by the policy's sampler where it has one. keys: one per prompt, such as (seed,
    iteration, name of the prompt); the sample's number is added to it.

    Raises ValueError, before any work, for a prompt that does not fit into the model's context with `max_new_tokens`,
    and for numbers that make no sense.
    """
    if n < 1 or sampling.max_new_tokens < 1 or sampling.temperature < 0 or not prompts:
        raise ValueError(f"nothing to sample: {len(prompts)} prompts, n = {n}, {sampling}")
    if len(keys) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many keys, got {len(keys)}")
    policy.check_room(prompts, sampling.max_new_tokens)
    if policy.sampler is not None:
        completions: Completions = policy.sampler.generate(prompts, n, sampling, keys)
        return completions

    group = torch.arange(len(prompts)).repeat_interleave(n)
    stop = {*policy.stop_ids, *sampling.stop_ids}
    numbers = uniforms(keys, n, sampling.max_new_tokens).to(policy.device)
    tokens, log_prob, mask = _continued(policy, prompts, group, numbers, sampling.temperature, sorted(stop))
    ids = [row[:length] for row, length in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]
    finish: list[Finish] = ["stop" if row[-1] in stop else "length" for row in ids]
    texts: list[str] = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Completions(tokens, mask, log_prob, group.to(tokens.device), finish, texts)


def _continued(
    policy: Policy, prompts: Sequence[Encoded], group: Tensor, uniform: Tensor, temperature: float, stop: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [B, T], log_prob float32 [B, T] and mask [B, T] of answers to prompts[group], each up to the first
    of the ids `stop`. uniform float64 [B, most]: each row's own numbers. The model is called as in `Policy.shared`."""
    tokens = torch.full(uniform.shape, policy.pad_id, device=policy.device)
    log_prob = torch.zeros(uniform.shape, device=policy.device)
    mask = torch.zeros(uniform.shape, dtype=torch.bool, device=policy.device)
    head: Any = policy.model.get_output_embeddings()
    ends = torch.tensor(stop, device=policy.device)
    cache, last = policy.prefix(prompts)
    going, row_of = torch.arange(len(tokens), device=policy.device), group.to(policy.device)
    cache.batch_select_indices(row_of)
    states, inputs = last[row_of], policy.inputs(prompts, tokens, row_of=group, pixels=False)
    first = inputs["input_ids"].shape[1] - tokens.shape[1]
    for step in range(tokens.shape[1]):
        token, log_p = _next_token(head(states), uniform[going, step], temperature, policy.forbidden)
        tokens[going, step], log_prob[going, step], mask[going, step] = token, log_p, True
        left = ~torch.isin(token, ends)
        count = int(left.sum())
        if count == 0 or step + 1 == tokens.shape[1]:
            break
        if count < len(left):  # an answer that has ended takes no part in further steps
            token, going = token[left], going[left]
            cache.batch_select_indices(left.nonzero()[:, 0])
            inputs = {name: value[..., left, :] for name, value in inputs.items()}
        place = first + step
        new = {name: value[..., place : place + 1] for name, value in inputs.items()}
        new |= {"input_ids": token[:, None], "attention_mask": inputs["attention_mask"][:, : place + 1]}
        states = policy.body(**new, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
    return tokens[:, : step + 1], log_prob[:, : step + 1], mask[:, : step + 1]


def _next_token(logits: Tensor, uniform: Tensor, temperature: float, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """(token, its log-probability) [B] of each row of `logits` [B, V] at its own number `uniform` [B]; at temperature 0
    the most probable token."""
    possible = logits.float().index_fill(1, forbidden, IMPOSSIBLE)
    log_p = (possible / (temperature or 1.0)).log_softmax(-1)
    token = chosen(log_p, uniform if temperature else None)
    return token, log_p.gather(1, token[:, None])[:, 0]
