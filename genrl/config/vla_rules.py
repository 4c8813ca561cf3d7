"""Combinations of settings of a policy's run that cannot work, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.combinations import Finding, ImpossibleConfig, monitor_problems

if TYPE_CHECKING:
    from genrl.config.vla import VLAConfig


def refuse_impossible(config: VLAConfig) -> None:
    """Raise ImpossibleConfig with everything that cannot work together."""
    found = [*_sources(config), *_groups(config), *_samplers(config), *_updates(config), *_processes(config)]
    found += monitor_problems(config, ("success",), "held-out figure")
    if found:
        raise ImpossibleConfig(found)


def _sources(config: VLAConfig) -> Iterator[Finding]:
    """One policy, and demonstrations where they are imitated."""
    policy, shown, algorithm = config.policy, config.demonstrations, config.trainer.algorithm
    if (policy.path is None) == (policy.new is None):
        yield (
            ("policy.path", "policy.new"),
            "write one of them, the folder of a policy or a new one to be trained; null takes the other out",
        )
    if policy.rename and policy.path is None:
        yield ("policy.rename", "policy.path"), "is of a published policy; a new one reads what the environment shows"
    if policy.new is not None and algorithm in ("ppo", "grpo"):
        text = (
            f"{algorithm} needs a policy that succeeds now and then; train it by sft and give its folder as policy.path"
        )
        yield ("policy.new",), text
    yield from _offline(config)
    if algorithm in ("sft", "rl100") and (algorithm == "sft" or policy.new is not None):
        if shown is None or (shown.expert is None) == (shown.dataset is None):
            yield (
                ("demonstrations",),
                f"{algorithm} imitates: write `expert: N`, or `dataset: FOLDER`, and not both (null takes one out)",
            )
    elif shown is not None and algorithm in ("ppo", "grpo"):
        yield ("demonstrations",), f"{algorithm} does not imitate; take them out, or use algorithm sft"


def _offline(config: VLAConfig) -> Iterator[Finding]:
    """What the methods that make their own worlds and data are written for."""
    policy, env, algorithm = config.policy, config.environment, config.trainer.algorithm
    if algorithm in ("diwa", "fisor", "rl_vlm_f"):
        if env.name != "minitable":
            yield ("environment.name",), f"{algorithm} knows the table only; write minitable"
        if policy.new is None:
            yield ("policy.new",), f"{algorithm} begins with a new policy; write `new: {{...}}`"
        elif policy.new.image_size:
            yield ("policy.new.image_size",), f"{algorithm} works on states; write 0"
    if algorithm in ("diwa", "fisor") and policy.new is not None and policy.new.type != "diffusion_mlp":
        yield ("policy.new.type",), f"{algorithm} trains a diffusion policy; write diffusion_mlp"
    shown = config.demonstrations
    if algorithm == "diwa" and (shown is None or shown.expert is None):
        yield ("demonstrations.expert",), "diwa imitates the expert in latents; write a number of episodes"
    if algorithm == "diwa" and config.sampler.kind != "diffusion":
        yield ("sampler.kind",), "diwa is DPPO in a world model; write diffusion"
    if algorithm == "rl100" and config.sampler.kind in ("flow_noise", "reinflow"):
        text = (
            f"rl100 needs a ratio for every denoising step, {config.sampler.kind} has one for the chain; write flow_cps"
        )
        yield ("sampler.kind",), text
    if algorithm == "rl100" and config.sampler.kind in ("flow_sde", "flow_cps") and config.sampler.selection != "all":
        yield ("sampler.selection",), "rl100 trains on all denoising steps of a chunk; write all"
    if algorithm == "rl100" and config.sampler.kind == "diffusion":
        if config.sampler.ft_denoising_steps != config.sampler.steps:
            yield ("sampler.ft_denoising_steps",), "rl100 trains all denoising steps; write as many as steps"
    if algorithm in ("rl100", "fisor", "rl_vlm_f", "diwa") and config.policy.freeze == "encoder" and policy.path:
        yield ("policy.freeze",), f"{algorithm} trains the whole policy; write nothing"


def _groups(config: VLAConfig) -> Iterator[Finding]:
    env, trainer = config.environment, config.trainer
    if env.num_envs % env.group_size:
        yield ("environment.num_envs", "environment.group_size"), "the groups must be complete: a multiple"
    if trainer.algorithm == "grpo" and env.group_size < 2:
        text = "grpo compares the episodes of a group; write 2 or more (8 is usual)"
        yield ("environment.group_size",), text
    chosen = getattr(trainer, "success_filter", None)
    if chosen is not None and chosen[0] >= chosen[1]:
        yield ("trainer.success_filter",), f"must rise from low to high, found {list(chosen)}"
    if chosen is not None and env.group_size < 2:
        yield ("trainer.success_filter", "environment.group_size"), "the filter is one of groups; write 2 or more"
    if trainer.algorithm == "ppo" and trainer.episodes == "all" and (trainer.weighting == "episodes" or chosen):
        key = "trainer.weighting" if trainer.weighting == "episodes" else "trainer.success_filter"
        yield (key, "trainer.episodes"), "is of one episode per environment; write episodes: first"


def _samplers(config: VLAConfig) -> Iterator[Finding]:
    sampler = config.sampler
    if sampler.kind in ("flow_noise", "reinflow") and sampler.low > sampler.high:
        yield ("sampler.low", "sampler.high"), "the standard deviation lies between them; low must be the smaller"
    if sampler.kind in ("flow_sde", "flow_cps"):
        drawn = sampler.steps - sampler.skip_last
        if sampler.selection == "last" and sampler.count > drawn:
            yield ("sampler.count", "sampler.steps"), f"{sampler.count} of {drawn} steps cannot be drawn"
        if sampler.selection != "last" and sampler.count != 1:
            yield ("sampler.count", "sampler.selection"), "counts the last steps; write selection: last"
    if sampler.kind == "flow_cps":
        for key, level in (("noise_level", sampler.noise_level), ("anneal", sampler.anneal and sampler.anneal[0])):
            if level is not None and level > 1:
                yield (f"sampler.{key}",), f"flow_cps draws all of the noise anew at 1; {level:g} is more"
    if sampler.kind == "diffusion" and sampler.ft_denoising_steps > sampler.steps:
        text = f"{sampler.ft_denoising_steps} of {sampler.steps} steps cannot be trained"
        yield ("sampler.ft_denoising_steps", "sampler.steps"), text
    new = config.policy.new
    if new is not None and (new.type == "diffusion_mlp") != (sampler.kind == "diffusion"):
        text = f"{new.type} predicts {'noise' if new.type == 'diffusion_mlp' else 'velocity'}; "
        text += "write sampler.kind: diffusion" if new.type == "diffusion_mlp" else "write sampler.kind: flow_sde"
        yield ("policy.new.type", "sampler.kind"), text
    if new is not None and sampler.kind == "diffusion" and sampler.steps > new.train_steps:
        yield ("sampler.steps", "policy.new.train_steps"), f"there are {new.train_steps} noise levels only"


def _updates(config: VLAConfig) -> Iterator[Finding]:
    trainer, sampler = config.trainer, config.sampler
    if trainer.algorithm not in ("ppo", "grpo", "diwa"):
        return
    if trainer.entropy_weight and sampler.kind not in ("flow_noise", "reinflow"):
        text = f"the noise of {sampler.kind} is not learned, its entropy has no gradient; write 0"
        yield ("trainer.entropy_weight", "sampler.kind"), text
    if trainer.algorithm != "grpo" and trainer.values == "action":
        if trainer.level == "chunk":
            text = "a chunk's ratio has one advantage; write level: action, or element"
            yield ("trainer.level", "trainer.values"), text
        if trainer.discount == "chunk":
            text = "where every action has a value, gamma is per action; write discount: smdp"
            yield ("trainer.discount", "trainer.values"), text
    for key in ("element_clip", "log_prob_clip"):
        bounds = getattr(trainer, key)
        if bounds is not None and bounds[0] >= bounds[1]:
            yield (f"trainer.{key}",), f"must rise from low to high, found {list(bounds)}"
    if trainer.algorithm == "ppo" and trainer.clip_base is not None and trainer.clip_base > trainer.clip_range:
        yield (
            ("trainer.clip_base", "trainer.clip_range"),
            "the clip range rises to the action; base is the smaller",
        )
    if trainer.algorithm == "ppo" and sampler.kind != "diffusion":
        for key, default in (("clip_base", None), ("denoising_gamma", 1.0)):
            if getattr(trainer, key) != default:
                yield (f"trainer.{key}", "sampler.kind"), "is of the trained steps of DPPO's chain; leave it out"
    if trainer.microbatch is not None and trainer.microbatch > trainer.minibatch:
        yield ("trainer.microbatch", "trainer.minibatch"), "a pass holds a part of a minibatch; write null, or fewer"


def _processes(config: VLAConfig) -> Iterator[Finding]:
    if config.distributed.fsdp:
        yield ("distributed.fsdp",), "policies are not sharded; write false"
