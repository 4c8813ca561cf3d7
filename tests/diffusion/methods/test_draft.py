"""Direct reward back-propagation: its gradient by one plain graph, its memory, runs, bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import ConfigError, check_files
from genrl.diffusion.config.schema import Config
from genrl.diffusion.forward import direct
from genrl.diffusion.methods.draft import train as draft
from genrl.diffusion.policy.adapters import trainable
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import QUIET, Bare, relative, run, watch
from tests.run_folders import tiered

SMOOTH = '''\
import torch


class Base:
    """Nothing of gradients here."""


class Heir(Base):
    def __call__(self, images):
        return images.mean(dim=(1, 2, 3))


def column(images, target):
    """Distance of the mean from a number of the prompt file."""
    return -((images.mean(dim=(1, 2, 3)) - torch.tensor([float(t) for t in target])) ** 2)


def blind(images):
    """Says that it has gradients, and has none."""
    return images.detach().mean(dim=(1, 2, 3))


column.differentiable = blind.differentiable = True
'''
DRAFT = {"algorithm": "draft"}
SIX = {"prompts_per_iteration": 3, "group_size": 2, "batch_size": 4}  # micro-batches of 4 and 2


def config(folder: Path, model: Path, trainer: dict[str, Any], **changes: Any) -> Config:
    (folder / "smooth.py").write_text(SMOOTH, encoding="utf-8")
    changes = {"rewards": [runs.reward(folder, "warmth")], **QUIET, **changes}
    return runs.config(folder, model, trainer={**DRAFT, **trainer}, **changes)


def warmth(images: Tensor) -> Tensor:
    return (images[:, 0] - images[:, 2] + 0.3 * images[:, 1] ** 2).mean(dim=(1, 2))


class Plain(Bare):
    """Everything in one graph, nothing recomputed."""

    def loss(self, one: MicroBatch, z: Tensor, steps: range, *, clean: bool, margin: Any) -> Tensor:
        x = z
        for i in range(steps.stop):
            with torch.set_grad_enabled(i >= steps.start):
                sigma_next = 0.0 if clean and i == steps.stop - 1 else one.sigmas[i + 1]
                x = x - (one.sigmas[i] - sigma_next) * self.velocity(one.batch.prompts, x, one.sigmas[i])
        r = warmth(self.decoded(x))
        return -r if margin is None else (margin - r).clamp(min=0)


VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "draft": ({"steps": 2}, runs.LORA),
    "draft-all-full": ({"steps": 3}, None),
    "alignprop": ({"truncation": "alignprop"}, runs.LORA),
    "refl": ({"truncation": "refl", "steps": 3, "margin": 2.0}, runs.LORA),
}


@pytest.mark.parametrize("name", tiered(VARIANTS, ("draft",)))
def test_gradient_by_one_plain_graph(folder: Path, model: Path, name: str) -> None:
    """In the first update and, away from the start, in the third."""
    trainer, lora = VARIANTS[name]
    settings = config(folder, model, trainer, lora=lora, sampling=SIX, iterations=3)
    seen = run(settings)
    plain, policy = Plain(settings), Policy(DiffusionPipeline.from_pretrained(model))
    clean, margin = settings.trainer.truncation == "refl", settings.trainer.margin  # type: ignore[union-attr]
    for k in (0, 2):
        plain.fill(seen.updates[k].weights)
        steps = draft.trained_steps(settings.trainer, 3, settings.seed, k)  # type: ignore[arg-type]
        samples = [(one, policy.roll_out(one.batch).initial) for one in seen.rollouts[k].mine.values()]
        losses = torch.cat([plain.loss(one, z, steps, clean=clean, margin=margin) for one, z in samples])
        assert relative(seen.updates[k].gradient, plain.gradient(losses.sum() / 6)) < 2e-4
        assert seen.rows[k]["loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
        assert seen.rows[k]["draft/steps"] == len(steps)
        assert not name.startswith("draft") or len(steps) == trainer["steps"]


@pytest.mark.parametrize("family", ["sd3", "sd15"])
def test_the_chain_is_the_sampler_and_its_gradient_that_of_kept_steps(family: str) -> None:
    """Flow and epsilon prediction; with recomputation and without."""
    made = FAMILIES[family]()
    policy, batch = Policy(made.pipe), made.batch(**made.unguided)
    with torch.no_grad():
        whole = policy.roll_out(batch)
        start = policy.roll_out(batch, stop=1).final
        assert torch.equal(direct.chain(policy, batch, start, range(1, 4)), whole.final)
        clean = policy.roll_out(batch, stop=2, predict=True).predicted
        assert torch.equal(direct.chain(policy, batch, start, range(1, 2), clean=True), clean)
    target = torch.randn(start.shape, generator=torch.Generator().manual_seed(2))
    leaf = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((target * direct.chain(policy, batch, leaf, range(1, 4))).sum(), leaf)
    kept = leaf
    for i in range(1, 4):
        kept = policy.advance(batch, kept, i)
    (plain,) = torch.autograd.grad((target * kept).sum(), leaf)
    assert torch.equal(gradient, plain) and bool(gradient.any())


def test_pictures_are_decoded_one_at_a_time_and_steps_recomputed(folder: Path, model: Path) -> None:
    settings = config(folder, model, {"steps": 3}, sampling=SIX, iterations=1)
    sizes: list[int] = []
    with runs.opened(settings) as run:
        run.policy.pipe.vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
        pulled = watch(run)
        draft.train(run, settings.trainer)  # type: ignore[arg-type]
    assert sizes[-6:] == [1] * 6 and len(pulled.updates) == 1
    assert runs.rows(Path(settings.output))[-1]["model_calls/train"] == 6 * 3 * 2


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_steps() -> None:
    """Checkpointed: the states between the steps, and no activation."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    trainable(policy.denoisers, None)
    batch = Batch(["a red star"], [("a", 0)], {**runs.CALL, "num_inference_steps": 4})
    kept: dict[int, int] = {}
    for count in (1, 2, 4):
        sizes: list[int] = []
        start = torch.zeros(policy.state_shape(batch))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            direct.chain(policy, batch, start, range(4 - count, 4))
        kept[count] = sum(sizes)
    assert kept[4] < 0.1 * kept[1] and kept[2] < 0.1 * kept[1]


