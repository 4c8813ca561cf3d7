"""Pictures that are given, not drawn: read, encoded, and laid out as the samples of an iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genrl.data.preferences import Reader, as_tensor, check_set
from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.inverse import encode
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts, batch_inputs, call_arguments, micro_batches, to_bytes
from genrl.diffusion.rollout.scoring import Scored
from genrl.diffusion.run import DiffusionRun


def check_given(config: Config, rows: Sequence[Prompt], columns: Sequence[str]) -> None:
    """Raise PromptError for rows without these images, or with one that does not fit the picture to be edited."""
    sampling = config.sampling
    size = (sampling.height, sampling.width)
    check_set(config.prompts.train, rows, columns, beside=sampling.inputs.get("image"), size=size)


def picture_size(run: DiffusionRun) -> tuple[int, int]:
    """Height and width of the pipeline's pictures under the settings of sampling."""
    policy, probe = run.policy, run.probe
    with torch.no_grad():
        picture = policy.decode(probe, torch.zeros(policy.state_shape(probe), device=policy.device))
    if picture.dim() != 4:
        method, model = run.config.trainer.algorithm, run.config.model.path
        raise ValueError(f"trainer.algorithm: {method} is for pictures; {model} makes videos")
    return picture.shape[-2], picture.shape[-1]


def given_pictures(run: DiffusionRun, reader: Reader, size: tuple[int, int], rewards: tuple[float, ...]) -> Rollouts:
    """The pictures of this iteration, encoded: of row k those at slots G k .. G (k + 1) - 1, with G = len(rewards).

    size: height and width that they are cut to; rewards: of each picture of a row.
    """
    config, policy, accelerator = run.config, run.policy, run.accelerator
    sampling, seed, iteration = config.sampling, config.seed, run.iteration
    run.loop.phase("sampling", sampling.images_per_iteration)
    rows, each = run.iteration_prompts, len(rewards)
    plan = micro_batches(range(each * len(rows)), sampling.batch_size, seed=seed, iteration=iteration)
    mine: dict[int, MicroBatch] = {}
    for position in range(accelerator.process_index, len(plan), accelerator.num_processes):
        slots = plan[position]
        batch = Batch(
            prompts=[rows[slot // each].text for slot in slots],
            keys=[(seed, iteration, slot) for slot in slots],
            sampling=call_arguments(sampling),
            inputs=batch_inputs(sampling.inputs, [rows[slot // each] for slot in slots]),
        )
        with run.loop.timed("sample"):
            pictures = {k: reader(rows[k]) for k in dict.fromkeys(slot // each for slot in slots)}
            images = torch.stack([as_tensor(pictures[slot // each][slot % each], *size) for slot in slots])
            final = encode(policy, batch, images)
        mine[position] = MicroBatch(slots, batch, final, torch.empty(0), [], to_bytes(images))
        run.loop.alive()
    return run.take(
        Rollouts(
            mine=mine,
            num_micro_batches=len(plan),
            prompts=[row.text for row in rows for _ in rewards],
            group=torch.arange(each * len(rows)) // each,
            scored=Scored({}, {}),
            total=torch.tensor(rewards, dtype=torch.float64).repeat(len(rows)),
            slots=plan,
        )
    )
