"""Diff-Instruct* from inside: both networks' gradients by one plain graph, resume, one-step export, bad input."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config, ConfigError, check_files, load
from genrl.config import dump as to_yaml
from genrl.config.estimate import plan
from genrl.diffusion.methods.diff_instruct import train as diff_instruct
from genrl.diffusion.policy.export import export
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.train import train
from genrl.runtime.guards import NonFiniteError
from genrl.runtime.replay import replay
from genrl.runtime.run import Run, write_atomic
from tests.diffusion import runs
from tests.diffusion.methods.test_diffusion_nft import copied, relative, velocity
from tests.diffusion.methods.test_draft import SMOOTH, decoded, warmth

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
ONE_STEP = {"num_inference_steps": 1, "prompts_per_iteration": 3, "group_size": 2, "batch_size": 4}
Given = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _rewards(folder: Path) -> None:
    (folder / "smooth.py").write_text(SMOOTH, encoding="utf-8")


def config(folder: Path, model: Path, /, trainer: dict[str, Any] | None = None, **changes: Any) -> Config:
    changes = {"rewards": [{"name": f"{folder / 'smooth.py'}:warmth", "weight": 3.0}], **QUIET, **changes}
    changes["sampling"] = {**ONE_STEP, **changes.get("sampling", {})}
    return runs.config(folder, model, trainer={"algorithm": "diff_instruct", **(trainer or {})}, **changes)


@dataclass
class Watched:
    rollouts: list[Rollouts] = field(default_factory=list)
    weights: list[Given] = field(default_factory=list)
    """Of the generator, before each of its updates."""
    assistants: list[tuple[Given, Given]] = field(default_factory=list)
    """Before and after each of its updates."""
    gradients: list[Given] = field(default_factory=list)
    assistant_gradients: list[Given] = field(default_factory=list)
    noised: dict[str, list[list[tuple[Tensor, Tensor, Tensor]]]] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)


def run(config: Config) -> Watched:
    seen = Watched()
    with runs.opened(config) as run, pytest.MonkeyPatch.context() as patch:
        weights = run.weights
        step, other, finish, collect = run.step, run.loop.step_other, run.finish, run.collect
        noised = diff_instruct.noised

        def grads() -> Given:
            return {key: p.grad.clone() for key, p in weights.named.items() if p.grad is not None}

        def watched_step() -> float:
            seen.weights.append(copied(weights.named))
            seen.gradients.append(grads())
            return step()

        def watched_other(optimizer: Any) -> float:
            before = copied(weights.named)  # within `use`: the assistant
            seen.assistant_gradients.append(grads())
            norm = other(optimizer)
            seen.assistants.append((before, copied(weights.named)))
            return norm

        def watched_noised(policy: Policy, rollouts: Rollouts, name: str, k: int) -> Iterator[Any]:
            found = list(noised(policy, rollouts, name, k))
            seen.noised.setdefault(name, []).append([(one.noisy, one.noise, one.time) for one, _ in found])
            yield from found

        def watched_collect(drawn: Any) -> Rollouts:
            seen.rollouts.append(collect(drawn))
            return seen.rollouts[-1]

        def watched_finish(metrics: Any) -> None:
            seen.rows.append(dict(metrics))
            finish(metrics)

        patch.setattr(diff_instruct, "noised", watched_noised)
        run.step, run.loop.step_other = watched_step, watched_other  # type: ignore[method-assign]
        run.finish, run.collect = watched_finish, watched_collect  # type: ignore[method-assign]
        diff_instruct.train(run, config.trainer)  # type: ignore[arg-type]
    return seen


class Plain:
    """A network of its own, loaded afresh."""

    def __init__(self, config: Config, values: Given | None, *, trained: bool = False) -> None:
        """values: weights; None = the model before training."""
        self.pipe: Any = DiffusionPipeline.from_pretrained(config.model.path)
        for part in (self.pipe.transformer, self.pipe.vae):
            part.eval().requires_grad_(False)
        self.named: dict[str, Any] = {}
        if values is not None:
            self.named = trainable({"transformer": self.pipe.transformer}, config.model.lora).named
            with torch.no_grad():
                for key, p in self.named.items():
                    p.copy_(values[key])
                    p.requires_grad_(trained)

    def score(self, prompts: list[str], x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.view(-1, 1, 1, 1)
        return -(x + (1 - s) * velocity(self.pipe, prompts, x, sigma)) / s


def by_hand(config: Config, seen: Watched, k: int) -> Given:
    """The gradient of the generator's k-th update, by one graph through generator, decoder and all scores."""
    settings: Any = config.trainer
    generator = Plain(config, seen.weights[k], trained=True)
    assistant, teacher = Plain(config, seen.assistants[k][1]), Plain(config, None)
    loss = torch.zeros(())
    for one, (noisy, noise, sigma) in zip(seen.rollouts[k].mine.values(), seen.noised["generator"][k], strict=True):
        prompts, z, s = one.batch.prompts, one.pieces[0].trajectory.initial, sigma.view(-1, 1, 1, 1)
        x0 = z - velocity(generator.pipe, prompts, z, torch.ones(len(z)))
        torch.testing.assert_close(x0.detach(), one.final, rtol=1e-4, atol=1e-4)
        xt = (1 - s) * x0 + s * noise
        torch.testing.assert_close(xt.detach(), noisy, rtol=1e-4, atol=1e-4)
        ours, theirs = assistant.score(prompts, xt, sigma), teacher.score(prompts, xt, sigma)
        blank, g = teacher.score([""] * len(prompts), xt, sigma), settings.guidance_scale
        if settings.guidance == "inner":
            theirs_used = blank + g * (theirs - blank)
        else:
            theirs_used = theirs
        y = (ours - theirs_used).flatten(1)
        if settings.divergence == "score":
            c = 0.00054 * y.shape[1] ** 0.5
            d = y / (y.square().sum(1, keepdim=True) + c * c).sqrt()
            regulariser = -(sigma**2) * (d * (ours + noise / s).flatten(1)).sum(1)
        else:
            regulariser = sigma**2 * (y.detach() * xt.flatten(1)).sum(1)
        if settings.guidance == "outer":
            regulariser = regulariser - g * sigma**2 * ((theirs - blank).detach() * xt).flatten(1).sum(1)
        loss = loss + (regulariser - 3.0 * warmth(decoded(generator.pipe, x0))).sum() / 6
    found = torch.autograd.grad(loss, list(generator.named.values()), allow_unused=True)
    return {
        key: torch.zeros_like(p) if g is None else g for (key, p), g in zip(generator.named.items(), found, strict=True)
    }


