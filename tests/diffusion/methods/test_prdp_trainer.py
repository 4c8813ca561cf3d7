"""PRDP from inside: its gradient computed a second time from the paper's formulas, its model calls, its runs."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config, ConfigError, check_files, load
from genrl.config import dump as to_yaml
from genrl.diffusion.methods.prdp import train as prdp
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.train import train
from genrl.runtime.guards import NonFiniteError
from genrl.runtime.replay import replay
from genrl.runtime.run import Run, write_atomic
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.test_flow_grpo import Watched, drifting, flow_sde, log_density, relative, watch

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

FLOW = {"algorithm": "prdp", "kernel": "flow_sde", "noise_level": 0.7, "beta": 1e-3, "clip_range": 1e-3}
DDIM = {"algorithm": "prdp", "beta": 1e-3, "clip_range": 1e-3}
DIFFUSION = {"num_inference_steps": 4, "pipeline_args": {}}
TRIPLES = {"group_size": 3, "batch_size": 2}  # groups are cut by micro-batches: the table does not mind
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Stable Diffusion 1.5. Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny-sd15"
    FAMILIES["sd15"]().pipe.save_pretrained(folder)
    return folder


def run(config: Config, prepare: Any = lambda run: None) -> Watched:
    with runs.opened(config) as run:
        seen = watch(run)
        prepare(run)
        prdp.train(run, config.trainer)  # type: ignore[arg-type]
    return seen


def by_hand(config: Config, rollouts: Rollouts, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Gradient and loss by autograd through all samples and steps at once, from a model loaded afresh."""
    pipe = DiffusionPipeline.from_pretrained(config.model.path)
    pipe.transformer.eval().requires_grad_(False)
    named = trainable({"transformer": pipe.transformer}, config.model.lora).named
    with torch.no_grad():
        for key, p in named.items():
            p.copy_(weights[key])
    log_ratio: dict[int, list[tuple[Tensor, Tensor]]] = {}  # slot -> (new, old) log-ratio of each step
    for one in rollouts.mine.values():
        recorded = one.pieces[0].trajectory
        sigmas = recorded.sigmas.tolist()
        for row, slot in enumerate(one.slots):
            text, _, pooled, _ = pipe.encode_prompt(one.batch.prompts[row], None, None, max_sequence_length=4)
            for i, old in recorded.log_probs.items():
                x, y = recorded.states[i][row][None], recorded.next_states[i][row][None]

                def log_prob(x: Tensor = x, y: Tensor = y, i: int = i, text: Any = text, pooled: Any = pooled,
                             sigmas: list[float] = sigmas) -> Tensor:  # fmt: skip
                    time = torch.full((1,), 1000 * sigmas[i])
                    v = pipe.transformer(x, text, pooled, time, return_dict=False)[0]
                    return log_density(y, *flow_sde(x, v, sigmas[i], sigmas[i + 1], sigmas[1], 0.7))[0]

                pipe.transformer.disable_adapters()
                with torch.no_grad():
                    reference = log_prob()
                pipe.transformer.enable_adapters()
                log_ratio.setdefault(slot, []).append((log_prob() - reference, old[row] - reference))
    errors = []
    for a, b in combinations(range(rollouts.num_samples), 2):
        if rollouts.group[a] != rollouts.group[b]:
            continue
        target = float(rollouts.total[a] - rollouts.total[b]) / 1e-3
        plain, clipped = (
            sum(f(*step) for step in log_ratio[a]) / 2 - sum(f(*step) for step in log_ratio[b]) / 2
            for f in (lambda new, old: new, lambda new, old: old + (new - old).clamp(-1e-3, 1e-3))
        )
        errors.append(torch.maximum((plain - target) ** 2, (clipped - target) ** 2))
    loss = torch.stack(errors).mean()
    loss.backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in named.items()}, float(loss)


