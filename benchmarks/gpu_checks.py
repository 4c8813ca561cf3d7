"""The checks of `benchmarks.gpu`, each for a process of its own.

    python -m benchmarks.gpu_checks NAME --out FILE.json [--dry-run]

Models have their published architecture and random weights (`benchmarks.full_size`), made on the card and loaded from a
folder as any others are; what a run shows of the ratio is what `genrl train` shows. FLUX.1 and Qwen-Image have few
blocks where only ratios are looked at. --dry-run: tiny networks on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import full_size, kernels
from benchmarks.full_size import MODELS, Published
from genrl.config import RunConfig, load
from genrl.diffusion.config.estimate import read_components
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config
from genrl.runtime.folder.run import read_metrics, write_atomic
from genrl.runtime.loop.frame import train
from genrl.runtime.weights.devices import without_cudnn_attention
from tests.vlm import tiny_checkpoints

ROOT = Path(__file__).resolve().parents[1]
KEEP = "GENRL_GPU_MODELS"
"""Environment: the folder in which `models` keeps what several checks load."""
REDUCED = {
    "sd35_medium": {"num_layers": 4, "dual_attention_layers": (0, 1)},
    "flux1_dev": {"num_layers": 4, "num_single_layers": 8},
    "qwen_image": {"num_layers": 6},
}
"""Blocks of those that are not whole where only ratios are looked at; their width is the published one."""
WHOLE = {"flux1_dev": {"num_layers": 19, "num_single_layers": 38}}
RECIPES = {
    "sd15": "flow_grpo",
    "sdxl": "sdxl_flow_grpo",
    "sd35_medium": "sd35_medium_flow_grpo_fast",
    "flux1_dev": "flux1_dev_flow_grpo",
    "qwen_image": "qwen_image_flow_grpo",
    "wan21_1_3b": "wan21_t2v_1_3b_flow_grpo",
}
HALF = ("model.dtype=bfloat16", "model.gradient_checkpointing=false", "trainer.kl_weight=0")
ONE = ("sampling.prompts_per_iteration=1", "trainer.updates_per_iteration=1")
FUSED = ("kernels.fused=true",)
ATTENTION = ("auto", "math", "efficient", "flash", "cudnn")
WAYS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "float16": ("model.dtype=float16",),
    **{f"attention: {name}": (f"kernels.attention={name}",) for name in ATTENTION},
    "fused": FUSED,
    "checkpointing": ("model.gradient_checkpointing=true",),
    "keep_graph": ("trainer.keep_graph=true",),
}
"""Of a run whose first ratio must be 1."""
COMPILED: dict[str, tuple[str, ...]] = {
    "compile": ("kernels.compile=true",),
    "compile, fused": ("kernels.compile=true", *FUSED),
    "cuda_graphs": ("kernels.compile=cuda_graphs",),
}
"""The same."""
CHOICES: dict[str, tuple[str, ...]] = {
    "as published": (),
    "fused": FUSED,
    "attention: cudnn": ("kernels.attention=cudnn",),
    "attention: flash": ("kernels.attention=flash",),
    "keep_graph": ("trainer.keep_graph=true",),
    "checkpointing": ("model.gradient_checkpointing=true",),
    "blocks offloaded": ("model.offload.denoiser=blocks",),
    "int8, checkpointing": ("model.quantize=int8", "model.gradient_checkpointing=true"),
    "fp8, checkpointing": ("model.quantize=fp8", "model.gradient_checkpointing=true"),
    "compile": ("kernels.compile=true",),
    "cuda_graphs": ("kernels.compile=cuda_graphs",),
}
"""Of a run that is timed and weighed."""
OF_A_GPU = ("float16", "attention: efficient", "attention: cudnn")
LANGUAGE: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "checkpointing": ("vlm.gradient_checkpointing=true",),
    "prefix attention": ("vlm.prefix_attention=flex",),
    "packing": ("vlm.packing=true",),
    "all weights, checkpointing": ("vlm.lora=null", "vlm.gradient_checkpointing=true"),
}
"""Of a vision-language model."""
SHORTER = [f"sampling.{key}" for key in ("prompts_per_iteration=1", "batch_size=4")]
"""Of a dry run of pictures: an iteration of three micro-batches."""
SHORT_QUICKSTART = [*SHORTER, "economy.keep=null", "trainer.updates_per_iteration=3"]
SMALLER = {"group_size": 6, "batch_size": 6, "num_inference_steps": 6, "height": 512, "width": 512}
"""Of the comparison with the usual loop."""
FLUX: dict[str, tuple[str, ...]] = {
    "flux1_dev_flow_grpo": (),
    "flux1_dev_flow_grpo, fused, cudnn": (*FUSED, "kernels.attention=cudnn"),
    "flux1_dev_24gb": (),
    "flux1_dev_24gb, blocks offloaded": ("model.quantize=null", "model.offload.denoiser=blocks"),
}
"""The same; a name begins with that of the recipe."""
MEMORY: dict[str, dict[str, tuple[str, ...]]] = {
    "adapters": {"LoRA": (), "LoRA, checkpointing": CHOICES["checkpointing"]},
    "graph_and_whole": {
        "LoRA, keep_graph": CHOICES["keep_graph"],
        "all weights": ("model.lora=null", "model.autocast=bfloat16"),
    },
    "int8_and_offload": {"int8": ("model.quantize=int8",), "blocks offloaded": CHOICES["blocks offloaded"]},
}
"""Of a run that is weighed, two to a process."""


TRAINING = ("diffusion/policy", "diffusion/test_train.py", "diffusion/methods", "vlm/policies", "vlm/test_run.py",
            "vla/policies", "vla/test_train.py", "runtime")  # fmt: skip
"""Tests that train or sample and take whatever accelerator there is."""


class Findings:
    """What a check finds, written as it goes; it begins with what an earlier call found."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.failed = False

    def knows(self, name: str) -> bool:
        """Whether this was found before, and is neither a failure nor a deviation."""
        value = self.values.get(name)
        wrong = isinstance(value, dict) and ("failed" in value or value.get("max_abs_dev"))
        return value is not None and not wrong

    def fail(self, name: str, error: BaseException) -> None:
        """Note what failed; the others go on, unless the card is lost to this process."""
        traceback.print_exc()
        self.failed = True
        self.put(name, {"failed": problem_of(error)})
        if "illegal memory" in str(error) or "device-side assert" in str(error):
            raise SystemExit(1)

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        write_atomic(self.file, json.dumps(self.values, indent=1))
        print(f"{name}: {json.dumps(value)[:400]}", flush=True)


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def problem_of(error: BaseException) -> str:
    """Its last two frames and what it says, in short."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    where = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:600]} ({where})"


# --- the card ---------------------------------------------------------------------------------------------------------


def device(findings: Findings, dry: bool) -> None:
    """What it is, and the two rates that everything else is held against."""
    from genrl.cli.doctor import examine

    findings.put("name", card())
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        findings.put("memory_bytes", properties.total_memory)
        findings.put("capability", list(torch.cuda.get_device_capability()))
        findings.put("copy_bytes_per_s", _copy_rate(2**32))
        findings.put("matrix_flop_per_s", _matrix_rate(8192))
    report = examine()
    findings.put("versions", {key: report[key] for key in ("packages", "torch") if key in report})
    findings.put("kernels", report.get("kernels"))


def _events(call: Callable[[], object], times: int) -> float:
    call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(times):
        began.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        seconds.append(1e-3 * began.elapsed_time(ended))
    return statistics.median(seconds)


def _copy_rate(size: int) -> float:
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _events(lambda: target.copy_(source), 10)


def _matrix_rate(size: int) -> float:
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    return float(2 * size**3 / _events(lambda: a @ b, 10))


# --- tests ------------------------------------------------------------------------------------------------------------


def tests(findings: Findings, dry: bool) -> None:
    """Those that are marked gpu."""
    _pytest(findings, ["tests/kernels", "tests/mdp/test_kernels.py", "-m", "gpu"], dry, workers=4)


def suite(findings: Findings, dry: bool) -> None:
    """Tests that train or sample and take whatever accelerator there is."""
    _pytest(findings, [*(f"tests/{name}" for name in TRAINING), "-m", "not slow"], dry, workers=12)


def _pytest(findings: Findings, what: Sequence[str], dry: bool, *, workers: int) -> None:
    """Counts and failures, as they come; of a dry run what would be run."""
    options = ["--collect-only"] if dry else ["-n", str(workers), "--dist", "worksteal", "--tb=short", "-rfE"]
    findings.values.pop("failed", None)  # of an earlier call
    command = [sys.executable, "-m", "pytest", *what, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        lines: list[str] = []
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            if line.startswith(("FAILED", "ERROR")):
                findings.put("failed", [*findings.values.get("failed", []), line.rstrip()])
    findings.put("summary", lines[-1] if lines else "")
    findings.failed = run.returncode not in (0, 5)


# --- ratios -----------------------------------------------------------------------------------------------------------


def ratio(findings: Findings, dry: bool, name: str) -> None:
    """|ratio - 1| of the first update of this family, by `WAYS`; what a run refuses is told in its words. A dry run
    compiles nothing."""
    unet = MODELS[name].denoiser[0] is UNet2DConditionModel  # has neither processors nor blocks of ours
    ways = {
        way: changes
        for way, changes in WAYS.items()
        if not (dry and way in OF_A_GPU) and not (unet and any("kernels." in change for change in changes))
    }
    with torch.compiler.set_stance("force_eager" if dry else "default"):
        _ratios(findings, dry, name, ways)


def compiled(findings: Findings, dry: bool, name: str) -> None:
    """The same by `COMPILED`."""
    with torch.compiler.set_stance("force_eager" if dry else "default"):
        _ratios(findings, dry, name, COMPILED)


def _ratios(findings: Findings, dry: bool, name: str, ways: dict[str, tuple[str, ...]]) -> None:
    model = _model(name, REDUCED, dry)
    with tempfile.TemporaryDirectory() as place:
        pipeline = _built(model, Path(place), dry, findings)
        for number, (way, changes) in enumerate(ways.items()):
            if findings.knows(way):
                continue
            rows, output = (*HALF, *ONE, *changes), Path(place) / f"run-{number}"
            try:
                row = _ratio_of(model, name, pipeline, output, _pixels(name, dry), rows)
            except Exception as error:  # noqa: BLE001 - it is what was found
                findings.fail(way, error)
                continue
            findings.put(way, row)
            findings.failed = findings.failed or row.get("max_abs_dev", 0) != 0


def _ratio_of(
    model: Published, name: str, pipeline: Path, output: Path, size: int, changes: Sequence[str]
) -> dict[str, Any]:
    """The deviation, or why a run refuses; whatever else it raises has failed."""
    torch.compiler.reset()
    began = time.perf_counter()
    try:
        rows = _trained(full_size.configured(model, RECIPES[name], pipeline, output, size, changes))
    except ValueError as error:  # what a model or a device cannot do is told before anything is drawn
        return {"refused": str(error)[:600]}
    return {"max_abs_dev": rows[0]["ratio/max_abs_dev"], "seconds": time.perf_counter() - began}


def _pixels(name: str, dry: bool, of_published: int = 256) -> int:
    if dry:
        return int(MODELS[name].tiny().call["height"])
    return of_published


def _model(name: str, blocks: dict[str, dict[str, int]], dry: bool) -> Published:
    model = MODELS[name]
    kind, settings = model.denoiser
    return model if dry else model._replace(denoiser=(kind, settings | blocks.get(name, {})))


def models(findings: Findings, dry: bool) -> None:
    """The two that several checks load, whole, where the plan keeps them while it lasts."""
    for name in ("sd35_medium", "flux1_dev"):
        with _noting_failure(findings, name):
            model = _model(name, WHOLE, dry)
            folder = _kept(model)
            if folder is None:
                raise ValueError(f"no place to keep models: `python -m benchmarks.gpu` says one by {KEEP}")
            findings.put(name, _build(model, folder, dry))


def _built(model: Published, place: Path, dry: bool, findings: Findings) -> Path:
    """The folder of the pipeline, that of `models` where it is whole; of a dry run the tiny one."""
    kept = _kept(model)
    if kept is not None and (kept / "model_index.json").exists():  # what diffusers writes last
        return kept
    for key, value in _build(model, place / "model", dry).items():
        findings.put(key, value)
    return place / "model"


def _kept(model: Published) -> Path | None:
    """Where `models` puts one of these sizes; None outside a plan."""
    place = os.environ.get(KEEP)
    return None if place is None else Path(place) / hashlib.sha256(repr(model.denoiser).encode()).hexdigest()[:12]


def _build(model: Published, folder: Path, dry: bool) -> dict[str, float]:
    """Write the pipeline; returns how many weights its denoiser has, and the seconds."""
    began = time.perf_counter()
    if dry:
        model.tiny().pipe.save_pretrained(folder)
        return {"seconds_to_build": time.perf_counter() - began}
    weights = full_size.build(model, folder, "cuda")
    torch.cuda.empty_cache()
    return {"denoiser_weights": weights, "seconds_to_build": time.perf_counter() - began}


def _trained(config: RunConfig) -> list[dict[str, float]]:
    """The metrics of the iterations of a run."""
    gc.collect()  # the run before, which is in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(config)
    return [row for row in read_metrics(Path(config.output) / "metrics.jsonl") if "timing/iteration_s" in row]


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernel(findings: Findings, dry: bool, name: str) -> None:
    """`benchmarks.kernels`, a shape at a time."""
    without_cudnn_attention()  # of what torch chooses, as in every run
    device = "cpu" if dry else "cuda"
    rows: list[dict[str, Any]] = findings.values.get("rows", [])
    for shape, case in kernels.cases(name, device, torch.bfloat16, tiny=dry).items():
        if any(row["shape"] == shape for row in rows):
            continue
        try:
            rows += kernels.measure(name, shape, case, 25, device)
        except Exception as error:  # noqa: BLE001 - it is what was found
            findings.fail(f"failed: {shape}", error)
            continue
        findings.put("rows", rows)


def attention(findings: Findings, dry: bool) -> None:
    """Which of torch's attention kernels go forward and backward through what models make of them, and how exactly:
    each in a process of its own, since one that reads what is not its own ends all use of the card."""
    names = ("auto", "math", "flash") if dry else ATTENTION
    command = [sys.executable, "-m", "benchmarks.gpu_attention"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    for name, process in [(name, subprocess.Popen([*command, name], **pipes)) for name in names]:  # type: ignore[call-overload]
        out, error = process.communicate()
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        findings.put(name, {"rows": rows} | ({"ended": error.strip()[-600:]} if process.returncode else {}))


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(findings: Findings, dry: bool) -> None:
    """A few iterations of the shipped main files of each kind."""
    few = ["evaluation.every=0", "trackers=[]", "iterations=1" if dry else "iterations=5"]
    files = {
        "configs/quickstart.yaml": SHORT_QUICKSTART if dry else [],
        "configs/flow_grpo.yaml": SHORTER if dry else [],
        "configs/vlm/quickstart.yaml": ["generation.prompts_per_iteration=1"] if dry else [],
        "configs/vla/flow_sde.yaml": ["environment.num_envs=32"],
    }
    with tempfile.TemporaryDirectory() as place:
        for file, changes in files.items():
            if findings.knows(file):
                continue
            output = f"output={place}/{Path(file).parent.name}-{Path(file).stem}"
            with _noting_failure(findings, file):
                rows = _trained(load(ROOT / file, [*few, *changes, output]))
                keep = ("timing/", "ratio/", "reward/", "memory/", "grad_norm")
                findings.put(file, {key: value for key, value in rows[-1].items() if key.startswith(keep)})


@contextlib.contextmanager
def _noting_failure(findings: Findings, name: str) -> Iterator[None]:
    """What fails is found out too, and the others go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        findings.fail(name, error)


