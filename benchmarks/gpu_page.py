"""docs/gpu.md: what was seen on a GPU, read from benchmarks/results/gpu.json.

python -m benchmarks.gpu_page > docs/gpu.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.gpu import FAMILIES, KERNELS, PLAN, results
from benchmarks.gpu_checks import MEMORY
from benchmarks.kernels import on_by_default

Checks = Mapping[str, Any]
TITLES = {
    "sd35_medium": "SD3.5-medium",
    "flux1_dev": "FLUX.1-dev, reduced",
    "sdxl": "SDXL",
    "sd15": "SD 1.5",
    "qwen_image": "Qwen-Image, reduced",
    "wan21_1_3b": "Wan 2.1 1.3B",
}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in lines)


def head(known: Checks) -> str:
    row = known.get("device", {})
    if "memory_bytes" not in row.get("found", {}):
        return "Nothing was measured on a GPU yet. `make gpu` runs the plan below on yours.\n"
    values = row["found"]
    versions = values["versions"]["packages"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "transformers", "peft"))
    rates = (
        f"{values['memory_bytes'] / 2**30:.0f} GiB, copies {values['copy_bytes_per_s'] / 1e12:.1f} TB/s, multiplies "
        f"{values['matrix_flop_per_s'] / 1e12:.0f} TFLOP/s in bfloat16"
    )
    missing = [check.name for check in PLAN if known.get(check.name, {}).get("status") != "done"]
    text = wrapped(f"Measured on one {values['name']} ({rates}), with {packages}.")
    if missing:
        text += "\n" + wrapped(f"Not done yet, or not to the end: {', '.join(f'`{name}`' for name in missing)}.")
    return text


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def tests(known: Checks) -> str:
    summary = known.get("tests", {}).get("found", {}).get("summary")
    return "" if summary is None else f"\nThe tests marked `gpu`: {summary}.\n"


def ratios(known: Checks) -> str:
    """The cell of a family and a way: the deviation, or in a word why there is none."""
    ways: dict[str, None] = {}
    columns: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        by_way = known.get(f"ratio:{family}", {}).get("found", {})
        by_way = by_way | known.get(f"compiled:{family}", {}).get("found", {})
        columns[family] = {way: _cell(row) for way, row in by_way.items() if isinstance(row, dict)}
        ways |= dict.fromkeys(columns[family])
    if not ways:
        return ""
    rows = [[way, *(columns[family].get(way, "") for family in FAMILIES)] for way in ways]
    return "\n" + table(["", *(TITLES[family] for family in FAMILIES)], rows) + "\n"


def _cell(row: Checks) -> str:
    if "max_abs_dev" in row:
        return f"{row['max_abs_dev']:.2g}"
    if "refused" in row:
        return "refused"
    return "no room" if "OutOfMemoryError" in row["failed"] else "**failed**"


def attention(known: Checks) -> str:
    """The largest error of outputs and gradients of each kernel, in units of the exact one's."""
    by_kernel = known.get("attention", {}).get("found", {})
    names = [name for name in by_kernel if name != "math"]
    if not names:
        return ""
    cases = [row["case"] for row in by_kernel[names[0]]["rows"]]
    by_case = {name: {row["case"]: row for row in by_kernel[name]["rows"]} for name in names}
    rows = [[case, *(_errors(by_case[name].get(case, {})) for name in names)] for case in cases]
    repeats = [name for name in names if not all(all(row.get("repeats", [True])) for row in by_kernel[name]["rows"])]
    text = "\n" + table(["", *names], rows) + "\n"
    return text + f"\nGradients that differ from call to call: {', '.join(repeats)}.\n"


def _errors(row: Checks) -> str:
    if "errors" not in row:
        return "refused" if "refused" in row else "**failed**"
    worst = max(row["errors"])
    return f"**{worst:.0f}**" if worst > 10 else f"{worst:.1f}"


