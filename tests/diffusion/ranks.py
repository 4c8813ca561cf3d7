"""What the processes of the distributed tests run: one training, watched from inside, with its tensors on disk."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from genrl.config import load
from genrl.config.method import code_of
from genrl.diffusion import train as training
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from tests.diffusion import runs
from tests.diffusion.methods.watched import gradients, watch


def record(path: str, out: str) -> None:
    """Train, and write samples, scores and gradients of every iteration to `out`/rank-<r>-<iteration>.safetensors."""
    config = load(Path(path))
    with runs.opened(config) as run:
        seen, rank, step = watch(run), run.accelerator.process_index, run.loop.optimizer.step

        def summed() -> None:
            seen.updates[-1].gradient = gradients(run)  # over all processes
            step()

        run.loop.optimizer.step = summed  # type: ignore[method-assign, assignment]
        code_of(config.trainer).train(run, config.trainer)
    for number, (rollouts, update) in enumerate(zip(seen.rollouts, seen.updates, strict=True)):
        gradient = {f"gradient/{key}": tensor for key, tensor in update.gradient.items()}
        save_file(samples(rollouts) | gradient, Path(out) / f"rank-{rank}-{number}.safetensors")


def samples(result: Rollouts) -> dict[str, Tensor]:
    """Everything that was drawn, by slot."""
    tensors = {"scores": result.total, "group": result.group}
    tensors["prompts"] = torch.tensor([list(text.ljust(40).encode()[:40]) for text in result.prompts])
    for one in result.mine.values():
        recorded = one.pieces[0].trajectory  # independent samples: one segment
        parts = {"final": recorded.final} | {f"state-{i}": x for i, x in recorded.states.items()}
        parts |= {f"log-prob-{i}": x for i, x in recorded.log_probs.items()}
        for row, slot in enumerate(one.slots):
            tensors |= {f"slot/{slot}/{name}": tensor[row].contiguous().clone() for name, tensor in parts.items()}
    return tensors


def short(path: str, most: int, phase: str, rank: int) -> None:
    """Train where memory runs out in one process."""
    running_out(most, phase, rank)
    training.train(load(Path(path)))


def running_out(most: int, phase: str, rank: int = 0) -> None:
    """From here on process `rank` has room for `most` samples only in this phase of the second iteration."""
    begin = DiffusionRun.begin

    def armed(run: DiffusionRun, result: Path | None) -> None:
        begin(run, result)

        def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            here = run.iteration == 1 and run.process.progress.name == phase
            if here and len(kwargs["hidden_states"]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")

        if run.accelerator.process_index == rank:
            run.policy.denoiser.register_forward_pre_hook(check, with_kwargs=True)

    DiffusionRun.begin = armed  # type: ignore[method-assign]
