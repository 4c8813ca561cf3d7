"""SPO from inside: its candidates, its scores, its gradient computed a second time by other means, its runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config, ConfigError, check_files, load
from genrl.config import dump as to_yaml
from genrl.diffusion.methods.spo import train as spo
from genrl.diffusion.methods.spo.train import Pairs, compare
from genrl.diffusion.policy.trajectory import Kernel
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.candidates import Found, draw, judge
from genrl.diffusion.train import train
from genrl.runtime.guards import NonFiniteError
from genrl.runtime.replay import replay
from genrl.runtime.run import Run, write_atomic
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

SPO = {"algorithm": "spo", "candidates": 3, "first": 1, "threshold": 0.0, "beta": 10.0}
FLOW = {**SPO, "kernel": "flow_sde", "noise_level": 0.7}
DIFFUSION = {"pipeline_args": {}, "num_inference_steps": 4}
CHAINS = {"prompts_per_iteration": 2, "group_size": 2, "batch_size": 3}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
WAYS = 3


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Stable Diffusion 1.5 pipeline (epsilon prediction). Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny-sd"
    FAMILIES["sd15"]().pipe.save_pretrained(folder)
    return folder


# -- comparisons -----------------------------------------------------------------------------------------------------


def test_winners_by_hand() -> None:
    scores = torch.tensor([[[0.1, 0.9, 0.5], [0.4, 0.4, 0.3]], [[1.0, math.nan, 0.0], [2.0, 2.0, 2.0]]]).double()
    pairs = compare(scores, threshold=0.3)
    assert pairs.win[0].tolist() == [1, 0] and pairs.lose[0].tolist() == [0, 2]
    # tanh(.4) = .38 counts, tanh(.05) = .05 does not; without all scores, or without a difference, there is no pair
    assert pairs.valid.tolist() == [[True, False], [False, False]]
    assert pairs.gap[0].tolist() == pytest.approx([0.8, 0.1]) and pairs.gap[1].isnan().tolist() == [True, False]
    assert compare(scores, threshold=0.0).valid.tolist() == [[True, True], [False, False]]


# -- a run, watched --------------------------------------------------------------------------------------------------


@dataclass
class Iteration:
    """What was learnt from, and what came of it."""

    found: Found
    pairs: Pairs
    slots: list[list[int]]
    prompts: list[str]
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def watched(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[Iteration]:
    seen: list[Iteration] = []
    learn = spo.learn
    with runs.opened(config) as run:
        step, finish = run.step, run.finish

        def watched_learn(run: Any, settings: Any, rollouts: Any, found: Found, pairs: Pairs, *rest: Any) -> Any:
            slots = [micro_batch.slots for micro_batch in rollouts.mine.values()]
            weights = {key: p.detach().clone() for key, p in run.weights.named.items()}
            seen.append(Iteration(dict(found), pairs, slots, rollouts.prompts, weights))
            return learn(run, settings, rollouts, found, pairs, *rest)

        def watched_step() -> float:
            seen[-1].gradient = {k: p.grad.clone() for k, p in run.weights.named.items() if p.grad is not None}
            return step()

        def watched_finish(metrics: Any) -> None:
            seen[-1].metrics = dict(metrics)
            finish(metrics)

        monkeypatch.setattr(spo, "learn", watched_learn)
        run.step, run.finish = watched_step, watched_finish  # type: ignore[method-assign]
        spo.train(run, config.trainer)  # type: ignore[arg-type]
    return seen


def by_hand(config: Config, iteration: Iteration) -> tuple[dict[str, Tensor], float]:
    """Gradient and loss of an iteration by autograd, from a model loaded afresh and the paper's formulas."""
    pipe = DiffusionPipeline.from_pretrained(config.model.path)
    pipe.unet.eval().requires_grad_(False)
    named = trainable({"unet": pipe.unet}, config.model.lora).named
    with torch.no_grad():
        for key, p in named.items():
            p.copy_(iteration.weights[key])
    pipe.scheduler.set_timesteps(4)  # PNDM's grid is not DDIM's: the plain one is written out
    times = [751, 501, 251, 1]
    alphas = [*(float(pipe.scheduler.alphas_cumprod[t]) for t in times), float(pipe.scheduler.final_alpha_cumprod)]

    def log_prob(slot: int, i: int, state: Tensor, action: Tensor) -> Tensor:
        text = pipe.encode_prompt([iteration.prompts[slot]], "cpu", 1, False)[0]
        eps = pipe.unet(state[None], times[i], encoder_hidden_states=text, return_dict=False)[0][0]
        ab, ab_next = alphas[i], alphas[i + 1]
        std = math.sqrt((1 - ab_next) / (1 - ab) * (1 - ab / ab_next))
        clean = (state - math.sqrt(1 - ab) * eps) / math.sqrt(ab)
        mean = math.sqrt(ab_next) * clean + math.sqrt(1 - ab_next - std**2) * eps
        return torch.distributions.Normal(mean, std).log_prob(action).mean()

    losses = []
    for slots in iteration.slots:
        for column, (i, candidates) in enumerate(iteration.found[slots[0]].items()):
            for row, slot in enumerate(slots):
                if not iteration.pairs.valid[slot, column]:
                    continue
                logs = []
                for table in (iteration.pairs.win, iteration.pairs.lose):
                    state, action = candidates.state[row], candidates.drawn[row, int(table[slot, column])]
                    pipe.unet.disable_adapters()
                    with torch.no_grad():
                        reference = log_prob(slot, i, state, action)
                    pipe.unet.enable_adapters()
                    ratio = (log_prob(slot, i, state, action) - reference).exp()
                    logs.append(ratio.clamp(0.9, 1.1).log())
                losses.append(-torch.nn.functional.logsigmoid(10.0 * (logs[0] - logs[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in named.items()}, float(loss)


def test_gradient_and_loss_by_hand(folder: Path, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second iteration, where the policy is no longer the reference."""
    config = runs.config(folder, sd, trainer=SPO, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    first, second = watched(config, monkeypatch)
    assert second.pairs.valid.any() and first.metrics["loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    expected, loss = by_hand(config, second)
    assert second.metrics["loss"] == pytest.approx(loss, abs=1e-6) and loss != pytest.approx(math.log(2.0), abs=1e-4)
    size = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    off = math.sqrt(sum(float((second.gradient[k] - g).square().sum()) for k, g in expected.items()))
    assert size > 0 and off < 1e-3 * size


def test_scores_are_the_rewards_of_predicted_pictures(folder: Path, sd: Path) -> None:
    """Brightness of every decoded prediction, at its chain, step and place, in whatever calls it was decoded."""
    config = runs.config(folder, sd, trainer=SPO, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    with runs.opened(config) as run:
        plan = config.trainer.plan(config.sampling, last=True)  # type: ignore[attr-defined]
        kernel, found = Kernel("ddim", 1.0), Found()
        drawing = partial(draw, plan=plan, kernel=kernel, batch_size=3, found=found)
        rollouts = next(run.collect(drawing) for _ in run.iterations())
        scores = judge(run, rollouts, found, plan)
        assert scores.shape == (4, 3, WAYS) and not scores.isnan().any() and len(scores.unique()) > 20
        for micro_batch in rollouts.mine.values():
            for column, i in enumerate(plan.splits):
                for row, slot in enumerate(micro_batch.slots):
                    clean = found[micro_batch.slots[0]][i].clean[row]
                    with torch.no_grad():
                        images = run.policy.decode(micro_batch.batch.take([row] * WAYS), clean)
                    torch.testing.assert_close(scores[slot, column].float(), images.mean(dim=(1, 2, 3)))


def test_a_pair_is_evaluated_once_by_each_model(folder: Path, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {**SPO, "inner_epochs": 2, "updates_per_iteration": 2}
    config = runs.config(folder, sd, trainer=trainer, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    iterations = watched(config, monkeypatch)
    for row, iteration in zip(runs.rows(Path(config.output)), iterations, strict=True):
        assert row["model_calls/sample"] == 4 * (2 + WAYS * 2)
        assert row["model_calls/train"] == 2 * 2 * int(iteration.pairs.valid.sum()) and row["updates"] == 4


def test_no_pair_no_update(folder: Path, sd: Path) -> None:
    rewards = [runs.reward(folder, "nothing")]
    run = train(runs.config(folder, sd, trainer=SPO, rewards=rewards, sampling={**DIFFUSION, **CHAINS}, **QUIET))
    assert all(row["updates"] == 0 and row["spo/valid_ratio"] == 0 == row["spo/gap"] for row in runs.rows(run))


@pytest.mark.parametrize(("kind", "lora"), [("ddim", None), ("flow_sde", runs.LORA)], ids=["full", "lora"])
def test_two_and_two_iterations_are_four(
    folder: Path, sd: Path, model: Path, kind: str, lora: dict[str, Any] | None
) -> None:
    common: dict[str, Any] = {"lora": lora, "optimizer": {"lr": 1e-2 if lora else 1e-4}}
    common |= {"trainer": SPO if kind == "ddim" else FLOW}
    common |= {"sampling": {**CHAINS, **(DIFFUSION if kind == "ddim" else {"num_inference_steps": 4})}}
    path = sd if kind == "ddim" else model
    straight = train(runs.config(folder, path, iterations=4, output=str(folder / "straight"), **common))
    train(runs.config(folder, path, iterations=2, output=str(folder / "stopped"), **common))
    written = Run(folder / "stopped").config
    written.write_text(written.read_text().replace("iterations: 2", "iterations: 4"))
    train(load(written), folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []
    assert runs.last_state(straight).tensors.keys() == {"weights", "optimizer", "snapshot-average"}
    assert any(row.get("spo/correct", 0) > 0 for row in runs.rows(straight))


def test_a_dump_computes_what_the_run_computed(folder: Path, sd: Path) -> None:
    config = runs.config(folder, sd, trainer=SPO, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    write_atomic(Run(Path(config.output)).config, to_yaml(config))
    with runs.opened(config) as run, pytest.raises(NonFiniteError) as error:
        losses = runs.spoil(run, lambda number: run.iteration == 1)
        spo.train(run, config.trainer)  # type: ignore[arg-type]
    assert error.value.dump is not None
    again = replay(error.value.dump)
    count = len(again.tensors["loss"])
    assert any(len(loss) == count and torch.equal(loss, again.tensors["loss"]) for loss in losses)
    assert torch.equal(again.tensors["log_prob"], again.recorded["log_prob"]) and not again.gradients


@pytest.mark.parametrize(
    ("trainer", "sampling", "text"),
    [
        ({"first": 3}, {}, "no step of 4 is left"),
        ({"noise_level": 0.0}, {}, "deterministic"),
        ({"noise_level": 1.5}, {}, "1 or less"),
        ({"candidates": 1}, {}, "candidates"),
        ({"clip_range": 1.0}, {}, "clip_range"),
        ({"kernel": "flow_sde"}, {}, "is for flow models"),
    ],
)
def test_impossible_settings_are_refused(
    folder: Path, sd: Path, trainer: dict[str, Any], sampling: dict[str, Any], text: str
) -> None:
    config = {"trainer": {**SPO, **trainer}, "sampling": {**DIFFUSION, **CHAINS, **sampling}}
    with pytest.raises(ConfigError) as error:
        check_files(runs.config(folder, sd, **config))
    assert text in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["adapters", "shards"])
def test_two_processes_learn_as_one(folder: Path, model: Path, fsdp: bool) -> None:
    """The same samples, pairs and gradients: in uneven shares of 3 micro-batches, and of a model in shards."""
    sampling = {"prompts_per_iteration": 4 if fsdp else 3, "group_size": 2, "batch_size": 2, "num_inference_steps": 4}
    common: dict[str, Any] = {"trainer": FLOW, "sampling": sampling, "lora": None if fsdp else runs.LORA, **QUIET}
    found = []
    for count in (1, 2):
        out = folder / f"run-{count}"
        runs.config(folder, model, output=str(out), distributed={"fsdp": fsdp and count == 2}, **common)
        path = (folder / "tiny.yaml").rename(folder / f"world-{count}.yaml")
        log = folder / f"{count}.log"
        if count == 1:
            processes = [runs.start(runs.train_file, str(path), log=log)]
        else:
            processes = runs.start_ranks(2, runs.train_file, str(path), log=log)
        assert runs.wait(processes, 120) == [0] * count, [p.read_text()[-2000:] for p in folder.glob("*.log")]
        found.append(runs.rows(out)[0])
    one, two = found
    assert one["spo/valid_ratio"] > 0 and one["grad_norm"] > 0
    for key in one.keys() - {"model_calls/train"} if fsdp else one.keys():  # in shards, pairs that do not count too
        assert two[key] == pytest.approx(one[key], rel=1e-4 if fsdp or key == "grad_norm" else 1e-9), key