def test_gradient_and_loss_by_hand(folder: Path, model: Path) -> None:
    """Of the first gradient step, and of one where the policy is away from the reference and from the old policy."""
    trainer = {**FLOW, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling=TRIPLES, iterations=2, **QUIET)
    seen = run(config)
    assert len(seen.updates) == 4
    for number in (0, 3):
        update = seen.updates[number]
        expected, _ = by_hand(config, seen.rollouts[number // 2], update.weights)
        assert relative(update.gradient, expected) < 2e-3, number
        assert max(float(g.abs().max()) for g in expected.values()) > 0
    losses = [by_hand(config, seen.rollouts[1], update.weights)[1] for update in seen.updates[2:]]
    assert seen.rows[1]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-3)
    assert seen.rows[1]["prdp/clip_frac"] > 0


def test_the_first_step_takes_the_recorded_log_probabilities(folder: Path, sd: Path) -> None:
    """6 samples, 3 trained steps: 18 calls of the reference, 18 with gradients; 36 more for every further step."""
    calls = {}
    for epochs in (1, 3):
        output = str(folder / f"epochs-{epochs}")
        trainer = {**DDIM, "clip_range": 10.0, "inner_epochs": epochs}
        train(runs.config(folder, sd, trainer=trainer, sampling={**DIFFUSION, **TRIPLES}, output=output, **QUIET))
        calls[epochs] = runs.rows(Path(output))
    for first, third in zip(calls[1], calls[3], strict=True):
        assert first["model_calls/train"] == 36 and third["model_calls/train"] == 36 + 2 * 36
        assert first["model_calls/sample"] == third["model_calls/sample"] == 24
        assert (first["updates"], third["updates"]) == (1, 3) and first["prdp/pairs"] == 6
    start = calls[1][
        0
    ]  # the policy is the reference and the old one: it predicts no difference, and nothing is clipped
    assert (start["prdp/unexplained"], start["prdp/correct"], start["prdp/clip_frac"]) == (1.0, 0.0, 0.0)


def test_it_learns_to_predict_its_rewards(folder: Path, sd: Path) -> None:
    """Many gradient steps on one set of samples, nothing clipped: log-ratios come to differ as rewards over beta do."""
    trainer = {**DDIM, "beta": 10.0, "clip_range": 10.0, "inner_epochs": 12}
    config = runs.config(
        folder, sd, trainer=trainer, sampling={**DIFFUSION, **TRIPLES}, optimizer={"lr": 1e-4, "weight_decay": 0},
        iterations=1, **QUIET,
    )  # fmt: skip
    found: list[dict[str, Tensor]] = []
    fit = prdp.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prdp, "fit", lambda *given: found.append(fit(*given)) or found[-1])
        run(config)
    unexplained = [float(one["prdp/unexplained"]) for one in found]
    assert unexplained[0] == 1.0 and unexplained[-1] < 0.2, unexplained
    assert float(found[0]["prdp/correct"].double().mean()) == 0.0
    assert float(found[-1]["prdp/correct"].double().mean()) > 0.8


def test_samples_without_a_score_are_in_no_pair(folder: Path, sd: Path) -> None:
    def silence(opened: Any) -> None:
        collect = opened.collect

        def collected(draw: Any, **shape: Any) -> Rollouts:
            found = collect(draw, **shape)
            found.total[[0, 3, 4]] = math.nan
            return found

        opened.collect = collected

    seen = run(runs.config(folder, sd, trainer=DDIM, sampling={**DIFFUSION, **TRIPLES}, iterations=1, **QUIET), silence)
    assert seen.rows[0]["prdp/pairs"] == 1 and seen.rows[0]["grad_norm"] > 0


def test_equal_rewards_are_a_target_too(folder: Path, sd: Path) -> None:
    """`positive` leaves such pairs out. Of `all` the target is 0, which the reference has reached."""
    rewards = [runs.reward(folder, "nothing")]
    for pairs, count in (("all", 6), ("positive", 0)):
        trainer = {**DDIM, "pairs": pairs}
        config = runs.config(folder, sd, trainer=trainer, rewards=rewards, sampling={**DIFFUSION, **TRIPLES}, **QUIET,
                             output=str(folder / pairs))  # fmt: skip
        for row in runs.rows(train(config)):
            assert (row["prdp/pairs"], row["updates"]) == (count, 0) and row.get("loss", 0.0) == 0.0


