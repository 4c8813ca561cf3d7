"""Policies of all families on tiny random checkpoints, made once for a file."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.policy import Policy
from tests.vlm import tiny_checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("vlm")
    return cache(lambda family: tiny_checkpoints.save(family, root / family))


@pytest.fixture(scope="module")
def load(folder: Callable[[str], Path]) -> Callable[[str], Policy]:
    """A policy with adapters that are not zero, one per family; tests leave it as it was."""

    def make(family: str) -> Policy:
        policy = Policy(str(folder(family)), lora=VLMLoRA(rank=2))
        torch.manual_seed(1)
        for parameter in policy.parameters:
            parameter.data.normal_(std=0.1)
        return policy

    return cache(make)