def group(findings: Findings, dry: bool) -> None:
    """The main job by a process group of one, as `torchrun` starts it: two ranks cannot share a card in
    NCCL."""
    with tempfile.TemporaryDirectory() as place:
        changes = ["iterations=2", "evaluation.every=0", "trackers=[]", f"output={place}/run"]
        if dry:
            changes += ["iterations=1", *SHORT_QUICKSTART]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "genrl", "train"]
        began = time.perf_counter()
        subprocess.run([sys.executable, *command, "configs/quickstart.yaml", *changes], cwd=ROOT, check=True)
        findings.put("seconds", time.perf_counter() - began)


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(findings: Findings, dry: bool, name: str) -> None:
    """Seconds of the parts of an iteration and the peak of memory beside its estimate, by choice."""
    choices = FLUX if name == "flux1_dev" else CHOICES
    if dry:
        choices = {choice: choices[choice] for choice in ("as published", "flux1_dev_24gb") if choice in choices}
    _by_choice(findings, dry, name, choices, 3)


def peak(findings: Findings, dry: bool, name: str) -> None:
    """The same of two iterations of SD3.5-medium, a part of `MEMORY`."""
    _by_choice(findings, dry, "sd35_medium", MEMORY[name], 2)


def flux(findings: Findings, dry: bool) -> None:
    """One iteration of FLUX.1-dev's recipe."""
    _by_choice(findings, dry, "flux1_dev", {"flux1_dev_flow_grpo": ()}, 1)