VARIANTS: list[tuple[dict[str, Any], Any]] = [
    ({"guidance_scale": 3.0}, runs.LORA),
    ({"guidance": "none"}, None),
    ({"guidance": "outer", "guidance_scale": 2.0, "assistant_steps": 2}, None),
    ({"divergence": "kl", "guidance": "outer", "guidance_scale": 2.0}, runs.LORA),
]


@pytest.mark.parametrize(("trainer", "lora"), VARIANTS, ids=["inner-lora", "none-full", "outer-full", "kl-outer-lora"])
def test_both_gradients_by_one_plain_graph(folder: Path, model: Path, trainer: dict[str, Any], lora: Any) -> None:
    """Of the third iteration, where generator, assistant and teacher are three different networks."""
    settings = config(folder, model, trainer, lora=lora, optimizer={"lr": 1e-2 if lora else 1e-3}, iterations=3)
    seen = run(settings)
    steps = trainer.get("assistant_steps", 1)
    last = Watched(seen.rollouts[2:], seen.weights[2:], seen.assistants[3 * steps - 1 :], noised=dict(seen.noised))
    last.noised["generator"] = seen.noised["generator"][2:]
    assert relative(seen.gradients[2], by_hand(settings, last, 0)) < 5e-4

    before, _ = seen.assistants[2 * steps]  # the assistant's first update in that iteration
    assistant, loss = Plain(settings, before, trained=True), torch.zeros(())
    given = seen.noised["assistant"][2 * steps]
    for one, (noisy, noise, sigma) in zip(seen.rollouts[2].mine.values(), given, strict=True):
        score, s = assistant.score(one.batch.prompts, noisy, sigma), sigma.view(-1, 1, 1, 1)
        loss = loss + (sigma**2 * (score + noise / s).square().flatten(1).sum(1)).sum() / 6
    found = torch.autograd.grad(loss, list(assistant.named.values()), allow_unused=True)
    expected = {
        key: torch.zeros_like(p) if g is None else g for (key, p), g in zip(assistant.named.items(), found, strict=True)
    }
    assert relative(seen.assistant_gradients[2 * steps], expected) < 5e-4


