"""Kernels against the best of the compiled definition and the library, on a GPU; on a CPU, the definitions alone.

    python -m benchmarks.kernels [prefix_attention qk_norm_rope adaln sde_step joint_attention] [--rounds 7]

Shapes in bfloat16: SD3.5-M at 512 and 1024 pixels, FLUX.1 at 720 and 1024, Qwen-Image at 512, the suffix of a flow VLA
and the answers of a VLM. Forward, and forward with backward. The candidates take turns (A B C A B C ...), so that all
see the same machine; times are medians over the rounds. `ratio` is the best other over ours: a kernel is worth turning
on where it is at least 1.05 on four shapes and nowhere below 0.97. `roofline` is the share of the time that the bytes
moved (the products, for attention) take at the card's peak. Writes benchmarks/results/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.kernels.adaln import adaln, adaln_torch
from genrl.kernels.backend import compiled, triton_problem
from genrl.kernels.joint_attention import joint_attention, usable
from genrl.kernels.prefix_attention import prefix_attention, prefix_attention_torch
from genrl.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_torch
from genrl.kernels.sde_step import sde_step, sde_step_torch

PEAK = {"H100": (790e12, 3.0e12), "H200": (790e12, 4.3e12), "A100": (280e12, 1.7e12)}
"""Sustained bfloat16 FLOP/s and bytes/s of some cards; none for another card."""
IMAGES = {  # tokens, heads, head dimension
    "SD3.5-M 512": (1357, 24, 64),
    "SD3.5-M 1024": (4429, 24, 64),
    "FLUX 720": (2537, 24, 128),
    "FLUX 1024": (4608, 24, 128),
    "Qwen-Image 512": (1280, 24, 128),
    "VLA suffix": (51, 8, 256),
}
PREFIXES = {  # rows, prefixes, heads, key heads, tokens, prefix, head dimension, causal
    "VLM 8 x 300 after 1000": (8, 1, 28, 4, 300, 1000, 128, True),
    "VLM 32 x 300 after 1000": (32, 4, 28, 4, 300, 1000, 128, True),
    "VLA 4 x 51 after 816": (32, 8, 8, 1, 51, 816, 256, False),
}
Outputs = Tensor | tuple[Tensor, ...]


class Case(NamedTuple):
    """What is timed: `ours`, the `definition` (to be compiled) and libraries, on `inputs` that have gradients."""

    inputs: list[Tensor]
    ours: Callable[..., Outputs]
    definition: Callable[..., Outputs]
    libraries: dict[str, Callable[..., Outputs]]
    amount: float
    """Bytes that must be moved forward, or products."""
    products: bool = False


def cases(kernel: str, device: str, dtype: torch.dtype) -> dict[str, Case]:
    """Shape -> case."""
    random = partial(torch.randn, device=device, dtype=dtype)
    found: dict[str, Case] = {}
    if kernel == "prefix_attention":
        for name, (rows, prefixes, heads, inner, length, prefix, size, causal) in PREFIXES.items():
            own, kept = (rows, inner, length, size), (prefixes, inner, prefix, size)
            row_of = torch.arange(rows, device=device) // (rows // prefixes)
            call = partial(prefix_attention, row_of=row_of, causal=causal)
            repeated = partial(prefix_attention_torch, row_of=row_of, prefix_mask=None, causal=causal, scale=size**-0.5)
            inputs = [random(rows, heads, length, size), random(own), random(own), random(kept), random(kept)]
            products = 4.0 * rows * heads * length * (prefix + length / (2 if causal else 1)) * size
            libraries = {name: partial(call, backend=name) for name in ("sdpa", "flex")}
            found[name] = Case(inputs, call, repeated, libraries, products, True)
        return found
    for name, (tokens, heads, size) in IMAGES.items():
        width = heads * size
        numbers = tokens * width
        if kernel == "qk_norm_rope":
            angle = torch.randn(tokens, size // 2, device=device)
            turn = (angle.cos(), angle.sin())
            inputs = [random(1, tokens, heads, size), random(size)]
            found[name] = Case(
                inputs,
                lambda x, w, turn=turn: qk_norm_rope(x, w, *turn),
                lambda x, w, turn=turn: qk_norm_rope_torch(x, w, *turn, 1e-6),
                {},
                4.0 * numbers,
            )
        elif kernel == "adaln":
            stream, modulation = (1, tokens, width), (1, 1, width)
            inputs = [random(stream), random(stream), *(random(modulation) for _ in range(3))]
            found[name] = Case(inputs, adaln, lambda *t: adaln_torch(*t, 1e-6), {}, 8.0 * numbers)
        elif kernel == "sde_step":
            x, noise = torch.randn(2, 1, 64 * tokens, device=device)  # 16 channels, patches of 2 x 2
            a, b, s = torch.tensor([[0.9], [-0.1], [0.3]])
            found[name] = Case(
                [torch.randn_like(x)],
                lambda v, x=x, n=noise, a=a, b=b, s=s: sde_step(x, v, a, b, s, noise=n)[1:],
                lambda v, x=x, n=noise, a=a, b=b, s=s: sde_step_torch(x, v, a, b, s, n, None, "mean")[1:],
                {},
                20.0 * x.numel(),
            )
        else:
            inputs = [random(1, tokens, heads, size) for _ in range(3)]
            libraries = {n: partial(joint_attention, backend=n) for n in usable(inputs[0]) if n not in ("auto", "math")}
            libraries.pop("sage", None)
            plain = partial(joint_attention, backend="auto")
            found[name] = Case(inputs, plain, _attention_torch, libraries, 4.0 * heads * tokens**2 * size, True)
    return found


def _attention_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return ((q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def seconds(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Time of each call in every round, the calls taking turns; two rounds before are not counted."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                spent[name].append(time.perf_counter() - started)
    return spent


def with_backward(call: Callable[..., Outputs], inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    grads: list[Tensor] = []

    def run() -> object:
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not grads:
            grads.extend(torch.randn_like(one) for one in outputs)
        return torch.autograd.grad(outputs, leaves, grads)

    return run


def measure(kernel: str, shape: str, case: Case, rounds: int, device: str) -> list[dict[str, object]]:
    """A row for the forward, and one for forward and backward."""
    gpu = device == "cuda"
    candidates: dict[str, Callable[..., Outputs]] = {"definition": case.definition}
    if gpu:
        candidates = {"ours": case.ours, "compiled": compiled(case.definition), **case.libraries}
    rows: list[dict[str, object]] = []
    for phase in ("forward", "both"):
        calls = {
            name: with_backward(call, case.inputs) if phase == "both" else partial(call, *case.inputs)
            for name, call in candidates.items()
        }
        spent = seconds(calls, rounds, device)
        median = {name: statistics.median(times) for name, times in spent.items()}
        row: dict[str, object] = {"kernel": kernel, "shape": shape, "phase": phase, "seconds": median, "raw": spent}
        if gpu:
            row["ratio"] = min(t for name, t in median.items() if name != "ours") / median["ours"]
            card = next((v for k, v in PEAK.items() if k in torch.cuda.get_device_name()), None)
            if card is not None and phase == "forward":
                row["roofline"] = case.amount / card[0 if case.products else 1] / median["ours"]
        rows.append(row)
    return rows


def verdict(rows: list[dict[str, object]]) -> str:
    """Whether a kernel may be on by default: at least 1.05 on four shapes, never below 0.97."""
    ratios = [float(row["ratio"]) for row in rows]  # type: ignore[arg-type]
    good = len({row["shape"] for row in rows if float(row["ratio"]) >= 1.05})  # type: ignore[arg-type]
    word = "on" if good >= 4 and min(ratios) >= 0.97 else "off"
    return f"{word} ({good} shapes at 1.05 or more, least {min(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["prefix_attention", "qk_norm_rope", "adaln", "sde_step", "joint_attention"]
    parser.add_argument("kernels", nargs="*", default=[], help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    unknown = set(arguments.kernels) - set(names)
    if unknown:
        parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = triton_problem(torch.device(device)) if device == "cuda" else "there is no GPU"
    if problem:
        print(f"No kernel can be timed: {problem}. These are the torch definitions, float32, one small shape each:")
    table: list[dict[str, object]] = []
    for kernel in arguments.kernels or names:
        found = cases(kernel, device, torch.float32 if problem else torch.bfloat16)
        shapes = {next(iter(found)): next(iter(found.values()))} if problem else found
        rows = [r for shape, case in shapes.items() for r in measure(kernel, shape, case, arguments.rounds, device)]
        for row in rows:
            times = "  ".join(f"{name} {1e3 * t:.3f}" for name, t in row["seconds"].items())  # type: ignore[attr-defined]
            extra = f"  ratio {row['ratio']:.2f}" if "ratio" in row else ""
            extra += f"  roofline {row['roofline']:.0%}" if "roofline" in row else ""
            print(f"{kernel:<18}{row['shape']:<25}{row['phase']:<9}{times} ms{extra}", flush=True)
        if not problem:
            print(f"{kernel:<18}by the rule: {verdict(rows)}")
        table += rows
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    (results / "kernels.json").write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
