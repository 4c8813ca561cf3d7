"""The density of a transition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal

from genrl.mdp import chains, kernels, levels, noise
from genrl.mdp.noise import derive_seed, generator, keyed_noise, seeded

SHAPES = st.sampled_from([(1, 1), (3, 4), (2, 3, 5), (2, 4, 2, 3), (1, 2, 3, 2, 2)])
STDS = st.floats(0.01, 90.0)


def draw(shape: tuple[int, ...], *keys: int | str) -> torch.Tensor:
    return noise.keyed_noise(shape, *keys).double()


@given(SHAPES, STDS, st.integers(0, 99))
def test_log_prob_is_that_of_torch_in_whichever_shape_the_std_is_given(shape, std: float, seed: int) -> None:
    x, mean = draw(shape, seed, "x"), draw(shape, seed, "mean")
    stds = torch.full((shape[0], *[1] * (len(shape) - 1)), std, dtype=torch.float64)
    joint = Independent(Normal(mean, stds.expand(shape)), len(shape) - 1)
    total = kernels.log_prob(x, mean, stds, "sum")
    assert torch.allclose(total, joint.log_prob(x), rtol=1e-12, atol=1e-12)
    value = kernels.log_prob(x, mean, stds)
    assert torch.allclose(value * math.prod(shape[1:]), total, rtol=1e-12, atol=1e-12)
    for given_as in (std, torch.tensor(std, dtype=torch.float64), stds.flatten(), stds.expand(shape)):
        assert torch.equal(kernels.log_prob(x, mean, given_as), value)


def test_no_gradient_reaches_the_action() -> None:
    x, mean = draw((2, 3), "x").requires_grad_(), draw((2, 3), "mean").requires_grad_()
    kernels.log_prob(x, mean, 0.5, "sum").sum().backward()
    assert x.grad is None
    assert mean.grad is not None and torch.allclose(mean.grad, (x - mean).detach() / 0.25)


HALF = {
    "density": lambda x, v: kernels.log_prob(x, v, 0.3),
    "step": lambda x, v: kernels.flow_sde(x, v, 0.8, 0.6, noise_level=0.7, sigma_max=0.97).mean,
    "flow": lambda x, v: levels.flow_sample(x, v, 0.3),
    "diffusion": lambda x, v: levels.diffusion_sample(x, v, 0.3),
}


@pytest.mark.parametrize("of", HALF)
def test_half_precision_is_computed_in_float32(of: str) -> None:
    x, v = noise.keyed_noise((4, 64), "x"), noise.keyed_noise((4, 64), "mean")
    for kind in (torch.bfloat16, torch.float16):
        value = HALF[of](x.to(kind), v.to(kind))
        assert value.dtype == torch.float32
        assert torch.equal(value, HALF[of](x.to(kind).float(), v.to(kind).float()))
    assert of in ("flow", "diffusion") or HALF[of](x, v.double()).dtype == torch.float64


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda std=std: kernels.log_prob(X, X, std), "not an action") for std in (0.0, -1.0, math.nan, X[:, 0] - 1)),
        (lambda: kernels.log_prob(X, X, torch.ones(3)), r"\[\] or \[2\]"),
        (lambda: kernels.log_prob(X, X, 1.0, "max"), "'mean' or 'sum'"),
        (lambda: levels.diffusion_target(X, X, 0.5, "x0"), "prediction_type must be"),
        (lambda: noise.prompt_indices(0, 1, seed=0, iteration=0), "at least one prompt"),
        (lambda: noise.prompt_indices(3, 0, seed=0, iteration=0), "at least one prompt"),
        (lambda: noise.prompt_indices(3, 1, seed=0, iteration=-1), "at least one prompt"),
        *((lambda key=key: derive_seed(key), "must be an int or a str") for key in (1.0, None, True, b"a")),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- Tokens: their probabilities are torch's, a draw is decided by its noise alone and has their frequencies
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_probabilities_and_entropy_are_torchs(temperature: float) -> None:
    logits = 3.0 * keyed_noise((4, 3, 256), "logits")
    result = chains.token_log_probs(logits.bfloat16(), temperature)
    theirs = Categorical(logits=logits.bfloat16().float() / temperature)
    tokens = torch.randint(256, (4, 3), generator=torch.Generator().manual_seed(0))
    assert result.dtype == torch.float32
    torch.testing.assert_close(chains.chosen_log_prob(result, tokens), theirs.log_prob(tokens))
    torch.testing.assert_close(chains.token_entropy(result), theirs.entropy())


def test_a_draw_is_where_the_cumulative_probability_reaches_that_of_its_noise() -> None:
    """P = .25, .5, .25: bounds at the quartiles of a normal, +-0.6745."""
    log_prob = torch.tensor([0.25, 0.5, 0.25]).log().expand(6, 3)
    noise = torch.tensor([-9.0, -0.675, -0.674, 0.674, 0.675, 9.0])
    assert chains.draw_tokens(log_prob, noise).tolist() == [0, 0, 1, 1, 2, 2]
    # A token without probability is never drawn
    log_prob = torch.log_softmax(torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf]), 0).expand(2000, 5)
    noise = torch.cat([keyed_noise((1998,), "draws"), torch.tensor([-40.0, 40.0])])
    assert set(chains.draw_tokens(log_prob, noise).tolist()) == {1, 3}


def test_frequencies_of_draws_are_the_probabilities() -> None:
    """20 000 draws of five tokens: within five standard errors."""
    log_prob = chains.token_log_probs(torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 1.6)
    sampled = chains.draw_tokens(log_prob.expand(20_000, 5), keyed_noise((20_000,), "frequencies"))
    share, wanted = sampled.bincount(minlength=5) / 20_000, log_prob.exp()
    assert ((share - wanted).abs() < 5.0 * (wanted * (1.0 - wanted) / 20_000).sqrt()).all()


# -- One rule for randomness


def test_the_rule_is_pinned_and_boundaries_between_keys_count() -> None:
    """Samples of an old run can be re-made only while this stays."""
    assert derive_seed() == 8238016292129134938
    assert derive_seed(0, "noise", 3) == 3650610395584477771
    assert torch.allclose(keyed_noise((3,), 0, "noise", 3), torch.tensor([0.500879, 0.968093, 0.688251]), atol=1e-6)
    assert len({derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed("abc"), derive_seed("a", "b", "c")}) == 4
    assert len({derive_seed(12, 3), derive_seed(1, 23), derive_seed("12", "3"), derive_seed(123)}) == 4
    assert len({derive_seed(1), derive_seed("1"), derive_seed(-1), derive_seed(2**70), derive_seed()}) == 5


def test_noise_is_standard_normal_and_independent_of_the_global_generator() -> None:
    torch.manual_seed(0)
    first = keyed_noise((8, 4, 64, 64), 1, "a")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(first, keyed_noise((8, 4, 64, 64), 1, "a"))
    assert torch.equal(before, torch.get_rng_state())
    assert first.dtype == torch.float32 and first.device.type == "cpu"
    count = first.numel()
    assert abs(first.mean().item()) < 5 / count**0.5
    assert abs(first.var().item() - 1) < 5 * (2 / count) ** 0.5
    other = keyed_noise((8, 4, 64, 64), 1, "b")
    assert abs((first * other).mean().item()) < 5 / count**0.5


def test_the_global_generator_is_that_of_the_keys_and_then_as_it_was() -> None:
    before = torch.get_rng_state()
    with seeded(3, "critics"):
        sampled = torch.randn(5)
    assert torch.equal(sampled, torch.randn(5, generator=generator(3, "critics")))
    assert torch.equal(before, torch.get_rng_state())


# -- Prompt order: a permutation per epoch, the same for any number of processes
@given(st.integers(1, 40), st.integers(1, 25), st.integers(0, 2**40), st.integers(0, 30))
def test_every_row_is_used_once_before_any_is_used_twice(rows: int, per_iteration: int, seed: int, start: int) -> None:
    used = []
    for iteration in range(start + 3):
        used += noise.prompt_indices(rows, per_iteration, seed=seed, iteration=iteration)
    for epoch in range(len(used) // rows):
        assert sorted(used[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_an_iteration_is_the_same_whatever_was_asked_before(rows: int, per_iteration: int, iteration: int) -> None:
    """Resuming needs no saved position, and a different number of prompts per iteration reads the same sequence."""
    alone = noise.prompt_indices(rows, per_iteration, seed=3, iteration=iteration)
    one_by_one = [
        noise.prompt_indices(rows, 1, seed=3, iteration=position)[0]
        for position in range(iteration * per_iteration, (iteration + 1) * per_iteration)
    ]
    assert alone == one_by_one


def test_the_order_is_pinned() -> None:
    """A run must read the same prompts tomorrow: a change of the rule is a change of every seed."""
    assert noise.prompt_indices(7, 5, seed=0, iteration=0) == [4, 3, 5, 0, 6]
    assert noise.prompt_indices(7, 5, seed=0, iteration=1) == [2, 1, 6, 3, 5]


@given(count=st.integers(0, 40), size=st.integers(1, 7), processes=st.integers(1, 5))
def test_shares_have_every_row_once_and_processes_in_step(count: int, size: int, processes: int) -> None:
    result = [list(noise.shares(count, size, process, processes)) for process in range(processes)]
    assert len({len(mine) for mine in result}) == 1
    assert sorted(row for mine in result for rows, counts in mine if counts for row in rows) == list(range(count))
    assert all(0 < len(rows) <= size for mine in result for rows, _ in mine)


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=40), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**40)
)
def test_pieces_are_of_one_bucket_and_use_its_rows_alike(buckets, together, pieces, seed) -> None:
    members = {b: [row for row, own in enumerate(buckets) if own == b] for b in buckets}
    per_epoch = sum(len(rows) // together for rows in members.values()) * together
    if not per_epoch:
        with pytest.raises(ValueError, match="of one bucket"):
            noise.bucketed_indices(buckets, pieces * together, together, seed=seed, iteration=0)
        return
    used: list[int] = []
    iteration = 0
    while len(used) < 2 * per_epoch:
        used += noise.bucketed_indices(buckets, pieces * together, together, seed=seed, iteration=iteration)
        iteration += 1
    for start in range(0, len(used), together):
        assert len({buckets[row] for row in used[start : start + together]}) == 1
    for epoch in range(2):
        once = used[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert len(set(once)) == per_epoch
        for rows in members.values():
            assert sum(row in rows for row in once) == len(rows) // together * together
    again = noise.bucketed_indices(buckets, together, together, seed=seed, iteration=1)
    assert again == used[together : 2 * together] or len(used) == together
    with pytest.raises(ValueError, match="of one bucket"):
        noise.bucketed_indices(buckets, 2 * together + 1, 2 * together, seed=seed, iteration=0)


# -- The forward process
def pictures(seed: int) -> tuple[Tensor, Tensor]:
    return noise.keyed_noise((3, 2, 4), seed, "clean").double(), noise.keyed_noise((3, 2, 4), seed, "noise").double()


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_a_ddim_step_with_the_right_prediction_stays_on_the_path(kind) -> None:
    clean, source = pictures(0)
    now, target = levels.diffusion_sample(clean, source, 0.3), levels.diffusion_target(clean, source, 0.3, kind)
    step = kernels.ddim(now, target, 0.3, 0.8, eta=0.0, prediction_type=kind)
    assert torch.allclose(step.mean, levels.diffusion_sample(clean, source, 0.8), atol=1e-9)


def test_levels_may_differ_per_sample() -> None:
    clean, source = pictures(0)
    at = torch.tensor([0.2, 0.5, 1.0])
    for sample in (levels.flow_sample, levels.diffusion_sample):
        together = sample(clean, source, at)
        for i in range(3):
            assert torch.allclose(together[i : i + 1], sample(clean[i : i + 1], source[i : i + 1], at[i]))
