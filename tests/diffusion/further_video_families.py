"""Tiny random-weight pipelines that make videos, one function per family: those beside the best known.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

import diffusers

from tests.diffusion import tiny_parts as parts
from tests.diffusion.further_families import KANDINSKY5
from tests.diffusion.tiny_parts import Family
from tests.diffusion.video_families import FLOW, SIZE, UNGUIDED


def allegro() -> Family:
    """Its VAE decodes one video at a time, in tiles of at least 128 x 128 pixels and 24 frames."""
    sizes = {"attention_head_dim": 12, "out_channels": 4, "cross_attention_dim": 24}
    sample = {"sample_height": 16, "sample_width": 16, "sample_frames": 6}
    transformer = parts.small(diffusers.AllegroTransformer3DModel, **sizes, **sample)
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=128
    )
    vae.enable_tiling()
    vae.enable_slicing()
    betas = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
    made = {"vae": vae, "transformer": transformer, "scheduler": diffusers.EulerAncestralDiscreteScheduler(**betas)}
    call = {"height": 128, "width": 128, "num_frames": 24, "guidance_scale": 7.5, "max_sequence_length": 16}
    pipe = diffusers.AllegroPipeline(**parts.t5(), **made)
    return Family("allegro", pipe, call, kind="epsilon", media="video", unguided=UNGUIDED)


def skyreels_v2() -> Family:
    transformer = parts.small(
        diffusers.SkyReelsV2Transformer3DModel, attention_head_dim=12, in_channels=16, out_channels=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    made = parts.texts(parts.umt5_encoder(), parts.t5_tokenizer()) | {"vae": parts.wan_autoencoder()}
    scheduler = diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=8.0)
    pipe = diffusers.SkyReelsV2Pipeline(**made, transformer=transformer, scheduler=scheduler)
    return Family("skyreels_v2", pipe, {**SIZE, "guidance_scale": 6.0}, media="video", unguided=UNGUIDED)


def sana_video() -> Family:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=32,
        rope_max_seq_len=32,
    )  # fmt: skip
    made = parts.texts(parts.gemma2_encoder(), parts.byte_tokenizer()) | {"vae": parts.wan_autoencoder()}
    scheduler = diffusers.DPMSolverMultistepScheduler(**FLOW, flow_shift=8.0)
    pipe = diffusers.SanaVideoPipeline(**made, transformer=transformer, scheduler=scheduler)
    call = {"height": 32, "width": 32, "frames": 5, "guidance_scale": 6.0, "max_sequence_length": 32}
    call |= {"complex_human_instruction": None, "use_resolution_binning": False}
    return Family("sana_video", pipe, call, media="video", unguided=UNGUIDED)


def kandinsky5_t2v() -> Family:
    transformer = parts.woken(diffusers.Kandinsky5Transformer3DModel(**KANDINSKY5, visual_cond=True))
    made = {"transformer": transformer, "vae": parts.hunyuan_video_autoencoder(), "scheduler": parts.flow(5.0)}
    made |= parts.texts(parts.qwen_vl_encoder(), parts.qwen_vl_processor())
    pipe = diffusers.Kandinsky5T2VPipeline(**made, **parts.clip("_2"))
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 192}
    return Family("kandinsky5_t2v", pipe, call, media="video", unguided=UNGUIDED)


def hunyuan_video15() -> Family:
    """Guidance is a component of its own, which has the scale. Its VAE's mask is made for one video at a time."""
    transformer = parts.small(
        diffusers.HunyuanVideo15Transformer3DModel, in_channels=9, out_channels=4, attention_head_dim=16,
        image_embed_dim=8, rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8,) * 5, layers_per_block=1)
    vae.enable_slicing()
    encoder = parts.qwen_vl_encoder(layers=3).model.language_model
    pipe = diffusers.HunyuanVideo15Pipeline(
        **parts.texts(encoder, parts.byte_tokenizer()), transformer=parts.woken(transformer), vae=vae,
        scheduler=parts.flow(5.0), **parts.byt5(), guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip
    pipe.system_message, pipe.prompt_template_encode_start_idx = "Describe.", 8
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 64, 8, 4
    return Family("hunyuan_video15", pipe, {"height": 32, "width": 32, "num_frames": 5}, media="video")
