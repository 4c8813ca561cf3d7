"""Peak memory of the log-probabilities of completions, forward and backward, with and without the logits.

    python -m benchmarks.vlm_memory

`whole` makes the logits [B, T, V] in float32, divides them by the temperature and gathers from their log-softmax, as a
training loop on `model(...).logits` does; `chunked` is `genrl.vlm.policies.log_probs.completion_log_probs`. Both are
given the
same states and output layer and go backward to both. Each runs in a process of its own; the peak is what the process
held at most beyond what it held before the pass (the kernel's high-water mark of resident memory), the gradient of the
output layer included in both. `graphs` are what the graph of the embedded model keeps of 16 answers of 16 tokens to two
questions, as configs/vlm/quickstart.yaml has it, with prompts shared or not and with blocks computed again. Writes
vlm_memory.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import parser, save

VOCABULARY = 131_072
SHAPES = ((8, 128, 64), (8, 256, 64))
"""Answers, tokens of each, width of the model."""
TEMPERATURE = 0.7


def whole(states: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(states, weight).float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def chunked(states: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, entropy: bool = False) -> torch.Tensor:
    from genrl.vlm.policies.log_probs import completion_log_probs

    return completion_log_probs(states, weight, tokens, temperature=TEMPERATURE, entropy=entropy).log_prob


def graphs() -> dict[str, int]:
    """Bytes that the graph of a backward pass keeps."""
    from genrl.config import load
    from genrl.vlm.config.schema import VLMConfig
    from genrl.vlm.policies.folder import open_policy
    from genrl.vlm.rollout.data import Questions

    config, sizes = load("configs/vlm/quickstart.yaml"), {}
    assert isinstance(config, VLMConfig)
    policy, questions = open_policy(config, "cpu"), Questions(config, "train")
    prompts = [policy.encode(questions[number].prompt) for number in range(2)]
    tokens, mask = torch.full((16, 16), 8), torch.ones(16, 16, dtype=torch.bool)
    group = torch.arange(2).repeat_interleave(8)
    for way in ("shared prompts", "a prompt per answer", "blocks computed again"):
        if way == "blocks computed again":
            policy.checkpoint_blocks()
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            replay = policy.log_probs(prompts, tokens, mask, group=group, share_prefix=way == "shared prompts")
        sizes[way] = sum(kept.values())
        del replay
    return sizes


WAYS = {"whole": whole, "chunked": chunked, "with entropy": lambda *given: chunked(*given, entropy=True)}


def resident(name: str) -> int:
    """VmRSS (now) or VmHWM (at most, since it was reset) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(way: str, rows: int, length: int, width: int) -> dict[str, float]:
    """Peak bytes and CPU seconds of a pass in this process, and the sum of the log-probabilities."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(rows, length, width, generator=rng, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, width, generator=rng) / width**0.5)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=rng)
    WAYS[way](states[:1, :2], weight, tokens[:1, :2]).sum().backward()  # what is loaded at first use
    states.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, began = resident("VmRSS"), time.process_time()
    log_prob = WAYS[way](states, weight, tokens)
    log_prob.sum().backward()
    return {
        "peak": resident("VmHWM") - before,
        "cpu_s": time.process_time() - began,
        "log_prob": float(log_prob.detach().double().sum()),
    }


def main() -> None:
    arguments = parser(__doc__)
    names = ("WAY", "ROWS", "LENGTH", "WIDTH")
    arguments.add_argument("--one", nargs=4, metavar=names, help="for the processes that this program starts")
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], *map(int, given.one[1:]))))
        return
    shapes = []
    print(f"| answers x tokens, vocabulary {VOCABULARY} | way | peak, MB | times less | CPU s |\n{'| --- ' * 5}|")
    for shape in SHAPES:
        results = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.vlm_memory", "--one", way, *map(str, shape)]
            results[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            ratio = results["whole"]["peak"] / results[way]["peak"]
            one = results[way]
            print(f"| {shape[0]} x {shape[1]} | {way} | {one['peak'] / 1e6:.0f} | {ratio:.1f} | {one['cpu_s']:.1f} |")
        spread = max(abs(one["log_prob"] / results["whole"]["log_prob"] - 1) for one in results.values())
        assert spread < 1e-6, f"log-probabilities differ by {spread:.1g}"
        shapes.append({"answers": shape[0], "tokens": shape[1], "width": shape[2], "ways": results})
    kept = graphs()
    for way, size in kept.items():
        print(f"graph of the embedded model, {way}: {size / 1e6:.1f} MB")
    save(given.out, "vlm_memory", {"vocabulary": VOCABULARY, "shapes": shapes, "graphs": kept})


if __name__ == "__main__":
    main()
