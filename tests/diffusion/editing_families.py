"""Tiny random-weight pipelines that edit pictures, one function per family.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

import functools

from diffusers import FluxKontextPipeline, QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

from tests.diffusion import tiny_parts as parts
from tests.diffusion.image_families import QWEN_CALL, QWEN_UNGUIDED, SIZE, flux_parts, qwen_parts
from tests.diffusion.tiny_parts import Family


def flux_kontext() -> Family:
    call = {**SIZE, "guidance_scale": 2.5, "max_sequence_length": 16, "max_area": 256, "_auto_resize": False}
    inputs = {"image": parts.pictures()}
    return Family("flux_kontext", FluxKontextPipeline(**flux_parts()), call, inputs=inputs)


_dimensions = pipeline_qwenimage_edit.calculate_dimensions


@functools.wraps(_dimensions)
def _small_dimensions(target_area: int, ratio: float) -> tuple[int, int, None]:
    return _dimensions(target_area // 32**2, ratio)


def qwen_image_edit() -> Family:
    # The pipeline scales every picture to 1024 x 1024, a constant of its code; here to 32 x 32.
    pipeline_qwenimage_edit.calculate_dimensions = _small_dimensions
    pipe = QwenImageEditPipeline(**qwen_parts(), processor=parts.qwen_vl_processor())
    inputs = {"image": parts.pictures(32), "negative_prompt": [" ", " "]}
    return Family("qwen_image_edit", pipe, QWEN_CALL, unguided=QWEN_UNGUIDED, inputs=inputs)
