"""`python -m benchmarks`: every benchmark that runs on a CPU in minutes."""

from __future__ import annotations

import runpy
import sys

for name in ("overhead", "peer_flow_grpo", "scaling", "ocr_accuracy", "vlm_memory", "vlm_prefix"):
    print(f"\n=== {name}", flush=True)
    sys.argv = [f"benchmarks.{name}"]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
