"""`python -m genrl.kernels.aot`: compile every kernel for four GPUs, none of which need be present.

Per kernel and target: registers of a thread, spilled bytes and shared memory. A spill or more shared memory than the
device has is a fault (exit code 1). Sizes are those of SD3.5, FLUX, Wan and a language model in bfloat16.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from genrl.kernels.backend import FUSION

LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Shared memory of a block, in bytes."""
ATTENTION = {"H": 16, "KEY_H": 2, "MASK": True, "CAST": False}


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on a target."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int

    @property
    def fits(self) -> bool:
        return self.spilled == 0 and self.shared <= LIMITS[self.target]


def cases() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Name -> (kernel, types of its arguments before the constants, constants and options)."""
    from genrl.kernels import adaln_triton, prefix_attention_triton, qk_norm_rope_triton, sde_step_triton

    found: dict[str, tuple[Any, str, dict[str, Any]]] = {}
    b, f, i = "*bf16 ", "*fp32 ", "i32 "
    for width, half, per_token in ((64, 32, 24), (128, 64, 24), (5120, 64, 1)):
        sizes = qk_norm_rope_triton.shape(width) | {"HALF": half, "PER_TOKEN": per_token, "WEIGHT": True, "ROPE": True}
        name, tail = f"qk_norm_rope {width}", i * 2 + "fp32"
        found[name] = qk_norm_rope_triton.forward_kernel, b * 2 + f * 2 + b + tail, sizes
        types = b * 2 + f * 2 + b * 2 + f + tail
        found[f"{name} backward"] = qk_norm_rope_triton.backward_kernel, types, sizes | {"DW": True}
    for width in (1536, 3072, 5120):
        sizes = adaln_triton.shape(width) | {"BRANCH": True}
        found[f"adaln {width}"] = adaln_triton.forward_kernel, b * 7 + i * 7 + "fp32", sizes
        types = b * 8 + f * 3 + i * 5 + "fp32"
        found[f"adaln {width} backward"] = adaln_triton.backward_kernel, types, sizes | {"ROWS": 32, "DH": True}
    block = {"BLOCK": sde_step_triton.BLOCK, **sde_step_triton.EXACT}
    found["sde_step"] = sde_step_triton.forward_kernel, f * 7 + i + "i32", block | {"SAMPLE": True}
    found["sde_step backward"] = sde_step_triton.backward_kernel, f * 6 + i + "i32", block | {"DMEAN": True}
    for size in (64, 128, 256):
        sizes = ATTENTION | FUSION | {"D": size, "BLOCK_D": size, "CAUSAL": True}
        forward, back = (sizes | prefix_attention_triton.tiles(2 * size, way)._asdict() for way in (False, True))
        name, mask, rows, tail = f"prefix_attention {size}", "*i8 ", "*i64 ", i * 2 + "fp32"
        types = b * 5 + mask + rows + b + f + tail
        found[name] = prefix_attention_triton.forward_kernel, types, forward | {"OWN": True}
        types = b * 5 + mask + rows + b + f * 2 + b + tail
        found[f"{name} backward, queries"] = prefix_attention_triton.dq_kernel, types, back | {"OWN": True}
        types = b * 3 + mask + rows * 2 + b + f * 2 + b * 2 + tail
        found[f"{name} backward, keys"] = prefix_attention_triton.dkv_kernel, types, back
    return found


def compile_for(kernel: Any, types: str, settings: dict[str, Any], target: str) -> tuple[int, int, int]:
    """(registers, spilled bytes, shared bytes). Pointers are given as divisible by 16, as torch allocates them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in settings.items() if name in kernel.arg_names}
    options = {name: value for name, value in settings.items() if name not in constants}
    given = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(given) for name in kernel.arg_names}
    if next(given, None) is not None:
        raise ValueError(f"{kernel.__name__} takes fewer arguments than {types!r} has types")
    names = list(kernel.arg_names)
    pointers = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, pointers)
    cuda = target.startswith("sm_")
    where = GPUTarget("cuda", int(target.removeprefix("sm_")), 32) if cuda else GPUTarget("hip", target, 64)
    made = triton.compile(source, target=where, options=options)
    if cuda:
        return *_resources(made.asm["cubin"]), made.metadata.shared
    text = made.asm["amdgcn"]
    counts = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text)
    }
    return counts["vgpr_count"], counts["private_segment_fixed_size"], made.metadata.shared


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack of a thread (spills, as these kernels have no arrays of their own), by Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled; unset it")
    wanted = sys.argv[1:]  # parts of names; none = all
    rows: list[Compiled] = []
    print(f"{'kernel':<40}{'target':<8}{'registers':>10}{'spilled':>9}{'shared':>9}", flush=True)
    for name, (kernel, types, settings) in cases().items():
        if wanted and not any(part in name for part in wanted):
            continue
        for target in LIMITS:
            row = Compiled(name, target, *compile_for(kernel, types, settings, target))
            verdict = "" if row.fits else "  FAULT"
            print(f"{name:<40}{target:<8}{row.registers:>10}{row.spilled:>9}{row.shared:>9}{verdict}", flush=True)
            rows.append(row)
    if "GENRL_AOT_JSON" in os.environ:
        Path(os.environ["GENRL_AOT_JSON"]).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
