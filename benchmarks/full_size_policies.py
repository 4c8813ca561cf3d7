"""pi0, pi0.5 and SmolVLA at their published sizes, with random weights: one iteration of PPO, by the LIBERO recipes.

    python -m benchmarks.full_size_policies [--policies smolvla pi0] [--envs 2]

No weights are downloaded: each folder has the names and shapes of the published checkpoint (tests/vla/published.py), in
bfloat16. Of the recipe everything stays but the simulator and the sizes of a rollout: MiniTable instead of LIBERO,
whose scenes are not in its package, with one camera, and one chunk per episode. Each policy is trained in a process of
its own. Printed and written to full_size_policies.json: weights, seconds, the peak of the process's memory, and the
ratio before the first update.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser, save
from genrl.config import load
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import train
from genrl.runtime.weights.devices import default_device, peak_bytes, resident_peak_bytes
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import IMAGE
from tests.vla.published import PI_REAL, SMOL_REAL, pi_folder, pi_shapes, random_weights, smol_folder, smol_shapes

RECIPES = {"pi0": "pi0_libero", "pi05": "pi0_libero", "smolvla": "smolvla_libero"}
CAMERA = "observation.images.image"
FEATURES = {
    "observation.state": {"type": "STATE", "shape": [3]},
    CAMERA: {"type": "VISUAL", "shape": [3, 256, 256]},
}
STATS = {"mean": 0.0, "std": 0.5, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}


def build(kind: str, folder: Path) -> int:
    """Write the folder, as LeRobot would save it, with the numbers of MiniTable's robot; returns the weights."""
    if kind == "smolvla":
        weights = random_weights(smol_shapes(SMOL_REAL), dtype=torch.bfloat16)
        smol_folder(folder / "plain", s=SMOL_REAL, weights=weights, input_features=FEATURES, chunk_size=50)
    else:
        weights = random_weights(pi_shapes(PI_REAL, adaptive=kind == "pi05"), dtype=torch.bfloat16)
        sizes = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "image_resolution": [224, 224]}
        pi_folder(
            folder / "plain", adaptive=kind == "pi05", weights=weights, input_features=FEATURES, chunk_size=50, **sizes
        )
    count = sum(one.numel() for one in weights.values())
    del weights
    stats = {
        name: {key: torch.zeros(3) + value for key, value in STATS.items()} for name in ("observation.state", "action")
    }
    policy = load_policy(folder / "plain", adapt=Adapt(rename={IMAGE: CAMERA}, stats=stats))
    save_policy(policy, folder / "policy")
    return count


def child(kind: str, folder: Path, envs: int) -> None:
    """Train for an iteration and print what it took as JSON."""
    torch.set_num_threads(1)
    changes = [
        f"policy.path={folder / 'policy'}", "policy.dtype=bfloat16", f"output={folder / 'run'}", "trackers=[]",
        f"environment={{name: minitable, num_envs: {envs}, chunk: 5, max_steps: 5}}", "evaluation.every=0",
        f"trainer.minibatch={envs}", f"trainer.microbatch={envs}", "trainer.epochs=1", "iterations=1",
    ]  # fmt: skip
    config, began = load(f"configs/vla/{RECIPES[kind]}.yaml", changes), time.perf_counter()
    train(config)
    row = read_metrics(folder / "run" / "metrics.jsonl")[-1]
    device = torch.device(default_device())
    found = {
        "seconds": time.perf_counter() - began,
        "peak_bytes": peak_bytes(device) if device.type != "cpu" else resident_peak_bytes(),
        "metrics": {key: row[key] for key in row if key.startswith(("timing/", "ratio/", "grad_norm"))},
    }
    print(json.dumps(found))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--policies", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--envs", type=int, default=2, help="tables side by side, a chunk each; default: 2")
    given, found = arguments.parse_args(), dict[str, Any]()
    for kind in given.policies:
        with tempfile.TemporaryDirectory() as place:
            row = found[kind] = {"weights": build(kind, Path(place)), "envs": given.envs}
            call = f"from pathlib import Path; from benchmarks.full_size_policies import child; child({kind!r}, "
            call += f"Path({place!r}), {given.envs})"
            done = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True)
            row |= json.loads(done.stdout.strip().rpartition("\n")[2])
            print(kind, json.dumps(row), flush=True)
        save(given.out, "full_size_policies", found)


if __name__ == "__main__":
    main()
