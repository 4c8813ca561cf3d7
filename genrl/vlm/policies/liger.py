"""Liger's fused kernels (arXiv 2410.10989) in the place of a model's norms, rotations and MLPs."""

from __future__ import annotations

from typing import Any

import torch


def use_liger(model: Any) -> None:
    """From here on `model` computes with them. The log-probabilities stay ours: Liger's loss is not used.

    Raises ValueError without a GPU or the package, and for a model type that Liger would leave as it is.
    """
    key = "vlm.kernels: liger"
    if not torch.cuda.is_available():
        raise ValueError(f"{key}: its kernels are Triton's and need a GPU, and there is none here; write null")
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ValueError(f"{key}: liger-kernel cannot be imported ({error}): pip install liger-kernel") from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"{key}: Liger has no kernels for {kind!r}; write null")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
