"""What each choice of the main job saves: Flow-GRPO by the usual loop, and by genrl with one choice more in each row.

    python -m benchmarks.peer_flow_grpo [--rounds 5] [--fast]

The usual loop is a stand-in of our own, written for this comparison after what the public implementations have in
common; it is nobody's code. It copies the pipeline's denoising loop, draws every step but the last from the SDE, calls
the text encoders for every batch, wraps the model in DDP, and in training runs the model again at every step, with
guidance. All rows share checkpoint, LoRA, prompts, group, steps, guidance, reward, batch and optimiser, and make one
update an iteration. With --fast the usual loop has a window of 2 steps, too, as Flow-GRPO-Fast, and stands beside the
rows with guidance that have it. The rows take turns, iteration by iteration, and ratios are of neighbours; the first
round is a warm-up. Seconds are the processor's, since the machine may do other things; the ratio by the wall clock
stands beside. Prints the table and writes peer_flow_grpo.json (--fast: peer_flow_grpo_fast.json).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import genrl_rewards
from benchmarks.common import Seconds, clock, opened, parser, save
from genrl.config import load
from genrl.data import prompts as prompt_files
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import collect, update
from genrl.runtime.loop.updating import Meter
from genrl.runtime.weights.devices import default_device

COMMON = (
    "sampling.prompts_per_iteration=2",
    "sampling.group_size=12",
    "sampling.batch_size=12",
    "sampling.num_inference_steps=8",
    "sampling.guidance_scale=4.5",
    "trainer.window=null",
    "trainer.advantage_scale=group",
    "evaluation.every=0",
    "checkpoint.every=1000000",
    "trackers=[]",
)
WINDOW = ("trainer.window={size: 2, high: 5}",)
PREFIX = ("trainer.tree={ways: 12, at: window_start}",)
ROWS: dict[str, tuple[str, ...]] = {
    "the same in genrl": (),
    "+ graphs of sampling kept": ("trainer.keep_graph=true",),
    "a window of 2 steps": WINDOW,
    "+ graphs kept": (*WINDOW, "trainer.keep_graph=true"),
    "window, no guidance in training": (*WINDOW, "trainer.guidance_in_training=false"),
    "window, no guidance at all": (*WINDOW, "sampling.guidance_scale=1.0"),
    "+ shared prefix": (*WINDOW, "sampling.guidance_scale=1.0", *PREFIX),
    "+ graphs kept, too": (*WINDOW, "sampling.guidance_scale=1.0", *PREFIX, "trainer.keep_graph=true"),
}
"""Name -> changes to configs/flow_grpo.yaml beside COMMON."""

FAST: dict[str, tuple[str, ...]] = {
    "the same in genrl": WINDOW,
    "+ graphs kept": (*WINDOW, "trainer.keep_graph=true"),
    "+ shared prefix": (*WINDOW, *PREFIX, "trainer.keep_graph=true"),
}
"""The same beside a usual loop that has WINDOW."""

FIRST = "the usual loop (stand-in)"


class Spent(NamedTuple):
    """In one iteration: until the scores, and from them on; and model calls, counted per sample."""

    sample: Seconds
    train: Seconds
    sample_calls: int
    train_calls: int


def usual_pipeline(config: Config) -> Any:
    """The pipeline on the device, frozen but for a LoRA on its attention, by diffusers and peft alone."""
    assert config.model.lora is not None
    device = default_device()
    pipe = load_pipeline(config.model)
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.to(device).eval().requires_grad_(False)
    rank, alpha = config.model.lora.rank, config.model.lora.alpha
    layers = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    pipe.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers))
    return pipe


def usual_loop(config: Config) -> Iterator[Spent]:
    """The stand-in, one iteration per item."""
    settings, sampling = config.trainer, config.sampling
    assert isinstance(settings, FlowGRPO) and config.model.lora is not None
    device = default_device()
    pipe = usual_pipeline(config)
    model = DistributedDataParallel(pipe.transformer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, weight_decay=0.0)
    scorer = genrl_rewards.load(config.rewards[0].name, config.rewards[0].args)
    rows = [row.text for row in prompt_files.load(config.prompts.train)]
    guidance, level, steps = sampling.guidance_scale or 1.0, settings.noise_level or 0.0, sampling.num_inference_steps
    calls, window = 0, settings.window

    def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            text, empty, pooled, empty_pooled = pipe.encode_prompt(
                prompt=texts, prompt_2=None, prompt_3=None, **sampling.pipeline_args
            )
        return torch.cat([empty, text]), torch.cat([empty_pooled, pooled])

    def velocity(x: Tensor, sigma: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        nonlocal calls
        calls += 2 * len(x)
        made = model(
            hidden_states=torch.cat([x, x]).to(context.dtype),
            timestep=(1000 * sigma).expand(2 * len(x)),
            encoder_hidden_states=context,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        unguided, guided = made.float().chunk(2)
        return unguided + guidance * (guided - unguided)

    def transition(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        """Flow-GRPO's SDE (arXiv 2505.05470, eq. 9): mean and standard deviation."""
        noise = level * torch.sqrt(s / (1 - torch.where(s == 1, s_max, s)))
        dt = s_next - s
        drift = 1 + noise**2 / (2 * s) * dt
        return x * drift + v * (1 + noise**2 * (1 - s) / (2 * s)) * dt, noise * torch.sqrt(-dt)

    def log_density(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (-((y - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)).mean(dim=(1, 2, 3))

    generator = torch.Generator().manual_seed(config.seed)
    while True:
        started, calls = clock(), 0
        chosen = torch.randperm(len(rows), generator=generator)[: sampling.prompts_per_iteration].tolist()
        texts = [rows[k] for k in chosen for _ in range(sampling.group_size)]
        batches, scores, trained = [], [], range(steps - 1)
        if window is not None:
            start = int(torch.randint((window.high or steps) - window.size + 1, (), generator=generator))
            trained = range(start, start + window.size)
        for first in range(0, len(texts), sampling.batch_size):
            batch = texts[first : first + sampling.batch_size]
            context, pooled = encode(batch)
            pipe.scheduler.set_timesteps(steps)
            sigmas = pipe.scheduler.sigmas.to(device)
            size = pipe.transformer.config.sample_size if sampling.height is None else sampling.height // 8
            noise = partial(torch.randn, generator=generator)
            x = noise(len(batch), pipe.transformer.config.in_channels, size, size).to(device)
            states, logs = [], []
            with torch.no_grad():
                for i in range(steps):
                    v = velocity(x, sigmas[i], context, pooled)
                    if i not in trained:
                        x = x + (sigmas[i + 1] - sigmas[i]) * v
                        continue
                    mean, std = transition(x, v, sigmas[i], sigmas[i + 1], sigmas[1])
                    states.append((x, mean + std * noise(x.shape).to(device)))
                    x = states[-1][1]
                    logs.append(log_density(x, mean, std))
                latents = x / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
                decoded = pipe.vae.decode(latents.to(context.dtype), return_dict=False)[0]
                images = (decoded.float() / 2 + 0.5).clamp(0, 1)
            scores += genrl_rewards.score(scorer, images=images, prompts=batch).values
            batches.append((context, pooled, sigmas, states, logs))
        group = torch.tensor(scores).view(-1, sampling.group_size)
        advantages = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).flatten()
        sampled, sample_calls, calls = clock(), calls, 0
        left = len(batches) * len(trained)
        for k, (context, pooled, sigmas, states, logs) in enumerate(batches):
            own = advantages[k * sampling.batch_size : (k + 1) * sampling.batch_size].to(device)
            for i, (state, next_state), log in zip(trained, states, logs, strict=True):
                left -= 1
                with model.no_sync() if left else nullcontext():
                    v = velocity(state, sigmas[i], context, pooled)
                    mean, std = transition(state, v, sigmas[i], sigmas[i + 1], sigmas[1])
                    ratio = (log_density(next_state, mean, std) - log).exp()
                    if not torch.all((ratio.detach() - 1).abs() < 1e-6):
                        raise RuntimeError("the stand-in does not replay what it sampled")
                    low, high = settings.clip_bounds
                    loss = torch.maximum(-own * ratio, -own * ratio.clamp(1 - low, 1 + high)).mean()
                    (loss / (len(batches) * len(trained))).backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield Spent(sampled - started, clock() - sampled, sample_calls, calls)


def ours(config: Config, stack: ExitStack) -> Iterator[Spent]:
    """genrl's own, one iteration per item: what `flow_grpo.train` does, with the time taken in between."""
    settings = config.trainer
    assert isinstance(settings, FlowGRPO)
    run = opened(config, stack)
    for iteration in run.iterations():
        started, calls, meter = clock(), run.policy.model_calls, Meter()
        steps = Steps.of(config, settings, iteration)
        rollouts = collect(run, settings, steps)
        sampled, sample_calls = clock(), run.policy.model_calls - calls
        advantages = flow_grpo.advantages_of(settings, rollouts)
        edges = estimate(run, settings, rollouts, steps, advantages, meter)
        update(run, settings, rollouts, edges, flow_grpo.loss, meter)
        train_calls = run.policy.model_calls - calls - sample_calls
        run.finish(meter.result())
        yield Spent(sampled - started, clock() - sampled, sample_calls, train_calls)


def measure(
    rounds: int, names: Sequence[str] = tuple(ROWS), changes: Sequence[str] = (), *, fast: bool = False
) -> dict[str, dict[str, Any]]:
    """Row -> of the rounds after the first: medians of seconds and of the ratio of the whole iteration to the usual
    loop's; means of calls, since where a window begins, and so what a prefix saves, is drawn anew in every round."""
    common = [*COMMON, *changes, f"iterations={rounds + 2}"]
    base = load("configs/flow_grpo.yaml", [*common, *(WINDOW if fast else ())])
    assert isinstance(base, Config)
    with ExitStack() as stack:
        if not dist.is_initialized():
            folder = stack.enter_context(TemporaryDirectory())
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        loops: dict[str, Iterator[Spent]] = {FIRST: usual_loop(base)}
        for name in names:
            config = load("configs/flow_grpo.yaml", [*common, *(FAST if fast else ROWS)[name]])
            assert isinstance(config, Config)
            loops[name] = ours(config, stack)
        turns = [{name: next(loop) for name, loop in loops.items()} for _ in range(rounds + 1)]
    results, pictures = {}, base.sampling.images_per_iteration
    for name in loops:
        mine = [turn[name] for turn in turns[1:]]
        ratios = [_whole(turn[FIRST]).cpu / _whole(turn[name]).cpu for turn in turns[1:]]
        results[name] = {
            "sample_s": median(one.sample.cpu for one in mine),
            "train_s": median(one.train.cpu for one in mine),
            "sample_calls": mean(one.sample_calls for one in mine) / pictures,
            "train_calls": mean(one.train_calls for one in mine) / pictures,
            "times_faster": median(ratios),
            "range": [min(ratios), max(ratios)],
            "times_faster_wall": median(_whole(turn[FIRST]).wall / _whole(turn[name]).wall for turn in turns[1:]),
            "rounds": [one._asdict() for one in mine],
        }
    return results


def _whole(spent: Spent) -> Seconds:
    return Seconds(spent.sample.wall + spent.train.wall, spent.sample.cpu + spent.train.cpu)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5, help="after the first; default: 5")
    arguments.add_argument("--fast", action="store_true", help="all with a window of 2 steps and guidance")
    arguments.add_argument("--rows", nargs="+", help="the rows to measure, by their names; default: all")
    given = arguments.parse_args()
    results = measure(given.rounds, given.rows or tuple(FAST if given.fast else ROWS), fast=given.fast)
    print(
        "| loop | calls per picture: sampling + training | sampling, CPU s | training, CPU s | times faster (range) "
        "| by the wall clock |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name, row in results.items():
        low, high = row["range"]
        print(
            f"| {name} | {row['sample_calls']:.2f} + {row['train_calls']:.2f} | {row['sample_s']:.2f} "
            f"| {row['train_s']:.2f} | {row['times_faster']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {row['times_faster_wall']:.2f} |"
        )
    save(given.out, "peer_flow_grpo_fast" if given.fast else "peer_flow_grpo", results)


if __name__ == "__main__":
    main()
