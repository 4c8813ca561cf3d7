"""All prompts of a run encoded before its denoiser is on the device (`model.offload.text_encoders:
encode_then_free`, `genrl encode`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from genrl.data.prompts import Prompt
from genrl.diffusion.config.model_rules import is_text_encoder
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.policy.encoding import NotEncoded
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.loading import load_components
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments

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
