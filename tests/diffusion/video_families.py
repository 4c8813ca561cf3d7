"""Tiny random-weight pipelines that make videos or sound, one function per family.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

import diffusers
import pytest
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from transformers import Gemma2Model, LlamaModel, Qwen3Model

from tests.diffusion import tiny_parts as parts
from tests.diffusion.image_families import KANDINSKY5
from tests.diffusion.tiny_parts import Family

SIZE = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
UNGUIDED: dict[str, object] = {"guidance_scale": 1.0}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def _wan_transformer(in_channels: int = 16) -> diffusers.WanTransformer3DModel:
    return parts.small(
        diffusers.WanTransformer3DModel, attention_head_dim=12, in_channels=in_channels, out_channels=16, freq_dim=16,
        ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def _wan_parts() -> dict[str, object]:
    scheduler = diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0)
    return parts.umt5() | {"vae": parts.wan_autoencoder(), "scheduler": scheduler}


def wan_t2v() -> Family:
    pipe = diffusers.WanPipeline(**_wan_parts(), transformer=_wan_transformer())
    return Family("wan_t2v", pipe, {**SIZE, "guidance_scale": 5.0}, media="video", unguided=UNGUIDED)


def wan22() -> Family:
    """Two experts: one transformer above the boundary noise level, the other below."""
    pipe = diffusers.WanPipeline(
        **_wan_parts(), transformer=_wan_transformer(), transformer_2=_wan_transformer(), boundary_ratio=0.875
    )
    call = {**SIZE, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
    return Family("wan22", pipe, call, media="video", unguided={**UNGUIDED, "guidance_scale_2": 1.0})


def wan_i2v() -> Family:
    pytest.importorskip("ftfy", reason="WanImageToVideoPipeline cleans its prompts with ftfy (pip install ftfy)")
    # The condition (a mask of 4 channels and 16 latent channels) is concatenated to the latents.
    pipe = diffusers.WanImageToVideoPipeline(**_wan_parts(), transformer=_wan_transformer(in_channels=36))
    call = {**SIZE, "guidance_scale": 5.0, "image": parts.picture()}  # it takes one picture for all prompts
    return Family("wan_i2v", pipe, call, media="video", unguided=UNGUIDED)


def ltx() -> Family:
    sizes = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 16}
    transformer = parts.small(diffusers.LTXVideoTransformer3DModel, **sizes)
    # 2 x 2 pixels per patch and one halving of each side and of time: 4 x 4 pixels, 2 frames per latent
    halved = (True, False, False, False)
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, patch_size=2, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=halved, decoder_spatio_temporal_scaling=halved,
    )  # fmt: skip
    shifts = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    made = parts.t5() | {"scheduler": parts.flow(use_dynamic_shifting=True, **shifts), "vae": vae}
    call = {**SIZE, "height": 32, "width": 32, "guidance_scale": 3.0}
    return Family("ltx", diffusers.LTXPipeline(**made, transformer=transformer), call, media="video", unguided=UNGUIDED)


def ltx_i2v() -> Family:
    """Its loop steps only the frames after the first, while its latents hold all of them."""
    base = ltx()
    pipe = diffusers.LTXImageToVideoPipeline(**base.pipe.components)
    return Family("ltx_i2v", pipe, base.call, media="video", unguided=UNGUIDED, inputs={"image": parts.pictures(32)})


def hunyuan_video() -> Family:
    sizes = {"out_channels": 4, "attention_head_dim": 16, "rope_axes_dim": (4, 6, 6)}
    transformer = parts.small(diffusers.HunyuanVideoTransformer3DModel, **sizes)
    pipe = diffusers.HunyuanVideoPipeline(
        **parts.texts(parts.decoder(LlamaModel, 3), parts.byte_tokenizer()), transformer=transformer,
        vae=parts.hunyuan_video_autoencoder(), scheduler=parts.flow(7.0), **parts.clip("_2"),
    )  # fmt: skip
    call = {**SIZE, "guidance_scale": 6.0, "max_sequence_length": 32}
    call |= {"prompt_template": {"template": "{}", "crop_start": 0}}
    return Family("hunyuan_video", pipe, call, media="video")


def mochi() -> Family:
    """Time runs the other way: 0 is noise, 1 is data, and the model predicts data - noise."""
    sizes = {"num_layers": 2, "pooled_projection_dim": 16, "in_channels": 12, "time_embed_dim": 4}
    transformer = parts.small(diffusers.MochiTransformer3DModel, **sizes, max_sequence_length=16)
    widths = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    vae = diffusers.AutoencoderKLMochi(**widths, layers_per_block=(1,) * 5)
    made = {"scheduler": parts.flow(invert_sigmas=True), "vae": vae}
    pipe = diffusers.MochiPipeline(**made, **parts.t5(), transformer=transformer)
    return Family("mochi", pipe, {**SIZE, "num_frames": 7, "guidance_scale": 4.5}, media="video", unguided=UNGUIDED)


def cogvideox() -> Family:
    sizes = {"out_channels": 4, "time_embed_dim": 2, "sample_width": 2, "sample_height": 2, "sample_frames": 5}
    transformer = parts.small(diffusers.CogVideoXTransformer3DModel, **sizes, max_text_seq_length=16)
    scheduler = diffusers.CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=3.0, timestep_spacing="trailing", clip_sample=False,
    )  # fmt: skip
    widths = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    made = {"vae": diffusers.AutoencoderKLCogVideoX(**widths), "transformer": transformer, "scheduler": scheduler}
    pipe = diffusers.CogVideoXPipeline(**made, **parts.t5())
    return Family("cogvideox", pipe, {**SIZE, "guidance_scale": 6.0}, kind="epsilon", media="video", unguided=UNGUIDED)


def ace_step() -> Family:
    """Music from a description and lyrics; without guidance, as its distilled (turbo) checkpoints run."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformer = diffusers.AceStepTransformer1DModel(
        **sizes, head_dim=8, num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    condition_encoder = AceStepConditionEncoder(
        **sizes, head_dim=8, text_hidden_dim=32, timbre_hidden_dim=8, num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    pipe = diffusers.AceStepPipeline(
        vae=parts.oobleck_autoencoder(8, 80),
        **parts.texts(parts.decoder(Qwen3Model), parts.byte_tokenizer()), transformer=transformer,
        condition_encoder=condition_encoder, scheduler=parts.flow(num_train_timesteps=1),
    )  # fmt: skip
    call = {"audio_duration": 1.0, "guidance_scale": 1.0}
    return Family("ace_step", pipe, call, media="audio", inputs={"lyrics": ["la la", "lo"]})


def allegro() -> Family:
    """Its VAE decodes one video at a time, in tiles of at least 128 x 128 pixels and 24 frames."""
    sizes = {"attention_head_dim": 12, "out_channels": 4, "cross_attention_dim": 24}
    sample = {"sample_height": 16, "sample_width": 16, "sample_frames": 6}
    transformer = parts.small(diffusers.AllegroTransformer3DModel, **sizes, **sample)
    widths = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    vae = diffusers.AutoencoderKLAllegro(**widths, sample_size=128)
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
    scheduler = diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=8.0)
    made = {"vae": parts.wan_autoencoder(), "transformer": transformer, "scheduler": scheduler}
    pipe = diffusers.SkyReelsV2Pipeline(**made, **parts.umt5())
    return Family("skyreels_v2", pipe, {**SIZE, "guidance_scale": 6.0}, media="video", unguided=UNGUIDED)


def sana_video() -> Family:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=32,
        rope_max_seq_len=32,
    )  # fmt: skip
    made = parts.texts(parts.decoder(Gemma2Model), parts.byte_tokenizer()) | {"vae": parts.wan_autoencoder()}
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
