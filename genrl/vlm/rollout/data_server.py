"""The other side of `python -m genrl.diffusion.data_server`: pictures of descriptions, drawn while training goes on."""

from __future__ import annotations

import base64
import io
import json
import queue
import subprocess
import sys
import threading

from PIL import Image

from genrl.mdp.noise import derive_seed

PATIENCE_S = 600.0
"""Longest wait for one picture."""


class DataServer:
    """A process that draws. Pictures are functions of their description and seed, whatever else is asked for.

    Submitted pictures are drawn in their order; what is neither taken nor forgotten stays.
    `close` ends the process.
    """

    def __init__(self, pipeline: str, num_inference_steps: int, guidance_scale: float) -> None:
        command = [sys.executable, "-m", "genrl.diffusion.data_server", pipeline]
        command += ["--num-inference-steps", str(num_inference_steps), "--guidance-scale", str(guidance_scale)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.arrived: queue.Queue[str] = queue.Queue()
        self.asked: dict[str, str] = {}
        self.drawn: dict[str, Image.Image] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.arrived.put(line)
        self.arrived.put("")  # it has ended

    def submit(self, description: str, sample: str, seed: int) -> None:
        """Ask for a picture; `sample` is its name. Returns at once. Raises RuntimeError where the process has ended."""
        self.asked[sample] = description
        request = {"id": sample, "description": description, "seed": derive_seed(seed, sample) % 2**63}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(self._ended()) from error

    def poll(self) -> list[str]:
        """Names of the pictures that are there and were not taken."""
        while not self.arrived.empty():
            self._read(self.arrived.get())
        return list(self.drawn)

    def take(self, sample: str) -> Image.Image:
        """The picture of this name, waited for. Raises RuntimeError where it cannot be drawn or does not come, and
        KeyError where it was never submitted."""
        description = self.asked[sample]
        while sample not in self.drawn:
            try:
                self._read(self.arrived.get(timeout=PATIENCE_S))
            except queue.Empty as error:
                raise RuntimeError(
                    f"synthesis: no picture of {description!r} came within {PATIENCE_S:.0f} s; look at the load of the "
                    "machine, or take fewer denoising steps (synthesis.num_inference_steps)"
                ) from error
        del self.asked[sample]
        return self.drawn.pop(sample)

    def forget(self, sample: str) -> None:
        """Keep no picture of this name, drawn or not."""
        self.asked.pop(sample, None)
        self.drawn.pop(sample, None)

    def _read(self, line: str) -> None:
        if not line:
            raise RuntimeError(self._ended())
        answer = json.loads(line)
        if "error" in answer:
            description = self.asked.get(answer["id"], answer["id"])
            raise RuntimeError(f"synthesis: {description!r} cannot be drawn: {answer['error']}")
        if answer["id"] not in self.asked:
            return
        self.drawn[answer["id"]] = Image.open(io.BytesIO(base64.b64decode(answer["png"]))).convert("RGB")

    def _ended(self) -> str:
        code = self.process.wait(timeout=10)
        return f"synthesis: the process that draws has ended with code {code}; what it said is above"

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(timeout=10)
