"""Benchmarks: each is `python -m benchmarks.NAME [--help]`, prints a table and writes `NAME.json` with its raw samples,
the command, the commit and the versions into benchmarks/results, which holds what docs/ publishes (or into `--out`).
`python -m benchmarks` (`make bench`) runs those of a CPU, briefly, into runs/benchmarks."""

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before diffusers and transformers look for a torchvision that may be broken beside a CPU-only torch
