"""Tiny random-weight pipelines that make videos, one function per family: those beside the best known.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

import diffusers
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from tests.diffusion import tiny_parts as parts
from tests.diffusion.further_families import KANDINSKY5
from tests.diffusion.tiny_parts import Family
from tests.diffusion.video_families import SIZE, UNGUIDED


def allegro() -> Family:
    """Its VAE decodes one video at a time, in tiles of at least 128 x 128 pixels and 24 frames."""
    transformer = parts.small(
        diffusers.AllegroTransformer3DModel,
        attention_head_dim=12,
        out_channels=4,
        cross_attention_dim=24,
        sample_height=16,
        sample_width=16,
        sample_frames=6,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=128
    )
    vae.enable_tiling()
    vae.enable_slicing()
    pipe = diffusers.AllegroPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.t5_encoder(),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.EulerAncestralDiscreteScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )
    call = {"height": 128, "width": 128, "num_frames": 24, "guidance_scale": 7.5, "max_sequence_length": 16}
    return Family("allegro", pipe, call, kind="epsilon", media="video", unguided=UNGUIDED)


def skyreels_v2() -> Family:
    transformer = parts.small(
        diffusers.SkyReelsV2Transformer3DModel,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    pipe = diffusers.SkyReelsV2Pipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        transformer=transformer,
        vae=parts.wan_autoencoder(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
        ),
    )
    return Family("skyreels_v2", pipe, {**SIZE, "guidance_scale": 6.0}, media="video", unguided=UNGUIDED)


def sana_video() -> Family:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        rope_max_seq_len=32,
    )
    pipe = diffusers.SanaVideoPipeline(
        tokenizer=parts.byte_tokenizer(),
        text_encoder=parts.gemma2_encoder(),
        vae=parts.wan_autoencoder(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
        ),
    )
    call = {"height": 32, "width": 32, "frames": 5, "guidance_scale": 6.0, "max_sequence_length": 32}
    call |= {"complex_human_instruction": None, "use_resolution_binning": False}
    return Family("sana_video", pipe, call, media="video", unguided=UNGUIDED)


def kandinsky5_t2v() -> Family:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        **KANDINSKY5,
        visual_cond=True,
    )
    pipe = diffusers.Kandinsky5T2VPipeline(
        transformer=parts.woken(transformer),
        vae=parts.hunyuan_video_autoencoder(),
        text_encoder=parts.qwen_vl_encoder(),
        tokenizer=parts.qwen_vl_processor(),
        text_encoder_2=parts.clip_encoder(),
        tokenizer_2=parts.clip_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 192}
    return Family("kandinsky5_t2v", pipe, call, media="video", unguided=UNGUIDED)


def hunyuan_video15() -> Family:
    """Guidance is a component of its own, which has the scale. Its VAE's mask is made for one video at a time."""
    transformer = parts.small(
        diffusers.HunyuanVideo15Transformer3DModel,
        in_channels=9,
        out_channels=4,
        attention_head_dim=16,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="t2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    vae.enable_slicing()
    byt5 = T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    pipe = diffusers.HunyuanVideo15Pipeline(
        text_encoder=parts.qwen_vl_encoder(layers=3).model.language_model,
        tokenizer=parts.byte_tokenizer(),
        transformer=parts.woken(transformer),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=T5EncoderModel(byt5),
        tokenizer_2=ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipe.system_message, pipe.prompt_template_encode_start_idx = "Describe.", 8
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 64, 8, 4
    call = {"height": 32, "width": 32, "num_frames": 5}
    return Family("hunyuan_video15", pipe, call, media="video")
