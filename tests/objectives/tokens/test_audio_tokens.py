"""MusicRL: its gradient is REINFORCE with a baseline and an exact KL (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import torch

from genrl.vlm.methods.music_rl.train import music_rl_loss


def test_masked_tokens_count_for_nothing_and_the_parts_have_their_own_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, requires_grad=True)
    reference = torch.randn(2, 3, 5, generator=generator).log_softmax(-1)
    value = torch.randn(2, 3, generator=generator, requires_grad=True)
    ids, mask = torch.tensor([[0, 4, 1], [2, 3, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    reward = torch.tensor([1.0, -1.0])
    output = music_rl_loss(logits.log_softmax(-1), reference, ids, reward, value, mask, alpha=0.2)
    assert torch.allclose(output.loss, -0.8 * output.policy + 0.2 * output.kl) and output.kl > 0
    assert torch.autograd.grad(output.loss, value, retain_graph=True, allow_unused=True)[0] is None
    (gradient,) = torch.autograd.grad(output.loss, logits, retain_graph=True)
    assert bool((gradient[1, 1:] == 0).all()) and bool((gradient[0] != 0).all())
    (to_value,) = torch.autograd.grad(output.value_loss, value)
    wanted = torch.where(mask.bool(), -2 * (reward[:, None] - value.detach()) / 4, 0.0)
    assert torch.allclose(to_value, wanted)