def _by_choice(findings: Findings, dry: bool, name: str, choices: dict[str, tuple[str, ...]], iterations: int) -> None:
    """At 512 px, the model whole and a micro-batch an iteration. A dry run quantises nothing."""
    whole, size, of_flux = _model(name, WHOLE, dry), _pixels(name, dry, 512), name == "flux1_dev"
    model = whole._replace(changes=("model.encodings=null",) if of_flux else ())
    with tempfile.TemporaryDirectory() as place:
        pipeline = _built(model, Path(place), dry, findings)
        for number, (choice, changes) in enumerate(choices.items()):
            if findings.knows(choice) or (dry and "int8" in choice):
                continue
            recipe = choice.partition(",")[0] if of_flux else RECIPES[name]
            few = (*_few(3 if of_flux else 9, iterations), *changes)
            with _noting_failure(findings, choice):
                output = Path(place) / f"run-{number}"
                config = full_size.configured(model, recipe, pipeline, output, size, few, steps=None)
                findings.put(choice, _timed(config, pipeline))


def _few(batch: int, iterations: int) -> tuple[str, ...]:
    """One micro-batch an iteration. What else the recipe says stays."""
    sizes = (f"sampling.batch_size={batch}", f"sampling.group_size={batch}", "sampling.prompts_per_iteration=1")
    return (
        *sizes,
        "model.dtype=bfloat16",
        "trainer.updates_per_iteration=1",
        f"iterations={iterations}",
        "checkpoint.every=1000",
    )


