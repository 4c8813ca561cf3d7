"""Replay of a group with the prompt computed once, against once per answer: positions, seconds, log-probabilities.

    python -m benchmarks.vlm_prefix [--rounds 5]

1,000 tokens of prompt (a picture of 100 of them), 8 answers of 300 tokens, a random LLaVA-type model; forward and
backward of all weights. Seconds are of the process on one thread, the median of rounds in turns.
Writes vlm_prefix.json.
"""

from __future__ import annotations

import statistics
import time

import torch
import transformers
from PIL import Image

from benchmarks.common import parser, save
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Tokens

MODEL = "assets/tiny-vlm"
PROMPT, ANSWER, ANSWERS = 1000, 300, 8
SIZES = ((128, 2), (256, 4))
"""Width and layers of the language model."""


def policy_of(width: int, layers: int) -> Policy:
    """The embedded model's processor and vision tower, a language model of this size, context for long prompts."""
    policy = Policy(MODEL)
    config = policy.model.config
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = width, 2 * width, layers
    text.num_attention_heads = text.num_key_value_heads = width // text.head_dim
    text.max_position_embeddings = 2048
    torch.manual_seed(0)
    policy.model = transformers.LlavaForConditionalGeneration(config).eval()
    policy.room = 2048
    return policy


def question(policy: Policy) -> Encoded:
    """One picture and random words, 1,000 tokens."""
    picture = policy.processor.image_processor(Image.new("RGB", (48, 48), "red"), return_tensors="pt")
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(4, policy.model.config.text_config.vocab_size, (PROMPT,), generator=rng)
    words[1:10] = policy.model.config.image_token_id
    tokens = Tokens(words, {}, {"pixel_values": picture["pixel_values"]})
    return Encoded(tokens, torch.arange(PROMPT), PROMPT, "benchmark")


def once(
    policy: Policy, prompt: Encoded, answers: torch.Tensor, *, share: bool
) -> tuple[torch.Tensor, int, float, torch.Tensor]:
    """Log-probabilities, positions computed, CPU seconds, and the gradient of the first layer's queries."""
    policy.model.zero_grad(set_to_none=True)
    began = time.process_time()
    group = torch.zeros(len(answers), dtype=torch.int64)
    replay = policy.log_probs([prompt], answers, torch.ones_like(answers), group=group, share_prefix=share)
    replay.log_prob.mean().backward()
    spent = time.process_time() - began
    gradient = policy.model.get_decoder().layers[0].self_attn.q_proj.weight.grad
    return replay.log_prob.detach(), replay.positions, spent, gradient.clone()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    results = []
    print("| model | positions: once, per answer | times fewer | CPU s: once, per answer | times faster "
          "| log-probs differ by | gradients by |")  # fmt: skip
    print("| --- " * 7 + "|")
    for width, layers in SIZES:
        policy = policy_of(width, layers)
        prompt, rng = question(policy), torch.Generator().manual_seed(1)
        answers = torch.randint(4, policy.model.config.text_config.vocab_size, (ANSWERS, ANSWER), generator=rng)
        rounds = [
            {share: once(policy, prompt, answers, share=share) for share in (True, False)} for _ in range(given.rounds)
        ]
        shared, plain = rounds[0][True], rounds[0][False]
        error = float((shared[0] - plain[0]).abs().max())
        slope = float((shared[3] - plain[3]).abs().max() / plain[3].abs().max())
        seconds = {share: statistics.median(one[share][2] for one in rounds) for share in (True, False)}
        assert error < 1e-5, f"log-probabilities differ by {error:.1g}"
        print(f"| width {width}, {layers} layers | {shared[1]}, {plain[1]} | {plain[1] / shared[1]:.2f}", end=" | ")
        print(f"{seconds[True]:.1f}, {seconds[False]:.1f} | {seconds[False] / seconds[True]:.2f}", end=" | ")
        print(f"{error:.1g} | {slope:.1g} |")
        results.append(
            {
                "width": width,
                "layers": layers,
                "positions": {"once": shared[1], "per answer": plain[1]},
                "cpu_s": {"once": seconds[True], "per answer": seconds[False]},
                "rounds": [{str(share): one[share][2] for share in one} for one in rounds],
                "log_prob_error": error,
                "gradient_error": slope,
            }
        )
    save(given.out, "vlm_prefix", {"prompt": PROMPT, "answer": ANSWER, "answers": ANSWERS, "models": results})


if __name__ == "__main__":
    main()
