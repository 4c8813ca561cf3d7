"""Diff-Instruct* from inside: both networks' gradients by one plain graph, resume, one-step export, bad input."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.files.export import export
from genrl.diffusion.methods.diff_instruct import train as diff_instruct
from genrl.diffusion.policy.adapters import snapshot_base
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.train import train
from genrl.mdp.noise import keyed_noise
from genrl.runtime.folder.run import Run
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.test_draft import warmth
from tests.diffusion.methods.watched import Bare, Given, Watched, copied, equal, gradients, relative, resumed, watch
from tests.run_folders import tiered

AT_399 = {"timestep_spacing": "leading", "steps_offset": 399}
ONE_STEP = {"num_inference_steps": 1, "prompts_per_iteration": 3, "group_size": 2, "batch_size": 4}


def config(folder: Path, model: Path, /, trainer: dict[str, Any] | None = None, **changes: Any) -> Config:
    changes = {"rewards": [runs.reward(folder, "warmth", weight=3.0)], **runs.QUIET, **changes}
    changes["sampling"] = {**ONE_STEP, **changes.get("sampling", {})}
    return runs.config(folder, model, trainer={"algorithm": "diff_instruct", **(trainer or {})}, **changes)


@dataclass
class Seen(Watched):
    assistants: list[tuple[Given, Given]] = field(default_factory=list)
    """Before and after each of its updates."""
    assistant_gradients: list[Given] = field(default_factory=list)
    noised: dict[str, list[list[tuple[Tensor, Tensor, Tensor]]]] = field(default_factory=dict)


def run(config: Config) -> Seen:
    with runs.opened(config) as run, pytest.MonkeyPatch.context() as patch:
        seen = Seen(**vars(watch(run)))
        weights, other, noised = run.weights, run.loop.optimization.step_other, diff_instruct.noised

        def watched_other(optimizer: Any) -> float:
            before = copied(weights.named)  # within `use`: the assistant
            seen.assistant_gradients.append(gradients(run))
            norm = other(optimizer)
            seen.assistants.append((before, copied(weights.named)))
            return norm

        def watched_noised(policy: Policy, rollouts: Rollouts, name: str, k: int) -> Iterator[Any]:
            result = list(noised(policy, rollouts, name, k))
            seen.noised.setdefault(name, []).append([(one.noisy, one.noise, one.time) for one, _ in result])
            yield from result

        patch.setattr(diff_instruct, "noised", watched_noised)
        run.loop.optimization.step_other = watched_other  # type: ignore[method-assign]
        diff_instruct.train(run, config.trainer)  # type: ignore[arg-type]
    return seen


class Flow(Bare):
    """SD3, which reads its noise at the end of the path."""

    def generate(self, prompts: list[str], z: Tensor) -> Tensor:
        return z - self.velocity(prompts, z, torch.ones(len(z)))

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Of picture and noise in a noisy state."""
        s = time.view(-1, 1, 1, 1)
        return 1 - s, s

    def score(self, prompts: list[str], x: Tensor, time: Tensor) -> Tensor:
        a, s = self.levels(time)
        return -(x + a * self.velocity(prompts, x, time)) / s


class UNet(Flow):
    """Stable Diffusion 1.5, which reads its noise at timestep 399, as DMD2's and the paper's."""

    def generate(self, prompts: list[str], z: Tensor) -> Tensor:
        ab, last = self.pipe.scheduler.alphas_cumprod[399], self.pipe.scheduler.alphas_cumprod[0]
        predicted = self.noise(prompts, z, torch.full((len(z),), 399))
        clean = (z - (1 - ab).sqrt() * predicted) / ab.sqrt()
        return last.sqrt() * clean + (1 - last).sqrt() * predicted  # it ends there unless set_alpha_to_one

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        ab = self.pipe.scheduler.alphas_cumprod[time].view(-1, 1, 1, 1)
        return ab.sqrt(), (1 - ab).sqrt()

    def score(self, prompts: list[str], x: Tensor, time: Tensor) -> Tensor:
        return -self.noise(prompts, x, time) / self.levels(time)[1]


