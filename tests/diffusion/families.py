"""Tiny random-weight pipelines of many families: the material of the family tests.

`FAMILIES[name]()` builds one in well under a second, without network or files. Weights are random
but the classes, the schedulers and their settings are those of the real checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

import tiny_parts as parts


@dataclass(frozen=True)
class Family:
    """A tiny pipeline and how to call it.

    `call` holds the arguments besides prompt, steps and generator, with guidance on where the
    pipeline has any; `unguided` holds what to change to have one model call per step.
    """

    name: str
    pipe: DiffusionPipeline
    call: dict[str, object]
    kind: Literal["flow", "epsilon"] = "flow"
    media: Literal["image", "video", "audio"] = "image"
    unguided: dict[str, object] = field(default_factory=dict)


def picture(size: int = 16) -> Image.Image:
    """The conditioning picture of editing and image-to-video families: a diagonal ramp."""
    ramp = torch.arange(size * size).view(size, size) * 255 // (size * size)
    return Image.fromarray(torch.stack([ramp, ramp.T, 255 - ramp], dim=-1).byte().numpy())


def sd15() -> Family:
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    pipe = StableDiffusionPipeline(
        vae=parts.kl_autoencoder(),
        text_encoder=parts.clip_encoder(),
        tokenizer=parts.clip_tokenizer(),
        unet=unet,
        scheduler=PNDMScheduler(skip_prk_steps=True, **SD_BETAS),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    call = {"height": 16, "width": 16, "guidance_scale": 5.0}
    return Family("sd15", pipe, call, kind="epsilon", unguided={"guidance_scale": 1.0})


SD_BETAS = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
}


def sd15_ddim() -> Family:
    family = sd15()
    family.pipe.scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **SD_BETAS)
    return Family("sd15_ddim", family.pipe, family.call, kind="epsilon", unguided=family.unguided)


def sdxl() -> Family:
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
    )
    pipe = StableDiffusionXLPipeline(
        vae=parts.kl_autoencoder(),
        text_encoder=parts.clip_encoder(),
        text_encoder_2=parts.clip_projection_encoder(),
        tokenizer=parts.clip_tokenizer(),
        tokenizer_2=parts.clip_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", **SD_BETAS),
        add_watermarker=False,
    )
    call = {"height": 16, "width": 16, "guidance_scale": 5.0}
    return Family("sdxl", pipe, call, kind="epsilon", unguided={"guidance_scale": 1.0})


def sd3() -> Family:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.kl_autoencoder(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=parts.clip_projection_encoder(),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_projection_encoder(),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_encoder(64),
        tokenizer_3=parts.t5_tokenizer(),
    )
    call = {"height": 16, "width": 16, "guidance_scale": 4.5, "max_sequence_length": 16}
    return Family("sd3", pipe, call, unguided={"guidance_scale": 1.0})


FLUX_SHIFT = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}


def _flux_parts(guidance_embeds: bool = True) -> dict[str, object]:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(**FLUX_SHIFT),
        "vae": parts.kl_autoencoder(shift_factor=0.12, scaling_factor=0.36),
        "text_encoder": parts.clip_encoder(),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": parts.t5_tokenizer(),
    }


def flux() -> Family:
    call = {"height": 16, "width": 16, "guidance_scale": 3.5, "max_sequence_length": 16}
    return Family("flux", FluxPipeline(**_flux_parts()), call)


def flux_kontext() -> Family:
    call = {"height": 16, "width": 16, "guidance_scale": 2.5, "max_sequence_length": 16}
    call |= {"image": picture(), "max_area": 16 * 16, "_auto_resize": False}
    return Family("flux_kontext", FluxKontextPipeline(**_flux_parts()), call)


def _qwen_transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def _qwen_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )


def qwen_image() -> Family:
    pipe = QwenImagePipeline(
        scheduler=_qwen_scheduler(),
        vae=parts.qwen_autoencoder(),
        text_encoder=parts.qwen_vl_encoder(),
        tokenizer=parts.qwen_tokenizer(),
        transformer=_qwen_transformer(),
    )
    call = {"height": 32, "width": 32, "true_cfg_scale": 4.0, "negative_prompt": [" ", " "]}
    return Family("qwen_image", pipe, call, unguided={"true_cfg_scale": 1.0})


def _wan_transformer(in_channels: int = 16, image_dim: int | None = None) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        image_dim=image_dim,
    )


def _wan_scheduler(flow_shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def wan_t2v() -> Family:
    pipe = WanPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        vae=parts.wan_autoencoder(),
        scheduler=_wan_scheduler(),
        transformer=_wan_transformer(),
    )
    call = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 5.0, "max_sequence_length": 16}
    return Family("wan_t2v", pipe, call, media="video", unguided={"guidance_scale": 1.0})


def wan_i2v() -> Family:
    pipe = WanImageToVideoPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        vae=parts.wan_autoencoder(),
        scheduler=_wan_scheduler(),
        transformer=_wan_transformer(in_channels=36),
    )
    call = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 5.0, "max_sequence_length": 16}
    call |= {"image": picture()}
    return Family("wan_i2v", pipe, call, media="video", unguided={"guidance_scale": 1.0})


_BUILDERS: list[Callable[[], Family]] = [
    sd15,
    sd15_ddim,
    sdxl,
    sd3,
    flux,
    flux_kontext,
    qwen_image,
    wan_t2v,
    wan_i2v,
]


def _seeded(build: Callable[[], Family]) -> Callable[[], Family]:
    def seeded() -> Family:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            family = build()
        family.pipe.set_progress_bar_config(disable=True)
        return family

    return seeded


FAMILIES: dict[str, Callable[[], Family]] = {build.__name__: _seeded(build) for build in _BUILDERS}
