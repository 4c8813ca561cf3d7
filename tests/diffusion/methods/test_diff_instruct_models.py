"""Diff-Instruct* on epsilon, v and sample prediction: Gaussians in closed form, UNets by one plain graph, the LoRA that
the generator begins with, and the recipe of SDXL in tiny form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, EulerDiscreteScheduler
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from genrl.config import Config, load
from genrl.diffusion.methods.diff_instruct import train as diff_instruct
from genrl.diffusion.methods.diff_instruct.settings import DiffInstruct
from genrl.diffusion.policy.export import export
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.weights import snapshot_base
from genrl.diffusion.train import train
from genrl.mdp.noise import keyed_noise
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.test_diff_instruct_trainer import config, networks, run
from tests.diffusion.methods.test_draft import warmth
from tests.diffusion.methods.watched import relative, resumed
from tests.diffusion.test_distributed import FSDP, check_equal, recorded

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

ROOT = Path(__file__).resolve().parents[3]
AT_399 = {"timestep_spacing": "leading", "steps_offset": 399}
ONE_STEP = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": 16, "width": 16}


# -- Gaussians -------------------------------------------------------------------------------------------------------

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2


class Gaussians:
    """A run whose networks know the scores: the assistant that of N(mu, v), the teacher that of N(m, v)."""

    def __init__(self, predicts: str, mu: Tensor, m: Tensor, blank: Tensor, v: float) -> None:
        flow = predicts == "flow"
        alphas = torch.cumprod(1 - BETAS.double(), 0)
        self.head = SimpleNamespace(
            parametrisation="flow" if flow else "diffusion", prediction_type=predicts, alphas_cumprod=alphas
        )
        self.predicts, self.mu, self.m, self.blank, self.v, self.of_teacher = predicts, mu, m, blank, v, False
        self.policy = self.weights = self

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        assert name == "assistant"
        yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.of_teacher = True
        yield
        self.of_teacher = False

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        alpha_bar = self.head.alphas_cumprod[time] if self.predicts != "flow" else None
        a, s = (1 - time, time) if alpha_bar is None else (alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
        return a[:, None], s[:, None]

    def velocity(self, batch: Batch, x: Tensor, time: Tensor) -> Tensor:
        mean = self.mu if not self.of_teacher else self.m if batch.prompts[0] else self.blank
        a, s = self.levels(time)
        noise = s * (x - a * mean) / (a * a * self.v + s * s)  # -s times the score
        clean = (x - s * noise) / a
        return {
            "flow": noise - clean, "epsilon": noise, "v_prediction": a * noise - s * clean, "sample": clean
        }[self.predicts]  # fmt: skip


@pytest.mark.parametrize("predicts", ["flow", "epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("trainer", [{}, {"guidance": "none"}, {"divergence": "kl", "guidance": "none"}])
def test_divergence_and_gradient_of_gaussians_in_closed_form(predicts: str, trainer: dict[str, Any]) -> None:
    """Of equal variance: y = a (mu - m) / (a^2 v + s^2) everywhere, so the divergence is s^2 (sqrt(|y|^2 + c^2) - c),
    its gradient in mu is s^2 a d'(y) / (a^2 v + s^2), and each sample has it exactly. Of the Kullback-Leibler form:
    s^2 a y. Guidance moves m to blank + g (m - blank)."""
    settings = DiffInstruct.model_validate({"algorithm": "diff_instruct", "guidance_scale": 3.0, **trainer})
    mu, m, blank = (keyed_noise((5,), name).double() for name in ("mu", "m", "blank"))
    v, keys = 0.3, [(0, 0, k) for k in range(64)]
    final = mu + v**0.5 * torch.stack([keyed_noise((5,), *key) for key in keys]).double()
    net: Any = Gaussians(predicts, mu, m, blank, v)
    batch = Batch(["a red star"] * len(keys), keys, {})
    rollouts: Any = SimpleNamespace(mine={0: SimpleNamespace(final=final, batch=batch)})
    ((given, _),) = diff_instruct.noised(net, rollouts, "generator", 0)
    a, s = net.levels(given.time)
    torch.testing.assert_close(given.noisy, a * final + s * given.noise)
    gradient, divergence = diff_instruct.divergence_gradient(net, settings, batch, given)

    variance = a * a * v + s * s
    y = a * (mu - (m if settings.guidance == "none" else blank + 3.0 * (m - blank))) / variance
    c = 0.00054 * 5**0.5
    size = (y.square().sum(1) + c * c).sqrt()
    torch.testing.assert_close(divergence, s[:, 0] ** 2 * (size - c), rtol=1e-6, atol=1e-9)
    expected = s * s * a * (y / size[:, None] / variance if settings.divergence == "score" else y)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


# -- UNets -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lora", [runs.LORA, None], ids=["lora", "full"])
def test_a_unet_learns_on_shards(folder: Path, lora: Any) -> None:
    """Over two processes (FSDP2), beside one that holds all; the assistant's rate is tiny, since Adam makes a whole
    step of rounding where a gradient is nearly 0."""
    pipe = FAMILIES["sd15"]().pipe
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, timestep_spacing="trailing")
    pipe.save_pretrained(folder / "sd15")
    changes: dict[str, Any] = {"trainer": {"algorithm": "diff_instruct", "assistant_lr": 1e-9}, "iterations": 1}
    changes |= {"lora": lora, "rewards": [runs.reward(folder, "warmth")]}
    changes["sampling"] = {"num_inference_steps": 1, "group_size": 4, "batch_size": 4, "pipeline_args": {}}
    (alone,) = recorded(folder, folder / "sd15", 1, **changes)
    parts = recorded(folder, folder / "sd15", 2, "sharded", **changes, **FSDP)
    check_equal(parts, alone, 1e-5)


@pytest.mark.parametrize("lora", [runs.LORA, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_the_gradient_of_a_unet_by_one_plain_graph(folder: Path, sd: Path, lora: Any) -> None:
    """Of the third iteration, where generator, assistant and teacher are three different networks; the generator reads
    its noise at timestep 399, as DMD2's and the paper's."""
    settings = config(
        folder, sd, {"guidance_scale": 3.0}, model={"scheduler": AT_399, "lora": lora}, iterations=3,
        optimizer={"lr": 1e-2 if lora else 1e-3}, sampling={"pipeline_args": {}},
    )  # fmt: skip
    seen = run(settings)
    generator, assistant, teacher = networks(settings, seen, 2)
    alphas: Tensor = generator.pipe.scheduler.alphas_cumprod
    ab, last = alphas[399], alphas[0]
    loss = torch.zeros(())
    for one, (noisy, noise, t) in zip(seen.rollouts[2].mine.values(), seen.noised["generator"][2], strict=True):
        prompts, z = one.batch.prompts, one.pieces[0].trajectory.initial
        predicted = generator.noise(prompts, z, torch.full((len(z),), 399))
        clean = (z - (1 - ab).sqrt() * predicted) / ab.sqrt()
        x0 = last.sqrt() * clean + (1 - last).sqrt() * predicted  # diffusers ends there unless set_alpha_to_one
        torch.testing.assert_close(x0.detach(), one.final, rtol=1e-4, atol=1e-4)
        a, s = (column.view(-1, 1, 1, 1) for column in (alphas[t].sqrt(), (1 - alphas[t]).sqrt()))
        xt = a * x0 + s * noise
        torch.testing.assert_close(xt.detach(), noisy, rtol=1e-4, atol=1e-4)
        ours, theirs, blank = (
            -network.noise(texts, xt, t) / s
            for network, texts in ((assistant, prompts), (teacher, prompts), (teacher, [""] * len(prompts)))
        )
        y = (ours - (blank + 3.0 * (theirs - blank))).flatten(1)
        d = y / (y.square().sum(1, keepdim=True) + 0.00054**2 * y.shape[1]).sqrt()
        regulariser = -(s.flatten() ** 2) * (d * (ours + noise / s).flatten(1)).sum(1)
        loss = loss + (regulariser - 3.0 * warmth(generator.decoded(x0))).sum() / 6
    assert relative(seen.updates[2].gradient, generator.gradient(loss)) < 5e-4


def test_a_step_that_would_return_its_noise_is_refused(folder: Path, sd: Path) -> None:
    """Stable Diffusion's own scheduler has a single step at timestep 1."""
    with pytest.raises(ValueError, match="the one step is at timestep 1, .*write {timestep_spacing: trailing}"):
        train(config(folder, sd, sampling={"pipeline_args": {}}))


