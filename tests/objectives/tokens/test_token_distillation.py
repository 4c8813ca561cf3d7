"""Distances of a student from a teacher: TRL's GKD and SDPO, ms-swift's advantages, and a table in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens.token_distillation import gap_advantage, generalised_divergence, with_rest
from genrl.objectives.tokens.tokens import masked
from tests.golden_cases import Arrays


def test_gkd(golden: Any) -> None:
    data = Arrays(golden("gkd"))
    student, kept = data.given("student_logits").requires_grad_(), data.given("labels") != -100
    for name in data.tags(r"loss_(beta.+)"):
        beta, temperature, *divided = name.removeprefix("beta").replace("_T", "_").split("_")
        rows = [(logits / float(temperature)).log_softmax(-1) for logits in (student, data.given("teacher_logits"))]
        far = generalised_divergence(*rows, float(beta))[kept]
        loss = far.sum() / int(divided[0].removeprefix("items")) if divided else far.mean()
        data.check(f"loss_{name}", loss.detach())
        if not divided:
            data.check(f"grad_{name}", torch.autograd.grad(loss, student)[0])
    data.all_used()


def test_whole_distributions_and_those_of_the_likeliest_tokens_with_the_rest(golden: Any) -> None:
    data = Arrays(golden("self_distillation"))
    student = data.given("student_logits").requires_grad_()
    log_p, log_t = student.log_softmax(-1), data.given("teacher_logits").log_softmax(-1)
    ids = log_p.topk(int(data.number("topk")), -1).indices
    some = [with_rest(rows.gather(-1, ids)) for rows in (log_p, log_t)]
    for name in data.tags(r"full_alpha(0|0\.5|1)"):
        for rows, key in (((log_p, log_t), f"full_alpha{name}"), (some, f"top_alpha{name}_tail")):
            found = generalised_divergence(*rows, float(name))
            data.check(key, found.detach())
            data.check(f"{key}_grad", torch.autograd.grad(found.sum(), student, retain_graph=True)[0])
    data.all_used(r"(full|top)_.*", but=r".*renorm.*")  # renormalising over the likeliest is not offered


def test_the_gap_as_an_advantage(golden: Any) -> None:
    data = Arrays(golden("token_opd"))
    policy, teacher, mask = data.given("policy_logp"), data.given("teacher_logp"), data.given("mask")
    advantage = data.given("advantages")
    for coef in data.tags(r"per_token_advantage_coef(.+)"):
        data.check(
            f"per_token_advantage_coef{coef}",
            gap_advantage(advantage, policy, teacher, mask, coef=float(coef)).expand(mask.shape),
        )
    data.check("teacher_k3", masked(kl_k3(policy, teacher), mask))


def test_the_policy_gradient_of_the_gap_is_that_of_the_reverse_kl() -> None:
    """On a table: the expectation over all answers of one token, by its probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    log_t = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_p, mask = logits.log_softmax(-1), torch.ones(5, 1)
    gap = gap_advantage(torch.zeros(5, dtype=torch.float64), log_p[:, None].detach(), log_t[:, None], mask)[:, 0]
    surrogate = -(log_p.exp().detach() * gap * log_p).sum()
    exact = generalised_divergence(log_p, log_t, 1.0)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (surrogate, exact)))


@pytest.mark.parametrize("beta", [1e-3, 0.999])
def test_what_vanishes_near_the_ends_is_refused(beta: float) -> None:
    rows = torch.zeros(2).log_softmax(-1)
    with pytest.raises(ValueError, match="not the KL of the limit"):
        generalised_divergence(rows, rows, beta)
