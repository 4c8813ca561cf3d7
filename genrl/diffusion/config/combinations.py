"""Combinations of settings that cannot work, refused before anything is loaded: those without which a run would be
silently wrong, or fail after a pipeline was loaded; and numbers of processes that do not fit a run. No torch.

Each rule is a generator of (keys concerned, what is wrong and what to write instead). Rules look at values only: what
needs the disk is in `genrl.diffusion.config.files`; what concerns one method is in its settings.

Which samples are run together decides their bits, so micro-batches are those of one process wherever several have equal
work by them; else they are cut anew (`shared_out`), and some processes wait only where samples cannot be divided so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.diffusion.config.model_rules import model_rules
from genrl.diffusion.config.schema import most_of_one
from genrl_rewards.contract import nearest

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


# Arguments of a pipeline's call that have a key of their own, or belong to the trainer.
OWN_KEY = {name: name for name in ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")}
OWN_KEY |= dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), "group_size")
OURS = (
    *("prompt", "prompt_embeds", "latents", "generator", "output_type", "return_dict", "timesteps", "sigmas"),
    *("callback_on_step_end", "callback_on_step_end_tensor_inputs", "eta"),
)


def problems(config: Config) -> Iterator[Finding]:
    """Every contradiction of settings of several sections."""
    for rule in (
        _batches,
        _buckets,
        _pipeline_args,
        _rewards,
        _evaluation,
        _precision,
        engine_rules,
        staleness_rules,
        economy_rules,
        model_rules,
        _optimizer,
    ):
        yield from rule(config)


def _batches(config: Config) -> Iterator[Finding]:
    """How many samples a group and a micro-batch have to have."""
    sampling, trainer = config.sampling, config.trainer
    size, group = sampling.batch_size, sampling.group_size
    total, pieces, updates = sampling.images_per_iteration, sampling.micro_batches, trainer.updates
    if group < 2 and trainer.compares is not None:
        text = "one sample of a prompt has nothing to be compared with; use a group of 2 or more"
        yield ("sampling.group_size", "trainer.algorithm"), text
    if updates > pieces and trainer.branches != "trees":
        text = f"{total} samples in batches of {size} are {pieces} micro-batches, too few for {updates} updates"
        keys = ("trainer.updates_per_iteration", "sampling.batch_size")
        yield keys, f"{text}; use {pieces} or less, or a smaller batch"
    if trainer.compares == "in_batch" and size % group:
        near = max(group, size // group * group)
        text = f"{trainer.algorithm} needs whole groups in a batch, but {size} is no multiple of {group}; use {near}"
        yield ("sampling.batch_size", "sampling.group_size", "trainer.algorithm"), text
    if trainer.trains_on == "samples" and sampling.same_initial_noise:
        text = f"{trainer.algorithm} samples deterministically: a group from one noise is one picture many times"
        yield ("sampling.same_initial_noise", "trainer.algorithm"), f"{text}; write false"
    if sampling.fit_batch and config.shards:
        yield ("sampling.fit_batch", config.sharded_by), "sharded models are not tried; find batch_size by hand"


def _buckets(config: Config) -> Iterator[Finding]:
    """Several sizes: micro-batches of one are cut from whole prompts, and nothing else may decide a size."""
    sampling, trainer, at = config.sampling, config.trainer, "sampling.buckets"
    if not sampling.buckets:
        return
    size, group = sampling.batch_size, sampling.group_size
    if size % group and group % size:
        near = size // group * group or next(n for n in range(size, 0, -1) if group % n == 0)
        text = f"micro-batches are of one size, so {size} samples must be whole groups of {group} or a share of one"
        yield ("sampling.batch_size", "sampling.group_size", at), f"{text}; use {near}"
    elif sampling.prompts_per_iteration % (together := sampling.prompts_together):
        near = max(together, sampling.prompts_per_iteration // together * together)
        text = f"a micro-batch is {together} prompts of one size; use {near} prompts, or a smaller batch"
        yield ("sampling.prompts_per_iteration", "sampling.batch_size", at), text
    trees = "grows trees, which are mixed in micro-batches" if trainer.branches == "trees" else ""
    for why in (trainer.refuses.get("sampling.buckets"), trees):
        if why:
            text = f"{trainer.algorithm} {why}; remove the buckets, or use flow_grpo or diffusion_nft"
            yield (at, "trainer.algorithm"), text
    if sampling.fit_batch:
        text = "how many samples fit depends on their size; find batch_size by hand, for the largest"
        yield ("sampling.fit_batch", at), text


def _pipeline_args(config: Config) -> Iterator[Finding]:
    for name in config.sampling.pipeline_args:
        key = f"sampling.pipeline_args.{name}"
        if name in OWN_KEY:
            yield (key, f"sampling.{OWN_KEY[name]}"), f"has its own key; write sampling.{OWN_KEY[name]} instead"
        elif name in OURS:
            yield (key,), "is set by the trainer; remove it"
    yield from _strength(config)


def _strength(config: Config) -> Iterator[Finding]:
    """What is left of a schedule that the pipeline cuts has to be a whole number of steps, however it rounds."""
    key, strength = "sampling.pipeline_args.strength", config.sampling.pipeline_args.get("strength", 1.0)
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0.0 < strength <= 1.0:
        yield (key,), f"has to be a number above 0 and at most 1, found {strength!r}"
        return
    for name in ("sampling", "evaluation"):
        steps = getattr(config, name).num_inference_steps
        if steps is None or _left(config.sampling.scheduled(steps), strength) == {steps}:
            continue
        fitting = [k for k in range(1, 1000) if _left(config.sampling.scheduled(k), strength) == {k}]
        nearest_steps = min(fitting, key=lambda k: abs(k - steps), default=None)
        remedy = "write a strength of two decimals" if nearest_steps is None else f"write {nearest_steps} steps"
        text = f"no whole number of steps leaves {steps} at strength {strength}, and pipelines round it differently"
        yield (f"{name}.num_inference_steps", key), f"{text}; {remedy}"


def _left(steps: int, strength: float) -> set[int]:
    """Steps that pipelines leave of a schedule: most round down what is run, some what is left out."""
    return {min(int(steps * strength), steps), steps - int(max(steps - min(steps * strength, steps), 0))}


def _rewards(config: Config) -> Iterator[Finding]:
    if all(reward.weight == 0 for reward in config.rewards) and "no_reward" not in config.trainer.takes:
        keys = tuple(f"rewards.{index}.weight" for index in range(len(config.rewards)))
        yield keys, "all weights are 0, so there is nothing to train on; give one reward a weight"
    for index, reward in enumerate(config.rewards):
        at, others = f"rewards.{index}", [*config.reward_labels]
        del others[index]
        steps = [iteration for iteration, _ in reward.schedule]
        if steps != sorted(set(steps)):
            yield (f"{at}.schedule",), f"the iterations must rise, found {', '.join(map(str, steps))}"
        if reward.gate is not None and reward.gate.reward not in others:
            hint = nearest(reward.gate.reward, others)
            text = f"no other reward is called {reward.gate.reward!r}; the others: {', '.join(others) or '-'}.{hint}"
            yield (f"{at}.gate.reward",), text
        yield from _elsewhere(config, index)


def _elsewhere(config: Config, index: int) -> Iterator[Finding]:
    """Rewards that another process computes."""
    reward, at = config.rewards[index], f"rewards.{index}"
    for key in ("args", "offload", "isolate") if reward.remote is not None else ():
        if getattr(reward, key) != type(reward).model_fields[key].default:
            yield (f"{at}.{key}", f"{at}.remote"), "is a matter of the server that computes this reward; leave it out"
    if reward.remote is None and not reward.isolate:
        return
    # What waits longer than the watchdog would be ended by it, instead of going on or pausing as the outage says.
    outage, limit, ended = reward.outage, config.distributed.timeout_s, "a run without progress is ended"
    if reward.remote is None and config.engine is not None and config.engine.reward_workers:
        limit, ended = limit / 2, "a reward worker that is silent is replaced"
    if outage.deadline_s >= limit:
        text = f"up to {outage.deadline_s:g} s are waited for the reward, but {ended} after {limit:g} s"
        yield (f"{at}.outage.deadline_s", "distributed.timeout_s"), f"{text}; wait less, or raise the timeout"


def _evaluation(config: Config) -> Iterator[Finding]:
    if config.prompts.eval is None and config.evaluation.every:
        text = "evaluation needs held-out prompts; set prompts.eval, or evaluation.every to 0"
        yield ("prompts.eval", "evaluation.every"), text
    monitor = config.evaluation.monitor
    if monitor is not None and monitor.reward in config.reward_labels:
        index = config.reward_labels.index(monitor.reward)
        if config.rewards[index].weight != 0:
            text = "is trained on, and so no witness; give another reward of weight 0"
            yield ("evaluation.monitor.reward", f"rewards.{index}.weight"), text


def _precision(config: Config) -> Iterator[Finding]:
    dtype, autocast = config.model.dtype, config.model.autocast
    if dtype == "float16" and config.model.lora is None:
        text = "trained float16 weights lose small updates and overflow; use float32 with autocast: float16, or lora"
        yield ("model.dtype", "model.lora"), text
    why = config.trainer.refuses.get("float16")
    if why and "float16" in (dtype, autocast):
        key, instead = ("model.dtype", "float32") if dtype == "float16" else ("model.autocast", "null")
        text = f"float16 needs a loss of known size, and that of {config.trainer.algorithm} has none ({why})"
        yield (key, "trainer.algorithm"), f"{text}: it would overflow or vanish; use bfloat16, or {instead}"
    if dtype == "bfloat16" and autocast is None and config.model.lora is None:
        text = "all weights are trained in float32 and would be fed the bfloat16 of the other parts; use bfloat16"
        yield ("model.autocast", "model.dtype", "model.lora"), text


def _optimizer(config: Config) -> Iterator[Finding]:
    warmup, total = config.optimizer.warmup_steps, config.optimizer_steps
    if warmup >= total > 0:  # that nothing is trained is said elsewhere
        keys = ("optimizer.warmup_steps", "iterations", "trainer.updates_per_iteration")
        yield keys, f"the run has {total} optimiser steps, so the warm-up never ends; use {total - 1} or less"
    if config.ema is not None and config.ema.every > total > 0:
        text = f"the run has {total} optimiser steps, so the average would stay the model before training"
        yield ("ema.every", "iterations", "trainer.updates_per_iteration"), f"{text}; use {total} or less"


def engine_rules(config: Config) -> Iterator[Finding]:
    """What rollout workers cannot draw, and what would not be the same there."""
    engine, trainer, at = config.engine, config.trainer, "engine"
    if engine is None:
        return
    name, workers = trainer.algorithm, engine.reward_workers
    for wrong, keys, text in (
        (
            trainer.trains_on == "pictures",
            (at, "trainer.algorithm"),
            f"{name} trains on given pictures: there is nothing to draw",
        ),
        (
            trainer.branches == "candidates",
            (at, "trainer.algorithm"),
            f"{name} keeps the candidates of each step beside the samples",
        ),
        (config.shards, (config.sharded_by, at), "every rollout worker holds the whole model"),
        (config.distributed.context > 1, ("distributed.context", at), "a rollout worker computes its samples alone"),
        (config.kernels.compile, ("kernels.compile", at), "a graph compiled elsewhere may round differently"),
        (config.sampling.fit_batch, ("sampling.fit_batch", at), "what fits here need not fit there"),
    ):
        if wrong:
            yield keys, f"{text}; leave one out, or write engine: null"
    if workers and trainer.rewards_are != "scored":
        text = f"{name} needs the reward's weights or gradients, which are where it is trained; write 0"
        yield ("engine.reward_workers", "trainer.algorithm"), text
    for number, reward in enumerate(config.rewards if workers else ()):
        if reward.offload:
            text = "the model is in another process, which keeps it; write false"
            yield (f"rewards.{number}.offload", "engine.reward_workers"), text


def staleness_rules(config: Config) -> Iterator[Finding]:
    """What cannot learn from samples that earlier weights drew."""
    at, trainer = "sampling.staleness", config.trainer
    if not config.sampling.staleness:
        return
    older = f"{trainer.algorithm} learns from samples of the present weights"
    guided = getattr(trainer, "guidance_in_training", True)
    for wrong, keys, text in (
        ("older_samples" not in trainer.takes, (at, "trainer.algorithm"), older),
        (trainer.branches == "trees", (at, "trainer.tree"), "trees were not tried with it"),
        (not guided, (at, "trainer.guidance_in_training"), "samples would be weighted by another policy than trained"),
        (config.distributed.context > 1, ("distributed.context", at), "was not tried with it"),
        (config.shards, (config.sharded_by, at), "weights in shards are not kept for later"),
    ):
        if wrong:
            yield keys, f"{text}; write sampling.staleness: 0"
    for number, reward in enumerate(config.rewards):
        if reward.offload and config.engine is not None:
            text = "pictures are scored while the model is trained, so neither makes room for the other; write false"
            yield (f"rewards.{number}.offload", at), text


def economy_rules(config: Config) -> Iterator[Finding]:
    """Why a run that trains a pipeline cannot choose its samples so."""
    economy, sampling, trainer = config.economy, config.sampling, config.trainer
    yield from economy.problems("sampling", sampling.group_size)
    if economy.keep is None:
        return
    size, group = sampling.batch_size, sampling.group_size
    if "part_of_groups" not in trainer.takes or trainer.branches == "trees":
        text = "reads whole groups; leave it out, or use flow_grpo without a tree, or diffusion_nft"
        yield ("economy.keep", "trainer.algorithm"), f"{trainer.algorithm} {text}"
    elif size % group:
        text = f"each micro-batch is to keep as many samples, so {size} must be whole groups of {group}"
        near = max(1, round(size / group)) * group
        yield ("sampling.batch_size", "sampling.group_size", "economy.keep"), f"{text}; use {near}"
    if config.kernels.compile:
        text = "smaller micro-batches are replayed by another graph; write false, or leave keep out"
        yield ("kernels.compile", "economy.keep"), text


WORTH_SAYING = 0.95
"""Of what so many processes can do, the share below which the rest is worth a word."""


def processes_problem(config: Config, num_processes: int) -> str | None:
    """Why `num_processes` do not fit this run, in words; None if they do."""
    context = config.distributed.context
    if num_processes % context:
        return f"distributed.context: {num_processes} processes cannot be put in groups of {context}"
    groups, unit, most = num_processes // context, _unit(config), most_processes(config)
    if groups > most:
        return (
            f"{groups} {unit}, but an optimiser step has micro-batches for {most} only; start no more, or write "
            f"{remedy(config, groups)}"
        )
    for key in ("rollout_workers", "reward_workers") if config.engine is not None else ():
        workers = getattr(config.engine, key)
        if workers % num_processes:
            return (
                f"engine.{key}: {num_processes} processes have as many each, and {workers} cannot be divided so; "
                f"write {-(-workers // num_processes) * num_processes}"
            )
    if config.distributed.fsdp and num_processes == 1:
        return f"{config.sharded_by}: there is one process, nothing to shard over; use --nproc or set it to false"
    if groups == 1 or not config.in_step:
        return None
    return _uneven(config, groups, unit)


def _uneven(config: Config, groups: int, unit: str) -> str | None:
    """Say what is uneven: where every model call is a collective, all processes must make as many in every update."""
    key, sampling = config.sharded_by, config.sampling
    if not config.distributed.fsdp:
        return f"{key}: gradients of all weights that wait on the CPU are not summed over processes; use fsdp"
    if sampling.images_per_iteration % sampling.batch_size:
        return (
            f"{key}: {sampling.images_per_iteration} samples in micro-batches of {sampling.batch_size} leave a smaller "
            "one, and all processes make as many model calls; change sampling.batch_size"
        )
    if _speedup(config, groups) < groups:
        return (
            f"{key}: {sampling.micro_batches} micro-batches in {config.trainer.updates} updates cannot be shared out "
            f"evenly to {groups} {unit}; write {remedy(config, groups)}"
        )
    return None


def waiting(config: Config, groups: int) -> str | None:
    """What it costs that processes (or groups of them, `distributed.context`) wait for those which have more
    micro-batches, and what mends it; None where it costs next to nothing."""
    times = _speedup(config, groups)
    if times >= WORTH_SAYING * groups:
        return None
    step = config.trainer.cut(config, groups)[0]
    samples = "trees" if config.trainer.branches == "trees" else "samples"
    return (
        f"{groups} {_unit(config)} share {len(step)} micro-batches of {max(step)} {samples} in an optimiser step, and "
        f"some wait: about {times:.2f} times as fast as one; with {remedy(config, groups)} none does"
    )


def remedy(config: Config, num_processes: int) -> str:
    """The changes by which all processes have the same work: the largest batch that makes it so, else more prompts."""
    sampling = config.sampling
    parts = num_processes * config.trainer.updates
    more = math.ceil(sampling.prompts_per_iteration / parts) * parts
    for prompts in (sampling.prompts_per_iteration, more):
        for size in range(sampling.batch_size, 0, -1):
            changes = {"prompts_per_iteration": prompts, "batch_size": size}
            changed = config.model_copy(update={"sampling": sampling.model_copy(update=changes)})
            if _speedup(changed, num_processes) == num_processes and not any(changed.problems()):
                new = {key: value for key, value in changes.items() if value != getattr(sampling, key)}
                return " ".join(f"sampling.{key}={value}" for key, value in new.items())
    return f"sampling.prompts_per_iteration={more}"


def even(config: Config) -> Iterator[int]:
    """The numbers of processes that have equal work, ascending."""
    for count in range(1, most_processes(config) + 1):
        if _speedup(config, count) == count:
            yield count


def most_processes(config: Config) -> int:
    """How many of them (or of their groups) can have a micro-batch in every optimiser step, however small it is."""
    return min(map(len, config.trainer.cut(config, config.sampling.images_per_iteration)))


def _speedup(config: Config, num_processes: int) -> float:
    """Samples (or trees) of an iteration over those of the process that has most of them, step by step."""
    steps = config.trainer.cut(config, num_processes)
    return sum(map(sum, steps)) / sum(most_of_one(step, num_processes) for step in steps)


def _unit(config: Config) -> str:
    context = config.distributed.context
    return "processes" if context == 1 else f"groups of {context} processes"
