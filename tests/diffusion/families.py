"""Tiny random-weight pipelines of many families: the material of the family tests.

`FAMILIES[name]()` builds one in well under a second, without network or files. Two prompts are
what their `inputs` are made for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.diffusion import editing_families as editing
from tests.diffusion import further_families as further
from tests.diffusion import further_video_families as further_video
from tests.diffusion import image_families as image
from tests.diffusion import starting_families as starting
from tests.diffusion import video_families as video
from tests.diffusion.tiny_parts import Family

Builder = Callable[[], Family]


def _seeded(build: Builder) -> Builder:
    """`build`, with the same random weights each time and the global random state left alone."""

    def seeded() -> Family:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            family = build()
        for component in family.pipe.components.values():
            if isinstance(component, nn.Module):
                component.eval()  # as `from_pretrained` does
        family.pipe.set_progress_bar_config(disable=True)
        return family

    return seeded


def _table(*builders: Builder) -> dict[str, Builder]:
    return {build.__name__: _seeded(build) for build in builders}


FAMILIES = _table(
    image.sd15,
    image.sdxl,
    image.sd3,
    image.flux,
    editing.flux_kontext,
    image.flux2,
    image.chroma,
    image.auraflow,
    image.lumina2,
    image.sana,
    image.pixart_sigma,
    image.cogview4,
    image.z_image,
    image.qwen_image,
    editing.qwen_image_edit,
    image.hidream,
    further.flux2_klein,
    further.bria,
    further.bria_fibo,
    further.ovis_image,
    further.longcat_image,
    further.prx,
    further.hunyuan_image,
    further.hunyuan_dit,
    further.kandinsky5_t2i,
    further.pixart_alpha,
    further.cogview3plus,
    starting.sd15_img2img,
    starting.sd15_inpaint,
    starting.sdxl_img2img,
    starting.sdxl_inpaint,
    starting.sd3_img2img,
    starting.sd3_inpaint,
    starting.flux_img2img,
    starting.flux_inpaint,
    starting.flux_fill,
    starting.flux_kontext_inpaint,
    starting.chroma_img2img,
    starting.qwen_img2img,
    starting.qwen_inpaint,
    starting.z_image_img2img,
    starting.z_image_inpaint,
    video.wan_t2v,
    video.wan22,
    video.wan_i2v,
    video.ltx,
    video.hunyuan_video,
    video.mochi,
    video.cogvideox,
    video.ace_step,
    further_video.allegro,
    further_video.skyreels_v2,
    further_video.sana_video,
    further_video.kandinsky5_t2v,
    further_video.hunyuan_video15,
)

REFUSED = _table(
    starting.chroma_inpaint, starting.sd_latent_upscaler, video.ltx_i2v, video.stable_audio, video.ace_step_guided
)
"""Pipelines whose loop does not fit; each says why in its docstring."""