# -- the recipe of SDXL ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny SDXL, and a LoRA on it that changes what it draws."""
    folder = tmp_path_factory.mktemp("sdxl")
    FAMILIES["sdxl"]().pipe.save_pretrained(folder / "base")
    pipe: Any = DiffusionPipeline.from_pretrained(folder / "base")
    pipe.unet.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_v"], init_lora_weights=False))
    pipe.save_lora_weights(folder / "distilled", convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet)))
    return folder / "base", folder / "distilled"


def rehearsed(folder: Path, sdxl: tuple[Path, Path], *changes: str) -> Config:
    """configs/diffusion/sdxl_diff_instruct.yaml with few small pictures."""
    return load(
        ROOT / "configs/diffusion/sdxl_diff_instruct.yaml",
        [
            *(f"model.path={sdxl[0]}", "model.variant=null", "model.dtype=float32", f"model.lora.from={sdxl[1]}"),
            *(f"prompts.train={folder / 'train.txt'}", f"prompts.eval={folder / 'eval.txt'}", "prompts.column=prompt"),
            f"rewards=[{{name: '{folder / 'rewards.py'}:warmth', weight: 100}}]",
            *("sampling.height=16", "sampling.width=16", "sampling.prompts_per_iteration=2", "evaluation.every=0"),
            *("trackers=[]", "ema=null", "iterations=2", f"output={folder / 'run'}", *changes),
        ],
    )


