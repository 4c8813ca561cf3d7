"""Adv-GRPO from inside: the reward's update and the model's by other means, schedules, resume, processes, bad input."""

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.config import ConfigError, check_files
from genrl.data.prompts import PromptError
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.adv_grpo import train as adv_grpo
from genrl.diffusion.methods.adv_grpo.settings import Adversary, AdvGRPO
from genrl.diffusion.methods.adv_grpo.train import Pairs, load_trained, turns
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.interface.using import rewards_of_run
from genrl.runtime.weights.optimization import Optimization
from tests.diffusion import runs
from tests.diffusion.methods.watched import QUIET, TRIPLES, Watched, equal, watch

CRITICS = '''
import torch


class Critic(torch.nn.Module):
    """A linear function of a picture's three mean colours."""

    loss = "hinge"
    patch_weight = 0.5

    def __init__(self, rate: float = 1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.rate = rate

    def __call__(self, images):
        return Critic.logits(self, images, [])

    def logits(self, images, prompts):
        return self.rate * images.mean(dim=(2, 3)) @ self.weight


class Patched(Critic):
    """The same of every pixel, too."""

    def logits(self, images, prompts):
        colours = images.permute(0, 2, 3, 1) @ self.weight
        return super().logits(images, prompts), colours.flatten(1)


class Preferring(Critic):
    loss = "preference"


class Detached(Critic):
    def logits(self, images, prompts):
        return super().logits(images, prompts).detach()


def frozen(images):
    """As `Critic` before it is trained."""
    return images.mean(dim=(2, 3)) @ torch.tensor([1.0, -2.0, 0.5])
'''
ADVERSARY: dict[str, Any] = {"schedule": "together", "lr": 0.05}


@pytest.fixture
def critics(folder: Path) -> Path:
    """The run's folder, with critics and two references of every prompt."""
    (folder / "critics.py").write_text(CRITICS, encoding="utf-8")
    (folder / "pictures").mkdir()
    for number, prompt in enumerate(runs.PROMPTS):
        for k in range(2):
            picture = Image.new("RGB", (20, 30), (200, 40 * number, 100 * k))
            picture.save(folder / "pictures" / f"{number}-{k}.png")
            (folder / "pictures" / f"{number}-{k}.txt").write_text(prompt, encoding="utf-8")
    return folder


def config(folder: Path, model: Path, critic: str = "Critic", adversary: Any = ADVERSARY, **changes: Any) -> Config:
    trainer = {"algorithm": "adv_grpo", "clip_range": 1e-2}
    trainer["adversary"] = {"references": str(folder / "pictures"), **adversary}
    rewards = [{"name": f"{folder / 'critics.py'}:{critic}"}, runs.reward(folder, "brightness", weight=0)]
    return runs.config(folder, model, **{"trainer": trainer, "rewards": rewards, "sampling": TRIPLES, **changes})


def stacked(pairs: list[Pairs]) -> tuple[Tensor, Tensor]:
    return torch.cat([one.real for one in pairs]).float() / 255, torch.cat([one.fake for one in pairs]).float() / 255


def paired(run: DiffusionRun, config: Config) -> tuple[Watched, list[list[Pairs]]]:
    pairs: list[list[Pairs]] = []
    seen, plain = watch(run), adv_grpo.paired
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adv_grpo, "paired", lambda *given: pairs.append(plain(*given)) or pairs[-1])
        adv_grpo.train(run, config.trainer)  # type: ignore[arg-type]
    return seen, pairs


