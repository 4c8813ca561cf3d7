"""Tiny random-weight pipelines that start from pictures: whole ones (img2img) or parts of them (inpainting).

Each is made of the components of its text-to-image family. At strength below 1 they cut their schedule themselves.
"""

from __future__ import annotations

from dataclasses import replace

import diffusers
from PIL import Image

from tests.diffusion import image_families as image
from tests.diffusion import tiny_parts as parts
from tests.diffusion.tiny_parts import Family


def _from(
    name: str, base: Family, kind: type[diffusers.DiffusionPipeline], *, masks: bool = False, **call: object
) -> Family:
    """`base` as a pipeline of this class, which starts from pictures of its size."""
    size = int(str(base.call["height"]))
    given: dict[str, list[object]] = {"image": [*parts.pictures(size)]}
    if masks:
        given["mask_image"] = [mask(size), mask(size)]
    components = {name: part for name, part in base.pipe.components.items() if name != "image_encoder" or part}
    return replace(base, name=name, pipe=kind(**components), call=base.call | call, inputs=given)


def mask(size: int) -> Image.Image:
    """White, to be drawn anew, on the right half."""
    made = Image.new("L", (size, size), 0)
    made.paste(255, (size // 2, 0, size, size))
    return made


def _without_size(family: Family) -> Family:
    """For pipelines that take their size from the picture."""
    return replace(family, call={k: v for k, v in family.call.items() if k not in ("height", "width")})


def sd15_img2img() -> Family:
    return _without_size(_from("sd15_img2img", image.sd15(), diffusers.StableDiffusionImg2ImgPipeline, strength=1.0))


def sd15_inpaint() -> Family:
    return _from("sd15_inpaint", image.sd15(), diffusers.StableDiffusionInpaintPipeline, masks=True, strength=1.0)


def sdxl_img2img() -> Family:
    return _without_size(_from("sdxl_img2img", image.sdxl(), diffusers.StableDiffusionXLImg2ImgPipeline, strength=1.0))


def sdxl_inpaint() -> Family:
    return _from("sdxl_inpaint", image.sdxl(), diffusers.StableDiffusionXLInpaintPipeline, masks=True, strength=1.0)


def sd3_img2img() -> Family:
    return _from("sd3_img2img", image.sd3(), diffusers.StableDiffusion3Img2ImgPipeline, strength=1.0)


def sd3_inpaint() -> Family:
    return _from("sd3_inpaint", image.sd3(16), diffusers.StableDiffusion3InpaintPipeline, masks=True, strength=1.0)


def flux_img2img() -> Family:
    return _from("flux_img2img", image.flux(), diffusers.FluxImg2ImgPipeline, strength=1.0)


def flux_inpaint() -> Family:
    return _from("flux_inpaint", image.flux(), diffusers.FluxInpaintPipeline, masks=True, strength=1.0)


def flux_fill() -> Family:
    """Picture and mask are channels beside the latents: 16 + 16 + 4 x 2 x 2."""
    base = Family(
        "flux", diffusers.FluxFillPipeline(**image.flux_parts(in_channels=48, out_channels=16)), image.flux().call
    )
    return _from("flux_fill", base, diffusers.FluxFillPipeline, masks=True)


def flux_kontext_inpaint() -> Family:
    base = image.flux()
    call = {"max_area": 256, "_auto_resize": False, "strength": 1.0}
    return _from("flux_kontext_inpaint", base, diffusers.FluxKontextInpaintPipeline, masks=True, **call)


def chroma_img2img() -> Family:
    return _from("chroma_img2img", image.chroma(), diffusers.ChromaImg2ImgPipeline, strength=1.0)


def chroma_inpaint() -> Family:
    return _from("chroma_inpaint", image.chroma(), diffusers.ChromaInpaintPipeline, masks=True, strength=1.0)


def qwen_img2img() -> Family:
    return _from("qwen_img2img", image.qwen_image(), diffusers.QwenImageImg2ImgPipeline, strength=1.0)


def qwen_inpaint() -> Family:
    return _from("qwen_inpaint", image.qwen_image(), diffusers.QwenImageInpaintPipeline, masks=True, strength=1.0)


def z_image_img2img() -> Family:
    return _from("z_image_img2img", image.z_image(), diffusers.ZImageImg2ImgPipeline, strength=1.0)


def z_image_inpaint() -> Family:
    return _from("z_image_inpaint", image.z_image(), diffusers.ZImageInpaintPipeline, masks=True, strength=1.0)


def sd_latent_upscaler() -> Family:
    """Its loop reads `scheduler.sigmas`, which DDIM has not."""
    base = image.sd15(in_channels=8)
    kept = ("vae", "text_encoder", "tokenizer", "unet")
    components = {name: part for name, part in base.pipe.components.items() if name in kept}
    scheduler = diffusers.EulerDiscreteScheduler(**image.SD_BETAS)
    pipe = diffusers.StableDiffusionLatentUpscalePipeline(**components, scheduler=scheduler)
    return replace(base, name="sd_latent_upscaler", pipe=pipe, call={}, inputs={"image": [*parts.pictures(16)]})
