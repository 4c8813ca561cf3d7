"""What is done once, before the first iteration: all prompts encoded, and trials of how many samples fit on the device
together and whether they stay apart there.

Prompts are encoded before the denoiser is on the device (`model.offload.text_encoders: encode_then_free`, `genrl
encode`).

A micro-batch is at its largest in training: one model call with its graph, beside gradients, optimiser states and the
reward models. Memory grows linearly with the batch, m(n) = m(1) + (n - 1) (m(2) - m(1)); so two small trials say which
sizes are not worth trying, and the largest that is left is tried for real, then half of it, until it fits everywhere,
and in all processes the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from genrl.data.prompts import Prompt
from genrl.diffusion.config.memory_estimate import snapshots
from genrl.diffusion.config.model_rules import is_text_encoder
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.policy.encoding import NotEncoded
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.loading import load_components
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, NoiseKey
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments
from genrl.runtime.loop.frame import halvings, too_large
from genrl.runtime.loop.running import TrainingRun
from genrl.runtime.weights.devices import empty_cache, peak_bytes, reset_peak, total_bytes

Tell = Callable[[int, int], None]


def batches(config: Config, policy: Policy, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Batch]:
    """What has to be encoded: each distinct prompt beside the first, under the arguments of sampling, of training
    (`Method.other_guidance`) and, for held-out ones, of evaluation."""
    plain = call_arguments(config.sampling)
    calls = [plain]
    if not policy.embeds_guidance:
        calls += [plain | {"guidance_scale": scale} for scale in config.trainer.other_guidance]
    all_batches = [batch for arguments in calls for batch in _pairs(config, prompts, arguments)]
    return all_batches + list(_pairs(config, held_out, plain | evaluation_arguments(config)))


def _pairs(config: Config, rows: Sequence[Prompt], arguments: Mapping[str, Any]) -> Iterator[Batch]:
    """Two prompts to a batch: that shows which axes of an encoding are the batch's, and whether lengths differ."""
    columns = config.sampling.inputs
    distinct = {(row.text, *(row.columns[column] for column in columns.values())): row for row in rows}
    for row in distinct.values():
        both = [next(iter(distinct.values())), row]
        texts, keys = [one.text for one in both], [("encode", k) for k in range(2)]
        yield Batch(texts, list(keys), arguments, inputs=batch_inputs(columns, both))


def encode_ahead(policy: Policy, model: Model, wanted: Sequence[Batch], tell: Tell = lambda done, count: None) -> int:
    """Encode what is not kept yet; the text encoders are loaded for it, placed, and dropped. Where everything is kept
    they are not even loaded. Returns how many of the batches were missing. tell: of (done, count) of these.

    Raises ValueError, naming the key, for a pipeline whose encodings cannot be made ahead.
    """
    missing = []
    for batch in wanted:
        try:
            policy.calls.encode(batch)
        except NotEncoded:
            missing.append(batch)
    if missing:
        names = text_encoders(policy.pipe)
        with policy.memo.present(load_components(model, policy.pipe, names)):
            for k, batch in enumerate(missing):
                policy.calls.encode(batch)
                # The size of one is known now; with the last, the machine would be out of memory.
                if k == 0:
                    _require_room(policy, len(missing))
                tell(k + 1, len(missing))
    return len(missing)


def _require_room(policy: Policy, count: int) -> None:
    """Raise ValueError where so many encodings as the one just made are more than may be kept."""
    memo = policy.memo
    total = memo.kept.size * count / 2  # two prompts were encoded
    if memo.store is None:
        limit, advice = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2, "half of this machine's memory"
        remedy = "name a folder for them (model.encodings), or write model.offload.text_encoders: between"
    else:
        limit, advice, remedy = memo.store.most, "a folder may hold", "take fewer prompts"
    if total > limit:
        raise ValueError(
            f"model.encodings: {count} encodings take about {total / 1e9:.0f} GB, more than {advice}; {remedy}"
        )


def text_encoders(pipe: Pipeline) -> list[str]:
    """Names of the text encoders, those included that are not loaded."""
    return [name for name in pipe.components if is_text_encoder(name)]


def place(pipe: Pipeline, device: torch.device, *, stay: Sequence[str] = ()) -> None:
    """Move the networks to the device, but for those named in `stay` and those that are there."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name not in stay:
            if any(p.device.type != device.type for p in part.parameters()):
                part.to(device)


MEMORY_HINT = (
    "lower sampling.batch_size, or see sampling.fit_batch, model.gradient_checkpointing and model.dtype, or sample "
    "smaller pictures"
)
MARGIN = 0.92
"""Share of the memory that may be in use: the rest is the allocator's, for pieces of other sizes."""


def settle(run: TrainingRun[Config], prompts: Sequence[Prompt]) -> None:
    """Make `sampling.batch_size` what fits, with `sampling.fit_batch`; a resumed run has it from its checkpoint.

    Raises RuntimeError where not even the smallest fits.
    """
    sampling = run.config.sampling
    if not sampling.fit_batch:
        return
    if "batch_size" not in run.loop.memory:
        run.loop.phase("finding the batch size", 0)
        # Kept with the checkpoint: on another card a resumed run would cut its micro-batches otherwise and give other
        # numbers.
        size = largest(sizes(run.config), lambda size: fits(run, prompts, size), lambda ok: all(gather_object([ok])))
        run.loop.memory["batch_size"] = size
        run.process.progress.say(f"{size} samples fit in a micro-batch (sampling.batch_size is {sampling.batch_size})")
    run.resize(run.loop.memory["batch_size"])