def _timed(config: Config, pipeline: Path) -> dict[str, Any]:
    torch.compiler.reset()
    began = time.perf_counter()
    rows = _trained(config)
    parts = ("timing/sample_s", "timing/decode_s", "timing/train_s", "timing/iteration_s")
    return {
        "whole_s": time.perf_counter() - began,
        "max_abs_dev": rows[0].get("ratio/max_abs_dev"),
        "peak_mb": rows[-1]["memory/peak_mb"],
        "estimate_mb": sum(size for _, size in memory(config, read_components(pipeline))) / 2**20,
        "raw": {part: [row.get(part) for row in rows] for part in parts},
    }


def peer(findings: Findings, dry: bool, pixels: str) -> None:
    """`benchmarks.peer_flow_grpo`: the usual loop and genrl's, on SD3.5-medium, and which share of the card's
    own matrix rate the model's operations are, a call in training counted as three."""
    from benchmarks.peer_flow_grpo import ROWS, measure

    names = ["the same in genrl", "+ graphs kept"]
    assert set(names) <= set(ROWS)
    with tempfile.TemporaryDirectory() as place:
        pipeline = _built(_model("sd35_medium", WHOLE, dry), Path(place), dry, findings)
        size = _pixels("sd35_medium", dry, int(pixels))
        changes = [f"model.path={pipeline}", f"model.dtype={'float32' if dry else 'bfloat16'}"]
        changes += ["rewards=[{name: jpeg}]", "sampling.pipeline_args={}", "model.lora.targets=null"]
        small = SMALLER | {"height": size, "width": size} | ({"group_size": 2, "batch_size": 2} if dry else {})
        changes += [f"sampling.{key}={value}" for key, value in small.items()]
        findings.put("flop_per_call", flop(pipeline, size))
        rows = measure(1 if dry else 2, names[:1] if dry else names, changes)
        if not dry:
            pictures, rate = 2 * small["group_size"], _matrix_rate(8192)
            for row in rows.values():
                for part, factor in (("sample", 1), ("train", 3)):
                    done = factor * row[f"{part}_calls"] * pictures * findings.values["flop_per_call"]
                    seconds = statistics.median(one[part][0] for one in row["rounds"])  # by the wall clock
                    row[f"{part}_utilisation"] = done / seconds / rate
        findings.put("rows", rows)


