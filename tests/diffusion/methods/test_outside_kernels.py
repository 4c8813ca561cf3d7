"""A transition kernel from a file is sampled by, trained through and replayed as the built-in ones are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.cli.sample import lines
from genrl.config import ConfigError
from genrl.diffusion.train import train
from genrl.mdp.kernels import transition_of
from tests.diffusion import runs
from tests.diffusion.methods.watched import QUIET
from tests.planted import replayed

BUILT_IN = {"algorithm": "flow_grpo", "kernel": "dance_sde", "noise_level": 0.3, "clip_range": 1e-3}
DANCE = '''
def dance(x, velocity, sigma, sigma_next, *, noise_level):
    """DanceGRPO's SDE, as its paper writes it."""
    step = sigma - sigma_next
    score = -(x + (1 - sigma) * velocity) / sigma
    mean = x - step * velocity + 0.5 * noise_level**2 * score * step
    return mean, noise_level * step**0.5
'''


@pytest.fixture
def kernel(folder: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (folder / "kernels.py").write_text(text)
        return f"{folder / 'kernels.py'}:dance"

    return write


def test_a_run_is_that_of_the_built_in_kernel(
    folder: Path, model: Path, kernel: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding: its arithmetic is float32, that of ours float64 on coefficients. And its dump is replayed."""
    own = {**BUILT_IN, "kernel": kernel(DANCE)}
    rows = []
    for name, trainer in (("theirs", own), ("ours", BUILT_IN)):
        config = runs.config(folder, model, trainer=trainer, output=str(folder / name), iterations=1, **QUIET)
        rows += runs.rows(train(config))
    theirs, ours = rows
    assert theirs["ratio/max_abs_dev"] == 0.0 and theirs["grad_norm"] > 0
    for key in ("loss/policy", "grad_norm", "reward/total_mean"):
        assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-6), key
    replayed(runs.config(folder, model, trainer=own, evaluation={"every": 0}), monkeypatch)


def refusal(folder: Path, name: str) -> str:
    with pytest.raises(ConfigError) as error:
        runs.config(folder, folder / "model", trainer={**BUILT_IN, "kernel": name})
    return str(error.value)


def test_what_is_no_kernel_is_refused(folder: Path, kernel: Callable[[str], str]) -> None:
    name = kernel(DANCE)
    assert "has no 'dancer'; did you mean dance?" in refusal(folder, f"{name}r")
    assert "is no kernel: define a function (x, velocity, sigma" in refusal(folder, kernel("dance = 3"))
    wrong = DANCE.replace("sigma_next, *", "*")
    takes = "dance(x, velocity, sigma, *, noise_level); (x, velocity, sigma, sigma_next, noise"
    assert takes in refusal(folder, kernel(wrong))
    assert "unknown kernel 'dance_sd'; did you mean dance_sde?" in refusal(folder, "dance_sd")


def test_what_is_no_transition_is_refused_and_a_std_for_each_sample_taken_in_any_shape() -> None:
    rows: list[tuple[torch.Tensor, Any, str]] = [
        (torch.zeros(2, 3), 1.0, "has the shape"),
        (torch.zeros(2, 4), torch.ones(3), "one number per sample"),
        (torch.zeros(2, 4), -1.0, "must be 0 or more"),
        (torch.zeros(2, 4), float("nan"), "must be 0 or more"),
    ]
    for mean, std, says in rows:
        with pytest.raises(ValueError, match=says):
            transition_of(torch.zeros(2, 4), mean, std)
    x = torch.zeros(2, 4, dtype=torch.float64)
    for std in (torch.tensor([0.5, 0.5]), torch.tensor([[0.5], [0.5]]), torch.tensor(0.5), 0.5):
        assert transition_of(x, x, std).std.tolist() == [[0.5], [0.5]]


STOCHASTIC = '''
from genrl.diffusion.steps.settings import Stochastic


class Own(Stochastic):
    """A method with steps drawn with noise."""


def train(run, settings):
    from functools import partial

    from genrl.diffusion.steps import plans

    for _ in run.iterations():
        WRONG
        plan = plans.make_plan(4, noise=dict.fromkeys(range(3), 0.7), roots=4)
        kernel = plans.choose_kernel(run, settings, plan)
        rollouts = run.collect(partial(plans.chains, kernel=kernel, steps=range(3)))
        assert run.replays and all(piece.trajectory.log_probs for one in rollouts.mine.values() for piece in one.pieces)
        run.start_training(0)
        run.finish({})


def loss(settings, policy, recorded): ...
'''


def test_a_method_with_noise_is_counted_and_checked_like_ours(folder: Path, model: Path) -> None:
    """Counted by `plan`, replayed before the first update; what draws takes what is handed to it."""

    def config(text: str = "pass", **more: Any) -> Any:
        (folder / "own.py").write_text(STOCHASTIC.replace("WRONG", text))
        trainer = {"algorithm": f"{folder / 'own.py'}:Own", "kernel": "flow_sde", "noise_level": 0.7}
        return runs.config(folder, model, trainer=trainer, evaluation={"every": 0}, **more)

    tree = config(sampling={"num_inference_steps": 4, "group_size": 4, "prompts_per_iteration": 2})
    text = "\n".join(lines(tree))
    assert f"model calls in training: {3 * tree.sampling.images_per_iteration}" in text and "0.7" in text
    train(tree.model_copy(update={"iterations": 1}))
    with pytest.raises(ValueError, match=r"is called with \(policy, batch, slots, \*, beat\)"):
        train(config("run.collect(lambda policy, batch: None)", output=str(folder / "other")))
