"""Benchmarks of a CPU, in minutes: `python -m benchmarks [NAME ...]`, into runs/benchmarks.

Those that train do so briefly here: their rates hold, the reward that they gain means little. How what docs/ publishes
was made stands in the JSON files of benchmarks/results.
"""

from __future__ import annotations

import argparse
import runpy
import sys

BRIEF: dict[str, list[str]] = {
    "model_calls": [],
    "overhead": [],
    "peer_flow_grpo": [],
    "peer_diffusers_sft": [],
    "end_to_end": ["--minutes", "0.1", "--seeds", "0"],
    "memory": [],
    "scaling": ["--processes", "1", "2", "--iterations", "2"],
    "kernels": ["--dry-run"],
    "vlm_prefix": [],
    "vlm_memory": [],
    "vla_context": [],
    "ocr_accuracy": [],
}
"""Name -> options."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BRIEF)}; default: all")
    parser.add_argument("--out", default="runs/benchmarks", help="folder of the JSON; default: runs/benchmarks")
    given = parser.parse_args()
    if unknown := set(given.names) - BRIEF.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BRIEF)}")
    for name in given.names or BRIEF:
        print(f"\n=== {name}", flush=True)
        sys.argv = [f"benchmarks.{name}", *BRIEF[name], "--out", given.out]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
