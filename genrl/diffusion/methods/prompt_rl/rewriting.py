"""New texts in place of prompts, by a language model: each process writes for its share of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from accelerate.utils import gather_object
from PIL.Image import Image

from genrl.data.prompts import Prompt
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.rewriter import Rewriter, Written
from genrl.diffusion.policy.text_room import TextRoom
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Draw, Drawn
from genrl.diffusion.rollout.rollout import batch_inputs

if TYPE_CHECKING:
    from genrl.diffusion.run import DiffusionRun

T = TypeVar("T")


def from_texts(
    policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None], texts: Sequence[str], draw: Draw
) -> Drawn:
    """`draw`, with each slot's own text in place of its prompt. Scores are of the prompts all the same."""
    return draw(policy, replace(batch, prompts=[texts[slot] for slot in slots]), slots, beat=beat)


def write(
    run: DiffusionRun, rewriter: Rewriter, prompts: Sequence[Prompt], count: int, fits: TextRoom
) -> tuple[dict[int, Written], list[tuple[list[str], list[bool]]]]:
    """(answers that this process wrote by the index of their prompt, new prompts and formats of all prompts).

    The generator is that of (seed, iteration, prompt): nobody's answers depend on who else writes.
    """
    mine = {}
    for p, prompt in own(run, prompts):
        key = (run.config.seed, "rewrite", run.iteration, p)
        mine[p] = rewriter.write(prompt.text, count, key, fits, pictures(run, prompt))
        run.loop.advance_or_leave(0)
    return mine, of_all({p: (written.texts, written.well_formed) for p, written in mine.items()})


def rewritten(run: DiffusionRun, rewriter: Rewriter, fits: TextRoom, prompts: Sequence[Prompt]) -> list[str]:
    """A new prompt for each of the prompts, the same in all processes."""
    mine = {}
    for row, prompt in own(run, prompts):
        key = (run.config.evaluation.seed, row)
        mine[row] = rewriter.rewrite(prompt.text, key, fits, pictures(run, prompt))
        run.loop.alive()
    return of_all(mine)


def own(run: DiffusionRun, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Prompt]]:
    """The prompts for which this process writes, with their numbers."""
    return islice(enumerate(prompts), run.accelerator.process_index, None, run.accelerator.num_processes)


def of_all(mine: Mapping[int, T]) -> list[T]:
    """What was written for each prompt, by whichever process."""
    found = dict(gather_object([*mine.items()]))
    return [found[number] for number in sorted(found)]


def pictures(run: DiffusionRun, prompt: Prompt) -> list[Image]:
    """What the pipeline is given with a prompt, such as the picture that is to be edited."""
    return [picture for (picture,) in batch_inputs(run.config.sampling.inputs, [prompt]).values()]
