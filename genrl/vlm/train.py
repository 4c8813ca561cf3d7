"""`genrl train` for a vision-language model: from a configuration to a trained model in a run folder."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn

from genrl.config.vlm import VLMConfig
from genrl.runtime.loop import Abandoned, Loop, begin, claim, make_accelerator, open_loop, say_end
from genrl.runtime.metrics import check_trackers
from genrl.runtime.pictures import save_samples
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run, write_atomic
from genrl.runtime.signals import Stop, Watchdog
from genrl.vlm.engines.vllm import open_sampler
from genrl.vlm.evaluate import Judged, figures, judge, shows_pictures
from genrl.vlm.methods.answers import train as answers
from genrl.vlm.methods.episodes import frame as episodes
from genrl.vlm.methods.extras import Average
from genrl.vlm.methods.music_rl import train as music_rl
from genrl.vlm.methods.music_rl.settings import MusicRL
from genrl.vlm.policies.folder import open_policy, save_model
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout import artefacts
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.rollout.synthesis import Synthesis
from genrl.vlm.session import Session
from rewards.contract import Reward

SHOWN = 32
"""Answers of an evaluation that are written into samples/."""
SEEN = 0.02
"""Accuracy with pictures over that without them, below which reinforcement has nothing to work on."""

logger = logging.getLogger(__name__)


def train(config: VLMConfig, resume: Path | None = None) -> Path:
    """Train as `config` says, into its run folder, or go on in the folder `resume`; returns the folder.

    Every process of a distributed run calls this. Raises ConfigError or ValueError for what is wrong before work
    starts, SystemExit (130, 143) where the process was asked to end and has saved.
    """
    if config.trainer.acts:
        return episodes.train(config, resume)
    check_trackers(config.trackers)
    accelerator = make_accelerator(config.distributed.timeout_s)
    check_processes(config, accelerator.num_processes)
    set_seed(config.seed)
    with ExitStack() as stack:
        claimed = claim(stack, config.output, resume, accelerator)
        policy = open_policy(config, accelerator.device)  # raises, as do these, before anything is written
        for part in config.parts:
            check_questions(part, policy)
        stop, watchdog, progress = begin(stack, claimed, config, accelerator, unit="answers")
        session = open_session(config, accelerator, claimed.run, progress, watchdog, stop, policy, stack)
        if claimed.found:
            session.loop.restore(claimed.found)
        if session.average is not None:
            session.loop.keep("average", session.average)
        stack.enter_context(watchdog)
        try:
            if session.baseline is None:
                answers.train(session)
            else:
                music_rl.train(session, session.baseline)
        except Abandoned:
            logger.info("the running iteration is done again on resume")
        finish(session)
    if stop.requested:
        raise SystemExit(stop.exit_code)
    return claimed.run.folder


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where questions cannot be shared out to the processes."""
    key, number = config.trainer.shared(config)
    if number % num_processes:
        raise ValueError(f"{key}: {number} cannot be shared out evenly to {num_processes} processes")
    if config.synthesis is not None and num_processes > 1:
        raise ValueError("synthesis: descriptions that wait are kept by one process; start one, or write null")
    if config.generation.engine == "vllm" and num_processes > 1:
        raise ValueError("generation.engine: vLLM samples for one process; start one, or write transformers")


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


def open_session(
    config: VLMConfig,
    accelerator: Accelerator,
    run: Run,
    progress: Progress,
    watchdog: Watchdog,
    stop: Stop,
    policy: Policy,
    stack: ExitStack,
) -> Session:
    """What one process trains with: reference, optimiser, log, rewards, questions; `stack` closes them."""
    opened, reference = open_rewards(config), None
    alone = isinstance(config.trainer, MusicRL)
    if any(part.trainer.reference for part in config.parts) and policy.peft is None:
        reference = open_policy(config, accelerator.device)
        reference.model.requires_grad_(False)
    average = None
    averages = [part.trainer.average for part in config.parts if part.trainer.average is not None]
    if averages:
        average = Average(policy.model, *averages[0])
    model: Any = policy.model
    groups, rates = [{"params": policy.parameters, "name": "policy"}], {"policy": config.optimizer.lr}
    baseline = None
    if alone:
        baseline = music_rl.Baseline(cast(Any, policy))
        model = nn.ModuleDict({"policy": policy.model, "baseline": baseline})
        groups.append({"params": list(baseline.parameters()), "name": "baseline"})
        rates["baseline"] = config.optimizer.lr
    loop = open_loop(config, accelerator, model, groups, rates, run, progress, watchdog, stop, stack)
    if config.generation.engine == "vllm":
        policy.sampler = open_sampler(config, policy, run.folder / "weights")
        loop.optimizer.register_step_post_hook(lambda *_: policy.sampler.stepped())
    loop.evaluate = Judge(config, policy, opened, loop)
    questions, synthesis = Questions(config, "train"), None
    if config.synthesis is not None:
        synthesis = Synthesis(config, questions, policy, loop)
        stack.callback(synthesis.close)
    preset = config.trainer.recipe(config)
    session = Session(config, preset, loop, policy, reference, average, opened, questions, synthesis)
    session.baseline = baseline
    return session


