"""On-policy distillation of policies: the released trainer's gradient, divergences in closed form, small runs, what is
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config import load
from genrl.config.errors import ConfigError
from genrl.mdp.kernels import flow_sde
from genrl.objectives.policy_losses import kl_gaussian
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.recorded import Recorded
from genrl.vla.methods.opd.settings import PolicyOPD
from genrl.vla.methods.opd.train import divergence, loss
from genrl.vla.policies.folder import save_policy
from genrl.vla.rollout.sampling import Acting, Replay
from genrl.vla.train import train
from tests.golden_cases import Arrays
from tests.vla import vla_runs
from tests.vla.published_runs import oft_config
from tests.vla.tiny_policies import SEES, flow


def update(estimator: Any, now: Replay, old: Tensor, executed: Tensor, **teacher: Tensor) -> dict[str, Tensor]:
    """The loss of decisions [n, H, A] whose policy now says `now`; teacher: what it said of them."""

    class Sampler:
        def replay(self, *_: Any) -> Replay:
            return now

    class Encoder(torch.nn.Module):
        def encode(self, _: Any) -> Any:
            return {}

    weight = teacher.pop("weight", torch.ones(len(old)))
    tensors = {f"teacher/{name}": value for name, value in teacher.items()}
    tensors |= dict.fromkeys(("states", "next_states", "step_index"), torch.zeros(len(old)))
    tensors |= {"old_log_prob": old[:, None], "executed": executed, "weight": weight, "advantage": 0.0 * weight}
    numbers = {"size": old.shape[1], "action_dim": old.shape[2], "total": int(executed.sum())}
    tensors |= {name: torch.tensor(value) for name, value in numbers.items()}
    return loss(PolicyOPD(teacher="-", estimator=estimator), Acting(Encoder(), Sampler()), Recorded(None, tensors))


def test_the_gradient_of_the_released_trainer(golden: Callable[[str], Any]) -> None:
    """RLinf's advantages are not normalised; what came after success does not count, and the mean is over the rest."""
    data = Arrays(golden("vla_opd"))
    shape = data.given("advantage").shape  # roll-outs, episodes, actions of a chunk, numbers of an action
    actions = [data.given(name).reshape(-1, 1, shape[-1]) for name in ("policy_logp", "teacher_logp")]
    assert shape[2] == data.number("chunks")
    now = actions[0].clone().requires_grad_()
    executed = data.given("mask").reshape(-1).long()
    actual = update("sampled", Replay(now[:, None], torch.zeros_like(now)[:, None]), actions[0], executed,
                   log_prob=actions[1][:, None])  # fmt: skip
    gradient = torch.autograd.grad(actual["loss"], now)[0].view(shape)
    data.check("grad", gradient, 1e-5, 1e-7)
    data.check("loss_token_mean", (gradient * data.given("new_logp")).sum(), 1e-5, 1e-7)
    counted = data.given("mask").expand(shape)
    torch.testing.assert_close(actual["teacher/kl"], -data.given("advantage")[counted].sum() / shape[-1])
    data.all_used()


def test_gaussian_steps_in_closed_form() -> None:
    """`ln(s_T / s) + (s^2 + (mu - mu_T)^2) / 2 s_T^2 - 1/2`; of one deviation, that of pipelines; of Flow-SDE's kernel,
    `D (1 - sigma) (1 + a^2 / 2)^2 / (2 a^2 sigma) (v - v_T)^2`."""
    rng = torch.Generator().manual_seed(0)
    mean, theirs, std, their_std = (torch.rand(5, 1, 4, 3, generator=rng, dtype=torch.float64) + 0.1 for _ in range(4))

    def of(std: Tensor, their_std: Tensor) -> Tensor:
        given = Recorded(None, {"teacher/means": theirs, "teacher/stds": their_std})
        return divergence(Replay(mean, mean, mean, std), given)

    wanted = (their_std / std).log() + (std**2 + (mean - theirs) ** 2) / (2 * their_std**2) - 0.5
    torch.testing.assert_close(of(std, their_std), wanted[:, 0])
    torch.testing.assert_close(of(std, std).flatten(1).mean(1), kl_gaussian(mean, theirs, std))
    assert not of(std, std)[mean[:, 0] == theirs[:, 0]].any()
    sigma, following, level = torch.tensor([0.75]), torch.tensor([0.5]), 0.8
    x, v, v_t = (torch.randn(1, 4, 3, generator=rng, dtype=torch.float64) for _ in range(3))
    own, other = (flow_sde(x, each, sigma, following, noise_level=level, sigma_max=0.9) for each in (v, v_t))
    mean, theirs, stds = own.mean[:, None], other.mean[:, None], own.std.expand(x.shape)[:, None]
    factor = 0.25 * (1 - 0.75) * (1 + level**2 / 2) ** 2 / (2 * level**2 * 0.75)
    torch.testing.assert_close(of(stds, stds), factor * (v - v_t) ** 2, rtol=1e-6, atol=1e-9)


