"""Optimiser steps of methods over tokens: what a loss reads of a micro-batch, the rows of an iteration shared out to
updates and micro-batches, the rows of all processes together, the loss of a micro-batch, and what it measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from accelerate.utils import gather_object
from pydantic import TypeAdapter
from torch import Tensor

from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import CAUSES, Loss, Results, deal, descend, require_on_policy
from genrl.runtime.weights import state
from genrl.vlm.policies.policy import Encoded
from genrl.vlm.policies.processor import Tokens
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.rollout.token_batch import TokenBatch, micro_batches

TOTALS = ("rows", "tokens", "groups")
PRESET: TypeAdapter[Preset] = TypeAdapter(Preset)


@dataclass(frozen=True)
class Asked:
    """What the policy is called with. group int64 [B]: which of the prompts each answer is to; changed: the same
    prompts with degraded pictures, where the loss reads them. preset: the method of this iteration, None where it is
    not made of named functions. round: see `contract.Estimating`."""

    prompts: Sequence[Encoded]
    group: Tensor
    temperature: float
    preset: Preset | None = None
    changed: Sequence[Encoded] | None = None
    round: tuple[int | str, ...] = ()

    def dumped(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON, tensors): the prompts that are asked alone."""
        # The prompts that this micro-batch asks: pictures of all others would make the dump many times as large.
        numbers, group = torch.unique(self.group, return_inverse=True)
        used = [self.prompts[n] for n in numbers.tolist()]
        changed = None if self.changed is None else [self.changed[n] for n in numbers.tolist()]
        tree = {
            "prompts": [tree_of(prompt) for prompt in used],
            "changed": None if changed is None else [tree_of(prompt) for prompt in changed],
            "group": group,
        }
        tensors, packed = state.pack(tree)
        preset = None if self.preset is None else PRESET.dump_python(self.preset, mode="json")
        info = {"asked": packed, "temperature": self.temperature, "preset": preset, "round": self.round}
        return info, {f"inputs/{name}": tensor for name, tensor in tensors.items()}

    @classmethod
    def from_dump(cls, info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self | None:
        """The reverse of `dumped`; None for a micro-batch without answers."""
        if "asked" not in info:
            return None
        inputs = {n.removeprefix("inputs/"): value for n, value in tensors.items() if n.startswith("inputs/")}
        tree = state.unpack(inputs, info["asked"])
        changed = None if tree["changed"] is None else [encoded_of(prompt) for prompt in tree["changed"]]
        preset = None if info["preset"] is None else PRESET.validate_python(info["preset"])
        prompts = [encoded_of(prompt) for prompt in tree["prompts"]]
        return cls(prompts, tree["group"], info["temperature"], preset, changed, tuple(info["round"]))


def tree_of(prompt: Encoded) -> dict[str, Any]:
    """A prompt as `state.pack` takes it."""
    tokens = {"ids": prompt.tokens.ids, "kinds": prompt.tokens.kinds, "pixels": prompt.tokens.pixels}
    return {"tokens": tokens, "positions": prompt.positions, "next": prompt.next_position, "where": prompt.where}


def encoded_of(tree: Mapping[str, Any]) -> Encoded:
    """The reverse of `tree_of`."""
    return Encoded(Tokens(**tree["tokens"]), tree["positions"], tree["next"], tree["where"])


def token_tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """The rows of a batch as tensors by name, for `token_batch`."""
    tensors: dict[str, Tensor] = {f"extra/{name}": value for name, value in batch.extra.items()}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif isinstance(value, int):
            tensors[field.name] = torch.tensor(value)
    return tensors


def token_batch(tensors: Mapping[str, Tensor]) -> TokenBatch:
    """The reverse of `token_tensors`; other names are left out. Rows are scored on the CPU."""
    names = {field.name for field in fields(TokenBatch)}
    named: dict[str, Any] = {name: value.cpu() for name, value in tensors.items() if name in names}
    named |= {name: int(value) for name, value in named.items() if name in TOTALS}
    extra = {name.removeprefix("extra/"): value.cpu() for name, value in tensors.items() if name.startswith("extra/")}
    return TokenBatch(**named, extra=extra)


PER_TOKEN = (
    "mask", "sampler", "old", "ref", "entropy", "masked_image", "ema", "answer_mask", "divergence",
    "credit", "returns", "old_value", "step", "draw", "turn", "turn_reward", "matched",
    "kl_cov", "proxy", "held", "height", "ids",
)  # fmt: skip
"""Tensors that are [B, T] where they have two dimensions; others have a row's numbers."""


class Update(NamedTuple):
    """One optimiser step's share of an iteration.

    parts: int64 rows of this process, micro-batch by micro-batch. most: the parts of the process that has most.
    rows, tokens, groups: of all processes together.
    """

    parts: list[Tensor]
    most: int
    rows: int
    tokens: int
    groups: int

    @property
    def passes(self) -> list[Tensor]:
        """The parts, then an empty one for each that only another process has."""
        return [*self.parts, *[torch.zeros(0, dtype=torch.int64)] * (self.most - len(self.parts))]

    def part(self, batch: TokenBatch, rows: Tensor) -> TokenBatch:
        """Some rows of a batch, with the totals of this update."""
        return replace(batch.select(rows), rows=self.rows, tokens=self.tokens, groups=self.groups)


def updates_of(
    mask: Tensor,
    size: int,
    *,
    updates: int,
    micro: int | None,
    seed: int,
    loop: Loop,
    whole_groups: bool = False,
) -> list[Update]:
    """The updates of this process's rows, mask [B, T], whole groups of `size` each, in an order that the seed decides,
    the same for any number of processes. whole_groups: a micro-batch has no part of a group."""
    rank, own_groups = loop.process.accelerator.process_index, len(mask) // size
    group = torch.arange(own_groups).repeat_interleave(size)
    bare = TokenBatch(mask, group, extra={"row": torch.arange(len(mask))})
    lengths = gather_object([mask.sum(1).reshape(own_groups, size).sum(1)])  # tokens of each group
    tokens = torch.cat(lengths)
    counts = [len(tokens_of) for tokens_of in lengths]
    all_updates = []
    # by groups of all processes, so that their number changes no update
    for dealt in deal(counts, rank, min(updates, len(tokens)), seed, "updates", loop.iteration):
        number = len(dealt.every)
        # Sorted, so that answers of similar place stay together; the order within an update changes no sum but its
        # rounding.
        rows = (dealt.mine.sort().values[:, None] * size + torch.arange(size)).flatten()
        at_once = micro or number * size
        # cut by a batch of masks alone: what is estimated later is cut in the same places
        parts = micro_batches(bare.select(rows), at_once, whole_groups=whole_groups) if len(rows) else []
        tokens_here = int(tokens[dealt.every].sum())
        all_updates.append(Update([part.extra["row"] for part in parts], 0, number * size, tokens_here, number))
    # Where weights are in shards every process makes as many passes as the busiest.
    most = [max(counts) for counts in zip(*gather_object([[len(u.parts) for u in all_updates]]), strict=True)]
    return [update._replace(most=number) for update, number in zip(all_updates, most, strict=True)]


def batch_of_all(mine: Mapping[str, Tensor], size: int) -> TokenBatch:
    """The rows of all processes, one process after the other, padded to the longest, in groups of `size`. What is no
    field of the batch is in `extra`."""
    every = gather_object([dict(mine)])
    longest = max(rows_of["mask"].shape[1] for rows_of in every)
    joint = {
        name: torch.cat(
            [padded(rows_of[name], longest) if _per_token(name, rows_of[name]) else rows_of[name] for rows_of in every]
        )
        for name in mine
    }
    mask = joint.pop("mask")
    return TokenBatch(
        mask=mask,
        group=torch.arange(len(mask)) // size,
        rewards=joint.pop("rewards", None),
        old_log_prob=joint.pop("old", None),
        sampler_log_prob=joint.pop("sampler", None),
        ref_log_prob=joint.pop("ref", None),
        extra=joint,
    )


def ours(batch: TokenBatch, counts: Sequence[int], rank: int, length: int) -> TokenBatch:
    """This process's rows (`counts`: of each process), with their numbers as extra["row"], and without the padding that
    other processes' longer answers brought."""
    first = sum(counts[:rank])
    local = batch.select(torch.arange(first, first + counts[rank]))

    def short(value: Tensor | None) -> Tensor | None:
        return value[:, :length] if value is not None and value.dim() == 2 else value  # [B, 1] stays as it is

    extra = {name: value[:, :length] if _per_token(name, value) else value for name, value in local.extra.items()}
    return replace(
        local,
        mask=local.mask[:, :length],
        old_log_prob=short(local.old_log_prob),
        sampler_log_prob=short(local.sampler_log_prob),
        ref_log_prob=short(local.ref_log_prob),
        advantage=short(local.advantage),
        weight=short(local.weight),
        extra=extra | {"row": torch.arange(counts[rank])},
    )


def padded(values: Tensor, length: int) -> Tensor:
    """[B, T] -> [B, length], with zeros on the right. Raises ValueError where T is more."""
    if values.shape[1] > length:
        raise ValueError(f"values of {list(values.shape)} tokens cannot be padded to {length}: some would be lost")
    return torch.nn.functional.pad(values, (0, length - values.shape[1]))


def _per_token(name: str, value: Tensor) -> bool:
    return name in PER_TOKEN and value.dim() == 2


ON_POLICY = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""How far a log-probability may be from that before the update where nothing was trained yet."""

NAMES = {
    "entropy": "entropy/sampled",
    "policy_entropy": "entropy/policy",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "clipped": "ratio/clipped",
    "kl_k2": "kl",
    "kl_k3": "kl",
    "kl_k3_clamped": "kl",
    "drift": "ratio/drift",
}
"""From what `policy_loss` measures to the catalogue of metrics."""
NORMS = {"policy": "grad_norm", "critic": "grad_norm/critic"}
"""The same, from groups of parameters to the norms of their gradients."""
EVIDENCE = ("loss", "log_prob")
"""What a loss returns beside its metrics."""


def update(
    loop: Loop,
    settings: Any,
    policy: Any,
    one: Update,
    recorded: Callable[[Update, Tensor], Recorded],
    loss: Loss,
    *,
    dtype: torch.dtype,
    groups: Sequence[str] = ("policy",),
    idle: Callable[[], Tensor] | None = None,
) -> dict[str, float]:
    """One optimiser step. The loss is the sum of those of the micro-batches of all processes.

    recorded: what the loss of some of this process's rows is made of. policy: what the loss is called with. groups: of
    parameters that are stepped. idle: as of `descend`.
    """
    fresh = loop.updates == 0  # nothing was trained yet: both forward passes must agree
    sums: dict[str, float] = defaultdict(float)
    most, error, num_tokens = 0.0, 0.0, 0
    figures: dict[str, float] = {}

    def prepare(rows: Tensor) -> Recorded | None:
        return recorded(one, rows) if len(rows) else None

    def measure(rows: Tensor, results: Results, given: Recorded) -> None:
        nonlocal most, error, num_tokens
        mask = given["mask"]
        number = int(mask.sum())
        if number:
            old = given["old_log_prob"] if "old_log_prob" in given else results["log_prob"].detach()
            apart = (results["log_prob"].detach() - old)[mask]
            error = max(error, float(apart.abs().max()) if fresh else 0.0)
            sums["drift"] -= float(apart.sum())
        for name in [name for name in results if name not in EVIDENCE]:
            value = float(results[name])
            if name == "ratio_max":
                most = max(most, value)
            else:  # parts of the loss add up; the others are means over the part's tokens
                sums[name] += value * (1 if name.startswith("loss/") else number)
        num_tokens += number
        sums["loss"] += float(results["loss"].detach())

    def agree() -> None:
        figures.update(_joint(sums, most, error, num_tokens))
        # Before the step, in all processes: an update on wrong ratios must not reach the weights.
        check_on_policy(figures.pop("error"), dtype)

    norms = descend(
        loop, settings, policy, one.passes, prepare, loss,
        groups=groups, done=len, measure=measure, idle=idle, before_step=agree,
    )  # fmt: skip
    return figures | {NORMS[name]: norm for name, norm in norms.items()}


def _joint(sums: dict[str, float], most: float, error: float, seen: int) -> dict[str, float]:
    every = gather_object([{"sums": dict(sums), "most": most, "error": error, "seen": seen}])
    tokens = max(1, sum(process_sums["seen"] for process_sums in every))
    figures = {"error": max(process_sums["error"] for process_sums in every)}
    for name in dict.fromkeys(name for process_sums in every for name in process_sums["sums"]):
        total = sum(process_sums["sums"].get(name, 0.0) for process_sums in every)
        mean = total if name == "loss" or name.startswith("loss/") else total / tokens
        figures[NAMES.get(name, name)] = mean
    if "ratio/mean" in figures:
        figures["ratio/max"] = max(process_sums["most"] for process_sums in every)
    return figures


def check_on_policy(error: float, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the first update's log-probabilities are those that its ratios compare with."""
    require_on_policy(error, ON_POLICY[dtype], "the log-probability of a token of the answers", causes=CAUSES)
