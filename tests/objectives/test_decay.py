"""Decay schedules of snapshots: golden trainers_schedules, its columns of decays (CRD's: test_forward_process)."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives import decay
from genrl.objectives.forward import matching


def number(text: str) -> float:
    return float(text.replace("p", "."))


def test_golden_decays(golden) -> None:
    """Every `out_ff_` column of a decay, and the one of AWM and DGPO. The rest: test_matching, test_noise_levels."""
    data = golden("trainers_schedules")
    steps = data["in_steps"].tolist()
    compared = set()

    def check(name: str, values: list[float]) -> None:
        compared.add(name)
        assert values == pytest.approx(data[name].tolist(), abs=1e-12), name

    check("out_ff_constant", [decay.ramp(n, start_value=0.995, slope=0.0, maximum=1.0) for n in steps])
    check("out_ff_power10", [matching.ema_decay(n, 0.995) for n in steps])
    shape = {"initial": 0.9, "final": 0.999, "total_steps": 1000}
    check("out_ff_cosine", [decay.cosine(n, **shape) for n in steps])
    check("out_ff_warmup_cosine", [decay.cosine(n, **shape, warmup_steps=100) for n in steps])
    for name in data.files:
        if found := re.fullmatch(r"out_ff_linear(\d+)_to_(.*)", name):
            top = number(found[2])
            check(name, [decay.ramp(n, slope=top / int(found[1]), maximum=top) for n in steps])
        elif found := re.fullmatch(r"out_awm_dgpo_linear_min_(.*)", name):
            check(name, [decay.ramp(n, slope=0.001, maximum=number(found[1])) for n in steps])
        elif found := re.fullmatch(r"out_ff_piecewise_(\d+)_(.*)_(.*)", name):
            slope, top = number(found[2]), number(found[3])
            check(name, [decay.ramp(n, slope=slope, maximum=top, start_step=int(found[1])) for n in steps])
    of_times = {name for name in data.files if re.match("out_ff_(discrete|logit_normal|uniform)", name)}
    elsewhere = {name for name in data.files if re.match("out_(nft|flow_grpo)", name)}
    assert compared | of_times | elsewhere == {name for name in data.files if name.startswith("out_")}


@given(st.integers(0, 3000), st.floats(0, 1), st.floats(0, 0.01), st.integers(0, 200))
def test_a_ramp_waits_rises_and_stops(step: int, top: float, slope: float, start: int) -> None:
    low = top / 2
    got = decay.ramp(step, slope=slope, maximum=top, start_step=start, start_value=low)
    assert low <= got <= top
    assert step > start or got == low
    assert got <= decay.ramp(step + 1, slope=slope, maximum=top, start_step=start, start_value=low)


def test_the_schedules_of_nft_are_ramps() -> None:
    for n in range(0, 1000, 7):
        assert matching.nft_old_policy_decay(n, "ramp") == decay.ramp(n, slope=0.001, maximum=0.5)
        want = decay.ramp(n, start_step=75, slope=0.0075, maximum=0.999)
        assert matching.nft_old_policy_decay(n, "delayed_ramp") == want


def test_a_cosine_meets_its_ends() -> None:
    shape = {"initial": 0.2, "final": 0.8, "total_steps": 100, "warmup_steps": 20}
    values = torch.tensor([decay.cosine(n, **shape) for n in range(140)])
    assert values[0] == 0 and values[20] == pytest.approx(0.2) and values[60] == pytest.approx(0.5)
    assert torch.allclose(values[100:], torch.tensor(0.8)) and (values.diff() >= 0).all()
    with pytest.raises(ValueError, match="must end before"):
        decay.cosine(0, initial=0.0, final=1.0, total_steps=10, warmup_steps=10)
