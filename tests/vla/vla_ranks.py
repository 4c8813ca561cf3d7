"""What the processes of the distributed tests run: one training, with its rollouts on disk."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from genrl.vla.rollout.collect import ChunkRollout
from genrl.vla.run import VLARun
from tests.vla import vla_runs


def record(path: str, out: str, teaching: int | None = None, resume: str | None = None) -> None:
    """Train the YAML file, and write every rollout to `out`/rollout-<iteration>-<first slot>.safetensors; and after the
    updates to `out`/shares-<rank>.safetensors how many weights are shares, their numbers here, and in all.

    teaching: slots from this one on always fail, of those before it every fourth one succeeds. resume: a run's folder,
    to go on there.
    """
    collect = VLARun.collect

    def watched(self: VLARun, settings: Any) -> ChunkRollout:
        result = collect(self, settings)
        if teaching is not None:
            slots = self.first_slot + torch.arange(result.rewards.shape[1])
            paid = torch.zeros_like(result.rewards)
            paid[0, :, 0] = ((slots < teaching) & (slots % 4 == 0)).float()
            result = result._replace(rewards=paid)
        kept = {name: value for name, value in result._asdict().items() if isinstance(value, torch.Tensor)}
        name = f"rollout-{self.loop.iteration}-{self.first_slot:02d}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in kept.items()}, Path(out) / name)
        return result

    finish = VLARun.finish

    def watched_end(self: VLARun, *arguments: Any) -> None:
        held = [p for p in self.policy.parameters() if isinstance(p, DTensor)]
        shares = torch.tensor([len(held), sum(p.to_local().numel() for p in held), sum(p.numel() for p in held)])
        save_file({"shares": shares}, Path(out) / f"shares-{self.process.rank}.safetensors")
        finish(self, *arguments)

    VLARun.collect, VLARun.finish = watched, watched_end  # type: ignore[method-assign]
    # a small epsilon would make a step of a rounding where a gradient is nearly 0
    torch.optim.AdamW.__init__ = partialmethod(torch.optim.AdamW.__init__, eps=1e-3)  # type: ignore[method-assign, assignment]
    vla_runs.train_file(path, resume)
