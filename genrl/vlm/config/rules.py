"""Combinations of settings of a vision-language model's run that cannot work, refused before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

from genrl.config.errors import Finding
from genrl.config.plugins import Group, find
from genrl.config.sections import NO_INT4
from genrl.vlm.config.names import BODY, OUTPUTS, TASKS
from genrl.vlm.config.sections import Generation

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig


OF_BUILT_IN = ("vlm.kernels", "vlm.quantize", "distributed.fsdp")
"""What only the vision-language models built in have."""
OF_TEXT = (
    *OF_BUILT_IN,
    *("vlm.gradient_checkpointing", "vlm.packing", "vlm.prefix_attention", "environment"),
    *("task.min_pixels", "task.max_pixels", "task.video", "stages", "augmentation", "rescue", "synthesis"),
)
"""What no model has that makes something else than text."""
UNSHARED = ("vlm.gradient_checkpointing", "vlm.packing", "distributed.fsdp", "environment")
"""With which prompts are computed once for each answer."""


def problems(config: VLMConfig) -> Iterator[Finding]:
    """Everything that cannot work together."""
    yield from _questions(config) if config.environment is None else _episodes(config)
    for rule in (_outputs, _quantized, _generation, _strategies, _rescue, _shards, _staleness, _economy):
        yield from rule(config)


def _questions(config: VLMConfig) -> Iterator[Finding]:
    task = config.task
    if (task.name is None) == (task.train is None):
        yield ("task.name", "task.train"), "write one of them: a generated task, or data"
    if task.name is not None and (wrong := _unknown(task.name, TASKS)):
        yield ("task.name",), wrong
    if task.name is not None and task.eval is not None:
        yield ("task.eval", "task.name"), "a generated task has its own held-out questions; leave eval out"
    if task.train is not None and task.eval is None and config.evaluation.every:
        yield ("task.eval", "evaluation.every"), "held-out data is needed; write it, or evaluation.every: 0"
    if task.train is not None and task.train == task.eval:
        yield ("task.eval", "task.train"), "held-out questions must be others than those trained on"
    if not config.rewards and any(part.trainer.learns_from != "data" for part in config.parts):
        yield ("rewards",), "answers are worth nothing: write at least one, such as [{name: exact}]"
    unpaid = all(reward.weight == 0 for reward in config.rewards) and config.rewards
    if unpaid and "no_reward" not in config.trainer.takes:
        yield ("rewards",), "all weights are 0: nothing is trained"
    if config.trainer.learns_from == "episodes":
        text = f"{config.trainer.algorithm} learns from episodes: write environment in place of task"
        yield ("trainer.algorithm", "task"), text


def _episodes(config: VLMConfig) -> Iterator[Finding]:
    if config.task != type(config.task)():
        yield ("task", "environment"), "write one of them: questions, or an environment to act in"
    if config.rewards:
        yield ("rewards", "environment"), "an environment has a reward of its own; leave rewards out"
    if config.trainer.learns_from != "episodes":
        yield ("trainer.algorithm", "environment"), f"{config.trainer.algorithm} learns from answers to questions"


def _outputs(config: VLMConfig) -> Iterator[Finding]:
    output, makes = config.vlm.output, config.vlm.makes
    if wrong := _unknown(output, OUTPUTS):
        yield ("vlm.output",), wrong
    if makes == "music_reward" and config.trainer.learns_from != "data":
        yield ("trainer.algorithm", "vlm.output"), "a score answers nothing; write music_preference, or output: music"
    for key in [key for key in (OF_TEXT if makes else OF_BUILT_IN if output != "text" else ()) if _value(config, key)]:
        yield (key, "vlm.output"), f"only models that answer with text have it, not output {output}; leave it out"
    for key in [key for key in UNSHARED if config.vlm.prefix_attention is not None and _value(config, key)]:
        yield ("vlm.prefix_attention", key), "with it answers share no prompts; write one of them"
    if config.vlm.codec is not None:
        if output != "voxels":
            yield ("vlm.codec", "vlm.output"), f"decodes bodies, and this model makes {output}; write voxels, or null"
        elif config.generation.max_new_tokens < (least := 2 * (BODY + 3)):
            text = f"two bodies of {BODY} codes with their marks leave no token for thoughts; write {least + 254}"
            yield ("generation.max_new_tokens", "vlm.codec"), text
    if config.vlm.lora is not None and makes == "masked_text":
        yield ("vlm.lora",), "all weights of this model are trained (output); leave it out"
    if config.generation.vllm is not None and makes:
        yield ("generation.vllm", "vlm.output"), f"vLLM answers with text, not {makes}; write null"
    if (output == "text" or makes not in (None, "image", "music")) and config.generation.guidance_scale is not None:
        text = "only pictures and MusicGen's music are sampled with guidance; leave it out"
        yield ("generation.guidance_scale", "vlm.output"), text
    if (output == "text" or makes not in (None, "masked_text")) and config.generation.denoising_steps is not None:
        yield ("generation.denoising_steps", "vlm.output"), "only masked_text is filled in steps; leave it out"


def _value(config: VLMConfig, key: str) -> Any:
    """The value of a key by its dotted name."""
    return reduce(getattr, key.split("."), config)


def _quantized(config: VLMConfig) -> Iterator[Finding]:
    key, kind = "vlm.quantize", config.vlm.quantize
    if kind is None:
        return
    if kind == "int4":
        yield (key,), NO_INT4
    if config.vlm.lora is None:
        text = "quantised weights cannot be trained, only adapters on them; write quantize: null, or give lora"
        yield (key, "vlm.lora"), text
    if config.distributed.fsdp:
        yield (key, "distributed.fsdp"), "quantised weights cannot be divided; write null, or fsdp: false"
    if config.generation.vllm is not None:
        yield (key, "generation.vllm"), "vLLM is sent merged weights, which quantised ones cannot be; write null"


def _unknown(name: str, group: Group) -> str:
    """What is wrong with a name that is no file's; "" where it is known. Files are looked at with the data."""
    if ".py" not in name and name not in group.built_in:
        try:
            find(name, group)
        except ValueError as error:
            return str(error)
    return ""


