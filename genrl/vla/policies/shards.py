"""A policy in shards (FSDP2), over several processes.

In the passes of an update each process holds a share of the weights, and a layer's are whole while it computes. Of
gradients and optimiser state it holds a share at all times; adapters, and the heads beside them, are whole. While
processes act and evaluate, each makes as many passes as its episodes need, so each holds all weights beside its share
(`runtime.sharding.unsharded`): the most memory that these phases take is not reduced.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method

from genrl.runtime.weights.sharding import Sharding, reshard_layers, shard
from genrl.vla.policies.layers import layers_of

PASSES = ("encode", "velocity", "velocity_and_noise", "value")
"""Methods that a policy is called by, as far as it has them; none of them calls another."""


def hold(policy: Any, sharding: Sharding, *, adapters: bool) -> None:
    """Hold a policy in shards from here on: its layers are gathered one by one, the rest once from a pass to its
    backward pass. adapters: what is trained stays whole in every process."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nobody writes into it here
    stacks = layers_of(policy)
    whole = [parameter for parameter in policy.parameters() if parameter.requires_grad and adapters]
    shard(policy, [layer for stack in stacks for layer in stack], sharding, whole=whole)
    reshard_layers(policy, after_forward=True)
    for name in (name for name in PASSES if hasattr(policy, name)):
        register_fsdp_forward_method(policy, name)
    # by default the backward pass goes by the last passes, which may have been some process's own
    for stack in stacks:
        for layer, before in zip(stack, [policy, *stack], strict=False):
            layer.set_modules_to_backward_prefetch([before])
