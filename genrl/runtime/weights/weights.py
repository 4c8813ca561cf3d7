"""What is trained, and its named snapshots: the reference, the old policy, the average for evaluation.

One mechanism serves them all: a snapshot is a list of tensors beside the trainable parameters, exchanged with them by
pointer for the length of a `with` block. With LoRA that is a second copy of the adapter, never of the base weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from genrl.config.sections import LARGEST_COPY
from genrl.runtime.weights.sharding import Shares, like

AVERAGE = "average"
REFERENCE = "reference"
FOLLOWING = "following"
"""A reference that a method has moved (GARDO); a snapshot that is checkpointed, unlike `REFERENCE`."""
LENT = "lent"


def result(saved: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The weights that a checkpoint's tensors are judged and handed over by: the average, where the run keeps one."""
    return saved.get(f"snapshot-{AVERAGE}", saved["weights"])


def put_back(parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], path: object) -> None:
    """Copy saved weights into a model. Raises ValueError where they are not the model's. path: of the message."""
    if saved.keys() != parameters.keys():
        odd = sorted(saved.keys() ^ parameters.keys())
        raise ValueError(f"{path} holds the weights of another model: {', '.join(odd[:4])} are in one of them only")
    for name, parameter in parameters.items():
        parameter.data.copy_(saved[name])


class Weights:
    """The trained parameters of a run by name, float32, and their snapshots.

    is_lora: they are adapters. in_step: all processes make their passes through the model together. reference: context
    in which the model is the one training began from; None = the snapshot `reference`, which has to be taken before the
    first update.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        is_lora: bool = False,
        in_step: bool = False,
        reference: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.named = dict(named)
        self.is_lora, self.in_step = is_lora, in_step
        self.is_sharded = any(isinstance(p, DTensor) for p in self.named.values())
        """Whether each process holds a share of them (FSDP)."""
        self.by_copy = self.is_sharded
        """Whether snapshots are exchanged by copies: FSDP gathers from memory of its own, and CUDA graphs read where
        they were recorded; a change of pointer reaches neither."""
        self.snapshots: dict[str, dict[str, Tensor]] = {}
        self._reference = reference

    @property
    def refers_to_snapshot(self) -> bool:
        """Whether `reference` is a snapshot, to be taken before the first update."""
        return self._reference is None

    @property
    def can_be_copied(self) -> bool:
        """Whether an iteration keeps a copy of all that it changes, so that it can be undone."""
        return self.is_lora or (not self.is_sharded and self.num_parameters <= LARGEST_COPY)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def snapshot(self, name: str) -> None:
        """Keep a copy of the present values under `name` (an older one of that name is replaced); of the average in
        float32 at least: in less its small steps would be lost."""
        values = {key: p.detach().clone() for key, p in self.named.items()}
        if name == AVERAGE:
            values = {key: value.to(torch.promote_types(value.dtype, torch.float32)) for key, value in values.items()}
        self.snapshots[name] = values

    @torch.no_grad()
    def take(self, name: str) -> None:
        """The present values become those of snapshot `name`, which stays."""
        self._fill(self.snapshots[name])

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """snapshot <- decay * snapshot + (1 - decay) * present values."""
        snapshot = list(self.snapshots[name].values())
        now = [p.detach().to(old.dtype) for p, old in zip(self.parameters, snapshot, strict=True)]
        torch._foreach_lerp_(snapshot, now, 1.0 - decay)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within the block the models run with snapshot `name`; by pointer, without copies, unless `by_copy`.

        To be left before the backward pass of a forward pass that was made outside of it.
        """
        snapshot = self.snapshots[name]
        if self.by_copy:
            with self._exchanged(snapshot):
                yield
            return
        present = {key: p.data for key, p in self.named.items()}
        for key, p in self.named.items():
            p.data = snapshot[key].to(p.dtype)
        try:
            yield
        finally:
            for key, p in self.named.items():
                # What was trained within the block is the snapshot's; a rounded copy (of the average) must not replace
                # it.
                if snapshot[key].dtype == p.dtype:
                    snapshot[key] = p.data
                p.data = present[key]

    @contextmanager
    def lent(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the models run with these values, wherever they are."""
        # As a snapshot, so that one mechanism, by pointer or by copy, serves both.
        self.snapshots[LENT] = {key: values[key].to(p.device, p.dtype) for key, p in self.named.items()}
        try:
            with self.use(LENT):
                yield
        finally:
            del self.snapshots[LENT]

    @contextmanager
    def _exchanged(self, kept: Mapping[str, Tensor]) -> Iterator[None]:
        present = {key: p.detach().clone() for key, p in self.named.items()}
        self._fill(kept)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, p in self.named.items():
                    if kept[key].dtype == p.dtype:  # what was trained within the block is the snapshot's
                        kept[key].copy_(p)
            self._fill(present)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for key, p in self.named.items():
            p.copy_(values[key])

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block the model is the one training began from: LoRA switched off, or the snapshot `reference`. Or
        the snapshot `FOLLOWING`, where a method has moved it."""
        moved = FOLLOWING if FOLLOWING in self.snapshots else REFERENCE
        with self.use(moved) if moved is FOLLOWING or self._reference is None else self._reference():
            yield

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything to be checkpointed: the parameters under `weights`, each snapshot under its name.

        Without the reference, which a resumed run takes from the model it loads.
        """
        return {"weights": {key: p.detach() for key, p in self.named.items()}} | {
            f"snapshot-{name}": dict(tensors) for name, tensors in self.snapshots.items() if name != REFERENCE
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, Tensor | Shares]]) -> None:
        """The reverse of `state`: a snapshot that it does not have was taken later, and goes. Raises ValueError, and
        changes nothing, where the parameters are not the same."""
        ours = {stem: named for stem, named in state.items() if stem == "weights" or stem.startswith("snapshot-")}
        shapes = {key: p.shape for key, p in self.named.items()}
        for named in ours.values():
            saved_shapes = {key: tensor.shape for key, tensor in named.items()}
            if saved_shapes != shapes:  # shapes too: copying would spread an adapter of rank 1 over one of any rank
                odd = sorted(
                    key for key in saved_shapes.keys() | shapes.keys() if saved_shapes.get(key) != shapes.get(key)
                )[:3]
                raise ValueError(f"the checkpoint is of another model or adapter: parameters differ, e.g. {odd}")
        self.snapshots = {name: values for name, values in self.snapshots.items() if name == REFERENCE}
        for stem, named in ours.items():
            placed = {key: like(named[key], p) for key, p in self.named.items()}
            if stem == "weights":
                self._fill(placed)
            else:
                self.snapshots[stem.removeprefix("snapshot-")] = placed
