"""`genrl train` for a vision-language model that acts in an environment."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from genrl.config.vlm import VLMConfig
from genrl.config.vlm_agents import Environment
from genrl.runtime.loop import Abandoned, Loop, begin, claim, make_accelerator, open_loop, say_end
from genrl.runtime.metrics import check_trackers
from genrl.runtime.pictures import save_samples
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run
from genrl.runtime.signals import Stop, Watchdog
from genrl.vlm.environments.hosts import open_host
from genrl.vlm.methods.episodes import train as episodes
from genrl.vlm.methods.episodes.critic import ValueHead
from genrl.vlm.methods.episodes.episodes import Table
from genrl.vlm.methods.episodes.evaluate import Judged, figures_of, judge
from genrl.vlm.methods.episodes.session import Session
from genrl.vlm.methods.episodes.settings import Critic, Episodes
from genrl.vlm.policies.folder import open_policy, save_model
from genrl.vlm.policies.policy import Policy

SEEN = 0.02
"""Success with pictures over that without them, below which reinforcement has nothing to work on."""

logger = logging.getLogger(__name__)


def train(config: VLMConfig, resume: Path | None = None) -> Path:
    """Train as `config` says, into its run folder, or go on in the folder `resume`; returns the folder.

    As `genrl.vlm.train.train`, which calls it where there is an environment.
    """
    check_trackers(config.trackers)
    accelerator = make_accelerator(config.distributed.timeout_s)
    check_processes(config, accelerator.num_processes)
    set_seed(config.seed)
    with ExitStack() as stack:
        claimed = claim(stack, config.output, resume, accelerator)
        settings = settings_of(config)
        policy = open_policy(config, accelerator.device)  # raises, as does this, before anything is written
        check_environment(config, policy)
        stop, watchdog, progress = begin(stack, claimed, config, accelerator, unit="steps")
        session = open_session(config, settings, accelerator, claimed.run, progress, watchdog, stop, policy, stack)
        if claimed.found:
            session.loop.restore(claimed.found)
            session.restore()
        if session.critic is not None:
            session.loop.keep("critic", session.critic)
        stack.enter_context(watchdog)
        try:
            episodes.train(session)
        except Abandoned:
            logger.info("the running iteration is done again on resume")
        finish(session)
    if stop.requested:
        raise SystemExit(stop.exit_code)
    return claimed.run.folder


def settings_of(config: VLMConfig) -> Environment:
    """The section `environment`, which is there."""
    assert config.environment is not None
    return config.environment


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where episodes cannot be shared out to the processes."""
    key, number = config.trainer.shared(config)
    if number % num_processes:
        raise ValueError(f"{key}: {number} cannot be shared out evenly to {num_processes} processes")


def check_environment(config: VLMConfig, policy: Policy) -> None:
    """ValueError for an environment that cannot be opened, or whose first prompt does not fit into the model."""
    settings = settings_of(config)
    host = open_host(settings)
    try:
        table = Table(settings, host)
        table.begin({0: 0}, "train")
        policy.check_room([policy.encode(table.prompt(0))], config.generation.max_new_tokens)
    finally:
        host.close()


def open_session(
    config: VLMConfig,
    settings: Environment,
    accelerator: Accelerator,
    run: Run,
    progress: Progress,
    watchdog: Watchdog,
    stop: Stop,
    policy: Policy,
    stack: ExitStack,
) -> Session:
    """What one process trains with: environments, reference, critic, optimiser, log; `stack` closes them."""
    method, reference = cast(Episodes, config.trainer), None
    if method.reference and policy.peft is None:
        reference = open_policy(config, accelerator.device)
        reference.model.requires_grad_(False)
    groups, rates = [{"params": policy.parameters, "name": "policy"}], {"policy": config.optimizer.lr}
    critic = None
    if method.with_critic:
        own = method.critic or Critic()
        width = policy.model.config.get_text_config().hidden_size
        critic = ValueHead(width, own.hidden, config.seed).to(accelerator.device)
        groups.append({"params": list(critic.parameters()), "name": "critic"})
        rates["critic"] = own.lr
    loop = open_loop(config, accelerator, policy.model, groups, rates, run, progress, watchdog, stop, stack)
    tables = []
    for _ in range(2):  # of training, whose episodes go on, and of evaluation
        host = open_host(settings)
        stack.callback(host.close)
        tables.append(Table(settings, host))
    loop.evaluate = Judge(config, policy, tables[1], loop)
    return Session(config, settings, method.recipe(config), loop, policy, reference, critic, tables[0])


class Judge:
    """Evaluation of the model as it is, shared out to the processes."""

    def __init__(self, config: VLMConfig, policy: Policy, table: Table, loop: Loop) -> None:
        self.config, self.policy, self.table, self.loop = config, policy, table, loop

    def __call__(self, iteration: int) -> dict[str, float]:
        found = self._acted(blind=False)
        row = figures_of(found)
        if iteration in (0, self.config.iterations) and self.config.evaluation.blind:
            blind = figures_of(self._acted(blind=True))["eval/success_mean"]
            row["eval/success_blind"] = blind
            if iteration == 0 and row["eval/success_mean"] - blind < SEEN:
                self.loop.progress.say(
                    f"warning: {row['eval/success_mean']:.3f} of the episodes succeed, {blind:.3f} with black "
                    "pictures: the model does not act by what it sees, and reinforcement will hardly teach it to"
                )
        if self.loop.is_main and found.films:
            scores = {"success": [one["success"] for one in found.episodes[: len(found.films)]]}
            pictures, texts = [film for film, _ in found.films], [text for _, text in found.films]
            sheet = save_samples(self.loop.run.samples, iteration, pictures, texts, scores)
            self.loop.log.log_picture(iteration, "samples/grid", sheet)
        return row

    def _acted(self, *, blind: bool) -> Judged:
        loop, number = self.loop, self.config.evaluation.questions
        loop.phase("evaluating", number)
        numbers = np.array_split(np.arange(number), loop.accelerator.num_processes)
        mine = judge(
            self.policy,
            self.config,
            self.table,
            numbers[loop.accelerator.process_index].tolist(),
            blind=blind,
            films=6 if loop.is_main and not blind else 0,
            advance=loop.advance_or_leave,
        )
        every = gather_object([mine])
        found: Judged = every[0]
        for part in every[1:]:
            found = found.joined(part)
        return found


def finish(session: Session) -> None:
    """The end of a run, complete or not: last checkpoint, the model's folder, report, and where they are."""
    loop = session.loop
    loop.save()
    if not loop.is_main:
        return
    folder = loop.run.folder / "model"
    save_model(session.policy, session.config.vlm.path, folder)
    say_end(loop, "success", pictures="curves and pictures", result=f"the model, as transformers saves it: {folder}")
