"""What the processes of the sharding tests run: one tiny denoiser in shards (FSDP2, gloo), no training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from genrl.diffusion.config.sections import Kernels
from genrl.diffusion.policy.adapters import trainable
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.train import use_kernels
from genrl.runtime.folder import checkpoint
from genrl.runtime.weights.sharding import Sharding, whole
from genrl.runtime.weights.state import pack
from genrl.runtime.weights.weights import Weights
from tests.diffusion.families import FAMILIES
from tests.run_folders import group

SAMPLING = {"num_inference_steps": 3, "height": 16, "width": 16, "max_sequence_length": 8}
BATCH = Batch(["a red star", "two blue dogs", "a cat"], [(7, 0, 0), (7, 0, 1), (7, 0, 2)], SAMPLING)
LEVELS = {0: [0.7, 0.7, 0.7], 1: [0.7, 0.3, 0.7]}
"""Noise levels of the samples, by process: as many different ones in none."""


def state_of(rank: int) -> Tensor:
    return torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(rank))


def tiny(sharded: bool, kernels: Kernels | None = None, family: str = "sd3") -> tuple[Policy, Weights]:
    policy = Policy(FAMILIES[family]().pipe)
    if kernels is not None:
        use_kernels(policy, kernels)
    sharding = Sharding.over("all", torch.device("cpu")) if sharded else None
    weights = trainable(policy.denoisers, None, sharding=sharding)
    policy.singly = weights.in_step
    return policy, weights


@torch.no_grad()
def moved(policy: Policy, weights: Weights, rank: int, guidance: float) -> list[Tensor]:
    """Velocities of this process by the first weights, by changed ones, and by the first again."""
    weights.snapshot("old")
    batch = replace(BATCH, sampling={**SAMPLING, "guidance_scale": guidance})
    arguments = batch, state_of(rank), torch.tensor(LEVELS[rank])
    result = [policy.velocity(*arguments)]
    torch._foreach_mul_(weights.parameters, 1.1)
    result.append(policy.velocity(*arguments))
    with weights.use("old"):
        result.append(policy.velocity(*arguments))
    return result


def velocities(out: str, halfway: bool) -> None:
    """The velocities of `moved` to `out`/velocity-<rank>.safetensors. halfway: the first forward pass raises within."""
    with group() as rank:
        policy, weights = tiny(sharded=True)
        failures = [RuntimeError("planted")] if halfway else []

        def fail(*_: object) -> None:
            if failures:
                raise failures.pop()

        policy.denoiser.transformer_blocks[1].attn.register_forward_pre_hook(fail)
        tensors = {str(k): velocity for k, velocity in enumerate(moved(policy, weights, rank, 1.0 if halfway else 4.5))}
        save_file(tensors, Path(out) / f"velocity-{rank}.safetensors")


ALL = Kernels(fused=True, attention="math")


def replayed(policy: Policy, weights: Weights, family: str, rank: int) -> dict[str, Tensor]:
    """Recorded and replayed log-probabilities of two steps of this process's samples, and the gradient."""
    call = {"num_inference_steps": 3, **FAMILIES[family]().call}
    batch = Batch(["a red star", "two blue dogs"], [(7, 0, rank, 0), (7, 0, rank, 1)], call)
    with torch.no_grad():
        recorded = policy.roll_out(batch, Kernel("flow_sde", 0.7), (0, 1))
    again = [policy.replay(recorded.step(i)) for i in (0, 1)]
    torch.stack([one.log_prob.sum() for one in again]).sum().backward()
    result = {f"recorded-{i}": recorded.log_probs[i] for i in (0, 1)}
    result |= {f"replayed-{i}": one.log_prob.detach() for i, one in enumerate(again)}
    return result | {key: whole(p.grad) for key, p in weights.named.items() if p.grad is not None}


def fused(out: str, family: str) -> None:
    """`replayed` of a sharded denoiser with our blocks, to `out`/fused-<rank>.safetensors."""
    with group() as rank, torch.compiler.set_stance("force_eager"):
        policy, weights = tiny(True, ALL, family)
        tensors = replayed(policy, weights, family, rank)
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, Path(out) / f"fused-{rank}.safetensors"
        )


def states(out: str) -> None:
    """Save a checkpoint after a step, to `out`; and how many whole tensors were made for it, to `out`/whole-<rank>."""
    with group() as rank:
        policy, weights = tiny(sharded=True)
        weights.snapshot("reference")
        weights.snapshot("average")
        optimizer = torch.optim.AdamW(weights.parameters, lr=1e-2)
        policy.velocity(BATCH, state_of(rank), torch.tensor(0.5)).square().sum().backward()
        optimizer.step()
        with whole_tensors() as made:
            tensors = weights.state() | {"optimizer": pack(optimizer.state_dict())[0]}
            if rank == 0:
                checkpoint.save(Path(out), 1, tensors=tensors, state={}, keep=1)
            else:
                checkpoint.save_shares(tensors)
        (Path(out) / f"whole-{rank}").write_text(str(len(made)))


@contextmanager
def whole_tensors() -> Iterator[list[DTensor]]:
    """Those that are made whole within the block."""
    make, made = DTensor.full_tensor, list[DTensor]()

    def watched(self: DTensor) -> Tensor:
        made.append(self)
        return make(self)

    DTensor.full_tensor = watched  # type: ignore[method-assign]
    try:
        yield made
    finally:
        DTensor.full_tensor = make  # type: ignore[method-assign]