def test_rewards_get_their_columns_and_weights(folder: Path, model: Path) -> None:
    """The gradient is that of the weighted sum; a third reward without gradients and weight is logged."""
    lines = [json.dumps({"prompt": text, "target": 0.1 * k}) for k, text in enumerate(runs.PROMPTS)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    column = {"name": f"{folder / 'smooth.py'}:column", "weight": -2.0, "batch_size": 2}
    judges = [runs.reward(folder, "warmth", weight=0.5), column, runs.reward(folder, "redness", weight=0)]
    settings = config(folder, model, {}, rewards=judges, iterations=1, sampling=SIX)
    prompts = settings.prompts.model_copy(update={"train": str(folder / "train.jsonl"), "eval": None})
    settings = settings.model_copy(update={"prompts": prompts})
    result: list[direct.Pulled] = []
    with runs.opened(settings) as opened, pytest.MonkeyPatch.context() as patch:
        plain = direct.reward_gradient
        patch.setattr(draft, "reward_gradient", lambda *given: result.append(plain(*given)) or result[-1])
        seen = watch(opened)
        draft.train(opened, settings.trainer)  # type: ignore[arg-type]
        targets = {text: 0.1 * k for k, text in enumerate(runs.PROMPTS)}
        for one, pulled in zip(seen.rollouts[0].mine.values(), result, strict=True):
            leaf = one.final.clone().requires_grad_()
            images = opened.policy.decode(one.batch, leaf, grad=True)
            aims = torch.tensor([targets[text] for text in one.batch.prompts])
            total = 0.5 * warmth(images) + 2.0 * (images.mean(dim=(1, 2, 3)) - aims) ** 2
            (gradient,) = torch.autograd.grad(-total.sum(), leaf)
            torch.testing.assert_close(pulled.gradient, gradient, rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(pulled.total, total.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(pulled.total, seen.rollouts[0].total[one.slots].float(), rtol=1e-5, atol=1e-6)
    assert "reward/redness_mean" in runs.rows(folder / "run")[0]


def test_a_reward_without_gradients_is_refused(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its source; where that cannot tell, before the model is loaded; where it breaks its word, in training."""
    smooth, own = folder / "smooth.py", folder / "rewards.py"
    for name, says in (
        (f"{own}:brightness", r"1\.name: draft .*brightness has no gradients .*; train on clipscore, pickscore"),
        ("shapes", r"shapes has no gradients .* use flow_grpo or diffusion_nft"),
        (f"{own}:redness", r"rewards\.1\.name: .*redness has no grad.* give it weight 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_files(config(folder, model, {}, rewards=[{"name": f"{own}:warmth"}, {"name": name}]))
    settings = config(folder, model, {}, rewards=[{"name": f"{smooth}:Heir"}])
    check_files(settings)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"0\.name: draft .*and Heir has no grad"):
        patch.setattr("genrl.diffusion.train.load_pipeline", lambda model: pytest.fail("loaded"))
        train(settings)
    with pytest.raises(ValueError, match=r"reward 'blind' is declared differentiable; it must then return a tensor"):
        train(config(folder, model, {}, rewards=[{"name": f"{smooth}:blind"}], iterations=1))