def kernels(known: Checks) -> str:
    parts = []
    for name in KERNELS:
        rows = [row for row in known.get(f"kernel:{name}", {}).get("found", {}).get("rows", []) if "seconds" in row]
        if not rows:
            continue
        others = [other for other in rows[0]["seconds"] if other != "ours"]
        body = [
            [row["shape"], row["phase"],
             *(_us(row["seconds"].get(k)) + "*" * (k in row.get("as_launched", ())) for k in ("ours", *others)),
             f"{row['ratio']:.2f}", f"{row['roofline']:.0%}" if "roofline" in row else ""]
            for row in rows
        ]  # fmt: skip
        shapes = {row["shape"] for row in rows}
        ratios = {shape: [row["ratio"] for row in rows if row["shape"] == shape] for shape in shapes}
        rule = "on" if on_by_default(ratios) else "off"
        heading = ["shape", "pass", "ours, µs", *(f"{other}, µs" for other in others), "best other / ours", "roofline"]
        parts.append(f"\n`{name}`, by the rule of a default: {rule}.\n\n{table(heading, body)}\n")
    return "".join(parts)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.0f}"


def speed(known: Checks) -> str:
    parts = []
    for family in ("sd35_medium", "flux1_dev"):
        by_choice = known.get(f"speed:{family}", {}).get("found", {})
        for name in [f"peak:{part}" for part in MEMORY] if family == "sd35_medium" else ["flux"]:
            by_choice = by_choice | known.get(name, {}).get("found", {})
        rows = [[name, *_timed(row)] for name, row in by_choice.items() if isinstance(row, dict)]
        if rows:
            heading = ["", "sampling, s", "training, s", "iteration, s", "peak, GB", "estimate, GB"]
            parts.append(f"\n{TITLES[family].removesuffix(', reduced')}:\n\n{table(heading, rows)}\n")
    return "".join(parts)


def _timed(row: Checks) -> list[str]:
    if "failed" in row:
        return [row["failed"][:80], "", "", "", ""]
    # The first iteration warms up, where there is another.
    times = [
        median(row["raw"][f"timing/{part}_s"][1:] or row["raw"][f"timing/{part}_s"])
        for part in ("sample", "train", "iteration")
    ]
    sizes = [row[name] * 2**20 / 1e9 for name in ("peak_mb", "estimate_mb")]
    return [*(f"{one:.2f}" for one in times), *(f"{one:.1f}" for one in sizes)]


def peer(known: Checks) -> str:
    pixels = "512" if "rows" in known.get("peer:512", {}).get("found", {}) else "256"  # of the first measurement
    rows = known.get("peer:512" if pixels == "512" else "peer", {}).get("found", {}).get("rows")
    if not rows:
        return ""
    body = [
        [
            name,
            f"{row['sample_calls']:.2f} + {row['train_calls']:.2f}",
            f"{row['times_faster_wall']:.2f}",
            *(
                f"{row[f'{part}_utilisation']:.0%}" if f"{part}_utilisation" in row else ""
                for part in ("sample", "train")
            ),
        ]
        for name, row in rows.items()
    ]
    heading = ["loop", "calls per picture: sampling + training", "times faster"]
    heading += ["of the matrix rate: sampling", "training"]
    return f"\nAt {pixels} px:\n\n" + table(heading, body) + "\n"


def language(known: Checks) -> str:
    by_way = known.get("language", {}).get("found", {})
    rows = [
        [
            way,
            f"{row['tokens_per_s']:.0f}",
            f"{row['timing/train_s']:.2f}",
            f"{row['memory/peak_mb'] * 2**20 / 1e9:.1f}",
        ]
        for way, row in by_way.items()
        if isinstance(row, dict) and "failed" not in row
    ]
    return "\n" + table(["", "tokens/s", "training, s", "peak, GB"], rows) + "\n" if rows else ""


def plan() -> str:
    rows = [
        [f"`{c.name}`", c.what, f"{c.limit}", "all of it, alone" if c.gigabytes is None else f"{c.gigabytes} GB"]
        for c in PLAN
    ]
    return table(["check", "what", "at most, s", "of the card"], rows)


def page(known: Checks) -> str:
    tables = {
        "ratios": ratios(known),
        "attention": attention(known),
        "kernels": kernels(known),
        "speed": speed(known),
        "peer": peer(known),
        "language": language(known),
    }
    measured = {name: text or "\nNot measured yet.\n" for name, text in tables.items()}
    return TEXT.format(head=head(known), tests=tests(known), plan=plan(), **measured)