@pytest.mark.parametrize("critic", ["Patched", "Preferring"])
def test_the_rewards_update_by_hand(critics: Path, model: Path, critic: str) -> None:
    """Two Adam steps in each of two iterations, by autograd over all pictures; graphs of sampling are used up."""
    settings = {**ADVERSARY, "steps": 2, "warmup": 2, "schedule": "alternate", "every": 3}
    adversary = {"references": str(critics / "pictures"), **settings}
    chosen = {"algorithm": "adv_grpo", "clip_range": 1e-2, "adversary": adversary, "keep_graph": True}
    result = config(critics, model, critic, trainer=chosen, iterations=3, **QUIET)
    with runs.opened(result) as opened:
        seen, pairs = paired(opened, result)
        trained = opened.loop.kept.things["adversary"].state_dict()["weight"]
    first, _, last = seen.rows
    weight = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.05, betas=(0.5, 0.999))
    for part, row in zip(pairs[:2], seen.rows, strict=False):
        real, fake = stacked(part)
        assert (len(real), real.shape) == (6, fake.shape)
        for step in range(2):
            y, x = (side.mean(dim=(2, 3)) @ weight for side in (real, fake))
            loss = ((1 - y).clamp(min=0).mean() + (1 + x).clamp(min=0).mean()) / 2
            right = ((y > 0).double().mean() + (x < 0).double().mean()) / 2
            if critic == "Patched":
                py, px = (side.permute(0, 2, 3, 1) @ weight for side in (real, fake))
                loss = loss + 0.5 * ((1 - py).clamp(min=0).mean() + (1 + px).clamp(min=0).mean()) / 2
            if critic == "Preferring":
                loss, right = -torch.log(y.exp() / (y.exp() + x.exp())).mean(), (y > x).double().mean()
            if step == 0:
                assert row["adversary/loss"] == pytest.approx(loss.item(), rel=1e-5)
                assert row["adversary/accuracy"] == pytest.approx(right.item())
                assert row["adversary/margin"] == pytest.approx((y.mean() - x.mean()).item(), abs=1e-3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert row["adversary/updates"] == 2 and "loss" not in row
    assert last["adversary/updates"] == 0 and "adversary/grad_norm" not in last and "loss" in last
    torch.testing.assert_close(trained, weight.detach(), rtol=1e-5, atol=1e-6)
    assert not any(p.trajectory.graphs for r in seen.rollouts for one in r.mine.values() for p in one.pieces)
    assert "grad_norm" not in first and last["grad_norm"] > 0 and len(seen.updates) == 1


def test_the_models_update_is_flow_grpos_on_the_scores_before_the_rewards(critics: Path, model: Path) -> None:
    common: dict[str, Any] = {"iterations": 1, "checkpoint": {"every": 1}, "evaluation": {"every": 0}}
    ours = train(config(critics, model, output=str(critics / "ours"), **common))
    frozen = [{"name": f"{critics / 'critics.py'}:frozen"}]
    common |= {"trainer": {"algorithm": "flow_grpo", "clip_range": 1e-2}, "output": str(critics / "theirs")}
    theirs = train(runs.config(critics, model, rewards=frozen, sampling=TRIPLES, **common))
    assert equal(*(runs.last_state(run).tensors["weights"] for run in (ours, theirs)))
    moved = runs.last_state(ours).tensors["kept-adversary"]["weight"]
    assert not torch.equal(moved, torch.tensor([1.0, -2.0, 0.5]))


def test_turns_and_the_learning_rate_counts_iterations_of_the_model(critics: Path, model: Path) -> None:
    low, high = torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0])

    def of(iterations: int, real: Tensor = high, fake: Tensor = low, **keys: Any) -> list[tuple[bool, bool]]:
        settings = AdvGRPO(adversary=Adversary(references="x", **keys))
        return [turns(settings, k, real, fake) for k in range(iterations)]

    both, model, reward = (True, True), (True, False), (False, True)
    assert of(20) == ([reward] * 9 + [model]) * 2
    assert of(6, every=3, warmup=3) == [reward] * 5 + [model]
    assert of(4, every=1, warmup=2) == [reward] * 2 + [model] * 2  # frozen after the warm-up
    assert of(3, schedule="together", warmup=1) == [reward, both, both]
    assert of(2, schedule="lag") == [model] * 2 and of(2, low, high, schedule="lag") == [reward] * 2
    assert of(2, schedule="lag", warmup=1) == [reward, model]

    def steps(**adversary: Any) -> int:
        return config(critics, model, adversary=adversary, iterations=30, **QUIET).optimizer_steps

    assert (steps(), steps(every=3), steps(schedule="together", warmup=5), steps(schedule="lag")) == (3, 10, 25, 30)