def by_hand(kind: type[Flow], config: Config, seen: Seen, k: int) -> Given:
    """The gradient of the generator's k-th update, by one graph through generator, decoder and all scores."""
    settings: Any = config.trainer
    generator, teacher = kind(config, seen.updates[k].weights), kind(config).frozen()  # adapters begin as nothing
    assistant = kind(config, seen.assistants[(k + 1) * settings.assistant_steps - 1][1]).frozen()
    loss = torch.zeros(())
    for one, (noisy, noise, time) in zip(seen.rollouts[k].mine.values(), seen.noised["generator"][k], strict=True):
        prompts, (a, s) = one.batch.prompts, generator.levels(time)
        x0 = generator.generate(prompts, one.pieces[0].trajectory.initial)
        torch.testing.assert_close(x0.detach(), one.final, rtol=1e-4, atol=1e-4)
        xt = a * x0 + s * noise
        torch.testing.assert_close(xt.detach(), noisy, rtol=1e-4, atol=1e-4)
        ours, theirs = assistant.score(prompts, xt, time), teacher.score(prompts, xt, time)
        blank = teacher.score([""] * len(prompts), xt, time)
        guided = diff_instruct.guided_score(blank, theirs, settings.guidance_scale)
        regulariser, _ = diff_instruct.regularisation(xt, noise, s.flatten(), ours, guided)
        loss = loss + (regulariser - 3.0 * warmth(generator.decoded(x0))).sum() / 6
    return generator.gradient(loss)


VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "inner-lora": ({"guidance_scale": 3.0}, runs.LORA),
    "none-full": ({"guidance_scale": 1.0, "assistant_steps": 2}, None),
    "unet-lora": ({"guidance_scale": 3.0}, runs.LORA),
    "unet-full": ({"guidance_scale": 3.0}, None),
}


@pytest.mark.parametrize("name", tiered(VARIANTS, ("inner-lora",)))
def test_both_gradients_by_one_plain_graph(folder: Path, model: Path, sd: Path, name: str) -> None:
    """Of the third iteration, where generator, assistant and teacher are three different networks."""
    trainer, lora = VARIANTS[name]
    of_model: dict[str, Any] = {"lora": lora, "optimizer": {"lr": 1e-2 if lora else 1e-3}, "iterations": 3}
    kind = UNet if name.startswith("unet") else Flow
    if kind is UNet:
        of_model |= {"model": {"scheduler": AT_399, "lora": lora}, "sampling": {"pipeline_args": {}}}
    settings = config(folder, sd if kind is UNet else model, trainer, **of_model)
    seen = run(settings)
    assert relative(seen.updates[2].gradient, by_hand(kind, settings, seen, 2)) < 5e-4
    at = 2 * trainer.get("assistant_steps", 1)  # the assistant's first update in that iteration
    assistant, loss = kind(settings, seen.assistants[at][0]), torch.zeros(())
    for one, (noisy, noise, time) in zip(seen.rollouts[2].mine.values(), seen.noised["assistant"][at], strict=True):
        s = assistant.levels(time)[1]
        error = assistant.score(one.batch.prompts, noisy, time) + noise / s
        loss = loss + (s.flatten() ** 2 * error.square().flatten(1).sum(1)).sum() / 6
    assert relative(seen.assistant_gradients[at], assistant.gradient(loss)) < 5e-4


def test_the_assistant_begins_as_the_teacher_and_only_it_learns_in_its_half(folder: Path, model: Path) -> None:
    nothing = [runs.reward(folder, "redness", weight=0)]
    seen = run(config(folder, model, {"guidance_scale": 1.0}, rewards=nothing, iterations=2))
    first, second = seen.rows
    assert first["diff_instruct/reward_pull"] == 0.0  # distillation: rewards of weight 0 are for the log
    (start, after), _ = seen.assistants
    assert not equal(start, after)
    assert equal(seen.updates[0].weights, start)  # in the first iteration it is still what the assistant was
    assert second["diff_instruct/divergence"] > 0 and first["grad_norm"] > 0


