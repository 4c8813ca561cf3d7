"""Training while answers or action chunks are drawn, by the engines themselves: seconds of an iteration, and what is
learnt, by staleness.

    python -m benchmarks.asynchronous_policies chunks [--seeds 0] [--staleness 0 1]
    python -m benchmarks.asynchronous_policies answers --vllm .venv-vllm/bin/python [--latency 0 1]

chunks: `configs/vla/flow_sde.yaml` with one Ray actor; answers: `configs/vlm/quickstart.yaml` with vLLM's server, in
the environment that `make vllm` builds. What draws and what trains have one thread each: on two free cores. Latency is
that of a reward, in iterations of a run without. Adds its rows to asynchronous_policies.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.common import parser, save
from genrl.runtime.folder.run import Run, read_metrics

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
PORT = 8673
START_S = 300.0
SLOW = '''"""Whether an answer is right, told late."""

import time

from genrl_rewards.scorers.texts.verifiable import exact


def slow(completions, answer):
    time.sleep({pause})
    return exact(completions, answer)
'''


def run(file: str, folder: Path, changes: Sequence[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Train; the rows of its metrics."""
    command = [sys.executable, "-m", "genrl", "train", file, f"output={folder}", "trackers=[]", *changes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return read_metrics(Run(folder).metrics)


def figures(rows: Sequence[dict[str, Any]], staleness: int, score: str) -> dict[str, float]:
    """Medians of iterations in the middle, and the score at the end."""
    steady = rows[3 + staleness : len(rows) - staleness]
    timings = {key for row in steady for key in row if key.startswith("timing/") or key == "workers/idle"}
    medians = {key: median(row[key] for row in steady if key in row) for key in sorted(timings)}
    return medians | {score: next(row[score] for row in reversed(rows) if score in row)}


@contextmanager
def ray_of_one() -> Iterator[dict[str, str]]:
    """Environment of runs whose Ray cluster has one CPU."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    quietly: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = ONE_THREAD | {"RAY_AUTH_MODE": "disabled"}
    head = ["start", "--head", "--num-cpus", "1", "--port", str(PORT), "--include-dashboard", "false"]
    subprocess.run([*ray, *head], env=started, **quietly)
    try:
        yield started | {"RAY_ADDRESS": f"127.0.0.1:{PORT}"}
    finally:
        subprocess.run([*ray, "stop", "--force"], env=started, **quietly)


@contextmanager
def vllm_server(python: str, place: Path) -> Iterator[tuple[str, Path]]:
    """Address of a server and its model: the embedded one, under the names that vLLM 0.32 reads by itself."""
    folder = place / "model"
    shutil.copytree("assets/tiny-vlm", folder)
    weights = load_file(folder / "model.safetensors")
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    options = "--dtype float32 --enforce-eager --enable-scale-out --logprobs-mode processed_logprobs"
    options += f" --host 127.0.0.1 --port {PORT} --no-enable-chunked-prefill"
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options.split()]
    with (place / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=ONE_THREAD | own, stdout=log, stderr=log)
    url, end = f"http://127.0.0.1:{PORT}", time.monotonic() + START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError as error:  # not yet
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"no server: {(place / 'server.log').read_text()[-3000:]}") from error
                time.sleep(1)
        yield url, folder
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("what", choices=["chunks", "answers"])
    arguments.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--latency", type=float, nargs="+", default=[0.0, 1.0])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--iterations", type=int, help="default: those of the file")
    arguments.add_argument("--vllm", help="the Python that has vLLM")
    given = arguments.parse_args()
    more = [f"iterations={given.iterations}"] if given.iterations else []
    results: list[dict[str, Any]] = []
    file = given.out / "asynchronous_policies.json"
    if file.exists():
        results = [row for row in json.loads(file.read_text())["found"] if row["what"] != given.what]

    def add(**row: Any) -> None:
        results.append({"what": given.what, **row})
        print(results[-1], flush=True)
        save(given.out, "asynchronous_policies", results)

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        cases = [(seed, k) for seed in given.seeds for k in given.staleness]
        if given.what == "chunks":
            with ray_of_one() as environment:
                for seed, k in cases:
                    changes = [*more, f"seed={seed}", "environment.workers=ray", f"environment.staleness={k}"]
                    rows = run("configs/vla/flow_sde.yaml", place / f"{seed}-{k}", changes, environment)
                    add(seed=seed, staleness=k, **figures(rows, k, "eval/success_mean"))
            return
        with vllm_server(given.vllm, place) as (url, model):
            engine = [f"generation.vllm.url={url}", f"generation.vllm.weights={place}"]
            alone = 0.0
            for latency in given.latency:
                (place / "slow.py").write_text(SLOW.format(pause=latency * alone))
                rewards = f"rewards=[{{name: {place}/slow.py:slow}}, {{name: tag_format, weight: 0.2}}]"
                for seed, k in cases:
                    changes = [*more, *engine, rewards, f"seed={seed}", f"generation.staleness={k}"]
                    changes += [f"vlm.path={model}"]
                    rows = run("configs/vlm/quickstart.yaml", place / f"{latency}-{seed}-{k}", changes, ONE_THREAD)
                    row = figures(rows, k, "eval/slow_mean")
                    alone = alone or row["timing/iteration_s"]
                    add(latency=latency, seed=seed, staleness=k, **row)


if __name__ == "__main__":
    main()