def test_the_gate_stops_a_pipeline_that_is_not_replayed(folder: Path, model: Path) -> None:
    with pytest.raises(RuntimeError, match="does not replay what sampling did"):
        run(runs.config(folder, model, trainer=FLOW, iterations=1, **QUIET), drifting(1e-2))


@pytest.mark.parametrize(("kind", "lora"), [("ddim", None), ("flow_cps", runs.LORA)], ids=["full", "lora"])
def test_two_and_two_iterations_are_four(
    folder: Path, sd: Path, model: Path, kind: str, lora: dict[str, Any] | None
) -> None:
    common: dict[str, Any] = {"lora": lora, "optimizer": {"lr": 1e-3 if lora else 1e-5}}
    flow = {**FLOW, "kernel": "flow_cps", "noise_level": 0.8}
    common |= {"trainer": {**(DDIM if kind == "ddim" else flow), "inner_epochs": 2}}
    common |= {"sampling": {**TRIPLES, **(DIFFUSION if kind == "ddim" else {})}}
    path = sd if kind == "ddim" else model
    straight = train(runs.config(folder, path, iterations=4, output=str(folder / "straight"), **common))
    train(runs.config(folder, path, iterations=2, output=str(folder / "stopped"), **common))
    written = Run(folder / "stopped").config
    written.write_text(written.read_text().replace("iterations: 2", "iterations: 4"))
    train(load(written), folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []
    assert all(row["updates"] == 2 for row in runs.rows(straight)[1:])


def test_a_dump_computes_what_the_run_computed(folder: Path, sd: Path) -> None:
    config = runs.config(folder, sd, trainer=DDIM, sampling={**DIFFUSION, **TRIPLES}, **QUIET)
    write_atomic(Run(Path(config.output)).config, to_yaml(config))
    with runs.opened(config) as run, pytest.raises(NonFiniteError) as error:
        losses = runs.spoil(run, lambda number: number == 9)
        prdp.train(run, config.trainer)  # type: ignore[arg-type]
    assert error.value.dump is not None
    again = replay(error.value.dump)
    assert torch.equal(losses[-1], again.tensors["loss"]) and losses[-1].abs().max() > 0
    assert torch.equal(again.tensors["log_prob"], again.recorded["log_prob"])


@pytest.mark.parametrize(
    ("trainer", "sampling", "text"),
    [
        ({}, {"num_inference_steps": 1}, "nothing is trained"),
        ({}, {"group_size": 1}, "group of 2 or more"),
        ({"noise_level": 0.0}, {}, "deterministic"),
        ({"kernel": "flow_sde"}, {}, "is for flow models"),
        ({"updates_per_iteration": 2}, {}, "updates_per_iteration"),
        ({"beta": 0.0}, {}, "beta"),
    ],
)
def test_impossible_settings_are_refused(
    folder: Path, sd: Path, trainer: dict[str, Any], sampling: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_files(runs.config(folder, sd, trainer={**DDIM, **trainer}, sampling={**DIFFUSION, **sampling}))
    assert text in str(error.value)


@pytest.mark.slow
def test_two_processes_learn_as_one(folder: Path, sd: Path) -> None:
    """Uneven shares of 3 micro-batches, groups cut between the processes: the same tables, hence the same gradients."""
    sampling = {**DIFFUSION, **TRIPLES}
    found = []
    for count in (1, 2):
        out = folder / f"run-{count}"
        trainer = {**DDIM, "inner_epochs": 2}
        runs.config(folder, sd, trainer=trainer, sampling=sampling, output=str(out), **QUIET)
        path = (folder / "tiny.yaml").rename(folder / f"world-{count}.yaml")
        log = folder / f"{count}.log"
        processes = [runs.start(runs.train_file, str(path), log=log)] if count == 1 else []
        processes = processes or runs.start_ranks(2, runs.train_file, str(path), log=log)
        assert runs.wait(processes, 240) == [0] * count, [p.read_text()[-2000:] for p in folder.glob("*.log")]
        found.append(runs.rows(out)[0])
    one, two = found
    for key in one:
        assert two[key] == pytest.approx(one[key], rel=1e-5), key
