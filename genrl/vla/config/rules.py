"""Settings of a policy's run that cannot work together, whatever its method: refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.config.plugins import names
from genrl.vla.config.names import BOTH, MINITABLE_THINGS, POLICIES, PREDICTS, PUBLISHED, SAMPLERS

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig, VLAMethod


def problems(config: VLAConfig) -> Iterator[Finding]:
    """Everything that cannot work together."""
    for rule in (_policy, _tokens, _new_policy, _layers, _shards, _rest, _staleness):
        yield from rule(config)


def _policy(config: VLAConfig) -> Iterator[Finding]:
    policy = config.policy
    if (policy.path is None) == (policy.new is None):
        text = "write one of them, the folder of a policy or a new one to be trained; null takes the other out"
        yield ("policy.path", "policy.new"), text


def _tokens(config: VLAConfig) -> Iterator[Finding]:
    """Policies without denoising steps."""
    sampler, trainer = config.sampler, config.trainer
    if sampler.predicts not in trainer.trains:
        yield ("trainer.algorithm", "sampler.kind"), not_trained(trainer, sampler.predicts)


def not_trained(trainer: VLAMethod, predicts: str) -> str:
    """Why a method cannot train a policy that predicts so, and what can."""
    if predicts == "actions":
        why, near = "a policy that computes its actions has no likelihood", "sft, or a policy of flows or tokens"
    else:
        why, near = "it works on denoising steps", "sft, dagger, grpo or ppo"
    return f"{trainer.algorithm} cannot train a policy that predicts {predicts}: {why}; take {near}"


def _new_policy(config: VLAConfig) -> Iterator[Finding]:
    new, sampler = config.policy.new, config.sampler
    if new is None:
        return
    known = [name for name in names(POLICIES) if name not in PUBLISHED]
    if new.type in PUBLISHED:
        yield ("policy.new.type",), f"{new.type} is a published policy: write its folder as policy.path"
    elif new.type not in known and ".py" not in new.type:
        close = get_close_matches(new.type, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        text = f"found {new.type!r}; {hint}they are: {', '.join(known)}; or name a file: path/file.py:Name"
        yield ("policy.new.type",), text
    if new.points and new.type in BOTH:
        yield ("policy.new.points", "policy.new.type"), f"{new.type} has no encoder of points; write 0"
    if new.points and config.demonstrations is not None and config.demonstrations.dataset is not None:
        yield ("policy.new.points", "demonstrations.dataset"), "data sets hold no points; write 0, or take an expert"
    if 0 < new.points < MINITABLE_THINGS and config.environment.name == "minitable":
        text = f"{new.points} points cannot show the {MINITABLE_THINGS} things on the table; write 512"
        yield ("policy.new.points", "environment.name"), text
    predicts = PREDICTS.get(new.type, sampler.predicts)
    if predicts != sampler.predicts:
        text = f"{new.type} predicts {predicts}; write sampler.kind: {SAMPLERS[predicts]}"
        yield ("policy.new.type", "sampler.kind"), text
    if sampler.predicts == "noise" and sampler.steps > new.train_steps:
        yield ("sampler.steps", "policy.new.train_steps"), f"there are {new.train_steps} noise levels only"


def of_layers(config: VLAConfig) -> list[str]:
    """The keys that are written, and need a policy with layers."""
    wanted = {
        "policy.lora": config.policy.lora is not None,
        "policy.dtype": config.policy.dtype is not None,
        "policy.gradient_checkpointing": config.policy.gradient_checkpointing,
        "distributed.fsdp": config.distributed.fsdp,
    }
    return [key for key, asked in wanted.items() if asked]


def _layers(config: VLAConfig) -> Iterator[Finding]:
    """What is done to the layers of large policies."""
    for key in of_layers(config):
        if config.policy.new is not None:
            yield (
                (key, "policy.new"),
                "is for pi0, pi0.5, SmolVLA, GR00T and OpenVLA; a new policy is small: leave it out",
            )
        elif config.sampler.predicts == "noise":
            yield (key, "sampler.kind"), "is for pi0, pi0.5, SmolVLA, GR00T and OpenVLA; leave it out"
    policy = config.policy
    if policy.dtype == "bfloat16" and policy.lora is None and not policy.frozen:
        text = "all that the folder does not freeze is trained, in float32; add policy.lora or policy.freeze: encoder"
        yield ("policy.dtype", "policy.freeze"), text


def _shards(config: VLAConfig) -> Iterator[Finding]:
    key, trainer = "distributed.fsdp", config.trainer
    if not config.distributed.fsdp:
        return
    if trainer.one_process:
        text = f"{trainer.algorithm} runs in one process, shards are of several; write false"
        yield (key, "trainer.algorithm"), text
    if trainer.retries:
        text = "a process that leaves a pass for want of memory leaves the others waiting; find microbatch by hand"
        yield ("trainer.fit_batch", key), text
    if config.environment.workers == "ray" and trainer.acts_on_actors:
        text = "Ray actors act with copies of the policy, and no process has all of it; write ray_simulators"
        yield ("environment.workers", key), text


def _staleness(config: VLAConfig) -> Iterator[Finding]:
    at, trainer, staleness = "environment.staleness", config.trainer, config.environment.staleness
    if staleness and not trainer.takes_older_samples:
        yield (at, "trainer.algorithm"), f"{trainer.algorithm} does not learn from rollouts of earlier weights; write 0"
    if staleness and config.distributed.fsdp:
        yield ("distributed.fsdp", at), "is not there for policies in shards; write 0"


def _rest(config: VLAConfig) -> Iterator[Finding]:
    env = config.environment
    if env.success_key is None and env.reward == "success":
        text = "nothing would ever be paid without one; write reward: environment"
        yield ("environment.success_key", "environment.reward"), text
    if config.distributed.context > 1:  # shared code would put processes into groups, of which this kind knows nothing
        yield ("distributed.context",), "is for pipelines: a policy's contexts are short; write 1"
    if config.environment.num_envs % config.environment.group_size:
        yield ("environment.num_envs", "environment.group_size"), "the groups must be complete: a multiple"
