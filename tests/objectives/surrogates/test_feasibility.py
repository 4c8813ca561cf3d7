"""FISOR against the golden arrays (its cases of vla_reference) and what its weights promise."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.surrogates import iql
from genrl.objectives.surrogates import iql as feasibility
from tests.golden_cases import Case, check_all, error


def test_fisor(golden) -> None:
    def check(case: Case) -> dict[str, tuple[float, float]]:
        options = case.params
        weights = feasibility.cloning_weights(
            case["q"],
            case["v"],
            case["qc"],
            case["vc"],
            reward_temperature=options["reward_temperature"],
            cost_temperature=options["cost_temperature"],
            largest_reward_weight=options["reward_ub"],
            largest_cost_weight=options["cost_ub"],
        )
        target = iql.q_target(case["rewards"], case["next_v"], case["mask"] == 0, options["gamma"])
        reach = feasibility.feasibility_target(case["h"], case["next_vc"], case["mask"], options["gamma"])
        value = feasibility.expectile_loss(case["q"] - case["v"], options["expectile"]).mean()
        violation = feasibility.reversed_expectile_loss(case["qc"] - case["vc"], options["cost_expectile"]).mean()
        ours = {
            "target_q": target,
            "target_qc": reach,
            "v_loss": value,
            "vc_loss": violation,
            "weights": weights,
            "actor_loss": feasibility.weighted_noise_loss(case["eps_pred"], case["eps"], weights),
        }
        return {name: (error(got, case[name]), 1e-9) for name, got in ours.items()}

    check_all(golden("vla_reference"), check, lambda case: case.fn != "fisor")  # GAE: test_gae


def test_infeasible_actions_of_feasible_states_are_never_cloned() -> None:
    violation_q, violation_value = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.tensor([-1.0, -1.0, 2.0, 0.5])
    q, value = torch.tensor([9.0, 1.0, 0.0, 9.0]), torch.tensor([0.0, 1.0, 9.0, 0.0])
    weights = feasibility.cloning_weights(q, value, violation_q, violation_value)
    assert weights[0] == 0 and weights[1] == 1
    assert weights[2] == pytest.approx(torch.tensor(5.0).exp().item())
    assert weights[3] < 1  # worse than what the state allows, whatever its reward


def test_a_terminal_state_keeps_its_own_violation() -> None:
    h, ahead = torch.tensor([25.0, -1.0]), torch.tensor([99.0, 99.0])
    target = feasibility.feasibility_target(h, ahead, torch.tensor([0.0, 1.0]), 0.99)
    assert target.tolist() == pytest.approx([25.0, 0.01 * -1 + 0.99 * 99])