def test_the_levels_and_noises_of_the_two_halves_are_drawn_anew(folder: Path, model: Path) -> None:
    seen = run(config(folder, model, {"assistant_steps": 2}, iterations=2))
    assert len(seen.noised["assistant"]) == 4 and len(seen.noised["generator"]) == 2
    levels = [torch.cat([sigma for _, _, sigma in one]) for part in seen.noised.values() for one in part]
    assert len({float(level) for one in levels for level in one}) == 6 * 6
    assert all(bool(((one >= 0.02) & (one <= 0.98)).all()) for one in levels)


def test_the_assistant_begins_as_the_teacher_and_only_it_learns_in_its_half(folder: Path, model: Path) -> None:
    seen = run(config(folder, model, {"guidance": "none"}, rewards=[runs.reward(folder, "redness", weight=0)],
                      iterations=2))  # fmt: skip
    first, second = seen.rows
    assert first["diff_instruct/reward_pull"] == 0.0  # distillation: rewards of weight 0 are for the log
    (start, after), _ = seen.assistants
    assert any(not torch.equal(start[key], after[key]) for key in start)
    for key, value in seen.weights[0].items():
        assert torch.equal(value, start[key])  # in the first iteration the generator is still what the assistant was
    assert second["diff_instruct/divergence"] > 0 and first["grad_norm"] > 0


def test_variety_within_a_prompt_is_logged(folder: Path, model: Path) -> None:
    """3 prompts with 2 samples each, in micro-batches of 4: the deviation of two numbers is their distance / sqrt 2."""
    seen = run(config(folder, model, iterations=1))
    drawn = {s: x for m in seen.rollouts[0].mine.values() for s, x in zip(m.slots, m.final, strict=True)}
    apart = torch.stack([(drawn[2 * k] - drawn[2 * k + 1]).abs().mean() for k in range(3)])
    assert seen.rows[0]["diff_instruct/spread"] == pytest.approx(float(apart.mean()) / 2**0.5, rel=1e-5)
    alone = run(config(folder, model, iterations=1, sampling={"prompts_per_iteration": 4, "group_size": 1}))
    assert "diff_instruct/spread" not in alone.rows[0]


