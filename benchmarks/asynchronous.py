"""Training while samples are drawn: seconds of an iteration, by staleness and by how long rewards take to answer.

    python -m benchmarks.asynchronous [--iterations 12] [--staleness 0 1 5] [--latency 0 1 5]

`configs/flow_grpo.yaml` with one rollout worker on Ray and its reward on a server, one thread each: on two free cores.
Latency is in iterations: of a synchronous one without latency. An iteration's micro-batches wait one after the other,
those of different iterations side by side, as with a judge behind an API. At a staleness of 0 pictures are scored after
all of them are drawn, and again while others are. Writes asynchronous.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import parser, save
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.runtime.folder.run import Run, read_metrics

FILE = "configs/flow_grpo.yaml"
PORT = 8671
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
WARM_UP = 3
"""Iterations that are not counted; as many more as the staleness at the start, which find samples that were waiting,
and at the end, when nothing is left to draw."""


class Slow(BaseHTTPRequestHandler):
    """Hands requests on to the reward server, and their answers back after `pause` seconds."""

    pause = 0.0

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._hand_on(None)

    def do_POST(self) -> None:
        started = time.perf_counter()
        self._hand_on(self.rfile.read(int(self.headers["Content-Length"])), started + self.pause)

    def _hand_on(self, body: bytes | None, until: float = 0.0) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}{self.path}", body, dict(self.headers))  # noqa: S310
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            status, reply, kind = answer.status, answer.read(), answer.headers["Content-Type"]
        time.sleep(max(0.0, until - time.perf_counter()))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


@contextmanager
def served() -> Iterator[str]:
    """URL of the reward, behind what makes it slow."""
    command = [sys.executable, "-m", "genrl", "serve", "shapes", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    proxy = ThreadingHTTPServer(("127.0.0.1", PORT + 1), Slow)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{PORT + 1}"
    finally:
        proxy.shutdown()
        server.terminate()
        server.wait()


def measure(url: str, folder: Path, staleness: int, iterations: int, *, meanwhile: bool = True) -> dict[str, float]:
    """Of the later iterations, the median."""
    changes = [f"rewards=[{{name: shapes, remote: '{url}'}}]", "evaluation.every=0", "trackers=[]"]
    changes += [f"iterations={iterations + 2 * staleness}", f"output={folder}", f"sampling.staleness={staleness}"]
    changes += [f"sampling.score_in_background={str(meanwhile).lower()}"]
    changes += ["engine.rollout_workers=1"]
    command = [sys.executable, "-m", "genrl", "train", FILE, *changes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    rows = [row for row in read_metrics(Run(folder).metrics) if WARM_UP < row["step"] - staleness <= iterations]
    keys = ("timing/iteration_s", "timing/sample_s", "timing/score_s", "timing/train_s", "workers/idle")
    return {key: median(row.get(key, 0.0) for row in rows) for key in keys}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--iterations", type=int, default=12)
    arguments.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 5])
    arguments.add_argument("--latency", type=float, nargs="+", default=[0.0, 1.0, 5.0])
    given = arguments.parse_args()
    config = load(FILE)
    assert isinstance(config, Config)
    rows: list[dict[str, Any]] = []
    with served() as url, tempfile.TemporaryDirectory() as folder:
        alone = measure(url, Path(folder) / "alone", 0, given.iterations)["timing/iteration_s"]
        for latency in given.latency:
            Slow.pause = latency * alone / config.sampling.micro_batches
            for staleness, meanwhile in [(0, False), *((k, True) for k in given.staleness)]:
                place = Path(folder) / f"{latency}-{staleness}-{meanwhile}"
                row = measure(url, place, staleness, given.iterations, meanwhile=meanwhile)
                rows.append({"latency": latency, "staleness": staleness, "meanwhile": meanwhile, **row})
                print(rows[-1], flush=True)
    save(given.out, "asynchronous", {"iteration_s": alone, "rows": rows})


if __name__ == "__main__":
    main()
