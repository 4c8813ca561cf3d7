"""Completions from a policy by transformers' `generate`: prompts and images computed once, shared by their groups.

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
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from genrl.vlm.policies.contract import uniforms
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
    cache, _ = policy.prefix(prompts)
    cache.batch_repeat_interleave(n)
    cache.crop(-1)  # `generate` wants a token to begin with: the prompt's last is computed again, in each row
    inputs = policy.inputs(prompts, row_of=group, pixels=False)
    uniform = uniforms(keys, n, sampling.max_new_tokens).to(policy.device)
    draw = _Draw(sampling.temperature, uniform, policy.forbidden)
    stop = sorted({*policy.stop_ids, *sampling.stop_ids})
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=policy.pad_id
    )
    sequences = _generate(policy.model, settings, draw, {**inputs, "past_key_values": cache})

    tokens = sequences[:, inputs["input_ids"].shape[1] :]
    ended = torch.isin(tokens, torch.tensor(stop, device=tokens.device))
    mask = ended.cumsum(1) - ended.long() == 0  # up to the first stop token, with it
    log_prob = torch.where(mask, torch.stack(draw.log_probs, 1), 0.0)
    ids = [row[:length] for row, length in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]
    finish: list[Finish] = ["stop" if row[-1] in stop else "length" for row in ids]
    texts: list[str] = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Completions(tokens, mask, log_prob, group.to(tokens.device), finish, texts)


def _generate(model: Any, settings: GenerationConfig, draw: _Draw, inputs: dict[str, Any]) -> Tensor:
    """`model.generate` without its makers' defaults (repetition penalty, top-p), which would fill the gaps."""
    makers, model.generation_config = model.generation_config, settings
    try:
        # what other processes do does not matter: in shards, each has gathered the weights before
        sequences: Tensor = model.generate(**inputs, logits_processor=LogitsProcessorList([draw]), synced_gpus=False)
    finally:
        model.generation_config = makers
    return sequences


class _Draw(LogitsProcessor):
    """Draws each row's token by that row's own number, and leaves `generate` no other choice."""

    def __init__(self, temperature: float, uniform: Tensor, forbidden: Tensor) -> None:
        self.temperature, self.uniform, self.forbidden = temperature, uniform, forbidden
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.float().index_fill(1, self.forbidden, IMPOSSIBLE)
        log_p = (logits / (self.temperature or 1.0)).log_softmax(-1)
        if self.temperature == 0:
            token = log_p.argmax(1, keepdim=True)
        else:
            cumulated = log_p.double().exp().cumsum(1)
            # right=True: never a token of probability 0, whose cumulated value is that of the one before it
            place = self.uniform[:, len(self.log_probs), None] * cumulated[:, -1:]
            token = torch.searchsorted(cumulated, place, right=True).clamp(max=log_p.shape[1] - 1)
        self.log_probs.append(log_p.gather(1, token)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)