@pytest.mark.slow
def test_a_run_asked_to_end_after_the_assistants_step_goes_on_to_the_bit(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full fine-tuning of a large model cannot take the assistant's step back: the iteration is finished first."""
    monkeypatch.setattr("genrl.runtime.weights.weights.LARGEST_COPY", 0)
    common: dict[str, Any] = {"lora": None, "checkpoint": {"every": 1}, "optimizer": {"lr": 1e-3}, "iterations": 3}
    train(config(folder, model, output=str(folder / "straight"), **common))
    follow, calls = diff_instruct.follow, iter(range(9))

    def ending(run: Any, *rest: Any) -> None:
        follow(run, *rest)
        if next(calls) == 1:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(diff_instruct, "follow", ending)
        train(config(folder, model, output=str(folder / "stopped"), **common))
    assert runs.last_state(folder / "stopped").step == 2
    train(load(Run(folder / "stopped").config), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []


ROOT = Path(__file__).resolve().parents[3]
ONE_CALL = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": 16, "width": 16}


def test_a_step_that_would_return_its_noise_is_refused(folder: Path, sd: Path) -> None:
    """Stable Diffusion's own scheduler has a single step at timestep 1."""
    with pytest.raises(ValueError, match="the one step is at timestep 1, .*write {timestep_spacing: trailing}"):
        train(config(folder, sd, sampling={"pipeline_args": {}}))


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny SDXL, and a LoRA on it that changes what it draws."""
    folder = tmp_path_factory.mktemp("sdxl")
    FAMILIES["sdxl"]().pipe.save_pretrained(folder / "base")
    pipe: Any = DiffusionPipeline.from_pretrained(folder / "base")
    pipe.unet.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_v"], init_lora_weights=False))
    pipe.save_lora_weights(folder / "distilled", convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet)))
    return folder / "base", folder / "distilled"


def rehearsed(folder: Path, sdxl: tuple[Path, Path]) -> Config:
    """configs/diffusion/sdxl_diff_instruct.yaml with few small pictures."""
    changes = [
        *(f"model.path={sdxl[0]}", "model.variant=null", "model.dtype=float32", f"model.lora.from={sdxl[1]}"),
        *(f"prompts.train={folder / 'train.txt'}", f"prompts.eval={folder / 'eval.txt'}", "prompts.column=prompt"),
        f"rewards=[{{name: '{folder / 'rewards.py'}:warmth', weight: 100}}]",
        *("sampling.height=16", "sampling.width=16", "sampling.prompts_per_iteration=2", "evaluation.every=0"),
        *("trackers=[]", "ema=null", "iterations=2", f"output={folder / 'run'}"),
    ]
    return load(ROOT / "configs/diffusion/sdxl_diff_instruct.yaml", changes)


def test_the_teacher_is_without_the_lora_that_the_generator_begins_with(folder: Path, sdxl: tuple[Path, Path]) -> None:
    settings = rehearsed(folder, sdxl)
    batch = Batch(["a red star"], [("x", 0)], ONE_CALL)
    x, t = keyed_noise((1, 4, 8, 8), "x"), torch.tensor([500])
    with runs.opened(settings) as opened, torch.no_grad():
        weights, policy = opened.weights, opened.policy
        snapshot_base(weights, "assistant", goes_on=True)
        generator = policy.velocity(batch, x, t)
        with weights.reference():
            teacher = policy.velocity(batch, x, t)
        with weights.use("assistant"):
            assistant = policy.velocity(batch, x, t)
        assert set(weights.snapshots) == {"assistant"}  # of the adapter: the base is there once
        assert all(".lora_" in name for name in weights.named)
        assert torch.equal(policy.velocity(batch, x, t), generator)
    plain: Any = DiffusionPipeline.from_pretrained(sdxl[0])
    text, _, pooled, _ = plain.encode_prompt("a red star", do_classifier_free_guidance=False)
    added = {"text_embeds": pooled, "time_ids": torch.tensor([[16.0, 16, 0, 0, 16, 16]])}
    base = plain.unet(x, t, encoder_hidden_states=text, added_cond_kwargs=added).sample.detach()
    torch.testing.assert_close(teacher, base, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(assistant, base, rtol=1e-4, atol=1e-4)
    assert float((generator - teacher).abs().max()) > 1e-2


@pytest.mark.slow
def test_the_recipe_of_sdxl_in_tiny_form(folder: Path, sdxl: tuple[Path, Path]) -> None:
    """Two iterations as written, resumed to the bit; the LoRA draws in one step of plain diffusers what was trained."""
    straight = resumed(rehearsed(folder, sdxl), folder)
    assert {row["model_calls/train"] for row in runs.rows(straight)} == {4 * (5 + 1 + 2 + 1)}
    assert all(row["diff_instruct/spread"] > 0 for row in runs.rows(straight))
    plain: Any = DiffusionPipeline.from_pretrained(sdxl[0])
    plain.scheduler = DDIMScheduler.from_config(plain.scheduler.config, timestep_spacing="trailing", clip_sample=False)

    def generate() -> Tensor:
        return plain("a red star", generator=torch.Generator().manual_seed(3), **ONE_CALL, output_type="pt").images

    begun = generate()
    plain.load_lora_weights(export(straight, folder / "out"))
    result = generate()
    assert plain.scheduler.timesteps.tolist() == [999]
    with runs.opened(rehearsed(folder, sdxl)) as opened, torch.no_grad():
        opened.weights.restore(runs.last_state(straight).tensors)
        noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(3))
        batch = Batch(["a red star"], [("x", 0)], ONE_CALL)
        trained = opened.policy.decode(batch, opened.policy.advance(batch, noise, 0))
    torch.testing.assert_close(result.float(), trained, rtol=1e-3, atol=1e-3)
    assert float((result - begun).abs().max()) > 1e-3