def test_both_estimators_have_the_gradient_of_the_kl_of_tokens() -> None:
    """Sampled, in expectation: every token once, by its probability."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).requires_grad_()
    theirs = torch.tensor([-0.2, 0.5, 0.0, 1.1], dtype=torch.float64).log_softmax(0)
    rows, executed = logits.log_softmax(0), torch.ones(1, dtype=torch.int64)
    wanted = torch.autograd.grad((rows.exp() * (rows - theirs)).sum(), logits, retain_graph=True)[0]
    each = Replay(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), every=rows.view(1, 1, 1, 1, 4))
    exact = update("distribution", each, torch.zeros(1, 1, 1), executed, every=theirs.view(1, 1, 1, 1, 4))
    torch.testing.assert_close(exact["teacher/kl"], (rows.exp() * (rows - theirs)).sum().detach())
    torch.testing.assert_close(torch.autograd.grad(exact["loss"], logits, retain_graph=True)[0], wanted)
    samples = rows.view(4, 1, 1)
    sampled = update("sampled", Replay(samples[:, None], torch.zeros(4, 1, 1, 1)), samples.detach(), executed.expand(4),
                     log_prob=theirs.view(4, 1, 1, 1), weight=4 * rows.exp().detach())  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(sampled["loss"], logits)[0], wanted, rtol=1e-5, atol=1e-7)


OPD: dict[str, Any] = {"algorithm": "opd", "epochs": 1, "minibatch": 64, "kl_stop": None}
NEW: dict[str, Any] = {"path": None, "new": {"image_size": 0}}


def config(place: Path, teacher: Path | None = None, sampler: Any = "flow_sde", **changes: Any) -> Any:
    own = {**OPD, **changes.pop("opd", {}), "teacher": str(teacher or vla_runs.policy_of("flow"))}
    return vla_runs.config(place, sampler=sampler, trainer=own, **changes)


@pytest.mark.parametrize("estimator", ["distribution", "sampled"])
def test_a_policy_learns_nothing_of_itself(estimator: str, tmp_path: Path) -> None:
    rows = vla_runs.rows(train(config(tmp_path, opd={"estimator": estimator})))
    assert abs(rows[0]["teacher/kl"]) < 1e-6 and rows[0]["grad_norm/policy"] < 1e-3


@pytest.mark.parametrize("sampler", ["flow_sde", pytest.param("flow_noise", marks=pytest.mark.slow)])
def test_a_new_policy_comes_near_its_teacher(sampler: str, tmp_path: Path) -> None:
    changes = {"policy": NEW, "iterations": 6, "optimizer": {"lr": 3e-3}, "environment": {"num_envs": 16}}
    teaching = {"epochs": 3, "minibatch": 32}
    rows = vla_runs.rows(train(config(tmp_path, sampler=sampler, opd=teaching, **changes)))
    assert 0 < rows[-1]["teacher/kl"] < 0.5 * rows[0]["teacher/kl"]


@pytest.mark.slow
def test_tokens_and_rewards(tmp_path: Path) -> None:
    changes = {"policy": NEW, "environment": {"group_size": 4}}
    rows = vla_runs.rows(train(config(tmp_path, opd={"reward_coef": 1.0}, **changes)))
    assert rows[0]["teacher/kl"] > 0
    oft_config(tmp_path)  # writes its policy
    own = oft_config(tmp_path, trainer={**OPD, "teacher": str(tmp_path / "base")}, output=str(tmp_path / "tokens"))
    assert abs(vla_runs.rows(train(own))[0]["teacher/kl"]) < 1e-6


def test_others_teach_nothing(tmp_path: Path) -> None:
    """Pictures that the policy does not see; other units; another teacher on resume; a policy that sees otherwise."""
    save_policy(flow(SEES), tmp_path / "sees")
    other = flow()
    other.stats["action"] = {name: 2 * value for name, value in other.stats["action"].items()}
    save_policy(other, tmp_path / "units")
    for folder, text in (("sees", "reads observation.image"), ("units", "other units")):
        with pytest.raises(ValueError, match=text):
            train(config(tmp_path, tmp_path / folder, output=str(tmp_path / f"of {folder}")))
    with pytest.raises(ValueError, match=r"policy.new: must have image_size"):
        train(config(tmp_path, tmp_path / "sees", policy=NEW, output=str(tmp_path / "new")))
    save_policy(flow(stir=False), tmp_path / "teacher")
    run = train(config(tmp_path, tmp_path / "teacher", iterations=1))
    save_policy(flow(seed=1), tmp_path / "teacher")
    with pytest.raises(ValueError, match="not the one that taught this run"):
        train(load(Run(run).config, ["iterations=2"]), run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"opd": {"reward_coef": 1.0}}, "rewards are compared in groups"),
        ({"sampler": {"kind": "diffusion", "steps": 5, "ft_denoising_steps": 3}}, "train all of them"),
        ({"distributed": {"fsdp": True}}, "the teacher is not in shards"),
    ],
)
def test_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        config(tmp_path, tmp_path / "teacher", policy={"path": "policy"}, **changes)
