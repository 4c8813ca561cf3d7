"""ArCHer's losses against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.objectives.tokens.token_credit import critic_losses, utterance_advantages, utterance_loss


def test_critics_and_advantages_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    q, v, slow_q, slow_v = (rng.normal(size=(2, 5)) for _ in range(4))
    rewards, ended = rng.normal(size=5), np.array([0, 1, 0, 0, 1])
    wanted_q = sum(np.mean((q[c] - rewards - 0.9 * (1 - ended) * slow_v[c]) ** 2) for c in range(2))
    wanted_v = sum(np.mean((v[c] - slow_q[c]) ** 2) for c in range(2))
    tensors = [torch.tensor(one, requires_grad=True) for one in (q, v, slow_q, slow_v)]
    found = critic_losses(*tensors, torch.tensor(rewards), torch.tensor(ended).bool(), gamma=0.9)
    assert float(found.q.detach()) == pytest.approx(wanted_q) and float(found.v.detach()) == pytest.approx(wanted_v)
    (found.q + found.v).backward()
    assert tensors[0].grad is not None and tensors[2].grad is None and tensors[3].grad is None
    advantages = utterance_advantages(tensors[0], tensors[1])
    np.testing.assert_allclose(advantages.numpy(), q.min(0) - v.min(0))
    assert not advantages.requires_grad


def test_all_tokens_of_an_utterance_have_its_advantage() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -0.25]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss = utterance_loss(log_prob, mask, torch.tensor([2.0, -1.0]))
    assert float(loss.detach()) == pytest.approx((2.0 * 3.0 - 1.0) / 2)
    loss.backward()
    wanted = torch.tensor([[-1.0, -1.0, 0.0], [0.5, 0.5, 0.5]])
    torch.testing.assert_close(log_prob.grad, wanted)
