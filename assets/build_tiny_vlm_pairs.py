"""Make the embedded judge of pairs before it is taught: `tiny-vlm-tasks` with the words of question and answers.

    python assets/build_tiny_vlm_pairs.py     # assets/tiny-vlm-pairs, two seconds

`configs/vlm/paco_reward.yaml` teaches it to judge.
"""

from __future__ import annotations

from pathlib import Path

import torch
from build_tiny_vlm import make_tokenizer, save

from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks.pairs import QUESTION

ASSETS = Path(__file__).resolve().parent
SEED = 0


def main() -> None:
    torch.manual_seed(SEED)
    policy = Policy(str(ASSETS / "tiny-vlm-tasks"))
    known = policy.tokenizer.get_vocab()
    words = [*sorted(known, key=known.__getitem__), *QUESTION.split(), "yes", "no"]
    tokenizer = make_tokenizer(words, longest=policy.tokenizer.model_max_length)
    assert all(tokenizer.get_vocab()[word] == number for word, number in known.items())
    policy.model.resize_token_embeddings(len(tokenizer))
    policy.processor.tokenizer = tokenizer
    save(policy.processor, policy.model, ASSETS / "tiny-vlm-pairs")


if __name__ == "__main__":
    main()
