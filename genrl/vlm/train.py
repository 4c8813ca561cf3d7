"""`genrl train` for a vision-language model: what of the frame is its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from torch import nn

from genrl.config.vlm import VLMConfig
from genrl.runtime import frame
from genrl.runtime.loop import Loop
from genrl.runtime.optimization import Schedule, adamw
from genrl.runtime.process import Process
from genrl.runtime.weights import Weights
from genrl.vlm.engines.vllm import open_sampler
from genrl.vlm.methods import trainer
from genrl.vlm.methods.agents import train as agents
from genrl.vlm.methods.compose import preset_of
from genrl.vlm.methods.extras import Average, needed
from genrl.vlm.methods.music_rl import train as music_rl
from genrl.vlm.policies.folder import open_policy
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.rollout.synthesis import Synthesis
from genrl.vlm.run import AnswersRun

MEMORY_HINT = "lower trainer.micro_batch, or generation.max_new_tokens"


def train(config: VLMConfig, resume: Path | None = None) -> Path:
    """Train a vision-language model (`runtime.frame.train`)."""
    return frame.train(config, KIND if config.environment is None else agents.KIND, resume)


def method_of(config: VLMConfig) -> Callable[[Any, Any], None]:
    """The function that trains."""
    return music_rl.train if config.trainer.preset == "music_rl" else trainer.train


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where questions cannot be shared out to the processes."""
    if config.generation.prompts_per_iteration % num_processes:
        raise ValueError(
            f"generation.prompts_per_iteration: {config.generation.prompts_per_iteration} questions cannot be shared "
            f"out evenly to {num_processes} processes"
        )
    if config.synthesis is not None and num_processes > 1:
        raise ValueError("synthesis: descriptions that wait are kept by one process; start one, or write null")
    if config.generation.engine == "vllm" and num_processes > 1:
        raise ValueError("generation.engine: vLLM draws for one process; start one, or write transformers")


def check_questions(config: VLMConfig, policy: Policy) -> None:
    """ValueError for rewards and questions that cannot be opened, fewer questions than an iteration needs, and where
    the first one does not fit into the model."""
    open_rewards(config)
    questions = Questions(config, "train")
    if len(questions) < config.generation.prompts_per_iteration:
        raise ValueError(
            f"task: {len(questions)} questions, and an iteration needs {config.generation.prompts_per_iteration} "
            "different ones (generation.prompts_per_iteration)"
        )
    policy.check_room([policy.encode(questions[0].prompt)], config.generation.max_new_tokens)


def prepare(config: VLMConfig, accelerator: Accelerator) -> Policy:
    """The model and its questions: what is wrong with them is said before anything is written."""
    for part in config.parts:
        preset_of(part)
    policy = open_policy(config, accelerator.device)
    for part in config.parts:
        check_questions(part, policy)
    return policy


def open_run(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> AnswersRun:
    """What one process trains with: reference, optimiser, log, rewards, questions; `stack` closes them."""
    preset = preset_of(config)
    opened = open_rewards(config)
    needs = [needed(preset_of(part)) for part in config.parts]
    reference = None
    alone = config.trainer.preset == "music_rl"
    if (alone or any(one.ref for one in needs)) and policy.peft is None:
        reference = open_policy(config, process.accelerator.device)
        reference.model.requires_grad_(False)
    average = None
    if any(one.ema for one in needs):
        average = Average(policy.model, config.trainer.ema_decay, config.trainer.ema_every)
    questions = Questions(config, "train")
    run = AnswersRun(process, config, preset, needed(preset), policy, reference, average, opened, questions)
    model: Any = policy.model
    groups: list[dict[str, Any]] = [{"params": policy.parameters, "name": "policy"}]
    if alone:
        run.baseline = music_rl.Baseline(cast(Any, policy))
        model = nn.ModuleDict({"policy": policy.model, "baseline": run.baseline})
        groups.append({"params": list(run.baseline.parameters()), "name": "baseline"})
    rates = {group["name"]: config.optimizer.lr for group in groups}
    weights = Weights({name: p for name, p in model.named_parameters() if p.requires_grad})
    optimizer = adamw(groups, config.optimizer)
    schedule = Schedule(config.optimizer, rates, config.iterations)
    run.loop = Loop(config, process, weights, optimizer, schedule, run, retries=config.trainer.fit_batch)
    if config.generation.engine == "vllm":
        policy.sampler = open_sampler(config, policy, process.run.folder / "weights")
        optimizer.register_step_post_hook(lambda *_: policy.sampler.stepped())
    if config.synthesis is not None:
        run.synthesis = Synthesis(config, questions, policy, run.loop)
        stack.callback(run.synthesis.close)
    return run


KIND = frame.Kind("answers", check_processes, prepare, open_run, method_of, MEMORY_HINT)
