"""Combinations of settings that cannot work, refused before anything is loaded.

Each rule is a generator of (keys concerned, what is wrong and what to write instead). Rules look at values only: what
needs the disk is in `genrl.diffusion.config.files`; what concerns one method is in its settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.config.folders import looks_local
from genrl.diffusion.config.context_rules import context_rules
from genrl.diffusion.config.engine_rules import engine_rules, staleness_rules
from genrl.diffusion.config.kernel_rules import kernel_rules
from genrl.diffusion.config.memory_rules import memory_rules
from genrl.diffusion.config.model_rules import model_rules

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

# Arguments of a pipeline's call that belong to the trainer or have a key of their own.
OWN_KEY = {
    "num_inference_steps": "sampling.num_inference_steps",
    "guidance_scale": "sampling.guidance_scale",
    "height": "sampling.height",
    "width": "sampling.width",
    "num_frames": "sampling.num_frames",
    "num_images_per_prompt": "sampling.group_size",
    "num_videos_per_prompt": "sampling.group_size",
}
OURS = (
    "prompt",
    "prompt_embeds",
    "latents",
    "generator",
    "output_type",
    "return_dict",
    "timesteps",
    "sigmas",
    "callback_on_step_end",
    "callback_on_step_end_tensor_inputs",
    "eta",
)


def problems(config: Config) -> Iterator[Finding]:
    """Every contradiction of settings of several sections."""
    for rule in (
        _batches,
        _buckets,
        _pipeline_args,
        _samples,
        _fitted,
        _rewards,
        _reward_rules,
        _prompts,
        _monitor,
        _precision,
        engine_rules,
        staleness_rules,
        economy_rules,
        kernel_rules,
        memory_rules,
        context_rules,
        model_rules,
        _optimizer,
        _run,
    ):
        yield from rule(config)


def _batches(config: Config) -> Iterator[Finding]:
    sampling, updates = config.sampling, config.trainer.updates
    total, pieces = sampling.images_per_iteration, sampling.micro_batches
    if sampling.group_size < 2 and not config.trainer.stands_alone:
        text = "one sample of a prompt has nothing to be compared with; use a group of 2 or more"
        yield ("sampling.group_size", "trainer.algorithm"), text
    if sampling.batch_size > total:
        sizes = f"{sampling.prompts_per_iteration} prompts x {sampling.group_size} = {total} samples"
        text = f"a batch of {sampling.batch_size} is more than {sizes}; use {total} or less"
        yield ("sampling.batch_size", "sampling.prompts_per_iteration", "sampling.group_size"), text
    if updates > pieces and not config.trainer.grows_trees:
        text = f"{total} samples in batches of {sampling.batch_size} are {pieces} micro-batches, too few for {updates}"
        text = f"{text} updates; use {pieces} or less, or a smaller batch"
        yield ("trainer.updates_per_iteration", "sampling.batch_size"), text


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
    for name in ("height", "width"):
        if getattr(config.evaluation, name) is not None:
            yield (f"evaluation.{name}", at), "held-out prompts have the sizes of the buckets; remove one of them"
    for why in (trainer.one_size, "grows trees, which are mixed in micro-batches" if trainer.grows_trees else ""):
        if why:
            text = f"{trainer.algorithm} {why}; remove the buckets, or use flow_grpo or diffusion_nft"
            yield (at, "trainer.algorithm"), text
    if sampling.fit_batch:
        text = "how many samples fit depends on their size; find batch_size by hand, for the largest"
        yield ("sampling.fit_batch", at), text
    if config.kernels.compile:
        text = "each size is compiled separately, so samples may be replayed by another graph; remove one of them"
        yield ("kernels.compile", at), text


def _pipeline_args(config: Config) -> Iterator[Finding]:
    for name in config.sampling.pipeline_args:
        key = f"sampling.pipeline_args.{name}"
        if name in OWN_KEY:
            yield (key, OWN_KEY[name]), f"has its own key; write {OWN_KEY[name]} instead"
        elif name in OURS:
            yield (key,), "is set by the trainer; remove it"
    yield from _strength(config)


def _strength(config: Config) -> Iterator[Finding]:
    """What is left of a schedule that the pipeline cuts has to be a whole number of steps, however it rounds."""
    key, given = "sampling.pipeline_args.strength", config.sampling.pipeline_args.get("strength", 1.0)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0.0 < given <= 1.0:
        yield (key,), f"has to be a number above 0 and at most 1, found {given!r}"
        return
    for name in ("sampling", "evaluation"):
        steps = getattr(config, name).num_inference_steps
        if steps is None or _left(config.sampling.scheduled(steps), given) == {steps}:
            continue
        fitting = [k for k in range(1, 1000) if _left(config.sampling.scheduled(k), given) == {k}]
        nearest = min(fitting, key=lambda k: abs(k - steps), default=None)
        remedy = "write a strength of two decimals" if nearest is None else f"write {nearest} steps"
        text = f"no whole number of steps leaves {steps} at strength {given}, and pipelines round it differently"
        yield (f"{name}.num_inference_steps", key), f"{text}; {remedy}"


def _left(steps: int, strength: float) -> set[int]:
    """Steps that pipelines leave of a schedule: most round down what is run, some what is left out."""
    return {min(int(steps * strength), steps), steps - int(max(steps - min(steps * strength, steps), 0))}


def _samples(config: Config) -> Iterator[Finding]:
    """How the samples of a group have to be to be compared."""
    sampling, trainer = config.sampling, config.trainer
    if trainer.deterministic and sampling.same_initial_noise:
        keys = ("sampling.same_initial_noise", "trainer.algorithm")
        text = f"{trainer.algorithm} samples deterministically: a group from one noise is one picture many times"
        yield keys, f"{text}; write false"
    if trainer.reads_pictures and sampling.same_initial_noise:
        text = f"{trainer.algorithm} trains on given pictures and draws none, so it would do nothing; write false"
        yield ("sampling.same_initial_noise", "trainer.algorithm"), text
    size, group, wanted = sampling.batch_size, sampling.group_size, trainer.samples_per_group
    if wanted is not None and group != wanted:
        text = f"{trainer.algorithm} has groups of {wanted}, found {group}; write {wanted}"
        yield ("sampling.group_size", "trainer.algorithm"), text
    elif trainer.whole_groups and size % group:
        near = max(group, size // group * group)
        text = f"{trainer.algorithm} needs whole groups in a batch, but {size} is no multiple of {group}; use {near}"
        yield ("sampling.batch_size", "sampling.group_size", "trainer.algorithm"), text


def _fitted(config: Config) -> Iterator[Finding]:
    """Where memory is not that of one model call with its graph, trying one says nothing."""
    if not config.sampling.fit_batch:
        return
    if why := config.trainer.not_fitted:
        text = f"{config.trainer.algorithm} {why}; find batch_size by hand"
        yield ("sampling.fit_batch", "trainer.algorithm"), text
    if config.shards:
        key = config.sharded_by
        yield ("sampling.fit_batch", key), "sharded models are not tried; find batch_size by hand"


def _rewards(config: Config) -> Iterator[Finding]:
    keys = tuple(f"rewards.{index}.weight" for index in range(len(config.rewards)))
    if all(reward.weight == 0 for reward in config.rewards) and config.trainer.needs_reward:
        yield keys, "all weights are 0, so there is nothing to train on; give one reward a weight"


def _reward_rules(config: Config) -> Iterator[Finding]:
    labels = config.reward_labels
    for index, reward in enumerate(config.rewards):
        at = f"rewards.{index}"
        steps = [iteration for iteration, _ in reward.schedule]
        if steps != sorted(set(steps)):
            yield (f"{at}.schedule",), f"the iterations must rise, found {', '.join(map(str, steps))}"
        if reward.gate is not None:
            others = [label for label in labels if label != labels[index]]
            if reward.gate.reward not in others:
                hint = difflib.get_close_matches(reward.gate.reward, others, n=1, cutoff=0.5)
                meant = f"did you mean {hint[0]!r}? " if hint else ""
                text = (
                    f"no other reward is called {reward.gate.reward!r}; {meant}the others: {', '.join(others) or '-'}"
                )
                yield (f"{at}.gate.reward",), text
        yield from _elsewhere(config, index)


def _elsewhere(config: Config, index: int) -> Iterator[Finding]:
    """Rewards that another process computes."""
    reward, at = config.rewards[index], f"rewards.{index}"
    if reward.remote is not None:
        from genrl_rewards.service.http_client import check_url  # httpx is of no use to the other runs

        urls = (reward.remote,) if isinstance(reward.remote, str) else reward.remote
        for url in urls:
            try:
                check_url(url)
            except ValueError:
                yield (f"{at}.remote",), f"{url!r} is no URL of a server; write http://HOST:PORT"
        theirs = ("args", "offload", "isolate")
        for key in [key for key in theirs if getattr(reward, key) != type(reward).model_fields[key].default]:
            yield (f"{at}.{key}", f"{at}.remote"), "is a matter of the server that computes this reward; leave it out"
    if reward.remote is None and not reward.isolate:
        return
    outage, limit, ended = reward.outage, config.distributed.timeout_s, "a run without progress is ended"
    if reward.remote is None and config.engine is not None and config.engine.reward_workers:
        limit, ended = limit / 2, "a reward worker that is silent is replaced"
    if outage.deadline_s >= limit:
        text = f"up to {outage.deadline_s:g} s are waited for the reward, but {ended} after {limit:g} s"
        yield (f"{at}.outage.deadline_s", "distributed.timeout_s"), f"{text}; wait less, or raise the timeout"


def _prompts(config: Config) -> Iterator[Finding]:
    prompts = config.prompts
    if prompts.eval is not None and PurePosixPath(prompts.eval) == PurePosixPath(prompts.train):
        text = "the same prompts: evaluation must be on held-out ones; name another file"
        yield ("prompts.eval", "prompts.train"), text
    if prompts.eval is None and config.evaluation.every:
        text = "evaluation needs held-out prompts; set prompts.eval, or evaluation.every to 0"
        yield ("prompts.eval", "evaluation.every"), text


def _monitor(config: Config) -> Iterator[Finding]:
    """A scorer that nobody trains on, watched."""
    monitor = config.evaluation.monitor
    if monitor is not None and monitor.reward in config.reward_labels:
        index = config.reward_labels.index(monitor.reward)
        if config.rewards[index].weight != 0:
            text = "is trained on, and so no witness; give another reward of weight 0"
            yield ("evaluation.monitor.reward", f"rewards.{index}.weight"), text


def _precision(config: Config) -> Iterator[Finding]:
    dtype, autocast = config.model.dtype, config.model.autocast
    keys = ("model.autocast", "model.dtype")
    if autocast is not None and dtype not in ("float32", autocast):
        yield keys, f"two different half precisions, {dtype} and {autocast}; use {dtype} and null"
    if dtype == "float16" and config.model.lora is None:
        text = "trained float16 weights lose small updates and overflow; use float32 with autocast: float16, or lora"
        yield ("model.dtype", "model.lora"), text
    why = config.trainer.not_in_float16
    if why and "float16" in (dtype, autocast):
        key, instead = ("model.dtype", "float32") if dtype == "float16" else ("model.autocast", "null")
        text = f"float16 needs a loss of known size, and that of {config.trainer.algorithm} has none ({why})"
        yield (key, "trainer.algorithm"), f"{text}: it would overflow or vanish; use bfloat16, or {instead}"
    if dtype == "bfloat16" and autocast is None and config.model.lora is None:
        text = "all weights are trained in float32 and would be fed the bfloat16 of the other parts; use bfloat16"
        yield ("model.autocast", "model.dtype", "model.lora"), text


def _optimizer(config: Config) -> Iterator[Finding]:
    warmup, total = config.optimizer.warmup_steps, config.optimizer_steps
    if warmup >= total > 0:  # that nothing is trained is told elsewhere
        keys = ("optimizer.warmup_steps", "iterations", "trainer.updates_per_iteration")
        yield keys, f"the run has {total} optimiser steps, so the warm-up never ends; use {total - 1} or less"
    if config.ema is not None and config.ema.every > total > 0:
        text = f"the run has {total} optimiser steps, so the average would stay the model before training"
        yield ("ema.every", "iterations", "trainer.updates_per_iteration"), f"{text}; use {total} or less"


def _run(config: Config) -> Iterator[Finding]:
    output = PurePosixPath(config.output)
    if looks_local(config.model.path) and output.is_relative_to(PurePosixPath(config.model.path)):
        text = f"the run would write into the model's folder {config.model.path}; use another, for example runs/first"
        yield ("output", "model.path"), text


def economy_rules(config: Config) -> Iterator[Finding]:
    """Why a run that trains a pipeline cannot choose its prompts or samples so."""
    economy, sampling, trainer = config.economy, config.sampling, config.trainer
    groups = sampling.group_size, sampling.prompts_per_iteration, sampling.staleness
    yield from economy.problems("sampling", *groups)
    name, at = trainer.algorithm, "economy.selection"
    if economy.selection is not None:
        if trainer.reads_pictures:
            yield (at, "trainer.algorithm"), f"{name} trains on given pictures in their order; leave it out"
        if sampling.buckets:
            yield (at, "sampling.buckets"), "micro-batches are of one size, chosen prompts are not; leave out one"
        for number, reward in enumerate(config.rewards):
            if economy.selection.by == "spread" and reward.normalize == "group":
                text = "scores that are normalised in groups all have the same spread; write none"
                yield (f"rewards.{number}.normalize", f"{at}.by"), text
    if economy.keep is None:
        return
    size, group = sampling.batch_size, sampling.group_size
    if not trainer.takes_part_of_groups or trainer.grows_trees:
        text = f"{name} reads whole groups; leave it out, or use flow_grpo without a tree, or diffusion_nft"
        yield ("economy.keep", "trainer.algorithm"), text
    elif size % group:
        text = f"each micro-batch is to keep as many samples, so {size} must be whole groups of {group}"
        near = max(1, round(size / group)) * group
        yield ("sampling.batch_size", "sampling.group_size", "economy.keep"), f"{text}; use {near}"
    if trainer.keeps_graphs:
        yield ("trainer.keep_graph", "economy.keep"), "kept graphs are of all samples; write false"
    if config.kernels.compile:
        text = "smaller micro-batches are replayed by another graph; write false, or leave keep out"
        yield ("kernels.compile", "economy.keep"), text
