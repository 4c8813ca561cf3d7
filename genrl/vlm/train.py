"""`genrl train` for a vision-language model: from a configuration to a trained model in a run folder."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from genrl.config import dump
from genrl.config.vlm import VLMConfig
from genrl.runtime import checkpoint
from genrl.runtime import run as run_folder
from genrl.runtime.loop import Abandoned, Loop, make_accelerator
from genrl.runtime.metrics import MetricLogger, check_trackers
from genrl.runtime.progress import Progress
from genrl.runtime.report import write_report
from genrl.runtime.run import Run, write_atomic
from genrl.runtime.signals import Stop, Watchdog, catch_stop
from genrl.vlm import trainer
from genrl.vlm.compose import preset_of
from genrl.vlm.data import Questions
from genrl.vlm.evaluate import Judged, figures, judge
from genrl.vlm.extras import Average, needed
from genrl.vlm.folder import open_policy, save_model
from genrl.vlm.policy import Policy
from genrl.vlm.rollout import open_rewards
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
    check_trackers(config.trackers)
    preset_of(config)
    accelerator = make_accelerator(config.distributed.timeout_s)
    check_processes(config, accelerator.num_processes)
    set_seed(config.seed)
    run = Run(resume or Path(config.output))
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(run_folder.lock(run.folder))
        found = checkpoint.latest(run.checkpoints) if resume else None
        start = int(found.name.removeprefix("step-")) if found else 0
        policy = open_policy(config, accelerator.device)  # raises, as do these, before anything is written
        check_questions(config, policy)
        if accelerator.is_main_process:
            run_folder.prepare(
                run.folder,
                dump(config),
                seed=config.seed,
                processes=accelerator.num_processes,
                resumed_from=start if resume else None,
            )
        accelerator.wait_for_everyone()
        stop = stack.enter_context(catch_stop())
        watchdog = Watchdog(run, config.distributed.timeout_s, rank=accelerator.process_index)
        progress = stack.enter_context(
            Progress(config.iterations, start=start, enabled=accelerator.is_main_process, unit="answers")
        )
        session = open_session(config, accelerator, run, progress, watchdog, stop, policy, stack)
        if found:
            session.loop.restore(found)
        if session.average is not None:
            session.loop.keep("average", session.average)
        stack.enter_context(watchdog)
        try:
            trainer.train(session)
        except Abandoned:
            logger.info("the running iteration is done again on resume")
        finish(session)
    if stop.requested:
        raise SystemExit(stop.exit_code)
    return run.folder


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where questions cannot be shared out to the processes."""
    if config.generation.prompts_per_iteration % num_processes:
        raise ValueError(
            f"generation.prompts_per_iteration: {config.generation.prompts_per_iteration} questions cannot be shared "
            f"out evenly to {num_processes} processes"
        )


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
    preset = preset_of(config)
    need, opened = needed(preset), open_rewards(config)
    reference = None
    if need.ref and policy.peft is None:
        reference = open_policy(config, accelerator.device)
        reference.model.requires_grad_(False)
    average = Average(policy.model, config.trainer.ema_decay, config.trainer.ema_every) if need.ema else None
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": policy.parameters, "name": "policy"}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    loop = Loop(
        settings=config,
        accelerator=accelerator,
        model=policy.model,
        optimizer=optimizer,
        rates={"policy": settings.lr},
        run=run,
        log=MetricLogger(
            run,
            config.trackers,
            config=config.model_dump(mode="json"),
            resumed_from=progress.start,
            enabled=accelerator.is_main_process,
        ),
        progress=progress,
        watchdog=watchdog,
        stop=stop,
        every=config.evaluation.every,
        evaluate=lambda iteration: {},
    )
    stack.callback(loop.log.finish)
    loop.evaluate = Judge(config, policy, opened, loop)
    return Session(config, preset, need, loop, policy, reference, average, opened, Questions(config, "train"))


class Judge:
    """Evaluation of the model as it is, shared out to the processes."""

    def __init__(self, config: VLMConfig, policy: Policy, opened: dict[str, Reward], loop: Loop) -> None:
        self.config, self.policy, self.opened, self.loop = config, policy, opened, loop
        self.questions: Questions | None = None

    def __call__(self, iteration: int) -> dict[str, float]:
        found = self._asked(blind=False)
        row = figures(self.config, found)
        if iteration == 0 and self.config.evaluation.blind:
            blind = figures(self.config, self._asked(blind=True))["eval/accuracy_mean"]
            row["eval/accuracy_blind"] = blind
            if row["eval/accuracy_mean"] - blind < SEEN:
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
        mine = judge(
            self.policy,
            self.config,
            self.opened,
            self.questions,
            numbers[loop.accelerator.process_index].tolist(),
            blind=blind,
            advance=self._advance,
        )
        every = gather_object([mine])
        found: Judged = every[0]
        for part in every[1:]:
            found = found.joined(part)
        return found

    def _advance(self, answers: int) -> None:
        self.loop.advance(answers)
        if self.loop.accelerator.num_processes == 1:
            self.loop.leave_if_asked()

    def _write(self, found: Judged, iteration: int) -> None:
        lines = [
            json.dumps({"question": name, "answer": text, **{label: v[k] for label, v in found.scores.items()}})
            for k, (name, text) in enumerate(zip(found.names[:SHOWN], found.texts, strict=False))
        ]
        self.loop.run.samples.mkdir(parents=True, exist_ok=True)
        write_atomic(self.loop.run.samples / f"step-{iteration:06d}.jsonl", "\n".join(lines) + "\n")


def finish(session: Session) -> None:
    """The end of a run, complete or not: last checkpoint, the model's folder, report, and where they are."""
    loop = session.loop
    loop.save()
    if not loop.is_main:
        return
    run, say = loop.run, loop.progress.say
    save_model(session.policy, session.config.vlm.path, run.folder / "model")
    rows = [row for row in run_folder.read_metrics(run.metrics) if row.get("eval/accuracy_mean") is not None]
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        interval = f"{last['eval/accuracy_low']:.3f} to {last['eval/accuracy_high']:.3f}"
        before, after = first["eval/accuracy_mean"], last["eval/accuracy_mean"]
        say(f"accuracy: {before:.3f} before, {after:.3f} ({interval}) after {last['step']} iterations")
    say(f"curves: {write_report(run.folder)}")
    if loop.is_complete:
        say(f"the model, as transformers saves it: {run.folder / 'model'}")
    else:
        say(
            f"stopped after {loop.iteration} of {session.config.iterations} iterations; "
            f"go on: genrl resume {run.folder}"
        )
