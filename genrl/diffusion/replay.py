"""`genrl replay`: the micro-batch that stopped a run, run again, to find where its numbers stop being finite.

A dump (`runtime.guards`) holds what the loss was made of, the settings of the trainer and, of an adapter, the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from genrl.config import Config
from genrl.config import load as load_config
from genrl.diffusion.methods.awm import train as awm
from genrl.diffusion.methods.awm.settings import AWM
from genrl.diffusion.methods.crd import train as crd
from genrl.diffusion.methods.crd.settings import CRD
from genrl.diffusion.methods.d3po import train as d3po
from genrl.diffusion.methods.d3po.settings import D3PO
from genrl.diffusion.methods.dgpo import train as dgpo
from genrl.diffusion.methods.dgpo.settings import DGPO
from genrl.diffusion.methods.diff_instruct.settings import DiffInstruct
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.settings import DiffusionNFT
from genrl.diffusion.methods.dpo import train as dpo
from genrl.diffusion.methods.dpo.settings import DPO
from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
from genrl.diffusion.methods.draft import train as draft
from genrl.diffusion.methods.draft.settings import Draft
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.methods.flow_grpo.train import policy_loss, reference_kl
from genrl.diffusion.methods.prdp.settings import PRDP
from genrl.diffusion.methods.spo.settings import SPO
from genrl.diffusion.methods.spo.train import pair_of, preference
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Batch, Children, Kernel, Policy, Trajectory
from genrl.diffusion.policy.weights import Weights
from genrl.diffusion.train import use_kernels
from genrl.runtime import checkpoint
from genrl.runtime.guards import Dump, non_finite, read_dump
from genrl.runtime.run import Run

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Replay:
    """What a dump holds, and what came of running it again."""

    dump: Dump
    weights: str
    """Where the weights came from, in words."""
    recorded: Tensors
    """As the run had it, the weights left out."""
    tensors: Tensors
    """As it came out now, in the order of computation."""
    module: str | None
    """First module of the denoiser whose output was not finite, with its class."""
    gradients: list[str]
    """Parameters whose gradient is not finite, in the order of the network."""


def replay(folder: Path, run: Path | None = None) -> Replay:
    """Run a dump again under the conditions that were recorded; run: its run folder, where it was moved out of it.

    Raises ValueError where the folder holds no dump, or there is no run around it.
    """
    if not (folder / "dump.json").is_file():
        raise ValueError(
            f"{folder} is no dump: it has no dump.json. A run that was stopped by a number that is not finite has its "
            "dumps in RUN/dumps/step-..."
        )
    found = Run(run or folder.resolve().parent.parent)
    if not found.config.is_file():
        raise ValueError(f"{found.folder} is not a run folder: it has no config.yaml. Name the dump's run by --run")
    dump, config = read_dump(folder), load_config(found.config)
    if not isinstance(config, Config):
        raise ValueError(
            f"{found.folder} trains no pipeline, and the dumps of other runs are not run again: {folder}/dump.json "
            "says what was not finite, tensors.safetensors has the numbers of that micro-batch"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy(
        load_pipeline(config.model).to(device),
        autocast=getattr(torch, config.model.autocast) if config.model.autocast else None,
        reduction=config.trainer.log_prob_reduction if isinstance(config.trainer, FlowGRPO) else "mean",
        offload_text_encoders=config.model.offload_text_encoders,
    )
    use_kernels(policy, config.kernels)  # but not compiled: modules are looked into
    weights = Weights(policy.denoisers, config.model.lora, seed=config.seed)
    if not weights.is_lora and config.uses_reference:
        weights.snapshot("reference")
    source = _put_weights(weights, dump, found)
    if config.model.gradient_checkpointing:
        for denoiser in policy.denoisers.values():
            denoiser.enable_gradient_checkpointing()

    recorded = {name: tensor for name, tensor in dump.batch.items() if not name.startswith("weights/")}
    given = {name: tensor.to(device) for name, tensor in recorded.items() if not name.startswith("inputs/")}
    batch = batch_of(dump.info, recorded)
    with first_not_finite(policy.denoisers) as module:
        made = _again(config, policy, weights, batch, given)
        share = made["loss"].sum() / dump.info["divisor"]
        (share * dump.info["loss_scale"]).backward()
    gradients = {name: p.grad for name, p in weights.named.items() if p.grad is not None}
    made["gradient"] = torch.stack(torch._foreach_norm(list(gradients.values())))
    made = {name: tensor.detach() for name, tensor in made.items()}
    return Replay(dump, source, recorded | dump.checked, made, next(iter(module), None), non_finite(gradients))


def batch_of(info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """The micro-batch of a dump's record: prompts, keys of its noise, arguments of the pipeline call, pictures."""
    initial = info["initial_keys"]
    return Batch(
        prompts=info["prompts"],
        keys=[tuple(key) for key in info["keys"]],
        sampling=info["sampling"],
        initial_keys=None if initial is None else [tuple(key) for key in initial],
        inputs={
            argument: [Image.fromarray(tensors[f"inputs/{argument}/{k}"].numpy()) for k in range(len(info["prompts"]))]
            for argument in info["inputs"]
        },
    )


