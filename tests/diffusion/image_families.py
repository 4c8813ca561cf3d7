"""Tiny random-weight pipelines that make images, one function per family.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

import diffusers

from tests.diffusion import tiny_parts as parts
from tests.diffusion.tiny_parts import Family

SIZE = {"height": 16, "width": 16}
UNGUIDED: dict[str, object] = {"guidance_scale": 1.0}
SD_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}


def sd15(in_channels: int = 4) -> Family:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=in_channels,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    pipe = diffusers.StableDiffusionPipeline(
        vae=parts.kl_autoencoder(),
        text_encoder=parts.clip_encoder(),
        tokenizer=parts.clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, **SD_BETAS),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    call = {**SIZE, "guidance_scale": 5.0}
    return Family("sd15", pipe, call, kind="epsilon", unguided=UNGUIDED)


def sdxl() -> Family:
    unet = diffusers.UNet2DConditionModel(
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
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=parts.kl_autoencoder(),
        text_encoder=parts.clip_encoder(),
        text_encoder_2=parts.clip_projection_encoder(),
        tokenizer=parts.clip_tokenizer(),
        tokenizer_2=parts.clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **SD_BETAS),
        add_watermarker=False,
    )
    call = {**SIZE, "guidance_scale": 5.0}
    return Family("sdxl", pipe, call, kind="epsilon", unguided=UNGUIDED)


def sd3(channels: int = 4) -> Family:
    transformer = parts.small(
        diffusers.SD3Transformer2DModel,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=2,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.kl_autoencoder(channels, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=parts.clip_projection_encoder(),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_projection_encoder(),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_encoder(64),
        tokenizer_3=parts.t5_tokenizer(),
    )
    call = {**SIZE, "guidance_scale": 4.5, "max_sequence_length": 16}
    return Family("sd3", pipe, call, unguided=UNGUIDED)


def flux_parts(in_channels: int = 16, out_channels: int = 16) -> dict[str, object]:
    transformer = parts.small(
        diffusers.FluxTransformer2DModel,
        patch_size=1,
        in_channels=in_channels,
        out_channels=out_channels,
        attention_head_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": parts.kl_autoencoder(shift_factor=0.12, scaling_factor=0.36),
        "text_encoder": parts.clip_encoder(),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": parts.t5_tokenizer(),
    }


def flux() -> Family:
    call = {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 16}
    return Family("flux", diffusers.FluxPipeline(**flux_parts()), call)


def flux2() -> Family:
    transformer = parts.small(
        diffusers.Flux2Transformer2DModel,
        patch_size=1,
        in_channels=16,
        attention_head_dim=16,
        joint_attention_dim=64,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    pipe = diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=parts.flux2_autoencoder(),
        text_encoder=parts.mistral3_encoder(),
        # The system message comes first and is longer than 48 bytes: keep the end, where the prompt is.
        tokenizer=parts.byte_tokenizer(truncation_side="left"),
        transformer=transformer,
    )
    call = {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 48, "text_encoder_out_layers": (1, 2)}
    return Family("flux2", pipe, call)


def chroma() -> Family:
    transformer = parts.small(
        diffusers.ChromaTransformer2DModel,
        in_channels=16,
        attention_head_dim=16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    pipe = diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=parts.kl_autoencoder(shift_factor=0.12, scaling_factor=0.36),
        text_encoder=parts.t5_encoder(),
        tokenizer=parts.t5_tokenizer(),
        transformer=transformer,
    )
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 16}
    return Family("chroma", pipe, call, unguided=UNGUIDED)


def auraflow() -> Family:
    transformer = parts.small(
        diffusers.AuraFlowTransformer2DModel,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=16,
    )
    pipe = diffusers.AuraFlowPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        vae=parts.kl_autoencoder(),
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
    )
    call = {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 16}
    return Family("auraflow", pipe, call, unguided=UNGUIDED)


def lumina2() -> Family:
    transformer = parts.small(
        diffusers.Lumina2Transformer2DModel,
        hidden_size=24,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(128, 32, 32),
        cap_feat_dim=32,
    )
    pipe = diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=parts.kl_autoencoder(blocks=4, shift_factor=0.12, scaling_factor=0.36),
        text_encoder=parts.gemma2_encoder(),
        tokenizer=parts.byte_tokenizer(),
    )
    call = {"height": 32, "width": 32, "guidance_scale": 4.0, "max_sequence_length": 48}
    return Family("lumina2", pipe, call | {"system_prompt": "Draw:"}, unguided=UNGUIDED)


def sana() -> Family:
    transformer = parts.small(
        diffusers.SanaTransformer2DModel,
        out_channels=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=32,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = diffusers.SanaPipeline(
        tokenizer=parts.byte_tokenizer(),
        text_encoder=parts.gemma2_encoder(),
        vae=parts.dc_autoencoder(),
        transformer=transformer,
        scheduler=scheduler,
    )
    call = {"height": 32, "width": 32, "guidance_scale": 4.5, "max_sequence_length": 32}
    call |= {"complex_human_instruction": None, "use_resolution_binning": False}
    return Family("sana", pipe, call, unguided=UNGUIDED)


def pixart_sigma() -> Family:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,  # the second half is a learned variance, which the pipeline drops
        num_layers=1,
        cross_attention_dim=16,
        sample_size=8,
        caption_channels=32,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.t5_encoder(),
        vae=parts.kl_autoencoder(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02),
    )
    call = {**SIZE, "guidance_scale": 4.5, "max_sequence_length": 16}
    call |= {"clean_caption": False, "use_resolution_binning": False}
    return Family("pixart_sigma", pipe, call, kind="epsilon", unguided=UNGUIDED)


def cogview4() -> Family:
    transformer = parts.small(
        diffusers.CogView4Transformer2DModel,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(16, 16),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    pipe = diffusers.CogView4Pipeline(
        tokenizer=parts.byte_tokenizer(first_token=True),
        text_encoder=parts.glm_encoder(),
        vae=parts.kl_autoencoder(),
        transformer=transformer,
        scheduler=scheduler,
    )
    call = {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 32}
    return Family("cogview4", pipe, call, unguided=UNGUIDED)


def z_image() -> Family:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 32, 32],
    )
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=parts.kl_autoencoder(shift_factor=0.12, scaling_factor=0.36),
        text_encoder=parts.qwen3_encoder(),
        tokenizer=parts.byte_tokenizer(),
        transformer=transformer,
    )
    call = {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 64}
    return Family("z_image", pipe, call, unguided={"guidance_scale": 0.0})


def qwen_parts() -> dict[str, object]:
    transformer = parts.small(
        diffusers.QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=64,
        out_channels=16,
        attention_head_dim=16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    return {
        "scheduler": scheduler,
        "vae": parts.qwen_autoencoder(),
        "text_encoder": parts.qwen_vl_encoder(),
        "tokenizer": parts.byte_tokenizer(),
        "transformer": transformer,
    }


QWEN_CALL = {"height": 32, "width": 32, "true_cfg_scale": 4.0}
QWEN_UNGUIDED: dict[str, object] = {"true_cfg_scale": 1.0}


def qwen_image() -> Family:
    call = QWEN_CALL | {"negative_prompt": " "}
    unguided = QWEN_UNGUIDED | {"negative_prompt": None}
    return Family("qwen_image", diffusers.QwenImagePipeline(**qwen_parts()), call, unguided=unguided)


def hidream() -> Family:
    transformer = parts.small(
        diffusers.HiDreamImageTransformer2DModel,
        patch_size=2,
        caption_channels=[32, 32],
        text_emb_dim=64,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
    )
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.kl_autoencoder(shift_factor=0.12, scaling_factor=0.36),
        text_encoder=parts.clip_projection_encoder(),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_projection_encoder(),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_encoder(),
        tokenizer_3=parts.t5_tokenizer(),
        text_encoder_4=parts.llama_language_model(),
        tokenizer_4=parts.byte_tokenizer(),
        transformer=transformer,
    )
    pipe.default_sample_size = 8  # every size is scaled to this area
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 32}
    return Family("hidream", pipe, call, unguided=UNGUIDED)
