"""Combinations of settings that cannot work, refused before anything is loaded.

Each rule is a generator of (keys concerned, what is wrong and what to write instead). Rules look at values only: what
needs the disk is in `genrl.config.files`; those of windows and trees are in `genrl.config.rollout_rules`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from genrl.config.direct_rules import DIRECT, direct_rules
from genrl.config.kernel_rules import kernel_rules
from genrl.config.plans import is_flow_grpo, most_micro_batches
from genrl.config.rollout_rules import rollout_rules

if TYPE_CHECKING:
    from genrl.config import AnyConfig
    from genrl.config.schema import Config
    from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO

Finding = tuple[tuple[str, ...], str]

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

DETERMINISTIC = ("diffusion_nft", "awm", "dgpo", "crd", "dpo", *DIRECT)
WHOLE_GROUPS = ("dgpo", "crd", "dpo", "dpo_offline", "d3po")
# Losses that are not means of terms of order 1, which float16's loss scale (`Session.loss_scale`) takes them for.
NOT_IN_FLOAT16 = {
    "prdp": "the gradient grows with 1 / beta",
    "dpo": "the gradient grows with beta",
    "dpo_offline": "the gradient grows with beta",
    "draft": "the loss is a sum over the numbers of a sample, by the reward's gradient",
    "diff_instruct": "the loss is a sum over the numbers of a sample, by gradients of scores",
}


class ImpossibleConfig(ValueError):
    """Settings that contradict each other. `problems` holds (keys concerned, what to do) pairs."""

    def __init__(self, problems: list[Finding]) -> None:
        super().__init__("; ".join(f"{', '.join(keys)}: {text}" for keys, text in problems))
        self.problems = problems


def refuse_impossible(config: Config) -> None:
    """Raise ImpossibleConfig with every contradiction of `config`; return nothing if there is none."""
    rules = (
        _batches,
        _pipeline_args,
        _schedule,
        rollout_rules,
        _noise,
        _policy,
        _objective,
        _adversary,
        _talk2move,
        _prompt_rl,
        direct_rules,
        _matching,
        _fitted,
        _whole_groups,
        _rewards,
        _reward_rules,
        _prompts,
        _evaluation,
        _monitor,
        _precision,
        kernel_rules,
        _model,
        _optimizer,
        _run,
    )
    problems = [finding for rule in rules for finding in rule(config)]
    if problems:
        raise ImpossibleConfig(problems)


def looks_local(path: str) -> bool:
    """Whether `path` is written like a folder rather than a hub id (org/name)."""
    return path.startswith((".", "/", "~", "assets/")) or path.count("/") != 1


def processes_problem(config: Config, num_processes: int) -> str | None:
    """Why `num_processes` are more than this run can use, in words; None if it can use them."""
    per_update = most_micro_batches(config) // config.trainer.updates
    if num_processes <= per_update:
        return None
    return (
        f"{num_processes} processes, but an optimiser step has only {per_update} micro-batches to share; start "
        f"{per_update} processes or fewer, or lower sampling.batch_size ({config.sampling.batch_size})"
    )


def _batches(config: Config) -> Iterator[Finding]:
    sampling, updates = config.sampling, config.trainer.updates
    total, pieces = sampling.images_per_iteration, sampling.micro_batches
    grows = is_flow_grpo(config.trainer) and config.trainer.tree is not None  # then trees are shared out
    if sampling.group_size < 2 and not _stands_alone(config):
        text = "one sample has nothing to be compared with, so its advantage is 0; use a group of 2 or more"
        yield ("sampling.group_size", "trainer.advantage_scale"), text
    if sampling.batch_size > total:
        sizes = f"{sampling.prompts_per_iteration} prompts x {sampling.group_size} = {total} samples"
        text = f"a batch of {sampling.batch_size} is more than {sizes}; use {total} or less"
        yield ("sampling.batch_size", "sampling.prompts_per_iteration", "sampling.group_size"), text
    if updates > pieces and not grows:
        text = f"{total} samples in batches of {sampling.batch_size} are {pieces} micro-batches, too few for {updates}"
        text = f"{text} updates; use {pieces} or less, or a smaller batch"
        yield ("trainer.updates_per_iteration", "sampling.batch_size"), text


def _stands_alone(config: Config) -> bool:
    """Whether a sample has a use without others of its prompt."""
    trainer = config.trainer
    if is_flow_grpo(trainer):
        return trainer.advantage_scale == "prompt_history" or trainer.aggregate == "log_tame_released"
    return trainer.algorithm in ("spo", *DIRECT)  # SPO compares candidates; a gradient needs no comparison


def _pipeline_args(config: Config) -> Iterator[Finding]:
    for name in config.sampling.pipeline_args:
        key = f"sampling.pipeline_args.{name}"
        if name in OWN_KEY:
            yield (key, OWN_KEY[name]), f"has a key of its own; write {OWN_KEY[name]} instead"
        elif name in OURS:
            yield (key,), "is set by the trainer; remove it"


def _schedule(config: Config) -> Iterator[Finding]:
    if config.trainer.algorithm == "spo":
        yield from _candidates(config)
        return
    if config.sampling.num_inference_steps > 1:
        return
    keys = ("sampling.num_inference_steps", "trainer.algorithm")
    if is_flow_grpo(config.trainer):
        yield keys, "the last step is never stochastic, so with 1 step nothing is trained; use 2 or more (peers: 10)"
    elif config.trainer.algorithm in ("d3po", "prdp"):
        yield keys, "the last step is never stochastic, so with 1 step nothing is trained; use 2 or more (D3PO: 20)"
    elif config.trainer.algorithm == "awm" and config.trainer.levels == "grid":
        yield keys, "neither the first noise level is trained nor the last; use 2 or more steps (AWM: 14)"
    elif config.trainer.algorithm in ("diffusion_nft", "crd") and config.trainer.timesteps_per_sample is None:
        yield keys, "all noise levels but the last are trained, and there is only 1; use 2 or more steps (paper: 10)"


def _candidates(config: Config) -> Iterator[Finding]:
    assert config.trainer.algorithm == "spo"
    steps, first = config.sampling.num_inference_steps, config.trainer.first
    fix = f"use {steps - 2} or less" if steps > 1 else "use 2 steps or more"
    if first > steps - 2:
        text = f"no step of {steps} is left at which candidates can always be compared; {fix}"
        yield ("trainer.first", "sampling.num_inference_steps"), text


def _noise(config: Config) -> Iterator[Finding]:
    if config.trainer.algorithm not in ("spo", "d3po", "prdp") and not is_flow_grpo(config.trainer):
        return
    kernel, level = config.trainer.kernel, config.trainer.noise_level
    keys = ("trainer.noise_level", "trainer.kernel")
    if kernel == "wan_sde":
        if level is not None:
            yield keys, f"wan_sde takes its noise from the schedule and has no level, found {level:g}; write null"
    elif level is None:
        yield keys, f"{kernel} needs a level; use 0.7 (flow_sde), 0.3 (dance_sde), 0.8 (flow_cps) or 1 (ddim)"
    elif level == 0:
        text = f"{kernel} at level 0 is deterministic and has no density to train on; use a level above 0"
        yield keys, f"{text}, or algorithm diffusion_nft, which needs none"
    elif kernel in ("flow_cps", "flow_ddim", "ddim") and level > 1:
        yield keys, f"{kernel} has levels above 0 to 1, found {level:g}; use 1 or less"


def _policy(config: Config) -> Iterator[Finding]:
    if not is_flow_grpo(config.trainer):
        return
    if not config.trainer.guidance_in_training and "true_cfg_scale" in config.sampling.pipeline_args:
        text = "only guidance_scale can be switched off in training, this guidance would stay; write true"
        yield ("trainer.guidance_in_training", "sampling.pipeline_args.true_cfg_scale"), text
    low, _ = config.trainer.clip_bounds
    if low >= 1:
        yield ("trainer.clip_range",), f"the ratio would be kept above 1 - {low:g} <= 0, which clips nothing; use 1e-4"
    yield from _kept_graph(config, config.trainer)
    kernel, kl = config.trainer.kernel, config.trainer.kl
    if config.trainer.kl_weight > 0 and kl == "gaussian_dt" and kernel in ("ddim", "flow_cps"):
        # It takes the transition std s for b sqrt(dt), b the diffusion coefficient of an SDE. flow_ddim is one step of
        # such an SDE (b -> eta sqrt(2 sigma / (1 - sigma)) as dt -> 0); the s of flow_cps does not shrink with dt.
        reason = "its steps are alpha-bars" if kernel == "ddim" else "its noise does not shrink with the step"
        yield ("trainer.kl", "trainer.kernel"), f"{kernel} has no dt to weight by ({reason}); use gaussian"


def _kept_graph(config: Config, trainer: FlowGRPO) -> Iterator[Finding]:
    if not trainer.keep_graph:
        return
    updates = trainer.updates * trainer.epochs
    if updates > 1:
        keys = ("trainer.keep_graph", "trainer.updates_per_iteration", "trainer.inner_epochs")
        yield keys, f"activations of sampling serve one update, and there are {updates} per iteration; use 1, or false"
    for key, value, text in (
        ("trainer.guidance_in_training", not trainer.guidance_in_training, "training makes other model calls"),
        ("model.gradient_checkpointing", config.model.gradient_checkpointing, "activations are not kept at all"),
        ("distributed.fsdp", config.distributed.fsdp, "sharded weights are gathered for one pass at a time"),
    ):
        if value:
            yield ("trainer.keep_graph", key), f"{text}; write trainer.keep_graph: false"


def _objective(config: Config) -> Iterator[Finding]:
    """Which loss, on which advantage."""
    trainer = config.trainer
    if not is_flow_grpo(trainer):
        return
    if trainer.objective == "score_function":
        if config.optimizer_steps > config.iterations:
            keys = ("trainer.objective", "trainer.updates_per_iteration", "trainer.inner_epochs")
            yield keys, "the score function has no ratio: after one update its samples are stale; use 1, or importance"
        for key in ("guard", "layer_tuning"):
            if getattr(trainer, key):
                text = "works on the importance ratio, which the score function has not; leave it out, or importance"
                yield (f"trainer.{key}", "trainer.objective"), text
    if trainer.guard and trainer.kernel == "ddim":
        text = "guard divides by the step in sigma, and ddim's are alpha-bars; use a flow model's kernel, or false"
        yield ("trainer.guard", "trainer.kernel"), text
    if trainer.guard and trainer.log_prob_reduction == "sum":
        text = "guard has a ratio of its own, a mean over the latent's numbers; write mean"
        yield ("trainer.log_prob_reduction", "trainer.guard"), text
    if trainer.kl_weight > 0 and trainer.kl == "x_prediction" and trainer.kernel == "ddim":
        text = "x_prediction is of a velocity; use mean_square or gaussian"
        yield ("trainer.kl", "trainer.kernel"), text
    yield from _advantage(config)


def _advantage(config: Config) -> Iterator[Finding]:
    trainer, tree = config.trainer, getattr(config.trainer, "tree", None)
    assert is_flow_grpo(trainer)
    scale, aggregate, history = trainer.advantage_scale, trainer.aggregate, trainer.history
    if scale == "prompt_history":
        if history.min_count > history.size:
            text = f"{history.min_count} rewards are never reached, {history.size} are kept; use {history.size} or less"
            yield ("trainer.history.min_count", "trainer.history.size"), text
    elif history != type(history)():
        text = "is of advantage_scale: prompt_history; remove it, or change the scale"
        yield ("trainer.history", "trainer.advantage_scale"), text
    if tree is not None and (scale == "prompt_history" or aggregate != "sum"):
        named = "advantage_scale" if scale == "prompt_history" else "aggregate"
        if tree.normalise == "depth":
            text = "normalises rewards by themselves, at every depth; write group"
            yield ("trainer.tree.normalise", f"trainer.{named}"), text
        if tree.contrast is not None:
            text = "has advantages of its own, over a prompt's history; write null"
            yield ("trainer.tree.contrast", f"trainer.{named}"), text
    if aggregate == "sum":
        return
    meant = {"gdpo": ("group",), "log_tame": ("group", "global", "none"), "log_tame_released": ("none",)}[aggregate]
    if scale not in meant:
        why = {"gdpo": "divides each reward by its group's spread", "log_tame": "is a rule for groups"}
        text = f"{aggregate} {why.get(aggregate, 'divides by nothing')}; use {' or '.join(meant)}"
        yield ("trainer.advantage_scale", "trainer.aggregate"), text
    for index, reward in enumerate(config.rewards):
        if reward.normalize != "none":
            text = f"{aggregate} judges and normalises the scores themselves; write none"
            yield (f"rewards.{index}.normalize", "trainer.aggregate"), text
        if aggregate != "gdpo" and reward.weight != 0 and reward.gate is not None and reward.gate.otherwise <= -1:
            text = f"{aggregate} takes ln(1 + r), which {reward.gate.otherwise:g} has not; use a number above -1"
            yield (f"rewards.{index}.gate.otherwise", "trainer.aggregate"), text


def _talk2move(config: Config) -> Iterator[Finding]:
    """An editing model, trained on its first steps."""
    trainer, steps = config.trainer, config.sampling.num_inference_steps
    if trainer.algorithm != "talk2move":
        return
    for key in ("window", "noise_outside_window", "tree", "tail_ratio", "layer_tuning"):
        if getattr(trainer, key):
            text = "which steps are drawn is a matter of the exit step here; remove it, or use algorithm flow_grpo"
            yield (f"trainer.{key}", "trainer.algorithm"), text
    if not config.sampling.inputs:
        text = "an editing model needs pictures to edit; name the argument of its call and the column of the files"
        yield ("sampling.inputs", "trainer.algorithm"), f"{text}, for example {{image: source_image}}"
    if trainer.kernel == "ddim":
        text = "the shortcut is for flow models, ddim for others; use flow_sde"
        yield ("trainer.kernel", "trainer.algorithm"), text
    if trainer.exit_step is not None and trainer.exit_step > steps - 1:
        text = f"the last of {steps} steps is never stochastic; use {steps - 1} or less, or null to have it found"
        yield ("trainer.exit_step", "sampling.num_inference_steps"), text
    if trainer.exit_step is not None and trainer.step_evaluation != type(trainer.step_evaluation)():
        text = "the exit step is given, so it is not looked for; remove it, or write exit_step: null"
        yield ("trainer.step_evaluation", "trainer.exit_step"), text
    if trainer.shortcut >= steps:
        text = f"{trainer.shortcut} steps are no shortcut of {steps}; use less (Talk2Move: 2 of 10)"
        yield ("trainer.shortcut", "sampling.num_inference_steps"), text


def _adversary(config: Config) -> Iterator[Finding]:
    """Which iterations train the model, and which its judge."""
    if config.trainer.algorithm != "adv_grpo":
        return
    adversary = config.trainer.adversary
    if adversary.schedule != "alternate" and adversary.every != type(adversary).model_fields["every"].default:
        text = f"is of schedule: alternate, and {adversary.schedule} needs none; remove it, or change the schedule"
        yield ("trainer.adversary.every", "trainer.adversary.schedule"), text
    if config.model_iterations == 0:
        keys = ("trainer.adversary.every", "trainer.adversary.warmup", "iterations")
        text = f"none of {config.iterations} iterations trains the model"
        if adversary.warmup >= config.iterations:
            yield keys[1:], f"{text}; use a warm-up of {config.iterations - 1} or less"
        else:
            yield keys, f"{text}: the first would be the {adversary.every}th; use more, or a smaller every"
    if config.sampling.num_frames is not None and config.sampling.num_frames > 1:
        text = "references are pictures, and these are videos; use 1, or another algorithm"
        yield ("sampling.num_frames", "trainer.algorithm"), text


def _prompt_rl(config: Config) -> Iterator[Finding]:
    """Groups of refined and retained prompts."""
    trainer, size = config.trainer, config.sampling.group_size
    if trainer.algorithm != "prompt_rl":
        return
    if trainer.retained >= size:
        text = (
            f"all {size} samples of a group would keep their prompt, and the language model has nothing to learn from"
        )
        yield ("trainer.retained", "sampling.group_size"), f"{text}; use {size - 1} or less (PromptRL: 2 of 8)"
    if trainer.tree is not None:
        text = "the samples of a group have prompts of their own, so nothing before a branch is shared; write null"
        yield ("trainer.tree", "trainer.algorithm"), text
    if trainer.advantage_scale == "prompt_history":
        text = "refined and retained prompts are judged within their group; use group"
        yield ("trainer.advantage_scale", "trainer.algorithm"), text
    if trainer.aggregate != "sum":
        text = "the format reward joins the sum of the others; write sum"
        yield ("trainer.aggregate", "trainer.algorithm"), text
    if trainer.rewriter.dtype == "float16":
        text = "its losses are not scaled, and small gradients vanish in float16; use bfloat16 or float32"
        yield ("trainer.rewriter.dtype",), text
    if trainer.rewriter.instruction.count("{prompt}") != 1:
        found = trainer.rewriter.instruction.count("{prompt}")
        text = f"holds {{prompt}} {found} times; write it once, where the prompt is to stand"
        yield ("trainer.rewriter.instruction",), text
    first, last = trainer.rewriter.answer_tags
    if first in last or last in first:
        text = f"{first!r} and {last!r} cannot be told apart; use two like <answer> and </answer>"
        yield ("trainer.rewriter.answer_tags",), text
    if trainer.reward_column is None:
        return
    if trainer.advantage_scale != "group":
        text = "prompts are judged by different rewards, each with its scale; use group"
        yield ("trainer.advantage_scale", "trainer.reward_column"), text
    if config.prompts.train.endswith(".txt"):
        text = "a .txt file has no columns; use a .jsonl file, or null"
        yield ("trainer.reward_column", "prompts.train"), text


def _matching(config: Config) -> Iterator[Finding]:
    """Training on finished samples, drawn deterministically."""
    trainer, steps = config.trainer, config.sampling.num_inference_steps
    if trainer.algorithm == "dpo_offline" and config.sampling.same_initial_noise:
        text = "dpo_offline trains on given pictures and draws none, so it would do nothing; write false"
        yield ("sampling.same_initial_noise", "trainer.algorithm"), text
    if trainer.algorithm not in DETERMINISTIC:
        return
    if config.sampling.same_initial_noise:
        keys = ("sampling.same_initial_noise", "trainer.algorithm")
        text = f"{trainer.algorithm} samples deterministically: a group from one noise is one picture many times"
        yield keys, f"{text}; write false"
    chosen, available = None, steps
    if trainer.algorithm in ("diffusion_nft", "crd"):
        chosen = trainer.timesteps_per_sample
    elif trainer.algorithm == "dgpo":
        chosen, available = trainer.timesteps_per_sample, min(steps, trainer.first_steps)
        if trainer.first_steps > steps:
            keys = ("trainer.first_steps", "sampling.num_inference_steps")
            yield keys, f"the sampling grid has {steps} steps; use {steps} or less"
    if chosen is not None and chosen > available:
        keys = ("trainer.timesteps_per_sample", "sampling.num_inference_steps")
        if trainer.algorithm == "dgpo":
            keys = ("trainer.timesteps_per_sample", "trainer.first_steps")
        yield keys, f"{chosen} noise levels cannot be drawn from a grid of {available}; use {available} or less"


def _fitted(config: Config) -> Iterator[Finding]:
    """Where memory is not that of one model call with its graph, trying one says nothing."""
    if not config.sampling.fit_batch:
        return
    if config.trainer.algorithm in DIRECT:
        text = f"{config.trainer.algorithm} goes backward through the decoder too; find batch_size by hand"
        yield ("sampling.fit_batch", "trainer.algorithm"), text
    if is_flow_grpo(config.trainer) and config.trainer.keep_graph:
        text = "kept graphs are those of all micro-batches, whatever their size; write false in one of them"
        yield ("sampling.fit_batch", "trainer.keep_graph"), text
    if config.trainer.algorithm in ("prompt_rl", "adv_grpo"):
        text = f"{config.trainer.algorithm} trains another model beside this one, which no trial runs"
        yield ("sampling.fit_batch", "trainer.algorithm"), f"{text}; find batch_size by hand"
    if config.distributed.fsdp:
        yield ("sampling.fit_batch", "distributed.fsdp"), "sharded models are not tried; find batch_size by hand"


def _whole_groups(config: Config) -> Iterator[Finding]:
    """What compares the samples of a group with each other in its loss has them in one micro-batch."""
    sampling, algorithm = config.sampling, config.trainer.algorithm
    size, group = sampling.batch_size, sampling.group_size
    if algorithm == "dpo_offline" and group != 2:
        text = f"a pair is a group of 2 images, found {group}; write 2"
        yield ("sampling.group_size", "trainer.algorithm"), text
    elif algorithm in WHOLE_GROUPS and size % group:
        near = max(group, size // group * group)
        text = f"{algorithm} needs whole groups in a batch, but {size} is no multiple of {group}; use {near}"
        yield ("sampling.batch_size", "sampling.group_size", "trainer.algorithm"), text
    guidance = getattr(config.trainer, "guidance_in_training", True)
    if algorithm in WHOLE_GROUPS and not guidance and "true_cfg_scale" in sampling.pipeline_args:
        text = "only guidance_scale can be switched off in training, this guidance would stay; write true"
        yield ("trainer.guidance_in_training", "sampling.pipeline_args.true_cfg_scale"), text


def _rewards(config: Config) -> Iterator[Finding]:
    keys = tuple(f"rewards.{index}.weight" for index in range(len(config.rewards)))
    if all(reward.weight == 0 for reward in config.rewards) and config.trainer.algorithm != "diff_instruct":
        yield keys, "all weights are 0, so there is nothing to train on; give one reward a weight"
    for index, reward in enumerate(config.rewards):
        for earlier in range(index):
            other = config.rewards[earlier]
            if (other.name, other.args, other.remote) == (reward.name, reward.args, reward.remote):
                pair = (f"rewards.{index}.name", f"rewards.{earlier}.name")
                yield pair, f"{reward.name!r} with the same args twice; keep one and add the weights"
                break


def _reward_rules(config: Config) -> Iterator[Finding]:
    labels = config.reward_labels
    for index, reward in enumerate(config.rewards):
        at = f"rewards.{index}"
        steps = [iteration for iteration, _ in reward.schedule]
        if steps != sorted(set(steps)):
            yield (f"{at}.schedule",), f"the iterations must rise, found {', '.join(map(str, steps))}"
        if reward.schedule and reward.weight == 0:
            text = "a schedule multiplies the weight, which is 0; give the weight that it multiplies"
            yield (f"{at}.schedule", f"{at}.weight"), text
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
        theirs = ("args", "offload", "isolate")
        for key in [key for key in theirs if getattr(reward, key) != type(reward).model_fields[key].default]:
            yield (f"{at}.{key}", f"{at}.remote"), "is a matter of the server that computes this reward; leave it out"
    if reward.isolate and reward.offload:
        text = "the model is in another process, which keeps it; leave out one of them"
        yield (f"{at}.offload", f"{at}.isolate"), text
    if reward.remote is None and not reward.isolate:
        return
    outage, limit = reward.outage, config.distributed.timeout_s
    if outage.timeout_s > outage.deadline_s:
        text = f"one attempt may take longer ({outage.timeout_s:g} s) than the whole call; use {outage.deadline_s:g}"
        yield (f"{at}.outage.timeout_s", f"{at}.outage.deadline_s"), f"{text} or less"
    waits = outage.deadline_s + (outage.pause_s if outage.policy == "pause" else 0)
    if waits >= limit:
        keys = (f"{at}.outage.deadline_s", f"{at}.outage.pause_s", "distributed.timeout_s")
        text = f"up to {waits:g} s are waited for the reward, but a run without progress is ended after {limit:g} s"
        yield keys[:1] + keys[2:] if outage.policy != "pause" else keys, f"{text}; wait less, or raise the timeout"


def _prompts(config: Config) -> Iterator[Finding]:
    prompts = config.prompts
    if prompts.eval is not None and PurePosixPath(prompts.eval) == PurePosixPath(prompts.train):
        text = "the same prompts: evaluation must be on held-out ones; name another file"
        yield ("prompts.eval", "prompts.train"), text
    files = [path for path in (prompts.train, prompts.eval) if path is not None]
    if prompts.column != "prompt" and all(path.endswith(".txt") for path in files):
        yield ("prompts.column", "prompts.train"), "a .txt file has no columns; remove it, or use a .jsonl file"


def _evaluation(config: Config) -> Iterator[Finding]:
    evaluation = config.evaluation
    if evaluation.every == 0:
        return
    if config.prompts.eval is None:
        text = "evaluation needs held-out prompts; set prompts.eval, or evaluation.every to 0"
        yield ("prompts.eval", "evaluation.every"), text
    if "grid_prompts" in evaluation.model_fields_set and evaluation.grid_prompts > evaluation.num_prompts:
        keys = ("evaluation.grid_prompts", "evaluation.num_prompts")
        yield keys, f"{evaluation.grid_prompts} pictures of {evaluation.num_prompts} prompts; use the same or less"
    if evaluation.batch_size is not None and evaluation.batch_size > evaluation.num_prompts:
        keys = ("evaluation.batch_size", "evaluation.num_prompts")
        yield keys, f"a batch of {evaluation.batch_size} of {evaluation.num_prompts} prompts; use the same or less"


def _monitor(config: Config) -> Iterator[Finding]:
    """A scorer that nobody trains on, watched."""
    yield from monitor_problems(config, config.reward_labels, "reward")
    monitor = config.evaluation.monitor
    if monitor is not None and monitor.reward in config.reward_labels:
        index = config.reward_labels.index(monitor.reward)
        if config.rewards[index].weight != 0:
            text = "is trained on, and so no witness; give another reward of weight 0"
            yield ("evaluation.monitor.reward", f"rewards.{index}.weight"), text


def monitor_problems(config: AnyConfig, names: Sequence[str], what: str) -> Iterator[Finding]:
    """Why the monitor cannot watch: not one of the names of what is evaluated, or too few evaluations."""
    evaluation, at = config.evaluation, "evaluation.monitor"
    monitor = evaluation.monitor
    if monitor is None:
        return
    if monitor.reward not in names:
        hint = difflib.get_close_matches(monitor.reward, names, n=1, cutoff=0.5)
        meant = f"did you mean {hint[0]!r}? " if hint else ""
        yield (f"{at}.reward",), f"no {what} is called {monitor.reward!r}; {meant}they are: {', '.join(names)}"
    if evaluation.every == 0:
        yield (at, "evaluation.every"), "nothing is evaluated, so nothing can be watched; evaluate every 20 iterations"
        return
    after = -(-config.iterations // evaluation.every)  # besides the first, before training
    if monitor.patience > after:
        text = f"only {after} evaluations follow the first, so {monitor.patience} cannot lie lower; use {after}"
        yield (f"{at}.patience", "evaluation.every", "iterations"), text + " or less"


def _precision(config: Config) -> Iterator[Finding]:
    dtype, autocast = config.model.dtype, config.model.autocast
    keys = ("model.autocast", "model.dtype")
    if dtype == "float16" and autocast == "float16":
        yield keys, "autocast does nothing for a float16 model; remove it, or hold the weights in float32"
    elif autocast is not None and dtype not in ("float32", autocast):
        yield keys, f"two different half precisions, {dtype} and {autocast}; use {dtype} and null"
    if dtype == "float16" and config.model.lora is None:
        text = "trained float16 weights lose small updates and overflow; use float32 with autocast: float16, or lora"
        yield ("model.dtype", "model.lora"), text
    why = NOT_IN_FLOAT16.get(config.trainer.algorithm)
    if why is not None and "float16" in (dtype, autocast):
        key, instead = ("model.dtype", "float32") if dtype == "float16" else ("model.autocast", "null")
        text = f"float16 needs a loss of known size, and that of {config.trainer.algorithm} has none ({why})"
        yield (key, "trainer.algorithm"), f"{text}: it would overflow or vanish; use bfloat16, or {instead}"
    if dtype == "bfloat16" and autocast is None and config.model.lora is None:
        text = "all weights are trained in float32 and would be fed the bfloat16 of the other parts; use bfloat16"
        yield ("model.autocast", "model.dtype", "model.lora"), text


def _model(config: Config) -> Iterator[Finding]:
    model = config.model
    if config.distributed.fsdp and model.lora is not None:
        text = "sharding is for full fine-tuning, adapters are small; write lora: null, or fsdp: false"
        yield ("distributed.fsdp", "model.lora"), text
    if model.offload_vae and config.trainer.algorithm in DIRECT:
        text = f"{config.trainer.algorithm} goes backward through the VAE, which has to stay; write false"
        yield ("model.offload_vae", "trainer.algorithm"), text
    if model.revision is not None and looks_local(model.path):
        yield ("model.revision", "model.path"), "a folder has no revisions; remove it, or use a hub id (org/name)"
    if model.lora is not None and model.lora.targets is not None:
        twice = [name for name, count in Counter(model.lora.targets).items() if count > 1]
        if twice:
            yield ("model.lora.targets",), f"{', '.join(twice)} twice; keep one"


def _optimizer(config: Config) -> Iterator[Finding]:
    warmup, total = config.optimizer.warmup_steps, config.optimizer_steps
    if warmup >= total > 0:  # that nothing is trained is told elsewhere
        keys = ("optimizer.warmup_steps", "iterations", "trainer.updates_per_iteration")
        yield keys, f"the run has {total} optimiser steps, so the warm-up never ends; use {total - 1} or less"


def _run(config: Config) -> Iterator[Finding]:
    if len(set(config.trackers)) < len(config.trackers):
        yield ("trackers",), "a tracker is named twice; keep one"
    output = PurePosixPath(config.output)
    if looks_local(config.model.path) and output.is_relative_to(PurePosixPath(config.model.path)):
        text = f"the run would write into the model's folder {config.model.path}; use another, for example runs/first"
        yield ("output", "model.path"), text
    for key, path in (("prompts.train", config.prompts.train), ("prompts.eval", config.prompts.eval)):
        if path is not None and output == PurePosixPath(path):
            yield ("output", key), "the run folder would replace the prompt file; use another, for example runs/first"