def _put_weights(weights: Weights, dump: Dump, run: Run) -> str:
    kept = {name.removeprefix("weights/"): t for name, t in dump.batch.items() if name.startswith("weights/")}
    if kept:
        weights.restore({"weights": kept})
        return "the dump's: those of the run at that moment"
    for path in checkpoint.steps(run.checkpoints):
        if int(path.name.removeprefix("step-")) <= dump.step and checkpoint.problem(path) is None:
            loaded = checkpoint.load(path)
            weights.restore(loaded.tensors)
            missed = dump.info["optimizer_steps"] - loaded.state["optimizer_steps"]
            return f"{path.name}'s, {missed} updates before that moment" if missed else f"{path.name}'s: as they were"
    return f"the model's before training: there is no checkpoint of step {dump.step} or before"


def _again(config: Config, policy: Policy, weights: Weights, batch: Batch, given: Tensors) -> Tensors:
    """The micro-batch's loss, as its trainer computes it, and what comes before it."""
    trainer = config.trainer
    if isinstance(trainer, SPO):
        return pair_loss(trainer, policy, batch, given)
    if isinstance(trainer, DiffusionNFT | AWM | DGPO | CRD | DPO | OfflineDPO):
        output = policy.velocity(batch, given["noisy"], given["sigma"])
        return {"model_output": output} | forward_terms(trainer, output, given)
    if isinstance(trainer, D3PO | PRDP):
        return step_terms(trainer, policy, batch, given)
    if isinstance(trainer, Draft | DiffInstruct):
        steps = range(int(given["first"]), int(given["last"]))
        clean = isinstance(trainer, Draft) and trainer.truncation == "refl"
        final = draft.chain(policy, batch, given["state"], steps, clean=clean)
        return {"final": final, "loss": draft.pull(final, given["pulled"])}
    assert isinstance(trainer, FlowGRPO)
    i = int(given["step"])
    kernel = Kernel(trainer.kernel, trainer.noise_level or 0.0)
    states = {i: given["state"]}
    children = Children(given["rows"], []) if "rows" in given else None
    next_state = given["next_state"]
    trajectory = Trajectory(
        batch, kernel, states, {i: next_state}, {}, next_state, torch.empty(0), i + 1, given["state"], children
    )
    reference = None
    if trainer.kl_weight > 0:
        with torch.no_grad(), weights.reference():
            reference = policy.replay(trajectory, i)
    new = policy.replay(trajectory, i)
    surrogate = policy_loss(trainer, new, next_state, given["old_log_prob"], given.get("old_mean"), given["advantage"])
    made = {"model_output": new.model_output, "mean": new.mean, "std": new.std, "log_prob": new.log_prob,
            "ratio": surrogate.ratio}  # fmt: skip
    loss = surrogate.loss
    if reference is not None:
        made["kl"] = reference_kl(trainer.kl, new, reference)
        loss = loss + trainer.kl_weight * made["kl"]
    return made | {"loss": loss * given["weight"]}


def forward_terms(
    trainer: DiffusionNFT | AWM | DGPO | CRD | DPO | OfflineDPO, output: Tensor, given: Tensors
) -> Tensors:
    """What the trainers on the forward process make of the model's answer."""
    match trainer:
        case DiffusionNFT():
            return diffusion_nft.objective(trainer, output, given)
        case AWM():
            return awm.objective(trainer, output, given)
        case DGPO():
            return dgpo.objective(trainer, output, given)
        case CRD():
            return crd.objective(trainer, output, given)
        case _:
            return dpo.objective(trainer, output, given)


def step_terms(trainer: D3PO | PRDP, policy: Policy, batch: Batch, given: Tensors) -> Tensors:
    """The same of D3PO and PRDP, at one step."""
    i, next_state = int(given["step"]), given["next_state"]
    kernel, state = Kernel(trainer.kernel, trainer.noise_level or 0.0), given["state"]
    recorded = Trajectory(batch, kernel, {i: state}, {i: next_state}, {}, next_state, torch.empty(0), i + 1, state)
    new = policy.replay(recorded, i)
    made = {"model_output": new.model_output, "mean": new.mean, "std": new.std, "log_prob": new.log_prob}
    if isinstance(trainer, PRDP):
        return made | {"loss": given["coefficient"] * new.log_prob}
    return made | d3po.objective(trainer, new.log_prob, given)


def pair_loss(trainer: SPO, policy: Policy, batch: Batch, given: Tensors) -> Tensors:
    """The same of SPO."""
    pair = given["next_state"].unflatten(0, (-1, 2))
    both = torch.arange(2).expand(len(pair), 2)
    kernel = Kernel(trainer.kernel, trainer.noise_level or 0.0)
    new = policy.replay(pair_of(batch, kernel, int(given["step"]), given["state"], pair, both), int(given["step"]))
    out = preference(trainer, new.log_prob.view(-1, 2), given["reference_log_prob"])
    return {"model_output": new.model_output, "mean": new.mean, "std": new.std, "log_prob": new.log_prob,
            "loss": given["weight"] * out.loss}  # fmt: skip


@contextmanager
def first_not_finite(denoisers: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """The list gets the first module that ends, within the block, with an output that is not finite."""
    bad: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, _: object, output: object) -> None:
            if not bad and any(not tensor.isfinite().all() for tensor in _tensors(output)):
                bad.append(f"{name} ({type(module).__name__})")

        return look

    handles = [
        module.register_forward_hook(watch(f"{component}.{name}" if name else component))
        for component, denoiser in denoisers.items()
        for name, module in denoiser.named_modules()
    ]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors(value))