def sizes(config: Config) -> list[int]:
    """The present size of micro-batches and the smaller ones that can be taken."""
    return halvings(config.sampling.batch_size, config.undivided)


def largest(sizes: list[int], fits: Callable[[int], bool], agreed: Callable[[bool], bool]) -> int:
    """The first of these sizes that fits in all processes; each is tried by all of them."""
    for size in sizes:
        if agreed(fits(size)):
            return size
    raise too_large(sizes[-1], MEMORY_HINT)


def fits(run: TrainingRun[Config], prompts: Sequence[Prompt], size: int) -> bool:
    """Whether this process has room for a micro-batch of this size. Weights and gradients are as before afterwards."""
    device = run.policy.device
    total = total_bytes(device)
    # Trials of 1 and 2 are what the others are reckoned from.
    if total is not None and size > 2:
        empty_cache(device)
        single, two = (peak(run, prompts, n) for n in (1, 2))
        if single is None or two is None or single + (size - 1) * (two - single) > MARGIN * total:
            return False
    return peak(run, prompts, size) is not None


def peak(run: TrainingRun[Config], prompts: Sequence[Prompt], size: int) -> int | None:
    """Most bytes in use during a trial of this size (0 on a CPU); None where they did not suffice."""
    device = run.policy.device
    reset_peak(device)
    try:
        attempt(run, prompts, size)
    except torch.OutOfMemoryError:
        return None
    finally:
        run.loop.optimizer.zero_grad(set_to_none=True)
        empty_cache(device)
    return peak_bytes(device)


def attempt(run: TrainingRun[Config], prompts: Sequence[Prompt], size: int) -> None:
    """What a micro-batch asks for at most: its decoded pictures, and a model call with its backward pass beside the
    gradients of the one before it and room for the copies of every trained number still to come (`copies_to_come`)."""
    config, policy = run.config, run.policy
    rows = [prompts[k % len(prompts)] for k in range(size)]
    keys: list[NoiseKey] = [("fit", k) for k in range(size)]
    texts = [row.text for row in rows]
    batch = Batch(texts, keys, call_arguments(config.sampling), inputs=batch_inputs(config.sampling.inputs, rows))
    state = torch.randn(policy.state_shape(batch), generator=torch.Generator().manual_seed(0)).to(policy.device)
    with policy.uncounted():
        with torch.no_grad():
            policy.decode(batch, state)
        for parameter in run.weights.parameters:
            parameter.grad = torch.zeros_like(parameter)
        room = [torch.empty_like(p) for p in run.weights.parameters for _ in range(copies_to_come(run))]
        # Any level: memory does not depend on it.
        sigma = torch.tensor(0.5 if policy.head.parametrisation == "flow" else 500)
        policy.velocity(batch, state, sigma).square().sum().backward()
    del room


def copies_to_come(run: TrainingRun[Config]) -> int:
    """The optimiser's two moments, the snapshots that the trainer takes after the trials (an old policy, ...), and the
    copies of all that an iteration changes (`runtime.loop.state.Undo`)."""
    num_snapshots = len(snapshots(run.config))
    undo = 3 + num_snapshots if run.weights.can_be_copied else 0
    return 2 + num_snapshots - len(run.weights.snapshots) + undo


APART_TOLERANCE = 1e-6
"""Of the largest number; two calls of the same shapes differ by nothing but the other sample's picture."""
ALONE = "write sampling.batch_size: 1, so that each sample is a call of its own"


@torch.no_grad()
def require_apart(policy: Policy, batch: Batch) -> None:
    """Raise ValueError unless the first of two samples stays as it is when the second is given the first's picture.

    Some pipelines read a list of pictures as several references for each sample (FLUX.2-klein), or share out one
    encoding: trained so, a sample would be drawn by one picture and scored by another. batch: of two samples; one step
    is made twice.
    """
    if len(batch) < 2 or not batch.inputs:
        return
    # The prompts and noise stay; so sample 0 can differ only by what it took from the other's picture.
    same: Mapping[str, Any] = {name: [values[0], values[0]] for name, values in batch.inputs.items()}
    kind = type(policy.pipe).__name__
    try:
        # One step is enough: what leaks between samples leaks in every call of the model.
        other, alike = (
            policy.roll_out(condition, stop=1).final[0] for condition in (batch, replace(batch, inputs=same))
        )
    except ValueError as error:
        text = f"a {kind} cannot be given the pictures of two samples in one call"
        raise ValueError(f"sampling.inputs: {text}; {ALONE} ({error})") from error
    difference = float((other - alike).abs().max())
    # Written so that NaN is refused, too.
    if not difference <= APART_TOLERANCE * float(alike.abs().max()):
        text = f"in a {kind} the picture of one sample changes another sample of the call (by up to {difference:.2g})"
        raise ValueError(f"sampling.inputs: {text}; {ALONE}")
