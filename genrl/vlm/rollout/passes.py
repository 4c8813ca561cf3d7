"""Questions that the model never or always answers rightly, left out before training (MedVLThinker)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from accelerate.utils import gather_object

from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.loop import Loop
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import answering
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import check_failed, draw, failures_of, open_rewards
from genrl_rewards.failures import Failure

TOGETHER = 64
"""Answers drawn side by side."""


def leave_out(config: VLMConfig, questions: Questions, policy: Policy, loop: Loop, stage: int) -> None:
    """Set `questions.kept` to those that were right at least once, but not always, in `task.passes` answers.

    The numbers of right answers are in passes-<stage>.jsonl of the run's folder; a resumed run reads them there.
    Raises ValueError where fewer questions are left than an iteration asks, and RewardFailed as `check_failed`. An
    answer without a score is not right, and is counted where the rest is said.
    """
    passes = config.task.passes
    if passes is None:
        return
    file = loop.process.run.folder / f"passes-{stage}.jsonl"
    loop.process.accelerator.wait_for_everyone()  # none looks for the file while another writes it
    if not file.is_file():
        with answering(policy):
            _count(config, questions, policy, loop, stage)
    counts = [json.loads(line)["right"] for line in file.read_text(encoding="utf-8").splitlines()]
    questions.kept = [number for number, right in enumerate(counts) if 0 < right < passes]
    never, always = sum(right == 0 for right in counts), sum(right == passes for right in counts)
    loop.process.progress.say(f"{len(questions.kept)} of {len(counts)} questions: {never} never right, {always} always")
    wanted = config.generation.prompts_per_iteration
    if len(questions.kept) < wanted:
        raise ValueError(
            f"task.passes: {len(questions.kept)} of {len(counts)} questions are sometimes right, and an iteration asks "
            f"{wanted}; take more questions, more passes, or easier ones ({file})"
        )


def _count(config: VLMConfig, questions: Questions, policy: Policy, loop: Loop, stage: int) -> None:
    assert config.task.passes is not None
    size = config.task.passes
    generation = config.generation.model_copy(update={"group_size": size, "batch_size": None})
    config, opened = config.model_copy(update={"generation": generation}), open_rewards(config)
    rank, processes = loop.process.accelerator.process_index, loop.process.accelerator.num_processes
    mine = list(range(rank, len(questions), processes))
    loop.phase("counting passes", len(mine) * size)
    right: dict[int, int] = {}
    together, unscored = max(1, TOGETHER // size), 0
    for start in range(0, -(-len(questions) // processes), together):  # as often in every process
        numbers, failures = mine[start : start + together], dict[str, tuple[Failure, ...]]()
        if numbers:
            rows = [questions.row(number) for number in numbers]
            found = draw(policy, config, opened, rows, (config.seed, "passes", stage), advance=loop.advance_or_leave)
            values, failures = found.scores[config.reward_labels[0]], found.failures
            first = values >= config.evaluation.right_at - 1e-9  # not where there is no score
            right |= dict(zip(numbers, first.view(-1, size).sum(1).tolist(), strict=True))
            unscored += int(values.isnan().sum())
        every: list[tuple[Mapping[str, tuple[Failure, ...]], int]] = gather_object([(failures, len(numbers) * size)])
        check_failed(config, failures_of([one for one, _ in every]), sum(number for _, number in every))
    loop.check_stop()
    without = sum(gather_object([unscored]))
    if without:
        loop.process.progress.say(f"{without} of {len(questions) * size} answers have no score, and are not right")
    counts = {number: count for part in gather_object([right]) for number, count in part.items()}
    if loop.is_main:
        lines = [
            json.dumps({"question": questions[number].name, "right": counts[number], "of": size})
            for number in range(len(questions))
        ]
        write_atomic(loop.process.run.folder / f"passes-{stage}.jsonl", "\n".join(lines) + "\n")
    loop.process.accelerator.wait_for_everyone()
