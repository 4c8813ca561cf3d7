"""Tiny random-weight pipelines that start from pictures: to edit them, whole (img2img) or in parts (inpainting).

Most are made of the components of their text-to-image family. At strength below 1 they cut their schedule themselves.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import diffusers
from diffusers import FluxKontextPipeline, QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from tests.diffusion import image_families as image
from tests.diffusion import tiny_parts as parts
from tests.diffusion.image_families import QWEN_CALL, QWEN_UNGUIDED, flux_parts, qwen_parts
from tests.diffusion.tiny_parts import Family

Builder = Callable[[], Family]


class Start(NamedTuple):
    """A pipeline that starts from pictures of its size, made of the components of another."""

    base: Builder
    kind: type[diffusers.DiffusionPipeline]
    masks: bool = False
    sized: bool = True
    """Whether it is told its size, or takes it from the picture."""
    call: dict[str, object] = {"strength": 1.0}


def _started(name: str, start: Start) -> Family:
    base = start.base()
    size = int(str(base.call["height"]))
    given: dict[str, list[object]] = {"image": [*parts.pictures(size)]}
    if start.masks:
        given["mask_image"] = [mask(size), mask(size)]
    components = {name: part for name, part in base.pipe.components.items() if name != "image_encoder" or part}
    call = {k: v for k, v in base.call.items() if start.sized or k not in ("height", "width")} | start.call
    return replace(base, name=name, pipe=start.kind(**components), call=call, inputs=given)


def mask(size: int) -> Image.Image:
    """White, to be drawn anew, on the right half."""
    made = Image.new("L", (size, size), 0)
    made.paste(255, (size // 2, 0, size, size))
    return made


def _flux_fill() -> Family:
    """Picture and mask are channels beside the latents: 16 + 16 + 4 x 2 x 2."""
    pipe = diffusers.FluxFillPipeline(**image.flux_parts(in_channels=48, out_channels=16))
    return Family("flux", pipe, image.flux().call)


_KONTEXT: dict[str, object] = {"max_area": 256, "_auto_resize": False, "strength": 1.0}
_STARTS = {
    "sd15_img2img": Start(image.sd15, diffusers.StableDiffusionImg2ImgPipeline, sized=False),
    "sd15_inpaint": Start(image.sd15, diffusers.StableDiffusionInpaintPipeline, masks=True),
    "sdxl_img2img": Start(image.sdxl, diffusers.StableDiffusionXLImg2ImgPipeline, sized=False),
    "sdxl_inpaint": Start(image.sdxl, diffusers.StableDiffusionXLInpaintPipeline, masks=True),
    "sd3_img2img": Start(image.sd3, diffusers.StableDiffusion3Img2ImgPipeline),
    "sd3_inpaint": Start(partial(image.sd3, 16), diffusers.StableDiffusion3InpaintPipeline, masks=True),
    "flux_img2img": Start(image.flux, diffusers.FluxImg2ImgPipeline),
    "flux_inpaint": Start(image.flux, diffusers.FluxInpaintPipeline, masks=True),
    "flux_fill": Start(_flux_fill, diffusers.FluxFillPipeline, masks=True, call={}),
    "flux_kontext_inpaint": Start(image.flux, diffusers.FluxKontextInpaintPipeline, masks=True, call=_KONTEXT),
    "chroma_img2img": Start(image.chroma, diffusers.ChromaImg2ImgPipeline),
    "chroma_inpaint": Start(image.chroma, diffusers.ChromaInpaintPipeline, masks=True),
    "qwen_img2img": Start(image.qwen_image, diffusers.QwenImageImg2ImgPipeline),
    "qwen_inpaint": Start(image.qwen_image, diffusers.QwenImageInpaintPipeline, masks=True),
    "z_image_img2img": Start(image.z_image, diffusers.ZImageImg2ImgPipeline),
    "z_image_inpaint": Start(image.z_image, diffusers.ZImageInpaintPipeline, masks=True),
}
BUILDERS: dict[str, Builder] = {name: partial(_started, name, start) for name, start in _STARTS.items()}


def sd_latent_upscaler() -> Family:
    """Its loop reads `scheduler.sigmas`, which DDIM has not."""
    base = image.sd15(in_channels=8)
    kept = ("vae", "text_encoder", "tokenizer", "unet")
    components = {name: part for name, part in base.pipe.components.items() if name in kept}
    scheduler = diffusers.EulerDiscreteScheduler(**image.SD_BETAS)
    pipe = diffusers.StableDiffusionLatentUpscalePipeline(**components, scheduler=scheduler)
    return replace(base, name="sd_latent_upscaler", pipe=pipe, call={}, inputs={"image": [*parts.pictures(16)]})


def flux_kontext() -> Family:
    call = image.sized(2.5, 16) | {"max_area": 256, "_auto_resize": False}
    return Family("flux_kontext", FluxKontextPipeline(**flux_parts()), call, inputs={"image": parts.pictures()})


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
