"""How many samples fit on the device together: found before training, by trying, and the same in all processes; and
fewer from an iteration on in which memory ran out all the same.

A micro-batch is at its largest in training: one model call with its graph, beside gradients, optimiser states and the
reward models. Memory grows linearly with the batch, m(n) = m(1) + (n - 1) (m(2) - m(1)); so two small trials say which
sizes are not worth trying, and the largest that is left is tried for real, then half of it, until it fits everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from accelerate.utils import gather_object

from genrl.config.estimate import snapshots
from genrl.diffusion.policy.compiling import start_over
from genrl.diffusion.policy.policy import Batch
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments
from genrl.diffusion.session import Session

MARGIN = 0.92
"""Share of the memory that may be in use: the rest is the allocator's, for pieces of other sizes."""


def settle(session: Session) -> None:
    """With `sampling.fit_batch`, make `sampling.batch_size` what fits; a resumed run has it from its checkpoint.

    Raises RuntimeError where not even the smallest fits.
    """
    sampling = session.config.sampling
    if not sampling.fit_batch:
        return
    if "batch_size" not in session.memory:
        session.phase("finding the batch size", 0)
        found = largest(sizes(session), lambda size: fits(session, size), lambda ok: all(gather_object([ok])))
        session.memory["batch_size"] = found
        session.progress.say(f"{found} samples fit in a micro-batch (sampling.batch_size is {sampling.batch_size})")
    take(session, session.memory["batch_size"])


def shrink(session: Session) -> None:
    """Half the micro-batch, in all processes, after memory ran out in an iteration (`session.NoRoom`) that was taken
    back. It is drawn and trained anew: replayed in pieces of what sampling drew as one, ratios would be off 1.

    Raises RuntimeError where there is no smaller one.
    """
    gc.collect()
    session.optimizer.zero_grad(set_to_none=True)
    if session.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    was, *smaller = sizes(session)
    if not smaller:
        raise too_large(was)
    session.memory["batch_size"] = smaller[0]
    take(session, smaller[0])
    session.replays = False  # other shapes may run other kernels
    if session.config.kernels.compile:
        start_over(session.policy.denoisers.values())
    session.progress.say(
        f"memory ran out in iteration {session.iteration + 1} with {was} samples in a micro-batch: it is done again, "
        f"with {smaller[0]} from here on"
    )


def take(session: Session, size: int) -> None:
    """From here on micro-batches have this size."""
    sampling = session.config.sampling.model_copy(update={"batch_size": size})
    session.config = session.config.model_copy(update={"sampling": sampling})


def sizes(session: Session) -> list[int]:
    """The present size of micro-batches and the smaller ones that can be taken."""
    sampling = session.config.sampling
    return halvings(sampling.batch_size, sampling.group_size if session.config.trainer.whole_groups else 1)


def halvings(most: int, multiple: int) -> list[int]:
    """most and, each half of the one before in whole multiples, the smaller ones: 12, 6, 3, 1."""
    sizes = [most]
    while sizes[-1] >= 2 * multiple:
        sizes.append(sizes[-1] // multiple // 2 * multiple)
    return sizes


def largest(sizes: list[int], fits: Callable[[int], bool], agreed: Callable[[bool], bool]) -> int:
    """The first of these sizes that fits in all processes; each is tried by all of them."""
    for size in sizes:
        if agreed(fits(size)):
            return size
    raise too_large(sizes[-1])


def too_large(size: int) -> RuntimeError:
    return RuntimeError(
        f"a micro-batch of {size} samples does not fit into the device's memory; write a smaller "
        "sampling.batch_size, model.gradient_checkpointing: true, model.dtype: bfloat16 or smaller pictures"
    )


def fits(session: Session, size: int) -> bool:
    """Whether this process has room for a micro-batch of this size. Weights and gradients are as before afterwards."""
    device = session.policy.device
    if device.type == "cuda" and size > 2:
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        one, two = (peak(session, n) for n in (1, 2))
        if one is None or two is None or one + (size - 1) * (two - one) > MARGIN * total:
            return False
    return peak(session, size) is not None


def peak(session: Session, size: int) -> int | None:
    """Most bytes in use during a trial of this size (0 on a CPU); None where they did not suffice."""
    device = session.policy.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        attempt(session, size)
    except torch.OutOfMemoryError:
        return None
    finally:
        session.optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def attempt(session: Session, size: int) -> None:
    """What a micro-batch asks for at most: its decoded pictures, and a model call with its backward pass beside the
    gradients of the one before it and room for the copies of every trained number still to come (`copies_to_come`)."""
    config, policy = session.config, session.policy
    rows = [session.prompts[k % len(session.prompts)] for k in range(size)]
    keys = [("fit", k) for k in range(size)]
    texts = [row.text for row in rows]
    batch = Batch(texts, keys, call_arguments(config.sampling), inputs=batch_inputs(config.sampling.inputs, rows))
    state = torch.randn(policy.state_shape(batch), generator=torch.Generator().manual_seed(0)).to(policy.device)
    with policy.uncounted():
        with torch.no_grad():
            policy.decode(batch, state)
        for parameter in session.weights.parameters:
            parameter.grad = torch.zeros_like(parameter)
        room = [torch.empty_like(p) for p in session.weights.parameters for _ in range(copies_to_come(session))]
        sigma = torch.tensor(0.5 if policy.head.parametrisation == "flow" else 500)
        policy.velocity(batch, state, sigma).square().sum().backward()
    del room


def copies_to_come(session: Session) -> int:
    """The optimiser's two moments, and the snapshots that the trainer takes after the trials (an old policy, ...)."""
    return 2 + len(snapshots(session.config)) - len(session.weights.snapshots)