TEXT = """\
<!-- Made by `python -m benchmarks.gpu_page > docs/gpu.md` from benchmarks/results/gpu.json. -->

# On a GPU

This page shows what has been measured on a GPU, and how to measure it on yours. It is the only page with figures from
a GPU; all other pages report CPUs.

```bash
make gpu                                  # installs, then runs the plan: about half an hour
python -m benchmarks.gpu --plan           # what it does, in which order
python -m benchmarks.gpu                  # six minutes of it; the next call goes on
python -m benchmarks.gpu ratio:sdxl peer  # these checks alone
```

A check that fails or runs out of time does not stop the others, and a second call goes on with what is missing. Results
are in `benchmarks/results/gpu.json`. On a machine without an index of packages, carry the wheels along:
`python3 benchmarks/gpu_setup.py WHEELS TARGET` installs them and says what is missing.

{head}{tests}
## The ratio of the first update

The largest |ratio - 1| before the first update, by `genrl train` on models of published size with random weights. 0
means that training computes the bits that sampling computed. *Reduced* models have their full width and fewer blocks.
UNets have no attention processors or fused kernels of ours. *No room*: several checks shared the card. FLUX.1 failed
as it is, too, before cuDNN's attention was left out (see below); compiled it was not run again since.
{ratios}
## torch's attention kernels

The largest error of output and gradients against float64, in units of the error that torch's exact kernel (`math`)
makes in bfloat16. `auto` is what torch chooses if nothing is switched off.
{attention}
**cuDNN's kernel is not safe.** torch keeps its plans by the layouts of query, key and value, but not by the layout of
the gradient. FLUX.1 has blocks of two kinds, whose gradients come in two layouts with one shape: the plan of one then
runs on the other. In the table its errors are hundreds of times the rounding error, without any message, and the
reduced FLUX.1 ended with an illegal memory access. So every run of genrl leaves cuDNN's kernel out of torch's choice,
which costs speed on cards where it is the fastest. `kernels.attention: cudnn` names it and hands it gradients in one
layout. If you train FLUX.1 with other code on such a card, call `torch.backends.cuda.enable_cudnn_sdp(False)`.

**No run chooses by a trial.** A trial at the start of a run could time the kernels, but would not have seen this error,
which comes when a second layout meets the plan of the first. What it could win is small: of an iteration of SD3.5-M at
512 px cuDNN saves 8 %, flash by name 5 % ([below](#an-iteration)). So the default is torch's choice without cuDNN, the
same in every call of a run, and a faster kernel is named by hand.

## Kernels
{kernels}
Each call is recorded as a CUDA graph and timed by the GPU's events with a cold cache; the [rule of a
default](kernels.md#timing) reads these tables. A star marks calls that waited for the host and could not be recorded:
theirs is the host's time.

Three kernels were written in Triton and timed on the H200: norm and rotation of queries and keys, the gates and
modulations of a block, and a step with its log-probability. `torch.compile` of their definitions was faster (1.4 to 2.9
times, up to 2.5 in the backward pass, and 20 to 80), so they are gone, and `kernels.fused` compiles the definitions.
The rows `fused` below are theirs; the compiled definitions were not measured yet. A fourth, of shared prefixes, was
right there but never timed; FlexAttention computes the same, and it is gone too. cuDNN's attention is 1.3 to 2 times
as fast as the flash kernel that torch chooses without it, and `kernels.attention: cudnn` has it.

## An iteration

One micro-batch of the published recipe at 512 px. The estimate is that of `genrl check` on that day.
{speed}
All this was measured while peft's adapters computed in float32. Since then [they compute in the model's
precision](adapters.md#precision), and the estimate counts [what each family's blocks keep](memory.md#the-estimate):
28.3 GB for the first row. Peaks of the rows below the first may hold up to 5 GB of the run before, which nobody had
collected; the benchmark does now. Neither was measured again.

## Beside the usual loop

[The stand-in of the usual loop](speed.md#the-choices-one-at-a-time) against genrl on SD3.5-medium, both
without cuDNN's attention.
{peer}
At equal work genrl was slower here, while on a CPU it is as fast. The stand-in's adapters are bfloat16, and genrl's
computed in float32 that day, without tensor cores. That was changed, but not measured again.

## Language

Qwen2.5-VL-3B's architecture: 32 answers of 256 tokens to questions with pictures, sampled by transformers, and an
update.
{language}
## The plan

{plan}
"""


def main() -> None:
    cards = list(results(RESULTS).values())
    print(page(cards[-1] if cards else {}), end="")


if __name__ == "__main__":
    main()
