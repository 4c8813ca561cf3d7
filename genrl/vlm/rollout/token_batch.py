"""The tensors of a rollout batch of token policies, and its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Completions [B, T] of a rollout batch, or some rows of it. Rows of one group have one number in `group` [B].

    The caller gives: mask, group, rewards [B] (NaN = no score), and, where a preset reads them, the log-probabilities
    and `extra` (row-indexed tensors by name; `Choice.tensors` says which choice reads which).
    old_log_prob None: strictly on policy, one update per rollout, `old = log_prob.detach()`.
    `estimate` fills in advantage [B] or [B, T], weight [B, 1] or [B, T], group_size [B], and the totals of the step:
    rows, tokens, groups. For it, prompts has one name per group, in the order of group numbers, and visits what DCPO
    knows of each, which its estimator brings up to date.
    """

    mask: Tensor
    group: Tensor
    rewards: Tensor | None = None
    log_prob: Tensor | None = None
    old_log_prob: Tensor | None = None
    sampler_log_prob: Tensor | None = None
    ref_log_prob: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    advantage: Tensor | None = None
    weight: Tensor | None = None
    group_size: Tensor | None = None
    rows: int | None = None
    tokens: int | None = None
    groups: int | None = None
    prompts: Sequence[str] | None = None
    visits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, length = self.mask.shape
        shapes = {"group": self.group, "rewards": self.rewards, "group_size": self.group_size}
        wrong = {name: list(v.shape) for name, v in shapes.items() if v is not None and v.shape != (rows,)}
        for name in ("log_prob", "old_log_prob", "sampler_log_prob", "ref_log_prob"):
            value = getattr(self, name)
            if value is not None and value.shape != (rows, length):
                wrong[name] = list(value.shape)
        wrong |= {f"extra[{name!r}]": list(v.shape) for name, v in self.extra.items() if len(v) != rows}
        if wrong:
            raise ValueError(f"the mask has {rows} rows of {length} tokens; of other shapes are {wrong}")

    @property
    def number(self) -> int:
        """The rows of the step, or those of this batch before it was estimated."""
        return self.rows or len(self.mask)

    @property
    def number_of_groups(self) -> int:
        """The groups of the step, or those of this batch before it was estimated."""
        return self.groups or len(self.group.unique())

    @property
    def scored(self) -> Tensor:
        """The tokens of rows that have a reward, bool [B, T]."""
        return self.mask.bool() if self.rewards is None else self.mask.bool() & ~self.rewards.isnan()[:, None]

    @property
    def terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(log_prob [B, T], old_log_prob [B, T], advantage [B] or [B, T], mask): what a surrogate is a function of."""
        log_prob = self.read("log_prob", "the loss")
        # strictly on policy, the old policy is the present one without its gradient
        old = log_prob.detach() if self.old_log_prob is None else self.old_log_prob
        return log_prob, old, self.read("advantage", "the loss"), self.mask

    def scores(self, reader: str) -> Tensor:
        """The rewards [B]."""
        return self.read("rewards", reader)

    def read(self, name: str, reader: str) -> Tensor:
        """A field, or one of the extra tensors. Raises ValueError where it is missing, naming the reader."""
        value: Tensor | None = getattr(self, name) if name in self.__dataclass_fields__ else self.extra.get(name)
        if value is None:
            where = name if name in self.__dataclass_fields__ else f"extra[{name!r}]"
            raise ValueError(
                f"{reader} reads {where}, which this batch does not have (extra: {sorted(self.extra)}); "
                "`Preset.reads` lists what a method asks for"
            )
        return value

    def with_log_prob(self, log_prob: Tensor, extra: Mapping[str, Tensor] | None = None) -> TokenBatch:
        """A batch with the current policy's log-probabilities [B, T], and further tensors of this update ([value])."""
        return replace(self, log_prob=log_prob, extra={**self.extra, **(extra or {})})

    def weighted(self, weight: Tensor | None) -> TokenBatch:
        """A batch with these weights of tokens, without gradient and as precise as the log-probabilities."""
        like = self.read("log_prob", "the loss")
        return replace(self, weight=None if weight is None else weight.detach().to(like.dtype))

    def select(self, rows: Tensor) -> TokenBatch:
        """Rows by their int64 indices; the totals of the step stay."""

        def chosen(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows]

        return replace(
            self,
            mask=self.mask[rows],
            group=self.group[rows],
            rewards=chosen(self.rewards),
            log_prob=chosen(self.log_prob),
            old_log_prob=chosen(self.old_log_prob),
            sampler_log_prob=chosen(self.sampler_log_prob),
            ref_log_prob=chosen(self.ref_log_prob),
            extra={name: value[rows] for name, value in self.extra.items()},
            advantage=chosen(self.advantage),
            weight=chosen(self.weight),
            group_size=chosen(self.group_size),
        )


def micro_batches(batch: TokenBatch, size: int, *, whole_groups: bool = False) -> list[TokenBatch]:
    """A batch in parts of at most `size` rows, in order. whole_groups: each in one part, for a loss that compares them.

    Raises ValueError where such a group is larger than `size`.
    """
    if not whole_groups:
        rows = torch.arange(len(batch.mask), device=batch.mask.device)
        return [batch.select(rows[start : start + size]) for start in range(0, len(rows), size)]
    parts: list[list[int]] = [[]]
    for number in sorted(set(batch.group.tolist())):
        members = (batch.group == number).nonzero()[:, 0].tolist()
        if len(members) > size:
            raise ValueError(
                f"the loss compares the {len(members)} completions of group {number} in one micro-batch, which holds "
                f"{size}: raise the micro-batch to {len(members)}, or use smaller groups"
            )
        if len(parts[-1]) + len(members) > size:
            parts.append([])
        parts[-1] += members
    return [batch.select(torch.tensor(part, device=batch.mask.device)) for part in parts]
