"""Decay schedules of snapshots: golden trainers_schedules, its columns of decays (CRD's: test_forward_process)."""

import math
from collections.abc import Callable

import pytest

from genrl.objectives import matching
from genrl.runtime.loop.collapse import Score, has_fallen, has_left, is_better
from tests.golden_cases import Arrays


def number(text: str) -> float:
    return float(text.replace("p", "."))


def test_golden_decays(golden) -> None:
    """Every `out_ff_` column of a decay, and the one of AWM and DGPO. The rest: test_matching, test_schedules."""
    a = Arrays(golden("trainers_schedules"))

    def check(name: str, rule: Callable[..., float], **options: float) -> None:
        a.check(name, [rule(n, **options) for n in a.given("in_steps").tolist()], atol=1e-12)

    shape = {"initial": 0.9, "final": 0.999, "total_steps": 1000}
    check("out_ff_constant", matching.ramp, start_value=0.995, slope=0.0, maximum=1.0)
    check("out_ff_power10", matching.ema_decay, maximum=0.995)
    check("out_ff_cosine", matching.cosine, **shape)
    check("out_ff_warmup_cosine", matching.cosine, **shape, warmup_steps=100)
    for found in a.matches(r"out_ff_linear(\d+)_to_(.*)"):
        top = number(found[2])
        check(found[0], matching.ramp, slope=top / int(found[1]), maximum=top)
    for found in a.matches(r"out_awm_dgpo_linear_min_(.*)"):
        check(found[0], matching.ramp, slope=0.001, maximum=number(found[1]))
    for found in a.matches(r"out_ff_piecewise_(\d+)_(.*)_(.*)"):
        check(found[0], matching.ramp, slope=number(found[2]), maximum=number(found[3]), start_step=int(found[1]))
    a.all_used("out_.*", but="out_(ff_(discrete|logit_normal|uniform)|nft|flow_grpo).*")
    assert matching.cosine(139, initial=0.2, final=0.8, total_steps=100, warmup_steps=20) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="must end before"):
        matching.cosine(0, initial=0.0, final=1.0, total_steps=10, warmup_steps=10)


# -- The rules of collapse: what is better, what has fallen, what has left its own history
def test_better_is_more_than_noise_and_fallen_three_standard_errors_or_the_tolerance() -> None:
    """Standard errors are those of the difference."""
    best = Score(0.5, 0.03)
    assert not is_better(Score(0.54, 0.04), best)  # one standard error of the difference is 0.05
    assert is_better(Score(0.56, 0.04), best)
    assert is_better(Score(0.5001), Score(0.5)) and not is_better(Score(0.5), Score(0.5))
    assert not is_better(Score(math.nan), Score(0.5))
    best = Score(0.5, 0.03)
    assert not has_fallen(Score(0.36, 0.04), best) and has_fallen(Score(0.34, 0.04), best)
    assert has_fallen(Score(0.44, 0.04), best, tolerance=0.05) and not has_fallen(Score(0.46, 0.04), best, 0.05)
    assert not has_fallen(Score(math.nan), best)


NOISE = [1 + 0.2 * math.sin(7.0 * i) for i in range(100)]


@pytest.mark.parametrize(
    ("series", "left"),
    [
        (NOISE, False),
        ([*NOISE[:99], 100.0], False),  # one figure may be anything
        ([*NOISE[:50], *(4 * x for x in NOISE[50:])], True),
        ([x * (1 + i / 100) for i, x in enumerate(NOISE)], False),  # twice as large at the end
        ([i / 100 for i in range(100)], False),  # a distance that grows steadily
        ([math.exp(i / 15) for i in range(100)], True),
        ([1.0] * 98 + [1.2] * 2, False),
        ([5.0] * 30, False),  # too short to be a history
        ([1e-9 * x for x in NOISE], False),
    ],
)
def test_leaving_its_own_history(series: list[float], left: bool) -> None:
    assert has_left(series, series[-10:]) == left
