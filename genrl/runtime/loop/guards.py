"""Stop before a number that is not finite reaches the weights, on all ranks together, with the evidence on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor


class StoppedTogether(RuntimeError):
    """Raised in all processes at the same place, so that they can still save."""


class NonFiniteError(StoppedTogether):
    """NaN or infinity; the message says in what, where, the dump's folder and what to do. `dump` may be None."""

    def __init__(self, message: str, dump: Path | None) -> None:
        super().__init__(message)
        self.dump = dump


@dataclass(frozen=True)
class Dump:
    """A micro-batch as it was: `checked`, `batch` and `results` as given to `require_finite`, `info` its JSON."""

    step: int
    where: str
    checked: dict[str, Tensor]
    batch: dict[str, Tensor]
    results: dict[str, Tensor]
    info: dict[str, Any]


def any_rank(flag: bool, accelerator: Accelerator | None) -> bool:
    """True on every rank if it is true on one. A collective: all ranks must call it at the same place."""
    return any_ranks([flag], accelerator)[0]


def any_ranks(flags: Sequence[bool], accelerator: Accelerator | None) -> list[bool]:
    """`any_rank` of several flags, in one collective."""
    if accelerator is None or accelerator.num_processes == 1:
        return list(flags)
    # As floats: not every backend sums booleans.
    counts = torch.tensor([float(flag) for flag in flags], device=accelerator.device)
    return [count > 0 for count in accelerator.reduce(counts, reduction="sum").tolist()]


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors which hold NaN or infinity. One wait for the device, whatever their number."""
    if not tensors:
        return []
    device = next(iter(tensors.values())).device
    bad = torch.stack([(~torch.isfinite(tensor)).any().to(device) for tensor in tensors.values()]).tolist()
    return [name for name, flag in zip(tensors, bad, strict=True) if flag]


def require_finite(
    checked: Mapping[str, Tensor],
    *,
    where: str,
    step: int,
    dumps: Path,
    batch: Mapping[str, Tensor],
    info: Mapping[str, object],
    results: Mapping[str, Tensor] | None = None,
    accelerator: Accelerator | None = None,
) -> None:
    """Raise NonFiniteError on all ranks if `checked` is not finite on one. Call it before the optimiser step.

    where: the place in words ("loss", "gradient"). dumps: the run's dump folder. batch: the micro-batch's
    tensors, enough to run it again; empty where no micro-batch of this rank is to blame. results: what came of it.
    info: JSON: prompts, seeds, settings. A rank with a bad value dumps its own micro-batch into
    `dumps/step-<step>-<where>-rank-<r>/`; a rank without one says that another has it.
    """
    bad = non_finite(checked)
    if not any_rank(bool(bad), accelerator):
        return
    rank = 0 if accelerator is None else accelerator.process_index
    if not bad:
        raise NonFiniteError(
            f"stopped before the update of step {step}: another rank found a number that is not finite; "
            f"its message and its dump in {dumps} tell more.",
            None,
        )
    place = re.sub(r"[^\w-]+", "-", where)
    folder = dumps / f"step-{step:06d}-{place}-rank-{rank}"
    details = "; ".join(f"{name}: {_brief(checked[name])}" for name in bad)
    dump: Path | None = None
    if batch:
        try:
            dump = _write_dump(folder, checked, batch, results or {}, info, step, where)
            evidence = (
                f"The micro-batch is in {folder}: `genrl replay {folder}` runs it again and shows where it begins."
            )
        except OSError as error:
            evidence = f"Its micro-batch could not be dumped: {error}."
    else:
        evidence = (
            f"Each micro-batch of this rank was finite: see the dumps of the others in {dumps}. Without any, it was "
            "the sum over ranks that overflowed."
        )
    raise NonFiniteError(
        f"stopped before the update of step {step} on rank {rank}: {where} is not finite ({details}). {evidence} "
        "The update was not made. Usual causes: float16 overflow (use bfloat16 or float32), or "
        "optimizer.lr too high (look for grad_norm spikes in metrics.jsonl).",
        dump,
    )


def read_dump(folder: Path) -> Dump:
    """What `require_finite` wrote. Raises FileNotFoundError where there is no dump."""
    record = json.loads((folder / "dump.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "tensors.safetensors")
    parts: dict[str, dict[str, Tensor]] = {"checked": {}, "batch": {}, "results": {}}
    for name, tensor in tensors.items():
        part, _, tensor_name = name.partition("/")
        parts[part][tensor_name] = tensor.clone()
    return Dump(record["step"], record["where"], parts["checked"], parts["batch"], parts["results"], record["info"])


def statistics(tensor: Tensor) -> dict[str, object]:
    """Shape, dtype, counts of NaN and infinity, and min, max, mean of the finite elements (None if none)."""
    # The mean of float16 numbers may overflow where none of them does.
    values = tensor.detach().to(torch.float64)
    finite = values[torch.isfinite(values)]
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "nan": int(torch.isnan(values).sum()),
        "inf": int(torch.isinf(values).sum()),
        "min": finite.min().item() if finite.numel() else None,
        "max": finite.max().item() if finite.numel() else None,
        "mean": finite.mean().item() if finite.numel() else None,
    }


def _brief(tensor: Tensor) -> str:
    counts = statistics(tensor)
    return f"{counts['nan']} NaN and {counts['inf']} infinite of {tensor.numel()}"


def _write_dump(
    folder: Path,
    checked: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
    info: Mapping[str, object],
    step: int,
    where: str,
) -> Path:
    named = {f"checked/{name}": tensor for name, tensor in checked.items()}
    named |= {f"batch/{name}": tensor for name, tensor in batch.items()}
    named |= {f"results/{name}": tensor for name, tensor in results.items()}
    record = {
        "step": step,
        "where": where,
        "info": dict(info),
        "statistics": {name: statistics(tensor) for name, tensor in named.items()},
    }
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    # cloned: safetensors refuses views into one storage, and micro-batches often are
    save_file(
        {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()},
        temporary / "tensors.safetensors",
    )
    (temporary / "dump.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    # An iteration that was done again may stop at the same place: the newest dump is the one that is told of.
    shutil.rmtree(folder, ignore_errors=True)
    return temporary.rename(folder)