def _generation(config: VLMConfig) -> Iterator[Finding]:
    generation = config.generation
    if generation.batch_size is not None and generation.batch_size < generation.group_size:
        text = "answers to a question are sampled together; write group_size or more"
        yield ("generation.batch_size", "generation.group_size"), text
    written = generation.elbo_samples != Generation().elbo_samples
    if written and "bound" not in config.trainer.reads:
        yield ("generation.elbo_samples", "trainer.preset"), "only BGPO trains on a bound; leave it out"


def _shards(config: VLMConfig) -> Iterator[Finding]:
    key, trainer = "distributed.fsdp", config.trainer
    if not config.distributed.fsdp:
        return
    if trainer.fit_batch:
        text = "a process that leaves a pass for want of memory leaves the others waiting; find micro_batch by hand"
        yield ("trainer.fit_batch", key), text
    if "heads" in trainer.reads:
        yield (key, "trainer.algorithm"), f"{trainer.name} trains modules beside the model; write false"
    if config.trains_shards and "ema" in trainer.reads:
        text = f"{trainer.name} reads a moving average, which of all weights is not held in shards; give vlm.lora"
        yield (key, "vlm.lora"), text
    if config.synthesis is not None:
        yield (key, "synthesis"), "descriptions are kept by one process, shards are of several; write null"


def _staleness(config: VLMConfig) -> Iterator[Finding]:
    at, trainer, staleness = "generation.staleness", config.trainer, config.generation.staleness
    if not staleness:
        return
    if "older_samples" not in trainer.takes:
        yield (at, "trainer.algorithm"), f"{trainer.algorithm} learns from samples of the present weights; write 0"
    for name in ("stages", "rescue", "synthesis"):
        if getattr(config, name):
            yield (name, at), "was not tried with it; leave it out, or write 0"
    if config.generation.answers_ahead:
        if config.environment is not None:
            yield ("generation.vllm.url", at), "a server samples answers ahead, not episodes; leave it out, or write 0"
        unsupported = {
            "trainer.resample": config.trainer.group_filter.rounds > 1,
            "augmentation": config.augmentation is not None,
        }
        for key in [key for key, is_set in unsupported.items() if is_set]:
            text = "this needs results of earlier iterations, before which the server samples; leave it out, or write 0"
            yield (key, at), text
    if config.distributed.fsdp:
        yield ("distributed.fsdp", at), "weights in shards are not kept for later; write 0"


