"""Without a GPU, Triton kernels are interpreted: the variable must be set before triton is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
