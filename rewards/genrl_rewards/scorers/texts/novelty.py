"""Reward without a verifier: what most of a group say is right, and among equals who thinks unlike the others is paid
more (EVOL-RL, arXiv 2509.15194), so that voting does not end in one way of saying one thing."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn.functional import normalize

from genrl_rewards.models.checkpoints import pretrained, tokenizer_of, torch_dtype, transformers
from genrl_rewards.scorers.texts.verifiable import answer_in, votes_of

NO_ANSWER = -1.0


class Novelty:
    """EVOL-RL's reward, without labels: .5 to 1 for the answer of the majority, -1 to -.5 for others, -1 without one;
    within these the more, the less the reasoning resembles that of the others.

    Answers are compared as in `majority`. Texts are compared by the counts of their words, or by a model.

    `tag`   of the answer
    `model` hub id or folder of a transformers text model, whose last states are averaged (theirs Qwen3-Embedding-4B)
    """

    def __init__(self, tag: str = "answer", model: str | None = None, dtype: str = "bfloat16", device: str = "cpu"):
        self.tag, self.model = tag, None
        if model is not None:
            precision = torch_dtype(dtype, "novelty")
            self.model = pretrained(transformers.AutoModel, model, types=(), reward="novelty", dtype=precision).to(
                device
            )
            self.tokenizer = tokenizer_of(model, "novelty")

    def __call__(self, completions: list[str], group: list[int]) -> list[float]:
        answers, votes = votes_of(completions, group, self.tag)
        winner = {number: counter.most_common(1)[0][0] for number, counter in votes.items()}
        scores = [NO_ANSWER] * len(completions)
        for number in votes:
            rows = [k for k, other in enumerate(group) if other == number and answers[k] is not None]
            right = torch.tensor([answers[k] == winner[number] for k in rows])
            thoughts = [answer_in(completions[k], "think") or completions[k] for k in rows]
            for k, score in zip(rows, novel(self.embedded(thoughts), right).tolist(), strict=True):
                scores[k] = score
        return scores

    @torch.no_grad()
    def embedded(self, texts: list[str]) -> Tensor:
        """Features [N, D] of texts."""
        if self.model is not None:
            states = []
            for text in texts:  # without padding, which not every tokenizer knows
                ids = self.tokenizer(text or " ", return_tensors="pt")["input_ids"].to(self.model.device)
                states.append(self.model(input_ids=ids).last_hidden_state[0].float().mean(0).cpu())
            return torch.stack(states)
        counts = [Counter(text.casefold().split()) for text in texts]
        words = list(dict.fromkeys(word for counter in counts for word in counter))
        return torch.tensor([[float(counter[word]) for word in words] for counter in counts]).view(len(texts), -1)


def novel(features: Tensor, right: Tensor) -> Tensor:
    """EVOL-RL's reward of a group, [n]: features [n, D] of its reasoning, right bool [n]."""
    unit = normalize(features, dim=1) if features.shape[1] else features
    alike = (unit @ unit.T).clamp(0, 1).fill_diagonal_(0)
    scores = torch.zeros(len(right))
    for good, low, single in ((True, 0.5, 1.0), (False, -1.0, -0.5)):
        rows = (right == good).nonzero()[:, 0]
        if len(rows) == 1:
            scores[rows] = single
        elif len(rows):
            within = alike[rows][:, rows].sum(1) / (len(rows) - 1)
            new = 1 - (within + alike[rows].amax(1)) / 2
            spread = new.max() - new.min()
            scores[rows] = low + 0.5 * ((new - new.min()) / spread if spread > 1e-8 else torch.full_like(new, 0.5))
    return scores
