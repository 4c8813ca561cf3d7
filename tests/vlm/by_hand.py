"""An update once more: log-probabilities from whole logits, and the gradients that reach the optimiser."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.vlm.policies.log_probs import IMPOSSIBLE
from genrl.vlm.policies.policy import Encoded, Policy


def naive_log_probs(
    policy: Policy, prompts: Iterable[Encoded], tokens: Tensor, mask: Tensor, temperature: float = 1.0
) -> list[Tensor]:
    """Of each row's tokens [n], from the logits of the row by itself, as the model's own forward gives them."""
    result = []
    for prompt, row, kept in zip(prompts, tokens, mask.bool(), strict=True):
        own = row[kept]
        logits = policy.model(**policy.inputs([prompt], own[None])).logits[0, prompt.length - 1 : -1]
        scores = (logits / temperature).index_fill(1, policy.forbidden, IMPOSSIBLE).log_softmax(-1)
        result.append(scores.gather(1, own[:, None])[:, 0])
    return result


def gradients(run: Any) -> dict[str, Tensor]:
    """Those that lie in the parameters of a run."""
    return {name: p.grad.clone() for name, p in run.loop.weights.named.items() if p.grad is not None}


def watched(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The gradients of the run's steps from here on, none of which is taken."""
    seen: list[dict[str, Tensor]] = []

    def step(groups: Any) -> dict[str, float]:
        seen.append(gradients(run))
        for parameter in run.loop.weights.named.values():
            parameter.grad = None
        return dict.fromkeys(groups, 0.0)

    monkeypatch.setattr(run.loop.optimization, "step", step)
    return seen


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor], apart: float = 1e-4) -> None:
    """The wanted gradients are among those found, within a share of the largest number."""
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert scale > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(actual[name], gradient, rtol=10 * apart, atol=apart * scale, msg=name)
