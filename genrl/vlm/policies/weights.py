"""The weights of a policy as a checkpoint of its model has them: names, shapes, adapters merged."""

from __future__ import annotations

import torch
from peft.tuners import lora
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from genrl.vlm.policies.policy import Policy


@torch.no_grad()
def checkpoint_weights(policy: Policy) -> dict[str, Tensor]:
    """Every weight, and every buffer that is saved, by its name in a checkpoint. The policy stays as it is: merged are
    copies, and nothing is rounded twice; the others are the policy's own tensors. Weights that are tied stand under one
    of their names."""
    merged = {
        f"{name}.weight": module.weight + module.get_delta_weight("default")
        for name, module in policy.model.named_modules()
        if isinstance(module, lora.Linear)
    }
    found = {}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        found[plain] = merged.get(plain, parameter.detach()).to(parameter.dtype)
    saved = policy.model.state_dict().keys()
    found |= {name.replace(".base_layer.", "."): b for name, b in policy.model.named_buffers() if name in saved}
    return dict(revert_weight_conversion(policy.model, found))