def test_references_take_turns_within_a_group(critics: Path, model: Path) -> None:
    """The three samples of a prompt see both of its references, in the samples' size; another iteration another way."""
    result = config(critics, model, iterations=3, **QUIET)
    with runs.opened(result) as opened:
        _, pairs = paired(opened, result)
    orders = set()
    for one in pairs:
        level = {slot: int(real[2, 0, 0]) for part in one for slot, real in zip(part.slots, part.real, strict=True)}
        assert all(part.real.shape == part.fake.shape and part.real.dtype == torch.uint8 for part in one)
        for first in (0, 3):
            group = tuple(level[slot] for slot in range(first, first + 3))
            assert group[0] == group[2] != group[1] and set(group) == {0, 100}
            orders.add(group)
    assert len(orders) == 2


def test_a_run_taken_back_in_an_iteration_goes_on_to_the_bit(critics: Path, model: Path, monkeypatch: Any) -> None:
    """With the reward, its optimiser, and what is drawn of the references."""
    adversary = {"schedule": "lag", "steps": 2, "lr": 0.1}
    common: dict[str, Any] = {"adversary": adversary, "iterations": 3, "evaluation": {"every": 0}}
    common["rewards"] = [{"name": f"{critics / 'critics.py'}:Critic", "args": {"rate": -1.0}}]  # so it lags for a while
    straight = train(config(critics, model, output=str(critics / "straight"), **common))
    stopped = config(critics, model, output=str(critics / "stopped"), **common)
    finish, armed = Optimization.step_other, [True]

    def step_other(self: Optimization, optimizer: torch.optim.Optimizer) -> float:
        norm = finish(self, optimizer)
        if self.iteration == 1 and armed:
            armed.clear()
            signal.raise_signal(signal.SIGTERM)  # the reward has moved, the model has not
        return norm

    monkeypatch.setattr(Optimization, "step_other", step_other)
    with pytest.raises(SystemExit):
        train(stopped)
    train(stopped, critics / "stopped")
    assert not armed and runs.differences(straight, critics / "stopped") == []


def test_evaluation_of_a_run_takes_the_reward_as_it_was_trained(critics: Path, model: Path) -> None:
    settings = config(critics, model, evaluation={"every": 0})
    run = train(settings)
    kept = runs.last_state(run).tensors["kept-adversary"]["weight"]
    with closing(rewards_of_run(settings, run)) as opened:
        assert torch.equal(opened.rewards["Critic"].weight, kept) and kept[0] != 1.0
        with pytest.raises(ValueError, match="has no checkpoint"):
            load_trained(opened, critics)


def test_what_is_refused_before_any_work(critics: Path, model: Path) -> None:
    own, bright = {"name": f"{critics / 'critics.py'}:Critic"}, runs.reward(critics, "brightness")
    lost = config(critics, model, adversary={**ADVERSARY, "references": str(critics / "picturse")})
    with pytest.raises(ConfigError, match=f"(?s)does not exist.*did you mean {critics / 'pictures'}\\?"):
        check_files(lost)
    check_files(config(critics, model))
    for rewards, says in (
        ([bright], "one reward is trained beside the model.*found none"),
        ([{**own, "weight": 0}, bright], "the samples are not rewarded by it"),
        ([{**own, "cache": 10}], "its scores change"),
        ([own, {"name": f"{critics / 'critics.py'}:Detached"}], "keep one"),
    ):
        with pytest.raises(ValueError, match=says):
            train(config(critics, model, rewards=rewards))
    with pytest.raises(ValueError, match="its logits have no graph"):
        train(config(critics, model, "Detached", **QUIET, output=str(critics / "detached")))
    patched = {"name": f"{critics / 'critics.py'}:Patched", "weight": 1}
    with pytest.raises(ValueError, match="'Patched' is trained beside the model"):
        train(runs.config(critics, model, trainer={"algorithm": "flow_grpo"}, rewards=[patched]))
    for k in range(2):
        (critics / "pictures" / f"1-{k}.txt").write_text("two blue cats", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)adversary\.references.*no picture for the prompt .*train.txt:2"):
        check_files(config(critics, model))
    with pytest.raises(PromptError, match="no picture for the prompt 'two blue dogs'"):
        train(config(critics, model))
