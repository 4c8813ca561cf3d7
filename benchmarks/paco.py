"""PaCo-RL on one batch of the embedded model: how right a judge of pairs is, and what log-tame changes in advantages.

    python -m benchmarks.paco assets/tiny-vlm-pairs JUDGE ...     # folders of judges; minutes

Pictures: of training prompts, sampled without noise on the way. The judge is compared with the rule `same_shapes` on
pairs of pictures of one prompt, and on held-out drawn pairs; advantages with each of the two rewards they are made of.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from scipy.stats import spearmanr
from torch import Tensor

import genrl_rewards
from genrl.diffusion.methods.paco_grpo.train import coefficient_of_variation, log_tame_advantages
from genrl.objectives.groups import group_advantages
from genrl.playground.tasks.pairs import QUESTION
from genrl.vlm import tasks
from genrl_rewards.pictures import pil_list, to_uint8
from genrl_rewards.scorers.judges.vlm import LocalVLM
from genrl_rewards.scorers.objects.shapes import alike, find

ASSETS = Path(__file__).resolve().parents[1] / "assets"
GROUPS, EACH, PAIRS = 16, 6, 256
CONFLICTS = ("jpeg", "sharpness", "saturation")


def pictures() -> tuple[Tensor, list[str], list[int]]:
    """[N, 3, 64, 64] in [0, 1], their prompts and groups."""
    pipe = DiffusionPipeline.from_pretrained(ASSETS / "tiny-t2i")
    pipe.set_progress_bar_config(disable=True)
    prompts = [p for p in (ASSETS / "prompts/shapes_train.txt").read_text().splitlines()[:GROUPS] for _ in range(EACH)]
    made = pipe(
        prompts,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=2,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
    return made.float(), prompts, [number // EACH for number in range(len(prompts))]


def judged(folder: str, images: Tensor, group: Sequence[int]) -> str:
    """Accuracy on held-out drawn pairs, and rank correlation with the rule on pairs of one group, in both orders."""
    vlm = LocalVLM(folder, "float32")
    rows = [tasks.row("pairs", "eval", number) for number in range(PAIRS)]
    asked = [(*row.prompt.parts[:2], QUESTION) for row in rows]
    said = [answer.yes for answer in vlm.yes_no(asked)]  # type: ignore[arg-type]
    right = sum((yes > 0.5) == (row.columns["answer"] == "yes") for yes, row in zip(said, rows, strict=True))
    shown, things = pil_list(images), [find(picture) for picture in to_uint8(images)]
    pairs = [(i, j) for i, j in itertools.combinations(range(len(shown)), 2) if group[i] == group[j]]
    rule = [alike(things[i], things[j]) for i, j in pairs]
    one, other = (
        [answer.yes for answer in vlm.yes_no([[shown[i], shown[j], QUESTION] for i, j in some])]
        for some in (pairs, [(j, i) for i, j in pairs])
    )
    both = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    ordered = torch.tensor([abs(a - b) for a, b in zip(one, other, strict=True)]).mean()
    rank = spearmanr(both, rule, nan_policy="omit").statistic
    return f"| {folder} | {right / PAIRS:.3f} | {rank:.2f} of {len(pairs)} pairs | {ordered:.3f} |"


def tamed(images: Tensor, prompts: list[str], group: list[int]) -> None:
    """Of shapes + another reward, weights 1: h and deviation of both, rank correlations of the advantages with them, of
    the plain sum and of log-tame; of the rewards with each other, and of the advantages."""
    shapes = genrl_rewards.score(genrl_rewards.load("shapes"), images=images, prompts=prompts).values
    of = torch.tensor(group)
    for name in CONFLICTS:
        other = genrl_rewards.score(genrl_rewards.load(name), images=images, prompts=prompts).values
        parts = [torch.tensor(values, dtype=torch.float64) for values in (shapes, other)]
        variations = [coefficient_of_variation(part) for part in parts]
        plain = group_advantages(parts[0] + parts[1], of, scale="global")
        tame = log_tame_advantages(parts, [1.0, 1.0], of, scale="global")
        cells = [f"{spearmanr(advantage, part).statistic:.2f}" for advantage in (plain, tame) for part in parts]
        cells += [f"{spearmanr(*pair).statistic:.2f}" for pair in (parts, (plain, tame))]
        numbers = ", ".join(f"{h:.2f}" for h in variations), ", ".join(f"{float(part.std()):.3f}" for part in parts)
        print(f"| {name} | {' | '.join([*numbers, *cells])} |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("judges", nargs="*")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    images, prompts, group = pictures()
    tamed(images, prompts, group)
    for folder in given.judges:
        print(judged(folder, images, group), flush=True)


if __name__ == "__main__":
    main()