@pytest.mark.parametrize("lora", [runs.LORA, None], ids=["lora", "full"])
def test_two_and_two_iterations_are_four(folder: Path, model: Path, lora: Any) -> None:
    """To the bit, with the assistant and its optimiser; and the model calls are those that are foretold."""
    common: dict[str, Any] = {"lora": lora, "checkpoint": {"every": 1}, "trainer": {"assistant_steps": 2}}
    common["optimizer"] = {"lr": 1e-2 if lora else 1e-3}
    straight = config(folder, model, output=str(folder / "straight"), iterations=4, **common)
    train(straight)
    train(config(folder, model, output=str(folder / "stopped"), iterations=2, **common))
    written = Run(folder / "stopped").config
    written.write_text(written.read_text().replace("iterations: 2", "iterations: 4"))
    train(load(written), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []
    kept = runs.last_state(folder / "straight").tensors
    assert {"snapshot-assistant", "kept-assistant_optimizer"} < kept.keys()
    moments = [tensor for key, tensor in kept["kept-assistant_optimizer"].items() if "exp_avg" in key]
    assert any(bool(tensor.any()) for tensor in moments)
    found, rows = plan(straight), runs.rows(folder / "straight")
    assert {row["model_calls/sample"] for row in rows} == {found.sample_calls} == {6}
    assert {row["model_calls/train"] for row in rows} == {found.train_calls} == {6 * (2 + 1 + 2 + 1)}


def test_a_run_asked_to_end_after_the_assistants_step_goes_on_to_the_bit(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full fine-tuning of a large model cannot take the assistant's step back: the iteration is finished first."""
    monkeypatch.setattr("genrl.runtime.weights.LARGEST_COPY", 0)
    common: dict[str, Any] = {"lora": None, "checkpoint": {"every": 1}, "optimizer": {"lr": 1e-3}}
    train(config(folder, model, output=str(folder / "straight"), iterations=3, **common))
    stopped = config(folder, model, output=str(folder / "stopped"), iterations=3, **common)
    follow, calls = diff_instruct.follow, 0

    def ending(run: Any, *rest: Any) -> None:
        nonlocal calls
        follow(run, *rest)
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(diff_instruct, "follow", ending)
        train(stopped)
    assert runs.last_state(folder / "stopped").step == 2
    train(load(Run(folder / "stopped").config), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []


@pytest.mark.parametrize("lora", [runs.LORA, None], ids=["lora", "full"])
def test_the_result_samples_in_one_step_in_plain_diffusers(folder: Path, model: Path, lora: Any) -> None:
    """The exported weights draw, in one step of the stock pipeline, what the trained generator draws."""
    settings = config(folder, model, lora=lora, ema=None, optimizer={"lr": 1e-2 if lora else 1e-3}, iterations=2,
                      checkpoint={"every": 2})  # fmt: skip
    folder_of_run = train(settings)
    out = export(folder_of_run, folder / "out")
    plain = DiffusionPipeline.from_pretrained(model if lora else out)
    if lora:
        plain.load_lora_weights(str(out))
    call = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 4}
    steps: list[int] = []
    forward = plain.transformer.forward
    plain.transformer.forward = lambda *a, **k: (steps.append(1), forward(*a, **k))[1]
    drawn = plain("a red star", generator=torch.Generator().manual_seed(3), output_type="pt", **call).images
    assert len(steps) == 1

    with runs.opened(settings) as run:
        run.weights.restore(runs.last_state(folder_of_run).tensors)
        batch = Batch(["a red star"], [("x", 0)], {**call})
        shape = run.policy.state_shape(batch)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            mine = run.policy.decode(batch, run.policy.advance(batch, noise, 0))
    torch.testing.assert_close(drawn.float(), mine, rtol=1e-4, atol=1e-4)
    start = DiffusionPipeline.from_pretrained(model)
    untrained = start("a red star", generator=torch.Generator().manual_seed(3), output_type="pt", **call).images
    assert float((drawn - untrained).abs().max()) > 1e-3
    assert "num_inference_steps=1" in (out / "README.md").read_text()


def test_a_dump_is_computed_again(folder: Path, model: Path) -> None:
    settings = config(folder, model, iterations=1)
    write_atomic(Run(Path(settings.output)).config, to_yaml(settings))
    with runs.opened(settings) as run, pytest.raises(NonFiniteError) as error:
        losses = runs.spoil(run, lambda number: True)
        diff_instruct.train(run, settings.trainer)  # type: ignore[arg-type]
    assert error.value.dump is not None
    assert torch.equal(replay(error.value.dump).tensors["loss"], losses[0])


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": {"num_inference_steps": 8}}, r"sampling\.num_inference_steps.*one step, found 8; write 1"),
        ({"evaluation": {"every": 1, "num_inference_steps": 8}}, r"evaluation\.num_inference_steps.*write null"),
        ({"sampling": {"guidance_scale": 4.0}}, r"sampling\.guidance_scale.*learnt from the teacher.*write 1"),
        ({"sampling": {"guidance_scale": None}}, r"sampling\.guidance_scale.*write 1"),
        ({"lora": {"frozen": ["org/distilled"]}}, r"model\.lora\.frozen.*name a distilled LoRA by model\.lora\.from"),
        ({"trainer": {"guidance": "both"}}, "allowed: one of none, inner, outer"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, model: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(folder, model, **changes)


def test_a_reward_without_gradients_is_refused_by_its_source(folder: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"diff_instruct differentiates the reward, and .*brightness has no grad"):
        check_files(config(folder, model, rewards=[runs.reward(folder, "brightness")]))