def flop(pipeline: Path, size: int) -> int:
    """Floating point operations of one call of an SD3 denoiser for one picture of size x size pixels: of its products
    and its attention, counted by torch without computing them."""
    config = SD3Transformer2DModel.load_config(pipeline / "transformer")
    with torch.device("meta"):
        model = SD3Transformer2DModel.from_config(config).eval()
        latents = torch.empty(1, config["in_channels"], size // 8, size // 8)
        context = torch.empty(1, 333, config["joint_attention_dim"])
        pooled = torch.empty(1, config["pooled_projection_dim"])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(latents, timestep=torch.empty(1), encoder_hidden_states=context, pooled_projections=pooled)
    return counter.get_total_flops()


# --- language ---------------------------------------------------------------------------------------------------------


def language(findings: Findings, dry: bool) -> None:
    """Qwen2.5-VL-3B: answers per second and an update by LoRA, of 32 answers of 256 tokens to questions with pictures,
    in ways that `genrl train` has. Its weights are random, so no answer is right: a reward of their letters."""
    with tempfile.TemporaryDirectory() as place:
        model, reward = Path(place) / "model", Path(place) / "letters.py"
        lines = ["def letters(completions):", "    return [sum(c < 'P' for c in t) / 256 for t in completions]"]
        reward.write_text("\n".join(lines))
        tiny_checkpoints.save("qwen2_5_vl", model)
        if not dry:
            findings.put("weights", _published_language(model))
            torch.cuda.empty_cache()
        tokens, dtype = (8, "float32") if dry else (256, "bfloat16")
        common = [
            f"vlm.path={model}", f"vlm.dtype={dtype}", "vlm.lora={rank: 32}", "trainer.preset=grpo", "iterations=2",
            f"rewards=[{{name: '{reward}:letters'}}]", "evaluation.every=0", "trackers=[]", "checkpoint.every=1000",
            f"generation={{prompts_per_iteration: 4, group_size: 8, max_new_tokens: {tokens}, batch_size: 32}}",
        ]  # fmt: skip
        for number, (way, changes) in enumerate(LANGUAGE.items()):
            if findings.knows(way) or (dry and way != "as it is"):
                continue
            with _noting_failure(findings, way):
                output = f"output={place}/run-{number}"
                rows = _trained(load(ROOT / "configs/vlm/quickstart.yaml", [*common, *changes, output]))
                keep = ("timing/", "ratio/", "memory/", "tokens_per_s", "grad_norm")
                findings.put(way, {key: value for key, value in rows[-1].items() if key.startswith(keep)})


def _published_language(folder: Path) -> int:
    """Qwen2.5-VL-3B-Instruct's sizes (its config.json) and random weights in the folder of a tiny one, whose tokenizer
    stays; returns the number of weights."""
    config = AutoConfig.from_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
    sizes = {
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 128_000},
        **{"rope_parameters": rope, "layer_types": ["full_attention"] * 36},
    }
    for name, value in sizes.items():
        setattr(config.text_config, name, value)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    eye = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    for name, value in {**eye, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}.items():
        setattr(config.vision_config, name, value)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=14).save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


_ALL = (
    device,
    models,
    tests,
    suite,
    ratio,
    compiled,
    kernel,
    attention,
    runs,
    group,
    speed,
    peak,
    flux,
    peer,
    language,
)
CHECKS: dict[str, Callable[..., None]] = {function.__name__: function for function in _ALL}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("name", help="a check of `python -m benchmarks.gpu --plan`")
    arguments.add_argument("--out", type=Path, required=True, help="JSON file of what it finds")
    arguments.add_argument("--dry-run", action="store_true", help="stand-in sizes on a CPU")
    given = arguments.parse_args()
    name, _, argument = given.name.partition(":")
    if name not in CHECKS:
        arguments.error(f"no check {name}; there are {', '.join(CHECKS)}")
    findings = Findings(given.out)
    CHECKS[name](findings, given.dry_run, *([argument] if argument else []))
    if findings.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