class Judge:
    """Evaluation of the model as it is, shared out to the processes."""

    def __init__(self, config: VLMConfig, policy: Policy, opened: dict[str, Reward], loop: Loop) -> None:
        self.config, self.policy, self.opened, self.loop = config, policy, opened, loop
        self.questions: Questions | None = None
        self.shown = artefacts.Shown()

    def __call__(self, iteration: int) -> dict[str, float]:
        found = self._asked(blind=False)
        assert self.questions is not None
        row = figures(self.config, found)
        ends = iteration in (0, self.config.iterations)
        if ends and self.config.evaluation.blind and shows_pictures(self.questions):
            blind = figures(self.config, self._asked(blind=True))["eval/accuracy_mean"]
            row["eval/accuracy_blind"] = blind
            if iteration == 0 and row["eval/accuracy_mean"] - blind < SEEN:
                self.loop.progress.say(
                    f"warning: {row['eval/accuracy_mean']:.3f} of the answers are right, {blind:.3f} with black "
                    "pictures: the model does not see what is asked, and reinforcement will not teach it to"
                )
        if self.loop.is_main:
            self._write(found, iteration)
        return row

    def _asked(self, *, blind: bool) -> Judged:
        loop = self.loop
        if self.questions is None:  # read when it is first needed
            self.questions = Questions(self.config, "eval")
        numbers = np.array_split(np.arange(len(self.questions)), loop.accelerator.num_processes)
        loop.phase("evaluating", len(self.questions))
        asked = (
            self.policy,
            self.config,
            self.opened,
            self.questions,
            numbers[loop.accelerator.process_index].tolist(),
        )
        if self.config.vlm.output == "text":
            mine = judge(*asked, blind=blind, advance=loop.advance_or_leave)
        else:
            self.shown = artefacts.Shown()
            mine = artefacts.judge(*asked, shown=self.shown, advance=loop.advance_or_leave)
        every = gather_object([mine])
        found: Judged = every[0]
        for part in every[1:]:
            found = found.joined(part)
        return found

    def _write(self, found: Judged, iteration: int) -> None:
        lines = [
            json.dumps({"question": name, "answer": text, **{label: v[k] for label, v in found.scores.items()}})
            for k, (name, text) in enumerate(zip(found.names[:SHOWN], found.texts, strict=False))
        ]
        self.loop.run.samples.mkdir(parents=True, exist_ok=True)
        for name, sound in self.shown.sounds.items():
            write_atomic(self.loop.run.samples / f"step-{iteration:06d}-{name}.wav", sound)
        if self.shown.images:
            number = len(self.shown.images)
            scores = {label: values[:number] for label, values in found.scores.items()}
            sheet = save_samples(self.loop.run.samples, iteration, self.shown.images, found.names[:number], scores)
            self.loop.log.log_picture(iteration, "samples/grid", sheet)
        write_atomic(self.loop.run.samples / f"step-{iteration:06d}.jsonl", "\n".join(lines) + "\n")


def finish(session: Session) -> None:
    """The end of a run, complete or not: last checkpoint, the model's folder, report, and where they are."""
    loop = session.loop
    loop.save()
    if not loop.is_main:
        return
    folder = loop.run.folder / "model"
    save_model(session.policy, session.config.vlm.path, folder)
    say_end(loop, "accuracy", pictures="curves", result=f"the model, as transformers saves it: {folder}")
