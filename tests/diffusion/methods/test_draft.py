"""Direct reward back-propagation: its gradient by one plain graph and by differences, its memory, runs, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config, ConfigError, check_files, load
from genrl.config import dump as to_yaml
from genrl.config.estimate import plan
from genrl.diffusion.methods import direct
from genrl.diffusion.methods.draft import train as draft
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.diffusion.train import train
from genrl.runtime.guards import NonFiniteError
from genrl.runtime.replay import replay
from genrl.runtime.run import Run, write_atomic
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.test_diffusion_nft import copied, relative, velocity

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

SMOOTH = '''\
import torch


def warmth(images):
    """Red less blue, and a little curvature."""
    return (images[:, 0] - images[:, 2] + 0.3 * images[:, 1] ** 2).mean(dim=(1, 2))


warmth.differentiable = True


def column(images, target):
    """Distance of the mean from a number of the prompt file."""
    return -((images.mean(dim=(1, 2, 3)) - torch.tensor([float(t) for t in target])) ** 2)


column.differentiable = True


class Blind:
    """Says that it has gradients, and has none."""

    differentiable = True

    def __call__(self, images):
        return images.detach().mean(dim=(1, 2, 3))


class Base:
    """Nothing of gradients here."""


class Heir(Base):
    def __call__(self, images):
        return images.mean(dim=(1, 2, 3))
'''
DRAFT = {"algorithm": "draft"}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
SIX = {"prompts_per_iteration": 3, "group_size": 2, "batch_size": 4}  # micro-batches of 4 and 2


@pytest.fixture(autouse=True)
def _rewards(folder: Path) -> None:
    (folder / "smooth.py").write_text(SMOOTH, encoding="utf-8")


def smooth(folder: Path, name: str = "warmth", **extra: Any) -> dict[str, Any]:
    return {"name": f"{folder / 'smooth.py'}:{name}", **extra}


def config(folder: Path, model: Path, trainer: dict[str, Any], **changes: Any) -> Config:
    changes = {"rewards": [smooth(folder)], **QUIET, **changes}
    return runs.config(folder, model, trainer={**DRAFT, **trainer}, **changes)


def run(config: Config) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[list[MicroBatch]], list[Any]]:
    """Train in this process: weights before and gradient of every update, samples, metrics."""
    weights, gradients, samples, rows = [], [], [], []
    with runs.opened(config) as run:
        step, finish, collect = run.step, run.finish, run.collect

        def watched_step() -> float:
            weights.append(copied(run.weights.named))
            gradients.append({key: p.grad.clone() for key, p in run.weights.named.items() if p.grad is not None})
            return step()

        def watched_collect(drawn: Any) -> Any:
            rollouts = collect(drawn)
            samples.append(list(rollouts.mine.values()))
            return rollouts

        def watched_finish(metrics: Any) -> None:
            rows.append(dict(metrics))
            finish(metrics)

        run.step, run.finish, run.collect = watched_step, watched_finish, watched_collect  # type: ignore
        draft.train(run, config.trainer)  # type: ignore[arg-type]
    return weights, gradients, samples, rows


def decoded(pipe: Any, latents: Tensor) -> Tensor:
    scaled = latents / pipe.vae.config.scaling_factor + (pipe.vae.config.shift_factor or 0.0)
    images: Tensor = pipe.vae.decode(scaled, return_dict=False)[0]
    return (images / 2 + 0.5).clamp(0, 1)


def warmth(images: Tensor) -> Tensor:
    return (images[:, 0] - images[:, 2] + 0.3 * images[:, 1] ** 2).mean(dim=(1, 2))


class Plain:
    """The model loaded afresh: everything in one graph, nothing recomputed."""

    def __init__(self, config: Config) -> None:
        self.pipe: Any = DiffusionPipeline.from_pretrained(config.model.path)
        for part in (self.pipe.transformer, self.pipe.vae):
            part.eval().requires_grad_(False)
        self.named = trainable({"transformer": self.pipe.transformer}, config.model.lora).named

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        for key, p in self.named.items():
            p.copy_(values[key])

    def loss(self, prompts: list[str], z: Tensor, sigmas: Tensor, first: int, last: int, *, clean: bool, margin: Any) -> Tensor:  # fmt: skip  # noqa: E501
        x = z
        for i in range(last):
            with torch.set_grad_enabled(i >= first):
                v = velocity(self.pipe, prompts, x, sigmas[i].expand(len(x)))
                sigma_next = 0.0 if clean and i == last - 1 else sigmas[i + 1]
                x = x - (sigmas[i] - sigma_next) * v
        r = warmth(decoded(self.pipe, x))
        return -r if margin is None else (margin - r).clamp(min=0)


def starts(samples: list[MicroBatch], policy: Policy) -> list[Tensor]:
    return [policy.roll_out(one.batch).initial for one in samples]


@pytest.mark.parametrize(
    ("trainer", "lora"),
    [
        ({}, runs.LORA),
        ({"steps": 2}, runs.LORA),
        ({"steps": 3}, None),
        ({"truncation": "alignprop"}, runs.LORA),
        ({"truncation": "refl", "steps": 3, "margin": 2.0}, runs.LORA),
    ],
    ids=["draft-1", "draft-2", "draft-all-full", "alignprop", "refl"],
)
def test_gradient_by_one_plain_graph(folder: Path, model: Path, trainer: dict[str, Any], lora: Any) -> None:
    """In the first update and, away from the start, in the third."""
    settings = config(folder, model, trainer, lora=lora, sampling=SIX, iterations=3)
    weights, gradients, samples, rows = run(settings)
    plain, policy = Plain(settings), Policy(DiffusionPipeline.from_pretrained(model))
    lengths = []
    for k in (0, 2):
        plain.fill(weights[k])
        steps = draft.trained_steps(settings.trainer, 3, settings.seed, k)  # type: ignore[arg-type]
        lengths.append(len(steps))
        clean = settings.trainer.truncation == "refl"
        losses = torch.cat(
            [
                plain.loss(
                    one.batch.prompts,
                    z,
                    one.sigmas,
                    steps.start,
                    steps.stop,
                    clean=clean,
                    margin=settings.trainer.margin,
                )  # fmt: skip
                for one, z in zip(samples[k], starts(samples[k], policy), strict=True)
            ]
        )
        found = torch.autograd.grad(losses.sum() / 6, list(plain.named.values()), allow_unused=True)
        expected = {
            key: torch.zeros_like(p) if g is None else g for (key, p), g in zip(plain.named.items(), found, strict=True)
        }
        assert relative(gradients[k], expected) < 2e-4
        assert rows[k]["loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
        assert rows[k]["draft/steps"] == len(steps)
    if trainer.get("truncation") == "draft" and "steps" in trainer:
        assert lengths == [trainer["steps"]] * 2


@pytest.mark.parametrize("family", ["sd3", "sd15"])
def test_the_chain_is_the_sampler_and_its_gradient_that_of_differences(family: str) -> None:
    """Flow and epsilon prediction; with recomputation and without."""
    arguments: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16}
    arguments |= {"max_sequence_length": 4} if family == "sd3" else {}
    policy = Policy(FAMILIES[family]().pipe)
    batch = Batch(["a red star", "a cat"], [("a", 0), ("a", 1)], arguments)
    with torch.no_grad():
        whole = policy.roll_out(batch)
        start = policy.roll_out(batch, stop=1).final
        assert torch.equal(direct.chain(policy, batch, start, range(1, 4)), whole.final)
        clean = policy.roll_out(batch, stop=2, predict=True).predicted
        assert torch.equal(direct.chain(policy, batch, start, range(1, 2), clean=True), clean)

    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(1))
    target = torch.randn(start.shape, generator=torch.Generator().manual_seed(2))

    def value(x: Tensor) -> Tensor:
        return (target * direct.chain(policy, batch, x, range(1, 4))).sum()

    leaf = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    kept = leaf
    for i in range(1, 4):
        kept = policy.advance(batch, kept, i)
    (plain,) = torch.autograd.grad((target * kept).sum(), leaf)
    assert torch.equal(gradient, plain)
    with torch.no_grad():
        slope = (value(start + 1e-2 * direction) - value(start - 1e-2 * direction)) / 2e-2
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=5e-3)


def test_the_gradient_in_the_weights_is_that_of_differences(folder: Path, model: Path) -> None:
    """All steps: the loss as a function of the adapters, along the gradient."""
    settings = config(folder, model, {"steps": 3}, sampling=SIX, iterations=2)
    weights, gradients, samples, _ = run(settings)
    plain, policy = Plain(settings), Policy(DiffusionPipeline.from_pretrained(model))
    (z, *_), (one, *_) = starts(samples[1], policy), samples[1]
    z, prompts = z[:1], one.batch.prompts[:1]

    def loss() -> Tensor:
        return plain.loss(prompts, z, one.sigmas, 0, 3, clean=False, margin=None).sum()

    plain.fill(weights[1])
    slopes = dict(zip(plain.named, torch.autograd.grad(loss(), list(plain.named.values())), strict=True))
    norm = sum(float(g.square().sum()) for g in slopes.values()) ** 0.5
    values = []
    for sign in (1, -1):
        plain.fill({key: weights[1][key] + sign * 2e-2 * g / norm for key, g in slopes.items()})
        with torch.no_grad():
            values.append(float(loss()))
    assert (values[0] - values[1]) / 4e-2 == pytest.approx(norm, rel=0.03)


def test_pictures_are_decoded_one_at_a_time_and_steps_recomputed(folder: Path, model: Path) -> None:
    settings = config(folder, model, {"steps": 3}, sampling=SIX, iterations=1)
    sizes: list[int] = []
    with runs.opened(settings) as run:
        decode = run.policy.decode

        def watched(batch: Batch, final: Tensor, *, grad: bool = False) -> Tensor:
            if grad:
                sizes.append(len(final))
            return decode(batch, final, grad=grad)

        run.policy.decode = watched  # type: ignore[method-assign]
        draft.train(run, settings.trainer)  # type: ignore[arg-type]
    assert sizes == [1] * 6
    assert runs.rows(Path(settings.output))[-1]["model_calls/train"] == 6 * 3 * 2


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_steps() -> None:
    """Checkpointed: the states between the steps, and no activation."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    trainable(policy.denoisers, None)
    arguments = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 4}
    batch = Batch(["a red star"], [("a", 0)], arguments)
    kept: dict[int, int] = {}
    for count in (1, 2, 4):
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        start = torch.zeros(1, 4, 8, 8)[:, : policy.state_shape(batch)[1]].expand(policy.state_shape(batch)).clone()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            direct.chain(policy, batch, start, range(4 - count, 4))
        kept[count] = total
    assert kept[4] < 0.1 * kept[1] and kept[2] < 0.1 * kept[1]