def _strategies(config: VLMConfig) -> Iterator[Finding]:
    """Stages, and questions that are changed or made during the run."""
    if config.stages:
        total = sum(stage.iterations for stage in config.stages)
        if total != config.iterations:
            yield ("iterations", "stages"), f"the stages have {total} iterations together; write iterations: {total}"
    for name in ("stages", "augmentation", "rescue", "synthesis"):
        if getattr(config, name) and config.environment is not None:
            yield (name, "environment"), "is for answers to questions; leave it out"
    if config.augmentation is not None and sorted(re.findall(r"{.*?}", config.augmentation.truth)) != [
        "{answer}",
        "{question}",
    ]:
        yield ("augmentation.truth",), "write the places {question} and {answer} in it, and no others"
    if config.synthesis is not None and (config.trainer.group_filter.rounds > 1 or config.augmentation is not None):
        yield ("synthesis", "trainer.resample"), "questions are answered once; write resample: 0, augmentation: null"
    if config.synthesis is not None and any(stage.task for stage in config.stages):
        yield ("synthesis", "stages"), "pictures are made of one task's questions; leave it out, or task of the stages"
    if config.synthesis is not None and config.generation.group_size < 2:
        yield ("synthesis", "generation.group_size"), "one answer has no diversity; write 2 or more"


HIDDEN = {"masked_image", "degraded", "divergence", "reference_probability"}
"""What is read of the question, where an answer may be one to the question with a hint."""


def _rescue(config: VLMConfig) -> Iterator[Finding]:
    rescue, trainer = config.rescue, config.trainer
    if rescue is None:
        return
    if "rescued" not in trainer.takes:
        text = f"{trainer.algorithm} takes the model's own answers alone; write algorithm: answers, or leave it out"
        yield ("rescue", "trainer.algorithm"), text
        return
    if bool(rescue.hints) == (rescue.demonstration is not None):
        yield ("rescue.hints", "rescue.demonstration"), "write one of them: columns with hints, or one with an answer"
    if sorted(re.findall(r"{.*?}", rescue.prompt)) != ["{hint}", "{question}"]:
        yield ("rescue.prompt",), "write the places {question} and {hint} in it, and no others"
    if rescue.demonstration and rescue.plain:
        yield ("rescue.plain", "rescue.demonstration"), "a demonstration is trained so in any case; leave it out"
    if read := sorted(trainer.reads & HIDDEN):
        yield ("rescue", "trainer.preset"), f"the preset reads {read[0]} of the question alone; nearest: grpo"
    preset = trainer.recipe(config)
    if preset.surrogate is None or preset.surrogate.one_ratio:
        text = "the answer that help brings has a loss of its own tokens, which this one lacks; nearest: clip"
        yield ("rescue", "trainer.preset"), text
    if config.generation.vllm is not None:
        yield ("rescue", "generation.vllm"), "was not tried with it; leave out one"
    if config.synthesis is not None or config.augmentation is not None:
        other = "synthesis" if config.synthesis is not None else "augmentation"
        yield ("rescue", other), "both change questions that are hard; leave out one"


def _economy(config: VLMConfig) -> Iterator[Finding]:
    """Why a run that trains a language model cannot choose its answers so."""
    key = "economy.keep"
    yield from config.economy.problems("generation", config.generation.group_size)
    if config.economy.keep is None:
        return
    if config.environment is not None:
        yield (key, "environment"), "is for answers to questions, not for episodes; leave it out"
    if config.synthesis is not None:
        yield (key, "synthesis"), "was not tried with pictures made in the run; leave it out"
    if "part_of_groups" not in config.trainer.takes:
        yield (key, "trainer.algorithm"), "the method reads whole groups; leave it out, or write grpo"
