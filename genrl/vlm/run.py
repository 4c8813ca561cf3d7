"""One process of a run that trains a vision-language model: answers drawn, estimated together with those of the other
processes, and what is measured of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import nn

from genrl.runtime.loop.process import Process
from genrl.runtime.show.sheet import SHOWN, ContactSheet
from genrl.vlm.common import Estimated, VLMRun
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import uses_engine
from genrl.vlm.evaluate import HeldOut, sheet_of
from genrl.vlm.methods.extras import Average, computed
from genrl.vlm.policies.folder import checkpoint_weights
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.rollout import rescue
from genrl.vlm.rollout.augment import augmented, gaps, leave_out
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import Answers, draw, joined, sampled_figures, totals, trained_on
from genrl.vlm.rollout.server import Server
from genrl.vlm.rollout.synthesis import Synthesis
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward


class AnswersRun(VLMRun):
    """One process of a run that answers questions. heads: what the method trains beside the policy; `stack` closes what
    is opened."""

    result: ClassVar[tuple[str, str]] = ("accuracy", "curves")

    def __init__(
        self,
        config: VLMConfig,
        process: Process,
        policy: Policy,
        reference: Policy | None,
        average: Average | None,
        opened: Mapping[str, Reward],
        heads: Mapping[str, nn.Module],
        stack: ExitStack,
    ) -> None:
        modules = {"policy": policy.parameters} | {
            name: [p for p in head.parameters() if p.requires_grad] for name, head in heads.items()
        }
        groups = {name: (parameters, config.optimizer.lr) for name, parameters in modules.items()}
        retries = any(part.trainer.fit_batch for part in config.parts)
        super().__init__(
            config, process, policy, reference, groups, heads,
            retries=retries, ends=config.ends, before_iteration=self.enter,
        )  # fmt: skip
        self.average, self.opened = average, opened
        self.questions = Questions(config, "train", counted=True)
        self.server: Server | None = None
        """Where the answers of coming iterations are drawn while one is trained."""
        if self.versions is not None and self.sampler is not None and config.generation.answers_ahead:
            self.server = Server(self.sampler, opened)
            stack.callback(self.server.close)
        self.synthesis: Synthesis | None = None
        if config.synthesis is not None:
            self.synthesis = Synthesis(config, self.questions, policy, self.loop)
            stack.callback(self.synthesis.close)
        self.stage = -1
        """Whose questions and method these are; -1: none was entered."""
        self.held_out = HeldOut(self, opened, nullcontext if self.server is None else self.server.alone)

    @property
    def settings(self) -> Any:
        """Settings of the method of the stage that the next iteration belongs to."""
        run_config: VLMConfig = self.loop.config
        return run_config.at(self.loop.iteration)[1].trainer

    def begin(self, last_checkpoint: Path | None) -> None:
        """Keep the average with every checkpoint."""
        if self.average is not None:
            self.loop.keep("average", self.average)
        super().begin(last_checkpoint)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What it takes to draw the running iteration in this process; nothing where a server draws."""
        with super().drawing() if self.server is None else nullcontext():
            yield

    @property
    def bounds(self) -> bool:
        """Whether the columns of the log-probabilities are estimates of a bound instead of tokens: BGPO."""
        return "bound" in self.config.trainer.reads

    def enter(self) -> None:
        """Take over questions and method of the stage that the iteration belongs to, where it is a new one."""
        run_config: VLMConfig = self.loop.config
        number, config = run_config.at(self.loop.iteration)
        if number == self.stage:
            return
        self.stage, self.present, self.preset = number, config, config.trainer.recipe(config)
        self.questions = Questions(config, "train", counted=True)
        if run_config.stages and run_config.stages[number].optimizer:
            first = sum(stage.iterations for stage in run_config.stages[:number])
            self.loop.reschedule(config.optimizer, first, run_config.stages[number].iterations)
        elif number:  # not the schedule of the stage before, which a run that is resumed here would not know
            self.loop.reschedule(config.optimizer, 0, run_config.iterations)
        leave_out(config, self.questions, self.policy, self.loop, number)

    def draw(self) -> tuple[Answers, dict[str, float]]:
        """This process's groups of the iteration, and figures of all processes' answers, those left out included."""
        self.enter()
        config, loop, iteration = self.config, self.loop, self.loop.iteration
        per_iteration, processes = config.generation.prompts_per_iteration, loop.process.accelerator.num_processes
        share_size, rank = per_iteration // processes, loop.process.accelerator.process_index
        all_answers, trained = list[Answers](), list[Answers]()
        counts: list[int] = [0] * processes
        memory: dict[str, Any] = {}  # what the iteration changes in the loop's, once it cannot be left any more
        described: Answers | None = None
        spent, first, helped = 0.0, loop.memory.get("questions", 0), rescue.Helped()
        # Before the first answer, so that a server which draws ahead is handed the weights of this iteration too.
        self.note_weights()
        # groups that the filter leaves out are made up for by those of further questions
        for _ in range(config.trainer.group_filter.rounds):
            loop.phase("answering", share_size * config.generation.group_size)
            picks = self.questions.asked(iteration, first, per_iteration)
            # all processes see the same numbers, and each takes its part
            numbers = picks[rank * share_size : (rank + 1) * share_size]
            rows = [self.questions.row(number) for number in numbers]
            if self.synthesis is not None:
                rows = self.synthesis.replaced(rows)
            with loop.timed("rollout"), self.drawing():
                answers_here, seconds = self._answers(rows, first)
                # All answers are measured, those too that the filter leaves out, else figures would flatter the model.
                all_answers.append(answers_here)
                spent += seconds
                answers_here = self._augmented(all_answers, first, memory)
                answers_here = self._rescued(answers_here, first, helped)
                if self.synthesis is not None:
                    pictured = [self.synthesis.described(number) for number in numbers[-1:]]
                    described = self._ask(pictured, "describe", iteration, first)
            loop.check_stop()
            first += len(picks)
            trained.append(trained_on(config, answers_here))
            counts = [a + b for a, b in zip(counts, gather_object([len(trained[-1].rows)]), strict=True)]
            # All processes see the same sum, so they stop together: another round begins with words to each other.
            if sum(counts) >= per_iteration:
                break
        loop.memory |= memory | {"questions": first}
        if not self.held_out.shown.images:  # else the evaluation has shown them
            self.note_sheet(lambda: self._sheet(all_answers[0].chosen(range(min(SHOWN, len(all_answers[0].rows))))))
        # of more groups than wanted, the first of each process are left out last
        answers = joined(trained).chosen(list(range(max(0, min(counts[rank], per_iteration - sum(counts[:rank]))))))
        share = min(sum(counts), per_iteration) / (per_iteration * len(all_answers))
        row = sampled_figures(config, joined(all_answers), len(all_answers), share, spent)
        if config.rescue is not None:
            row |= helped.figures(config)
        if self.synthesis is not None and described is not None:
            paid, figures = self.synthesis.paid(all_answers[0])
            self.synthesis.park(numbers[-1:], described)
            answers, row = joined([answers, *paid]), row | figures
        return answers, row

    def _augmented(self, rounds: Sequence[Answers], first: int, memory: dict[str, Any]) -> Answers:
        """The answers of the last of the iteration's rounds, of which some are to changed questions (`augmentation`);
        what it goes by next is put into `memory`."""
        config, loop, answers = self.config, self.loop, rounds[-1]
        if config.augmentation is None:
            return answers
        gap, changed = gaps(config, loop, rounds)
        memory.update(changed)
        if gap is None:
            return answers
        ask = partial(self._ask, iteration=loop.iteration, first=first)
        return augmented(config, answers, gap, ask, loop.iteration)

    def _rescued(self, answers: Answers, first: int, helped: rescue.Helped) -> Answers:
        """The answers, with right ones that help brought in groups that had none (`rescue`)."""
        config, settings = self.config, self.config.rescue
        if settings is None or self.loop.iteration < settings.warmup:
            return answers
        ask = partial(rescue.one_each, config, settings, self.policy, self.opened, (self.loop.iteration, first))
        return helped.rescued(config, settings, answers, ask)

    def _answers(self, rows: Sequence[Row], first: int) -> tuple[Answers, float]:
        """The answers to this iteration's questions, drawn now, or by the server before; and the seconds they took."""
        config, loop, server = self.config, self.loop, self.server
        if server is None:
            started = time.perf_counter()
            return self._ask(rows, "answers", loop.iteration, first), time.perf_counter() - started
        assert self.versions is not None
        # the server is kept busy with all iterations whose weights are known by now
        for iteration in self.coming():
            if server.has(iteration):
                continue
            # `generation.staleness` goes without `resample`: every iteration before it uses up just these questions.
            start = first + (iteration - loop.iteration) * len(rows)
            rows_ahead = [self.questions.row(number) for number in self.questions.asked(iteration, start, len(rows))]
            with self.versions.drawing(loop.weights, iteration):
                tensors = checkpoint_weights(self.policy)
                # A copy: the server reads it while training goes on writing into the weights.
                weights = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
            version = f"after {iteration - self.versions.age(iteration)} iterations"
            server.begin(iteration, config, rows_ahead, (config.seed, "answers", iteration, start), weights, version)
        return server.take(loop.iteration, loop.advance_or_leave)

    def _ask(self, rows: Sequence[Row], key: str, iteration: int, first: int) -> Answers:
        """Groups of answers to these questions. key: of which kind, part of the samples' keys."""
        keys = (self.config.seed, key, iteration, first)
        return draw(self.policy, self.config, self.opened, rows, keys, advance=self.loop.advance_or_leave)

    def _sheet(self, answers: Answers) -> ContactSheet:
        """The first answer to each question."""
        first = slice(None, None, max(1, answers.size))
        scores = {label: values[first] for label, values in answers.scores.items()}
        return sheet_of(self.opened, answers.rows, answers.texts[first], scores)

    def look(self) -> ContactSheet:
        """Questions of the training data, answered as in evaluations, and scored."""
        return self.held_out.look(self.config, self.questions)

    @property
    def needs_old(self) -> bool:
        """Whether log-probabilities before the update are computed by a pass of their own. Where one update is all that
        the present weights' answers get, they are its own, without gradient: every ratio is 1. The first iteration has
        the pass in any case, for the checks that sampler and trainer see the same."""
        settings, engine = self.config.trainer, uses_engine(self.policy)
        once = isinstance(settings, RecipeMethod) and settings.updates == settings.epochs == 1
        helped = self.config.rescue is not None
        return not once or engine or helped or self.bounds or self.versions is not None or self.loop.iteration == 0

    def estimate(self, answers: Answers) -> Estimated | None:
        """Advantages and weights of this process's answers, from those of all processes; None where there are none."""
        config, loop = self.config, self.loop
        if sum(gather_object([len(answers.rows)])) == 0:
            return None
        size = config.economy.keep or config.generation.group_size
        updates = self.updates(answers.mask, size)
        parts = [part for update in updates for part in update.parts]
        # Without the probability under the weights that drew, older answers cannot be weighed.
        if self.versions is not None and bool(answers.sampler_log_prob[answers.mask].isnan().any()):
            raise ValueError("generation.staleness: this policy does not say how likely its samples were; write 0")
        reads = self.reads | ({"old"} if self.needs_old else set())
        loop.phase("estimating", 0)
        with loop.timed("estimate"), loop.fitting():
            local: dict[str, Any] = computed(
                self.policy, self.reference, self.average, answers, parts, reads, config, loop.iteration
            )
        loop.check_stop()
        local |= {"mask": answers.mask, "rewards": totals(config, answers.scores)}
        if self.bounds:
            # Estimates of a bound are of the whole answer: none of them stands for padding.
            local["mask"] = torch.ones(local["old"].shape, dtype=torch.bool)
        else:
            local["sampler"] = answers.sampler_log_prob
        if config.rescue is not None:
            # the sampler's probabilities under a hint say nothing of the question alone
            local["unsampled"] = answers.unsampled
            local["sampler"] = torch.where(answers.unsampled[:, None], local["old"], local["sampler"])
        # statistics of DCPO are by question, and a question may be another process's next time
        prompts = [name for names in gather_object([[row.name for row in answers.rows]]) for name in names]
        visits = {name: (int(n), float(m), float(s)) for name, (n, m, s) in loop.memory.get("visits", {}).items()}
        ready = self.estimated(local, size, updates, prompts=prompts, visits=visits)
        if ready.estimate.visits:
            loop.memory["visits"] = {name: list(entry) for name, entry in ready.estimate.visits.items()}
        return ready

    def forget(self) -> None:
        """`VLMRun.forget`; the pictures that the iteration has taken from the data server are drawn again."""
        super().forget()
        if self.synthesis is not None:
            self.synthesis.known = False

    def evaluated(self, iteration: int) -> dict[str, float]:
        """The most probable answers to held-out questions (`HeldOut`)."""
        return self.held_out.evaluated(iteration)

    def rows_at_most(self) -> int:
        """The answers that a process has in an update."""
        config, parts = self.config, int(self.process.accelerator.num_processes)
        if isinstance(config.trainer, RecipeMethod):
            parts = max(parts, config.trainer.updates)  # of one update, a process may have all groups
        groups = -(-config.generation.prompts_per_iteration // parts)
        return groups * (config.economy.keep or config.generation.group_size)