@pytest.mark.parametrize("trainer", [{"truncation": "alignprop"}, {"truncation": "refl"}, {"steps": 2}])
def test_two_and_two_iterations_are_four(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """To the bit; and the model calls are those that are foretold."""
    common: dict[str, Any] = {"sampling": SIX, "checkpoint": {"every": 1}}
    common["rewards"] = [smooth(folder), runs.reward(folder, "redness", weight=0)]
    straight = config(folder, model, trainer, output=str(folder / "straight"), iterations=4, **common)
    train(straight)
    train(config(folder, model, trainer, output=str(folder / "stopped"), iterations=2, **common))
    written = Run(folder / "stopped").config
    written.write_text(written.read_text().replace("iterations: 2", "iterations: 4"))
    train(load(written), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []
    rows = runs.rows(folder / "straight")
    assert all("reward/redness_mean" in row for row in rows)  # without gradients, and logged
    if trainer.get("truncation") == "alignprop":
        lengths = [int(row["draft/steps"]) for row in rows]
        assert len(set(lengths)) > 1
        assert [row["model_calls/train"] for row in rows] == [6 * (k if k == 1 else 2 * k) for k in lengths]
        assert plan(straight).train_calls == pytest.approx(6 * (1 + 4 + 6) / 3)
        return
    found = plan(straight)
    assert {row["model_calls/sample"] for row in rows} == {found.sample_calls}
    assert {row["model_calls/train"] for row in rows} == {found.train_calls}


def test_a_dump_is_computed_again(folder: Path, model: Path) -> None:
    settings = config(folder, model, {"steps": 2}, sampling=SIX, iterations=1)
    write_atomic(Run(Path(settings.output)).config, to_yaml(settings))
    with runs.opened(settings) as run, pytest.raises(NonFiniteError) as error:
        losses = runs.spoil(run, lambda number: True)
        draft.train(run, settings.trainer)  # type: ignore[arg-type]
    assert error.value.dump is not None
    again = replay(error.value.dump)
    assert torch.equal(again.tensors["loss"], losses[0])
    assert torch.equal(again.tensors["final"], again.recorded["final"])


def test_samples_above_the_margin_are_left_alone(folder: Path, model: Path) -> None:
    _, gradients, _, rows = run(config(folder, model, {"margin": -5.0}, iterations=1))
    assert not any(bool(g.any()) for g in gradients[0].values())
    assert rows[0]["loss"] == 0 and rows[0]["grad_norm"] == 0


def test_rewards_get_their_columns_and_weights(folder: Path, model: Path) -> None:
    """Two rewards, one of which reads the prompt file: the gradient is that of the weighted sum."""
    lines = [json.dumps({"prompt": text, "target": 0.1 * k}) for k, text in enumerate(runs.PROMPTS)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    both = [smooth(folder, weight=0.5), smooth(folder, "column", weight=-2.0, batch_size=2)]
    settings = config(folder, model, {}, rewards=both, iterations=1, sampling=SIX)
    prompts = settings.prompts.model_copy(update={"train": str(folder / "train.jsonl"), "eval": None})
    settings = settings.model_copy(update={"prompts": prompts})
    found: list[direct.Pulled] = []
    with runs.opened(settings) as run, pytest.MonkeyPatch.context() as patch:
        plain = direct.reward_gradient
        patch.setattr(draft, "reward_gradient", lambda *given: found.append(plain(*given)) or found[-1])
        collect = run.collect
        samples: list[Any] = []
        run.collect = lambda drawn: samples.append(collect(drawn)) or samples[-1]  # type: ignore[method-assign]
        draft.train(run, settings.trainer)  # type: ignore[arg-type]
        (rollouts,) = samples
        targets = {text: 0.1 * k for k, text in enumerate(runs.PROMPTS)}
        for one, pulled in zip(rollouts.mine.values(), found, strict=True):
            leaf = one.final.clone().requires_grad_()
            images = run.policy.decode(one.batch, leaf, grad=True)
            aims = torch.tensor([targets[text] for text in one.batch.prompts])
            total = 0.5 * warmth(images) + 2.0 * (images.mean(dim=(1, 2, 3)) - aims) ** 2
            (gradient,) = torch.autograd.grad(-total.sum(), leaf)
            torch.testing.assert_close(pulled.gradient, gradient, rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(pulled.total, total.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(pulled.total, rollouts.total[one.slots].float(), rtol=1e-5, atol=1e-6)


def test_the_reward_rises_on_held_out_prompts(folder: Path, model: Path) -> None:
    rows = runs.rows(
        train(
            config(
                folder,
                model,
                {"steps": 3},
                lora=None,
                optimizer={"lr": 3e-3},
                iterations=8,
                sampling=SIX,
                evaluation={"every": 8},
            )  # fmt: skip
        )
    )
    assert rows[-1]["eval/total_mean"] > rows[0]["eval/total_mean"] + 0.01


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["rewards.py:brightness"], r"rewards\.0\.name: draft differentiates the reward, and .*brightness has no "
                                    r"gradients .*; train on clipscore, pickscore"),
        (["shapes"], r"shapes has no gradients .* use flow_grpo or diffusion_nft"),
        (["smooth.py:warmth", "rewards.py:redness"], r"rewards\.1\.name: .*redness has no grad.* train on warmth"),
    ],
)  # fmt: skip
def test_a_reward_without_gradients_is_refused_by_its_source(
    folder: Path, model: Path, names: list[str], says: str
) -> None:
    rewards = [{"name": str(folder / name) if ".py" in name else name} for name in names]
    with pytest.raises(ConfigError, match=says):
        check_files(config(folder, model, {}, rewards=rewards))


def test_a_reward_whose_source_cannot_tell_is_refused_before_the_model_is_loaded(folder: Path, model: Path) -> None:
    settings = config(folder, model, {}, rewards=[smooth(folder, "Heir")])
    check_files(settings)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match=r"rewards\.0\.name: draft differentiates the reward, and Heir has no grad"),
    ):
        patch.setattr("genrl.diffusion.train.load_pipeline", lambda model: pytest.fail("loaded"))
        train(settings)


def test_a_reward_that_breaks_its_word_is_named(folder: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=r"reward 'Blind' is declared differentiable; it must then return a tensor"):
        train(config(folder, model, {}, rewards=[smooth(folder, "Blind")], iterations=1))


@pytest.mark.parametrize(
    ("trainer", "changes", "says"),
    [
        ({"steps": 4}, {}, r"trainer\.steps.*the sampler has 3 steps; use 3 or less"),
        ({}, {"reward": {"normalize": "group"}}, r"rewards\.0\.normalize.*write none"),
        ({}, {"reward": {"remote": "http://127.0.0.1:1"}}, r"rewards\.0\.remote.*stays in the process.*write null"),
        ({}, {"reward": {"isolate": True}}, r"rewards\.0\.isolate.*write false"),
        ({}, {"sampling": {"same_initial_noise": True}}, "one picture many times"),
        ({"truncation": "drafft"}, {}, "did you mean draft"),
    ],
)
def test_what_cannot_work_is_refused(
    folder: Path, model: Path, trainer: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    rewards = [smooth(folder, **changes.pop("reward", {}))]
    with pytest.raises(ConfigError, match=says):
        config(folder, model, trainer, rewards=rewards, **changes)
