"""Scaling that was not measured: what a cost model foresees for 8, 64 and 512 GPUs, work per GPU the same.

    python -m benchmarks.scaling_predicted

Seconds of an iteration are its arithmetic at a stated share of a GPU's peak, and what goes over the wires at stated
bandwidths. What is sent is counted by `benchmarks.scaling` on the embedded model, and follows these formulas:

- replicated: an all-reduce of the float32 gradients for each update, 2 (N - 1) / N of their bytes;
- in shards: the weights are gathered in each model call, and in each backward pass once more, (N - 1) / N of their
  bytes; where all are trained, their gradients are reduced and scattered after each backward pass;
- scores, counts and rows of metrics: a few small collectives.

Nothing overlaps in the lower figure of efficiency, all that FSDP can fetch ahead in the upper one. Left out: slow
processes, decoding, rewards, and what a network shared with others does. Prints a table.
"""

from __future__ import annotations

from dataclasses import dataclass

PEAK = 989e12 * 0.4
"""Operations a second: of an H100 in bfloat16, and the share of it that is assumed."""
MEMORY = 3.35e12
"""Bytes a second from a GPU's memory, which bound how fast tokens are written."""
INSIDE, BETWEEN = 450e9, 50e9
"""Bytes a second of a GPU to others of its machine (8), and to other machines (400 Gbit/s each)."""
SMALL = 14 * 5e-3
"""Seconds of an iteration's small collectives: as counted, and as long as they took over gloo."""


@dataclass(frozen=True)
class Case:
    """A run. passes: forward passes of an iteration that are no training, and of training, per sample; a backward pass
    takes `backward` times a forward one's work."""

    name: str
    parameters: float
    trained: float
    tokens: int
    samples: int
    """Per GPU and iteration."""
    micro_batch: int
    passes: tuple[int, int]
    backward: float
    shard: int | None
    """GPUs that share the weights; None = each has all."""
    written: int = 0
    """Tokens that are written one by one."""
    gathers: int | None = None
    """Of all weights where nothing is trained; None = one for every pass of a micro-batch."""

    def compute_s(self) -> float:
        sampling, training = self.passes
        operations = 2 * self.parameters * self.tokens * self.samples * (sampling + (1 + self.backward) * training)
        return operations / PEAK + self.written * 2 * self.parameters / MEMORY

    def sent_s(self, gpus: int) -> tuple[float, float]:
        """Seconds of what can be fetched ahead, and of what cannot."""
        if self.shard is None:
            return 0.0, _seconds(4 * self.trained, gpus, gpus, times=2)
        group = min(gpus, self.shard)
        pieces = self.samples / self.micro_batch
        sampling, training = self.passes
        gathers = (pieces * sampling if self.gathers is None else self.gathers) + 2 * pieces * training
        ahead = gathers * _seconds(2 * self.parameters, group, gpus)
        whole = self.trained == self.parameters
        if whole:
            ahead += pieces * training * _seconds(4 * self.trained, group, gpus)
        rest = 4 * self.trained / (group if whole else 1)
        return ahead, _seconds(rest, gpus // group if whole else gpus, gpus, times=2)

    def efficiency(self, gpus: int) -> tuple[float, float]:
        """Of a GPU that sends nothing: with nothing overlapped, and with all that can be."""
        alone, (ahead, rest) = self.compute_s(), self.sent_s(gpus)
        return alone / (alone + ahead + rest + SMALL), alone / (max(alone, ahead) + rest + SMALL)


def _seconds(size: float, group: int, gpus: int, times: int = 1) -> float:
    """A ring over `group` of the run's GPUs; those of one machine come first."""
    if group == 1:
        return 0.0
    inside = group <= 8 and (gpus <= 8 or group == 8)
    return times * (group - 1) / group * size / (INSIDE if inside else BETWEEN)


FLUX = (11.9e9, 75e6, 1536, 24, 4, (10, 3), 2.0)
CASES = (
    Case("SD3.5-medium, LoRA, replicated", 2.24e9, 19e6, 1180, 72, 9, (20, 20), 2.0, None),
    Case("FLUX.1-dev, LoRA, shards of a machine", *FLUX, 8),
    Case("FLUX.1-dev, LoRA, shards of all", *FLUX, 10**6),
    Case("7B VLM, in full, shards of a machine", 8.3e9, 8.3e9, 1024, 32, 4, (2, 1), 3.0, 8, 512, 2),
    Case("7B VLM, in full, shards of all", 8.3e9, 8.3e9, 1024, 32, 4, (2, 1), 3.0, 10**6, 512, 2),
)
"""512 pixels; backward passes of LoRA leave out the gradients of frozen weights, those in full compute activations
again. The VLM gathers its weights once to answer and once to estimate."""


def main() -> None:
    print("| run | an iteration's arithmetic, s | 8 GPUs | 64 | 512 |\n| --- | --- | --- | --- | --- |")
    for case in CASES:
        cells = [" to ".join(f"{value:.2f}" for value in case.efficiency(gpus)) for gpus in (8, 64, 512)]
        print(f"| {case.name} | {case.compute_s():.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
