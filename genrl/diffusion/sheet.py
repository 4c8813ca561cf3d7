"""The sheet of a pipeline's samples: pictures as decoded, beside those that it is given, with their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from genrl.data.prompts import Prompt
from genrl.diffusion.evaluate import Evaluated, evaluate, spread
from genrl.diffusion.rollout.rollout import Rollouts, batch_inputs, call_arguments
from genrl.diffusion.rollout.scoring import Scored, Scorers
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, score_text
from genrl_rewards.calls import inner
from genrl_rewards.rows import read_as

if TYPE_CHECKING:
    from genrl.diffusion.run import DiffusionRun


def look(
    scorers: Scorers, scored: Scored, slot: int, row: Prompt, text: str, image: Tensor, inputs: Mapping[str, Any]
) -> Look:
    """One sample: its number among the scores, its row, the text that it was drawn from, and what it was given."""
    facts = {f"reward {label}": score_text(float(values[slot])) for label, values in scored.values.items()}
    facts |= {label: score_text(float(values[slot])) for label, values in scored.parts.items()}
    for label, reward in scorers.rewards.items():
        if read := read_as(inner(reward), {**row.columns, "prompts": row.text}):
            facts[f"{label} expects"] = read
    if text != row.text:
        facts["drawn from"] = text
    facts |= {f"column {name}": f"{value!r:.200}" for name, value in row.columns.items()}
    inputs_shown = [(f"given as {name}", picture) for name, picture in inputs.items()]
    return Look(row.text, facts, [*inputs_shown, ("drawn, as rewards see it", image)])


def of_rollouts(scorers: Scorers, rollouts: Rollouts, rows: Sequence[Prompt]) -> ContactSheet:
    """The sheet of this process's first sample of each of the first prompts. rows: a prompt each group."""
    slots = {
        slot: (micro_batch, k) for micro_batch in rollouts.mine.values() for k, slot in enumerate(micro_batch.slots)
    }
    first = {int(rollouts.group[slot]): slot for slot in sorted(slots, reverse=True)}
    looks = []
    for group, slot in sorted(first.items())[:SHOWN]:
        micro_batch, k = slots[slot]
        inputs = {name: each[k] for name, each in micro_batch.batch.inputs.items()}
        image = micro_batch.images[k].float() / 255
        looks.append(look(scorers, rollouts.scored, slot, rows[group], micro_batch.batch.prompts[k], image, inputs))
    return ContactSheet(looks)


def of_evaluated(scorers: Scorers, found: Evaluated, rows: Sequence[Prompt], inputs: Mapping[str, str]) -> ContactSheet:
    """The sheet of the first shown samples of an evaluation of these rows. inputs: as of `batch_inputs`."""
    numbers = found.shown[:SHOWN]
    given = batch_inputs(inputs, [rows[k] for k in numbers])
    looks = []
    for place, (k, image) in enumerate(zip(numbers, found.images, strict=False)):
        pictures = {name: each[place] for name, each in given.items()}
        looks.append(look(scorers, found.scored, k, rows[k], found.prompts[k], image, pictures))
    return ContactSheet(looks)


def drawn_now(run: DiffusionRun) -> ContactSheet:
    """The sheet of training prompts, drawn for it by the pipeline's own solver with the arguments of training."""
    config, rows = run.config, [run.prompts[number] for number in spread(SHOWN, len(run.prompts))]
    size, inputs = min(SHOWN, config.sampling.batch_size), config.sampling.inputs
    sampling = call_arguments(config.sampling)
    judged = evaluate(run.policy, rows, run.scorers, sampling, batch_size=size, seed=config.seed, inputs=inputs)
    return of_evaluated(run.scorers, judged, rows, inputs)
