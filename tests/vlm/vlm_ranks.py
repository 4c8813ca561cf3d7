"""What a process of several runs: importable by the children."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from genrl.config import load
from genrl.runtime.loop.process import Process
from genrl.runtime.weights.sharding import whole
from genrl.vlm import train as kind
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.policy import Policy
from genrl.vlm.run import AnswersRun
from tests.vlm import fake_vllm


def run(file: str, resume: str | None = None) -> None:
    """Train as a file says."""
    kind.train(load(Path(file)), None if resume is None else Path(resume))


def by_vllm(file: str, resume: str | None = None) -> None:
    """`run` where the stand-in of vLLM is installed."""
    fake_vllm.use(sys.modules)
    run(file, resume)


def record(file: str, out: str) -> None:
    """`run`, and of every optimiser step, to `out`/rank-<r>-<step>.safetensors: this process's answers, all
    log-probabilities before the update and of the reference, those of its passes (empty: an idle one) and the most that
    they are apart from those before, the whole gradient, and how many layers were whole at a time."""

    def opened(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> Any:
        made = kind.open_run(config, process, policy, stack)
        kept = {"whole": torch.tensor(0)}
        estimate, backward, step = made.estimate, made.loop.optimization.backward, made.loop.optimizer.step

        def watched_estimate(sampled: Any) -> Any:
            answers = sampled if isinstance(made, AnswersRun) else sampled.rows
            kept.update(tokens=answers.tokens, mask=answers.mask)
            result = estimate(sampled)
            ready = result if isinstance(made, AnswersRun) else result[0]
            kept["old"] = ready.batch.old_log_prob
            kept.update({"reference": ready.batch.ref_log_prob} if ready.batch.ref_log_prob is not None else {})
            return result

        def watched_backward(settings: Any, results: Mapping[str, Tensor], recorded: Any, **how: Any) -> None:
            passes = sum(name.startswith("pass-") for name in kept)
            kept[f"pass-{passes}"] = results.get("log_prob", torch.zeros(0)).detach()
            if "log_prob" in results:
                apart = (results["log_prob"].detach() - recorded["old_log_prob"])[recorded["mask"].bool()]
                kept[f"apart-{passes}"] = apart.abs().max()
            backward(settings, results, recorded, **how)

        layers = policy.model.get_decoder().layers

        def watched_layer(*_: object) -> None:
            if torch.is_grad_enabled():
                held = [next(layer.parameters()) for layer in layers]
                result = torch.tensor(sum(not isinstance(parameter, DTensor) for parameter in held))
                kept["whole"] = torch.maximum(result, kept["whole"])

        def watched_step() -> None:
            gradients = {k: p.grad for k, p in made.loop.weights.named.items() if p.grad is not None}
            tensors = kept | {f"gradient/{k}": whole(gradient) for k, gradient in gradients.items()}
            file = Path(out) / f"rank-{process.rank}-{made.loop.optimizer_steps}.safetensors"
            save_file({k: tensor.contiguous().clone() for k, tensor in tensors.items()}, file)
            for name in [name for name in kept if name.startswith(("pass-", "apart-"))]:
                del kept[name]
            step()

        for layer in layers:
            layer.register_forward_pre_hook(watched_layer)
        made.estimate, made.loop.optimization.backward = watched_estimate, watched_backward
        made.loop.optimizer.step = watched_step
        return made

    kind.KIND = kind.KIND._replace(open=opened)
    run(file)
