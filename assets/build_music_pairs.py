"""Make the pairs of pieces that MusicRL's reward model learns from (configs/vlm/musicgen_reward.yaml).

    python assets/build_music_pairs.py     # assets/tune-pairs/{train,eval}.jsonl, from assets/tiny-musicgen

Two pieces of the embedded MusicGen to each text; preferred is the one that gets louder (`louder` in
rewards/genrl_rewards/scorers/texts/tunes.py), a rule that is nowhere in the files. Pieces are written as their codes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from genrl.vlm.policies.music_tokens import MusicPolicy
from genrl.vlm.tasks import Split, row
from genrl_rewards.scorers.texts.tunes import louder

ASSETS = Path(__file__).resolve().parent
NUMBER: dict[Split, int] = {"train": 1500, "eval": 256}
STEPS, TEMPERATURE, TOGETHER = 10, 0.99, 64


def pairs(policy: MusicPolicy, split: Split) -> list[str]:
    lines = []
    for start in range(0, NUMBER[split], TOGETHER):
        rows = [row("tunes", split, number) for number in range(start, min(start + TOGETHER, NUMBER[split]))]
        prompts = [policy.encode(one.prompt) for one in rows]
        answers = policy.sample(prompts, 2, TEMPERATURE, [("pairs", one.name) for one in rows])
        codes, scores = policy.codes(answers.tokens), louder(answers.made["audio"], answers.made["rate"])
        for number, one in enumerate(rows):
            first, second = 2 * number, 2 * number + 1
            if scores[first] < scores[second]:
                first, second = second, first
            pair = {
                "prompt": one.columns["question"],
                "preferred": codes[first].tolist(),
                "other": codes[second].tolist(),
            }
            lines.append(json.dumps(pair))
    return lines


def main() -> None:
    policy = MusicPolicy(str(ASSETS / "tiny-musicgen"), STEPS)
    for split in get_args(Split):
        file = ASSETS / "tune-pairs" / f"{split}.jsonl"
        file.write_text("\n".join(pairs(policy, split)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
