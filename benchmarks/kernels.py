"""Kernels against the best of the compiled definition and the library, on a GPU.

    python -m benchmarks.kernels [prefix_attention joint_attention] [--rounds 7]
    python -m benchmarks.kernels --dry-run      # all of it but the times, on a CPU

Shapes in bfloat16: SD3.5-M at 512 and 1024 pixels, FLUX.1 at 720 and 1024, Qwen-Image at 512, the suffix of a flow VLA
and the answers of VLMs. Forward, and forward with backward. First every candidate's error against the definition in
float32 is held against twice the definition's own. Then the candidates take turns (A B C A B C ...), each call after
the cache was written over, recorded as a CUDA graph and timed by the GPU's events; times are medians over the rounds.
`ratio` is the best other over ours, and `on_by_default` the rule of a default: of each shape the lesser of both ratios
is at least 1.05 on four shapes, and nowhere below 0.97. `roofline` is the share of the time that the bytes moved (the
products, for attention) take at the card's peak. None is a kernel of our own: `ours` is what runs if nothing is named
(torch's choice for joint attention, the rows of a prefix packed under a mask), and the rows say whether another library
should be.

Without a GPU nothing can be timed. --dry-run makes every candidate run on tiny shapes, forward and backward, and checks
the errors. Writes kernels.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import parser, save
from genrl.kernels.blocks import joint_attention, usable
from genrl.kernels.prefix_attention import prefix_attention, prefix_attention_torch
from genrl.runtime.weights.devices import without_cudnn_attention

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
    "VLM 8 x 1024 after 300": (8, 1, 28, 4, 1024, 300, 128, True),
    "VLM 16 x 256 after 2000, 64 wide": (16, 2, 14, 2, 256, 2000, 64, True),
    "VLA 4 x 51 after 816": (32, 8, 8, 1, 51, 816, 256, False),
}
TINY_IMAGES = {"tiny": (40, 2, 16), "tiny, odd": (17, 1, 32)}
TINY_PREFIXES = {"tiny": (4, 2, 2, 1, 5, 9, 16, True), "tiny, not causal": (3, 1, 2, 2, 4, 6, 16, False)}
CACHE = 2**28
"""Bytes that are written between two timed calls: more than a card keeps."""
GAIN, SHAPES, LOSS = 1.05, 4, 0.97
"""Of a default: the least ratio that counts, on how many shapes, and the least anywhere."""
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


def cases(kernel: str, device: str, dtype: torch.dtype, *, tiny: bool) -> dict[str, Case]:
    """Shape -> case."""
    images, prefixes_of = (TINY_IMAGES, TINY_PREFIXES) if tiny else (IMAGES, PREFIXES)
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    by_shape: dict[str, Case] = {}
    if kernel == "prefix_attention":
        for name, (rows, prefixes, heads, inner, length, prefix, size, causal) in prefixes_of.items():
            own, kept = (rows, inner, length, size), (prefixes, inner, prefix, size)
            row_of = torch.arange(rows, device=device) // (rows // prefixes)
            call = partial(prefix_attention, row_of=row_of, causal=causal)
            # It has no backward pass on a CPU.
            libraries = {} if device == "cpu" else {"flex": partial(call, backend="flex")}
            repeated = partial(prefix_attention_torch, row_of=row_of, prefix_mask=None, causal=causal, scale=size**-0.5)
            inputs = [random(rows, heads, length, size), random(own), random(own), random(kept), random(kept)]
            products = 4.0 * rows * heads * length * (prefix + length / (2 if causal else 1)) * size
            by_shape[name] = Case(inputs, call, repeated, libraries, products, True)
        return by_shape
    for name, (tokens, heads, size) in images.items():
        inputs = [random(1, tokens, heads, size) for _ in range(3)]
        libraries = {n: partial(joint_attention, backend=n) for n in usable(inputs[0]) if n not in ("auto", "math")}
        plain = partial(joint_attention, backend="auto")
        by_shape[name] = Case(inputs, plain, _attention_torch, libraries, 4.0 * heads * tokens**2 * size, True)
    return by_shape


def _attention_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return ((q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def with_backward(call: Callable[..., Outputs], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A call with its backward pass; returns the gradients of the inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    grads: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        outputs = _tuple(call(*leaves))
        if not grads:
            rng = torch.Generator(leaves[0].device).manual_seed(0)
            like = {"generator": rng, "device": leaves[0].device}
            grads.extend(torch.randn(one.shape, **like).to(one.dtype) for one in outputs)
        return torch.autograd.grad(outputs, leaves, grads)

    return run


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def errors(case: Case, candidates: Mapping[str, Callable[..., Outputs]]) -> dict[str, float]:
    """Largest error of outputs and gradients of each candidate, over what the definition has in the inputs' precision
    with a rounding more; both against the definition in float64."""
    exact = [t.double() for t in case.inputs]
    truth = [*_tuple(case.definition(*exact)), *with_backward(case.definition, exact)()]

    def error(call: Callable[..., Outputs]) -> list[float]:
        outputs = [*_tuple(call(*case.inputs)), *with_backward(call, case.inputs)()]
        return [float((a.double() - b).abs().max()) for a, b in zip(outputs, truth, strict=True)]

    rounding = torch.finfo(case.inputs[0].dtype).eps  # the definition may be exact by luck
    own = [one + rounding * float(b.abs().max()) for one, b in zip(error(case.definition), truth, strict=True)]
    return {name: max(a / b for a, b in zip(error(call), own, strict=True)) for name, call in candidates.items()}


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call's launches as a CUDA graph, so that its time is the GPU's and not the host's, which takes longer to
    launch a short kernel than it runs. A call that waits for the GPU cannot be recorded and is timed as it is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time on the GPU of each call in every round, the calls taking turns; two rounds before are not counted.

    Writing over the cache keeps the GPU busy while the recorded launches are handed to it.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    cache = torch.empty(CACHE, dtype=torch.int8, device="cuda")
    for number in range(rounds + 2):
        for name, call in calls.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            if number >= 2:
                spent[name].append(1e-3 * began.elapsed_time(ended))
    return spent


def candidates_of(case: Case, device: str) -> dict[str, Callable[..., Outputs]]:
    """Name -> what can compute the case; without a GPU the compiler traces and compiles nothing."""
    definition = torch.compile(case.definition, dynamic=False, backend="inductor" if device == "cuda" else "eager")
    return {"ours": case.ours, "compiled": definition, **case.libraries}


def measure(kernel: str, shape: str, case: Case, rounds: int, device: str) -> list[dict[str, Any]]:
    """A row for the forward, and one for forward and backward; on a CPU without times.

    Raises RuntimeError where ours has more than twice the definition's error.
    """
    torch.compiler.reset()  # one function for many shapes: beyond a few it would run uncompiled
    candidates = candidates_of(case, device)
    relative_errors = errors(case, candidates)
    if relative_errors["ours"] > 2:
        raise RuntimeError(f"{kernel}, {shape}: {relative_errors['ours']:.1f} times the error of its definition")
    rows: list[dict[str, Any]] = []
    for phase in ("forward", "both"):
        row: dict[str, Any] = {"kernel": kernel, "shape": shape, "phase": phase, "errors": relative_errors}
        rows.append(row)
        if device == "cpu":
            continue
        calls: dict[str, Callable[[], object]] = {
            name: with_backward(call, case.inputs) if phase == "both" else partial(call, *case.inputs)
            for name, call in candidates.items()
        }
        graphs = {name: recorded(call) for name, call in calls.items()}
        row["as_launched"] = [name for name, call in calls.items() if graphs[name] is call]
        row["raw"] = seconds(graphs, rounds)
        median = row["seconds"] = {name: statistics.median(times) for name, times in row["raw"].items()}
        row["ratio"] = min(t for name, t in median.items() if name != "ours") / median["ours"]
        card = next((v for k, v in PEAK.items() if k in torch.cuda.get_device_name()), None)
        if card is not None and phase == "forward":
            row["roofline"] = case.amount / card[0 if case.products else 1] / median["ours"]
    return rows


def on_by_default(ratios: Mapping[str, Iterable[float]]) -> bool:
    """Whether a kernel may be on where nobody asked for it: shape -> the ratios of its phases, best other / ours.

    It gains at least 1.05 in every phase of four shapes, and nowhere falls below 0.97.
    """
    least = [min(of_phases) for of_phases in ratios.values()]
    return sum(one >= GAIN for one in least) >= SHAPES and min(least, default=0.0) >= LOSS


def main() -> None:
    arguments = parser(__doc__)
    names = ["prefix_attention", "joint_attention"]
    arguments.add_argument("kernels", nargs="*", default=[], help=f"of {', '.join(names)}; default: all")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--dry-run", action="store_true", help="tiny shapes, no times; needs no GPU")
    given = arguments.parse_args()
    unknown = set(given.kernels) - set(names)
    if unknown:
        arguments.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    device = "cpu" if given.dry_run else "cuda"
    without_cudnn_attention()  # of what torch chooses, as in every run
    if not given.dry_run and not torch.cuda.is_available():
        arguments.error("no kernel can be timed: there is no GPU. --dry-run checks all but the times")
    table: list[dict[str, Any]] = []
    for kernel in given.kernels or names:
        by_shape = cases(kernel, device, torch.bfloat16, tiny=given.dry_run)
        rows = [row for one in by_shape.items() for row in measure(kernel, *one, given.rounds, device)]
        for row in rows:
            times = "  ".join(f"{name} {1e3 * t:.3f}" for name, t in row.get("seconds", {}).items())
            extra = f"{times} ms  ratio {row['ratio']:.2f}" if times else "no times"
            extra += f"  roofline {row['roofline']:.0%}" if "roofline" in row else ""
            worst = ", ".join(f"{name} {error:.1f}" for name, error in row["errors"].items())
            print(f"{kernel:<18}{row['shape']:<34}{row['phase']:<9}{extra}  (errors: {worst})", flush=True)
        if not given.dry_run:
            shapes = {row["shape"] for row in rows}
            ratios = {shape: [row["ratio"] for row in rows if row["shape"] == shape] for shape in shapes}
            print(f"{kernel:<18}by the rule of a default: {'on' if on_by_default(ratios) else 'off'}")
        table += rows
    save(given.out, "kernels", table)


if __name__ == "__main__":
    main()
