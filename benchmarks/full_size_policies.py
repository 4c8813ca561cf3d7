"""pi0, pi0.5 and SmolVLA at their published sizes, with random weights: one iteration of PPO, by the LIBERO recipes.

    python -m benchmarks.full_size_policies [--policies smolvla pi0] [--envs 2] [--layers 2]

No weights are downloaded: each folder has the names and shapes of the published checkpoint (tests/vla/published.py), in
bfloat16; `--layers` leaves out layers of pi0's and pi0.5's stacks. Of the recipe everything stays but the simulator and
the sizes of a rollout: MiniTable instead of LIBERO, whose scenes are not in its package, with one camera, and one chunk
per episode. Each policy is trained in a process of its own. Printed and written to full_size_policies.json: weights,
seconds, the peak of the process's memory in acting and training over what its libraries held, beside the estimate of
`genrl check`, and the ratio before the first update. All weights are held in float32, as the recipes have them: those
in fewer bytes would be mapped files, which are not the process's own memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser, save
from benchmarks.full_size import GIVES_BACK, Peak, private_bytes
from genrl.config import load
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import train
from genrl.vla.config.memory_estimate import in_folder, memory
from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies import pi0
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import IMAGE
from genrl.vla.run import VLARun
from tests.vla.published import PI_REAL, SMOL_REAL, pi_folder, pi_shapes, random_weights, smol_folder, smol_shapes

RECIPES = {"pi0": "pi0_libero", "pi05": "pi05_libero", "smolvla": "smolvla_libero"}
CAMERA = "observation.images.image"
FEATURES = {
    "observation.state": {"type": "STATE", "shape": [3]},
    CAMERA: {"type": "VISUAL", "shape": [3, 256, 256]},
}
STATS = {"mean": 0.0, "std": 0.5, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}


def shorten(layers: int | None) -> Any:
    """The sizes of pi0 with so many layers in each stack, as the classes are to know them; None = all."""
    if layers is None:
        return PI_REAL
    for name in ("gemma_2b", "gemma_300m"):
        pi0.GEMMA[name] = pi0.GEMMA[name]._replace(depth=layers)
    pi0.SIGLIP["gemma_2b"] = pi0.SIGLIP["gemma_2b"]._replace(depth=layers)
    return type(PI_REAL)(**vars(PI_REAL) | {"layers": layers, "eye_layers": layers})


def build(kind: str, folder: Path, layers: int | None) -> int:
    """Write the folder, as LeRobot would save it, with the numbers of MiniTable's robot; returns the weights."""
    if kind == "smolvla":
        weights = random_weights(smol_shapes(SMOL_REAL), dtype=torch.bfloat16)
        smol_folder(folder / "plain", s=SMOL_REAL, weights=weights, input_features=FEATURES, chunk_size=50)
    else:
        adaptive = kind == "pi05"
        weights = random_weights(pi_shapes(shorten(layers), adaptive=adaptive), dtype=torch.bfloat16)
        settings = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "train_expert_only": False}
        settings |= {"image_resolution": [224, 224], "tokenizer_max_length": 200 if adaptive else 48, "chunk_size": 50}
        pi_folder(folder / "plain", adaptive=adaptive, weights=weights, input_features=FEATURES, **settings)
    count = sum(one.numel() for one in weights.values())
    del weights
    stats = {
        name: {key: torch.zeros(3) + value for key, value in STATS.items()} for name in ("observation.state", "action")
    }
    policy = load_policy(folder / "plain", adapt=Adapt(rename={IMAGE: CAMERA}, stats=stats))
    save_policy(policy, folder / "policy")
    return count


def child(kind: str, folder: Path, envs: int, layers: int | None) -> None:
    """Train for an iteration and print what it took as JSON."""
    torch.set_num_threads(1)
    shorten(layers)
    changes = [
        f"policy.path={folder / 'policy'}", "policy.dtype=float32", f"output={folder / 'run'}", "trackers=[]",
        f"environment={{name: minitable, num_envs: {envs}, chunk: 5, max_steps: 5}}", "evaluation.every=0",
        f"trainer.minibatch={envs}", f"trainer.microbatch={envs}", "trainer.epochs=1", "iterations=1",
    ]  # fmt: skip
    config, began = load(f"configs/vla/{RECIPES[kind]}.yaml", changes), time.perf_counter()
    assert isinstance(config, VLAConfig)
    known = in_folder(folder / "policy")
    assert known is not None
    begin, end, measured = VLARun.collect, VLARun.finish, dict[str, int]()

    def collect(run: VLARun, *given: Any) -> Any:
        peak.peak = private_bytes()  # loading and writing the policy take room that a device need not have
        return begin(run, *given)

    def finish(run: VLARun, *given: Any) -> None:
        measured["peak_bytes"] = peak.peak - peak.before
        end(run, *given)

    VLARun.collect, VLARun.finish = collect, finish  # type: ignore[assignment, method-assign]
    with Peak() as peak:
        train(config)
    row = read_metrics(folder / "run" / "metrics.jsonl")[-1]
    result = {
        "seconds": time.perf_counter() - began,
        **measured,
        "estimate_bytes": sum(size for _, size in memory(config, known)),
        "metrics": {key: row[key] for key in row if key.startswith(("timing/", "ratio/", "grad_norm"))},
    }
    print(json.dumps(result))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--policies", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--envs", type=int, default=2, help="tables side by side, a chunk each; default: 2")
    arguments.add_argument("--layers", type=int, help="of each stack of pi0 and pi0.5; default: all")
    given, results = arguments.parse_args(), dict[str, Any]()
    for kind in given.policies:
        with tempfile.TemporaryDirectory() as place:
            row = results[kind] = {"weights": build(kind, Path(place), given.layers), "envs": given.envs}
            row["layers"] = given.layers
            call = f"from pathlib import Path; from benchmarks.full_size_policies import child; child({kind!r}, "
            call += f"Path({place!r}), {given.envs}, {given.layers})"
            done = subprocess.run(
                [sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True, env=os.environ | GIVES_BACK
            )
            row |= json.loads(done.stdout.strip().rpartition("\n")[2])
            print(kind, json.dumps(row), flush=True)
        save(given.out, "full_size_policies", results)


if __name__ == "__main__":
    main()
