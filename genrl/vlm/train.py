"""`genrl train` for a vision-language model: what of the frame is its own."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from genrl.config.method import module_of
from genrl.runtime.loop import frame
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.replay import Reopened
from genrl.vlm.common import Headed, open_reference, trained_weights
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.episodes import run as episodes
from genrl.vlm.episodes.run import Actor, EpisodesRun
from genrl.vlm.methods.extras import Average
from genrl.vlm.methods.updates import Asked
from genrl.vlm.policies.folder import open_policy
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.rollout.data import Questions, tell
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.run import AnswersRun
from genrl_rewards.rows import survey

logger = logging.getLogger(__name__)

MEMORY_HINT = "lower trainer.micro_batch, generation.max_new_tokens, or environment.parallel where there is one"


def train(config: VLMConfig, resume: Path | None = None) -> Path:
    """Train a vision-language model (`frame.train`)."""
    return frame.train(config, resume)


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where questions cannot be shared out to the processes."""
    if config.distributed.fsdp and num_processes == 1:
        raise ValueError("distributed.fsdp: there is one process, nothing to shard over; use --nproc or write false")
    for part in config.parts:
        key, number, least = part.trainer.shared(part)
        if number % num_processes:
            raise ValueError(f"{key}: {number} cannot be shared out evenly to {num_processes} processes")
        if least is not None and least[1] < num_processes:
            raise ValueError(
                f"{least[0]}: {least[1]} is less than one for each of {num_processes} processes; write more"
            )
    if config.synthesis is not None and num_processes > 1:
        raise ValueError("synthesis: descriptions that wait are kept by one process; start one, or write null")
    if config.generation.staleness and config.generation.answers_ahead and num_processes > 1:
        raise ValueError("generation.staleness: a server samples ahead for one process; start one, or write 0")


def check_questions(config: VLMConfig, policy: Policy) -> None:
    """ValueError for rewards and questions that cannot be opened, fewer questions than an iteration needs, and where
    the first one does not fit into the model."""
    opened = open_rewards(config)
    questions = Questions(config, "train")
    # Columns that a reward cannot read are told for the whole file now, not row by row in the middle of the run.
    for label, reward in opened.items() if config.trainer.learns_from != "data" else ():
        if read := survey(label, reward, questions.columns()):
            read.tell(logger)
    key, number, _ = config.trainer.shared(config)
    if len(questions) < number:
        raise ValueError(f"task: {len(questions)} questions, and an iteration needs {number} different ones ({key})")
    if config.trainer.learns_from != "data":
        # One question is enough to see that pictures and template fit; those that are too long are named when they are
        # asked.
        policy.check_room([policy.encode(questions[0].prompt)], config.generation.max_new_tokens)
    if config.trainer.demonstrations is not None:
        tell(policy, [questions[0]], config.trainer.demonstrations[1])
    if check := getattr(module_of(config.trainer), "check", None):  # what else the method reads
        check(config, policy)


def prepare(config: VLMConfig, accelerator: Accelerator) -> Policy:
    """The model, seen to fit its questions or its environment, before anything is written."""
    policy = open_policy(config, accelerator.device)
    if config.trainer.learns_from == "episodes":
        episodes.check_environment(config, policy)
    else:
        for part in config.parts:
            check_questions(part, policy)
    return policy


def open_run(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> AnswersRun | EpisodesRun:
    """What one process trains with; `stack` closes it."""
    return (episodes.open_run if config.trainer.learns_from == "episodes" else open_answers)(
        config, process, policy, stack
    )


def open_answers(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> AnswersRun:
    """Reference, optimiser, log, rewards, questions."""
    opened, reference = open_rewards(config), open_reference(config, process, policy)
    # Of any stage: an average that begins with a later stage would have missed the weights before it.
    followed = any("ema" in part.trainer.reads for part in config.parts)
    average = Average(policy.model, *ConsistencyBonus.average) if followed else None
    return AnswersRun(config, process, policy, reference, average, opened, heads_of(config, policy), stack)


def heads_of(config: VLMConfig, policy: Policy) -> dict[str, nn.Module]:
    """What the method trains beside the policy, by name: `heads(policy)` of its module, where it says so."""
    if "heads" not in config.trainer.reads:
        return {}
    heads: dict[str, nn.Module] = vars(module_of(config.trainer))["heads"](policy)
    return heads


def reopen(config: VLMConfig, device: str, iteration: int) -> Reopened:
    """The model as a run trains it."""
    policy = open_policy(config, device)
    if config.trainer.learns_from == "episodes":
        actor = Actor(policy, episodes.critic_of(config, policy))
        return Reopened(actor, trained_weights(policy, {}), {"model": policy.model}, Asked.from_dump)
    heads = heads_of(config, policy)
    judged = Headed(policy, heads) if heads else policy
    return Reopened(judged, trained_weights(policy, heads), {"model": policy.model}, Asked.from_dump)


KIND = frame.Kind("answers", check_processes, prepare, open_run, reopen, MEMORY_HINT)