def test_the_teacher_is_without_the_lora_that_the_generator_begins_with(folder: Path, sdxl: tuple[Path, Path]) -> None:
    settings = rehearsed(folder, sdxl)
    batch = Batch(["a red star"], [("x", 0)], ONE_STEP)
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


def test_the_recipe_of_sdxl_in_tiny_form(folder: Path, sdxl: tuple[Path, Path]) -> None:
    """Two iterations as written, resumed to the bit; the LoRA draws in one step of plain diffusers what was trained."""
    straight = resumed(rehearsed(folder, sdxl), folder)
    assert {row["model_calls/train"] for row in runs.rows(straight)} == {4 * (5 + 1 + 2 + 1)}
    assert all(row["diff_instruct/spread"] > 0 for row in runs.rows(straight))

    plain: Any = DiffusionPipeline.from_pretrained(sdxl[0])
    plain.scheduler = DDIMScheduler.from_config(plain.scheduler.config, timestep_spacing="trailing", clip_sample=False)
    call = {**ONE_STEP, "output_type": "pt"}
    begun = plain("a red star", generator=torch.Generator().manual_seed(3), **call).images
    plain.load_lora_weights(export(straight, folder / "out"))
    drawn = plain("a red star", generator=torch.Generator().manual_seed(3), **call).images
    assert plain.scheduler.timesteps.tolist() == [999]
    with runs.opened(rehearsed(folder, sdxl)) as opened, torch.no_grad():
        opened.weights.restore(runs.last_state(straight).tensors)
        noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(3))
        batch = Batch(["a red star"], [("x", 0)], ONE_STEP)
        trained = opened.policy.decode(batch, opened.policy.advance(batch, noise, 0))
    torch.testing.assert_close(drawn.float(), trained, rtol=1e-3, atol=1e-3)
    assert float((drawn - begun).abs().max()) > 1e-3


def test_the_generator_reads_its_noise_at_the_timestep_of_the_scheduler(folder: Path, sdxl: tuple[Path, Path]) -> None:
    """`steps_offset` of one leading step, as DMD2's one-step UNet has it: at 399."""
    settings = rehearsed(folder, sdxl, f"model.scheduler={AT_399}")
    with runs.opened(settings) as opened, torch.no_grad():
        made = opened.policy.roll_out(Batch(["a red star"], [("x", 0)], ONE_STEP))
        assert made.sigmas.tolist() == [399]
    plain: Any = DiffusionPipeline.from_pretrained(sdxl[0])
    plain.scheduler = EulerDiscreteScheduler.from_config(plain.scheduler.config, **AT_399)
    plain("a red star", output_type="latent", **ONE_STEP)
    assert plain.scheduler.timesteps.tolist() == [399.0]
