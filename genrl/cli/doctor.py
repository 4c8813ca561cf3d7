"""`genrl doctor`: what a bug report needs. Versions, devices, back-ends, and the installations known to be broken."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from genrl.cli.arguments import Overrides, opened

Finding = dict[str, str | int | float | bool | None]
Report = dict[str, Finding]

REQUIRED = ("genrl-diffusion", "torch", "diffusers", "transformers", "accelerate", "peft", "datasets", "safetensors",
            "numpy", "pillow", "pydantic", "typer", "rich")  # fmt: skip
OPTIONAL = {
    "rapidocr": "reward ocr",
    "onnxruntime": "reward ocr",
    "bitsandbytes": "model.quantize: nf4",
    "torchao": "model.quantize: int8, fp8; optimizer.name: adamw_8bit",
    "open_clip_torch": "reward hpsv2, CLIP in open_clip's format",
    "triton": "kernels.compile, kernels.fused",
    "math-verify": "reward math",
    "ftfy": "prompts of Wan and other video pipelines",
    "sentencepiece": "T5 tokenizers (SD3, FLUX, PixArt)",
}
TRACKERS = ("tensorboard", "wandb", "swanlab", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive")


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(doctor)


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A YAML configuration: draw and score a few of its samples.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the sheet; doctor-NAME by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Report versions, devices and back-ends, and what looks wrong with them; of a run, what its samples look like.

    Example: `genrl doctor --json > doctor.json`

    `genrl doctor mine.yaml` opens the run as training does, draws a few samples, decodes and scores them, and writes a
    page: prompts, scores, the pictures that rewards see, expected answers as read, and of policies every dimension of
    states and actions before and after normalisation. Look at it before the run begins. Nothing is trained.
    """
    if file is not None:
        _look(file, overrides, out or Path(f"doctor-{file.stem}"))
        return
    report = examine()
    if as_json:
        typer.echo(json.dumps(report | {"advice": advice(report)}, indent=1))
    else:
        _print(report, advice(report))


def _look(file: Path, overrides: list[str] | None, out: Path) -> None:
    """Draw the sheet of a run into a folder, and print what it says."""
    from rich.table import Column, Table

    from genrl.cli.tables import console, printable, safe
    from genrl.config import check_files, load_located

    config, origins = load_located(*opened(file, overrides))
    for note in check_files(config, origins):
        if not note.startswith("output:"):  # nothing is written there
            typer.secho(printable(note), fg=typer.colors.YELLOW, err=True)

    from genrl.runtime.loop.frame import look
    from genrl.runtime.show import sheet

    seen = look(config)
    sheet.save(seen, out)
    table = Table("sample", "", "")
    for number, sample in enumerate(seen.looks, start=1):
        for name, value in {"asked": sample.text, **sample.facts}.items():
            table.add_row(str(number) if name == "asked" else "", safe(name), safe(value[:200]))
        table.add_section()
    head, *rows = seen.numbers or [[]]
    numbers = Table(*(Column(safe(name), overflow="fold") for name in head))
    for row in rows:
        numbers.add_row(*map(safe, row))
    console.print(table, *([numbers] if rows else []))
    console.print(f"look at it: {safe(str(sheet.write_page(out, file.stem)))}", soft_wrap=True)


def _print(report: Report, advice: Sequence[str]) -> None:
    """One table per section, then the advice."""
    from rich.table import Table

    from genrl.cli.tables import console, safe

    for section, findings in report.items():
        table = Table(title=section, title_justify="left", show_header=False)
        for name, value in findings.items():
            purpose = f" ({OPTIONAL[name]})" if section == "optional" and name in OPTIONAL else ""
            text = "-" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
            table.add_row(safe(name + purpose), safe(text))
        console.print(table)
    for line in advice:
        console.print(f"[yellow]{safe(line)}[/yellow]")
    if not advice:
        console.print("[green]nothing looks wrong[/green]")


def examine() -> Report:
    """Everything, as section -> name -> value. Imports torch; a broken torchvision is reported, not raised."""
    return {
        "system": _system(),
        "packages": {name: _version(name) for name in REQUIRED},
        "optional": {name: _version(name) for name in OPTIONAL},
        "torch": _torch(),
        "kernels": _kernels(),
        "threads": _threads(),
        "simulators": _simulators(),
        "trackers": {name: importlib.util.find_spec(name) is not None for name in TRACKERS},
        "hub": _hub(),
    }


def advice(report: Report) -> list[str]:
    """What to do about the findings, one line each; empty where all is well."""
    lines = [f"{name} is missing: pip install {name}" for name, v in report["packages"].items() if v is None]
    if report["torch"]["torchvision"] == "declared":
        lines.append(
            "torchvision does not fit this torch: genrl works around it; other programs need the torchvision built "
            "for this torch (same index), or none"
        )
    threads, cores = report["threads"]["torch_threads"], report["threads"]["usable_cores"]
    if report["torch"]["device"] == "cpu" and isinstance(threads, int) and threads > 1:
        lines.append(
            f"{threads} torch threads on {cores} cores: on a busy machine one thread per process is much faster; "
            "set OMP_NUM_THREADS=1 and start more processes by --nproc"
        )
    free = report["system"]["free_disk_gb"]
    if isinstance(free, float) and free < 5:
        lines.append(f"only {free:g} GB of disk are free here: checkpoints and pictures need room")
    libero = report.get("simulators", {}).get("libero")
    if isinstance(libero, str) and not libero.startswith("ready"):
        lines.append(libero)
    return lines


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> Finding:
    import psutil

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "free_disk_gb": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
    }


def _torch() -> Finding:
    import torch

    from genrl.runtime.weights.devices import accelerators, default_device
    from genrl_rewards.models.torchvision_compat import ensure

    finding: Finding = {
        "device": default_device(),
        "cuda_build": torch.version.cuda,
        "torchvision": ensure(),
        "distributed": ", ".join(_collectives()) or "none",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    for device in accelerators():
        module = torch.get_device_module(device.type)
        if not hasattr(module, "get_device_properties"):  # MPS
            finding[str(device)] = "there"
            continue
        properties = module.get_device_properties(device)
        size = f"{properties.total_memory / 2**30:.1f} GB"
        finding[str(device)] = f"{properties.name}, {size}, bfloat16 {module.is_bf16_supported()}"
    return finding


def _kernels() -> Finding:
    """Which names of `kernels.attention` can run here, in half precision, and whether `kernels.fused` and
    `kernels.compile` can."""
    import torch

    from genrl.kernels import machine
    from genrl.runtime.weights.devices import default_device

    device = default_device()
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    return {
        "joint_attention": ", ".join(machine.usable(like)),
        "compile": machine.compile_problem(like.device) or ("true, cuda_graphs" if device == "cuda" else "true"),
    }


def _simulators() -> Finding:
    """Whether LIBERO could run, where any of it is installed: it has six packages, three of them by hand."""
    from genrl.vla.simulators.libero import package

    begun = any(importlib.util.find_spec(name) for name in ("libero", "robosuite", package.SCENES))
    return {"libero": "; ".join(package.missing()) or f"ready, scenes in {package.scenes()}" if begun else None}


def _collectives() -> list[str]:
    from torch import distributed

    if not distributed.is_available():
        return []
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return [name for name, available in backends.items() if available]


def _threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {
        "usable_cores": cores,
        "torch_threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
    }


def _hub() -> Finding:
    from huggingface_hub import constants

    return {"cache": constants.HF_HUB_CACHE, "offline": constants.HF_HUB_OFFLINE}  # a token is never shown
