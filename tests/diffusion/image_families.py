"""Tiny random-weight pipelines that make images, one function per family: the best known, then those beside them.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

from dataclasses import replace

import diffusers
import transformers
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from tests.diffusion import tiny_parts as parts
from tests.diffusion.tiny_parts import Family

SIZE = {"height": 16, "width": 16}
UNGUIDED: dict[str, object] = {"guidance_scale": 1.0}
SD_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
UNSAFE = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
FLUX_VAE = {"shift_factor": 0.12, "scaling_factor": 0.36}
FLUX_ROPE = {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}


def sized(guidance: float, length: int, side: int = 16) -> dict[str, object]:
    """A call: pictures of this side, so much guidance, texts of this length."""
    return {"height": side, "width": side, "guidance_scale": guidance, "max_sequence_length": length}


def sd15(in_channels: int = 4) -> Family:
    unet = diffusers.UNet2DConditionModel(
        **UNET, in_channels=in_channels, cross_attention_dim=32, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, **SD_BETAS)
    made = parts.clip() | {"unet": unet, "scheduler": scheduler, "vae": parts.kl_autoencoder()}
    pipe = diffusers.StableDiffusionPipeline(**made, **UNSAFE)
    return Family("sd15", pipe, {**SIZE, "guidance_scale": 5.0}, kind="epsilon", unguided=UNGUIDED)


def sdxl() -> Family:
    unet = diffusers.UNet2DConditionModel(
        **UNET, attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1), cross_attention_dim=64,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **SD_BETAS)
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=parts.kl_autoencoder(), **parts.clip(), **parts.clip_projection("_2"), unet=unet, scheduler=scheduler,
        add_watermarker=False,
    )  # fmt: skip
    return Family("sdxl", pipe, {**SIZE, "guidance_scale": 5.0}, kind="epsilon", unguided=UNGUIDED)


def sd3(channels: int = 4) -> Family:
    transformer = parts.small(
        diffusers.SD3Transformer2DModel, in_channels=channels, out_channels=channels, num_layers=2,
        num_attention_heads=4, joint_attention_dim=64, pooled_projection_dim=64, pos_embed_max_size=8,
        qk_norm="rms_norm",
    )  # fmt: skip
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=parts.flow(3.0),
        vae=parts.kl_autoencoder(channels, shift_factor=0.06, scaling_factor=1.5),
        **parts.clip_projection(), **parts.clip_projection("_2"), **parts.t5("_3", 64),
    )  # fmt: skip
    return Family("sd3", pipe, sized(4.5, 16), unguided=UNGUIDED)


def flux_parts(in_channels: int = 16, out_channels: int = 16) -> dict[str, object]:
    kind, channels = diffusers.FluxTransformer2DModel, {"in_channels": in_channels, "out_channels": out_channels}
    transformer = parts.small(kind, **channels, **FLUX_ROPE, guidance_embeds=True)
    made = {"transformer": transformer, "scheduler": parts.shifting(), "vae": parts.kl_autoencoder(**FLUX_VAE)}
    return made | parts.clip() | parts.t5("_2")


def flux() -> Family:
    return Family("flux", diffusers.FluxPipeline(**flux_parts()), sized(3.5, 16))


FLUX2 = {"in_channels": 16, "attention_head_dim": 16, "joint_attention_dim": 64, "timestep_guidance_channels": 16}
FLUX2_CALL = sized(4.0, 48) | {"text_encoder_out_layers": (1, 2)}


def flux2_parts(**sizes: object) -> dict[str, object]:
    transformer = parts.small(diffusers.Flux2Transformer2DModel, **FLUX2, axes_dims_rope=(4, 4, 4, 4), **sizes)
    vae = parts.kl_autoencoder(kind=diffusers.AutoencoderKLFlux2)
    return {"scheduler": parts.shifting(), "vae": vae, "transformer": transformer}


def flux2() -> Family:
    # The system message comes first and is longer than 48 bytes: keep the end, where the prompt is.
    made = flux2_parts() | parts.texts(parts.mistral3_encoder(), parts.byte_tokenizer(truncation_side="left"))
    return Family("flux2", diffusers.Flux2Pipeline(**made), FLUX2_CALL)


def chroma() -> Family:
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    transformer = parts.small(diffusers.ChromaTransformer2DModel, in_channels=16, **FLUX_ROPE, **approximator)
    made = {"scheduler": parts.flow(), "vae": parts.kl_autoencoder(**FLUX_VAE), "transformer": transformer}
    return Family("chroma", diffusers.ChromaPipeline(**made, **parts.t5()), sized(5.0, 16), unguided=UNGUIDED)


def auraflow() -> Family:
    layers = {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_attention_heads": 4, "pos_embed_max_size": 16}
    transformer = parts.small(diffusers.AuraFlowTransformer2DModel, **layers)
    made = parts.umt5() | {"vae": parts.kl_autoencoder()}
    pipe = diffusers.AuraFlowPipeline(**made, transformer=transformer, scheduler=parts.flow(1.73))
    return Family("auraflow", pipe, sized(3.5, 16), unguided=UNGUIDED)


def lumina2() -> Family:
    rope = {"axes_dim_rope": (4, 4, 4), "axes_lens": (128, 32, 32)}
    sizes = {"hidden_size": 24, "num_kv_heads": 1, "multiple_of": 8, "cap_feat_dim": 32}
    pipe = diffusers.Lumina2Pipeline(
        transformer=parts.small(diffusers.Lumina2Transformer2DModel, **sizes, **rope),
        scheduler=parts.flow(6.0), vae=parts.kl_autoencoder(blocks=4, **FLUX_VAE),
        **parts.texts(parts.decoder(transformers.Gemma2Model), parts.byte_tokenizer()),
    )  # fmt: skip
    return Family("lumina2", pipe, sized(4.0, 48, 32) | {"system_prompt": "Draw:"}, unguided=UNGUIDED)


def sana() -> Family:
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    transformer = parts.small(diffusers.SanaTransformer2DModel, out_channels=4, **cross)
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    of_side = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8)}
    of_side |= {"qkv_multiscales": ((), (5,)), "layers_per_block": (1, 1)}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in of_side.items()}
    sides |= {"latent_channels": 4, "attention_head_dim": 2, "scaling_factor": 0.41407}
    made = parts.texts(parts.decoder(transformers.Gemma2Model), parts.byte_tokenizer())
    made |= {"vae": diffusers.AutoencoderDC(**sides)}
    scheduler = diffusers.DPMSolverMultistepScheduler(**settings)
    pipe = diffusers.SanaPipeline(**made, transformer=transformer, scheduler=scheduler)
    call = sized(4.5, 32, 32) | {"complex_human_instruction": None, "use_resolution_binning": False}
    return Family("sana", pipe, call, unguided=UNGUIDED)


def pixart_sigma() -> Family:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, cross_attention_dim=16, sample_size=8,
        out_channels=8,  # the second half is a learned variance, which the pipeline drops
        caption_channels=32, norm_num_groups=4, use_additional_conditions=False,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02)
    made = parts.t5() | {"vae": parts.kl_autoencoder(), "transformer": transformer, "scheduler": scheduler}
    call = sized(4.5, 16) | {"clean_caption": False, "use_resolution_binning": False}
    return Family("pixart_sigma", diffusers.PixArtSigmaPipeline(**made), call, kind="epsilon", unguided=UNGUIDED)


def cogview4() -> Family:
    sizes = {"out_channels": 4, "time_embed_dim": 8, "condition_dim": 4, "rope_axes_dim": (16, 16)}
    transformer = parts.small(diffusers.CogView4Transformer2DModel, **sizes)
    scheduler = parts.flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    made = parts.texts(parts.decoder(transformers.GlmModel), parts.byte_tokenizer(first_token=True))
    made |= {"vae": parts.kl_autoencoder()}
    pipe = diffusers.CogView4Pipeline(**made, transformer=transformer, scheduler=scheduler)
    return Family("cogview4", pipe, sized(3.5, 32), unguided=UNGUIDED)


def z_image() -> Family:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
        axes_dims=[4, 4, 8], axes_lens=[256, 32, 32],
    )  # fmt: skip
    made = {"scheduler": parts.flow(6.0), "vae": parts.kl_autoencoder(**FLUX_VAE), "transformer": transformer}
    made |= parts.texts(parts.decoder(transformers.Qwen3Model), parts.byte_tokenizer())
    return Family("z_image", diffusers.ZImagePipeline(**made), sized(4.0, 64), unguided={"guidance_scale": 0.0})


def qwen_parts() -> dict[str, object]:
    transformer = parts.small(diffusers.QwenImageTransformer2DModel, in_channels=64, out_channels=16, **FLUX_ROPE)
    shifts = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    made = {"scheduler": parts.flow(use_dynamic_shifting=True, **shifts)}
    made |= {"vae": parts.wan_autoencoder(diffusers.AutoencoderKLQwenImage)}
    return made | parts.texts(parts.qwen_vl_encoder(), parts.byte_tokenizer()) | {"transformer": transformer}


QWEN_CALL = {"height": 32, "width": 32, "true_cfg_scale": 4.0}
QWEN_UNGUIDED: dict[str, object] = {"true_cfg_scale": 1.0}


def qwen_image() -> Family:
    call = QWEN_CALL | {"negative_prompt": " "}
    unguided = QWEN_UNGUIDED | {"negative_prompt": None}
    return Family("qwen_image", diffusers.QwenImagePipeline(**qwen_parts()), call, unguided=unguided)


def hidream() -> Family:
    transformer = parts.small(
        diffusers.HiDreamImageTransformer2DModel, patch_size=2, caption_channels=[32, 32], text_emb_dim=64,
        num_routed_experts=2, num_activated_experts=1, axes_dims_rope=(4, 2, 2), max_resolution=(16, 16),
        llama_layers=[0, 1],
    )  # fmt: skip
    # with plain attention: its caller asks for the attention maps
    llama = parts.decoder(transformers.LlamaForCausalLM, attn_implementation="eager")
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=parts.flow(3.0), vae=parts.kl_autoencoder(**FLUX_VAE), **parts.clip_projection(),
        **parts.clip_projection("_2"), **parts.t5("_3"),
        **parts.texts(llama, parts.byte_tokenizer(), "_4"), transformer=transformer,
    )  # fmt: skip
    pipe.default_sample_size = 8  # every size is scaled to this area
    return Family("hidream", pipe, sized(5.0, 32), unguided=UNGUIDED)


BRIA = {
    **{"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8},
    **{"num_attention_heads": 2, "pooled_projection_dim": None, "axes_dims_rope": [0, 4, 4]},
}
KANDINSKY5 = {
    **{"in_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 32, "time_dim": 16, "out_visual_dim": 4},
    **{"patch_size": (1, 2, 2), "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 1},
    **{"axes_dims": (4, 4, 8)},
}


def flux2_klein() -> Family:
    made = flux2_parts(guidance_embeds=False)
    made |= parts.texts(parts.decoder(transformers.Qwen3ForCausalLM), parts.byte_tokenizer())
    return Family("flux2_klein", diffusers.Flux2KleinPipeline(**made), FLUX2_CALL, unguided=UNGUIDED)


def bria() -> Family:
    made = {"transformer": diffusers.BriaTransformer2DModel(**BRIA, joint_attention_dim=32)}
    made |= {"scheduler": parts.flow(3.0), "vae": parts.kl_autoencoder(shift_factor=0.0, scaling_factor=0.13)}
    return Family("bria", diffusers.BriaPipeline(**made, **parts.t5()), sized(5.0, 16), unguided=UNGUIDED)


def bria_fibo() -> Family:
    transformer = diffusers.BriaFiboTransformer2DModel(**BRIA, joint_attention_dim=64, text_encoder_dim=32)
    made = {"transformer": transformer, "scheduler": parts.shifting(), "vae": parts.wan_autoencoder()}
    made |= parts.texts(parts.decoder(transformers.SmolLM3ForCausalLM, vocab_size=128_004), parts.byte_tokenizer())
    return Family("bria_fibo", diffusers.BriaFiboPipeline(**made), sized(5.0, 48, 64), unguided=UNGUIDED)


def ovis_image() -> Family:
    transformer = parts.small(diffusers.OvisImageTransformer2DModel, in_channels=16, out_channels=16, **FLUX_ROPE)
    made = {"scheduler": parts.shifting(), "vae": parts.kl_autoencoder(**FLUX_VAE), "transformer": transformer}
    made |= parts.texts(parts.decoder(transformers.Qwen3Model), parts.byte_tokenizer())
    return Family("ovis_image", diffusers.OvisImagePipeline(**made), sized(5.0, 196), unguided=UNGUIDED)


def longcat_image() -> Family:
    sizes = {**FLUX_ROPE, "in_channels": 64, "axes_dims_rope": [4, 4, 8]}
    transformer = parts.small(diffusers.LongCatImageTransformer2DModel, **sizes)
    made = {"scheduler": parts.shifting(), "vae": parts.kl_autoencoder(16, **FLUX_VAE), "transformer": transformer}
    made |= parts.texts(parts.qwen_vl_encoder(), parts.byte_tokenizer())
    pipe = diffusers.LongCatImagePipeline(**made, text_processor=parts.qwen_vl_processor())
    pipe.tokenizer_max_length = 32
    call = {**SIZE, "guidance_scale": 4.5, "enable_prompt_rewrite": False}
    return Family("longcat_image", pipe, call, unguided=UNGUIDED)


def prx() -> Family:
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=1,
        axes_dim=[4, 4],
    )  # fmt: skip
    text_config = transformers.T5GemmaModuleConfig(**parts.decoder_sizes(32, layers=2))
    text_config.dropout_rate = 0.0
    pipe = diffusers.PRXPipeline(
        transformer=parts.woken(transformer), scheduler=parts.flow(3.0),
        **parts.texts(T5GemmaEncoder(text_config), parts.byte_tokenizer()),
        vae=parts.kl_autoencoder(blocks=4, **FLUX_VAE), default_sample_size=32,
    )  # fmt: skip
    call = {"height": 32, "width": 32, "guidance_scale": 1.0, "use_resolution_binning": False}
    return Family("prx", pipe, call | {"tokenizer_max_length": 32})


def hunyuan_image() -> Family:
    sizes = {"out_channels": 4, "guidance_embeds": True, "rope_axes_dim": (4, 4)}
    transformer = parts.small(diffusers.HunyuanImageTransformer2DModel, **sizes)
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64, 64), layers_per_block=1,
        scaling_factor=0.476986, spatial_compression_ratio=8, sample_size=128,
    )  # fmt: skip
    made = parts.texts(parts.qwen_vl_encoder(layers=2), parts.byte_tokenizer()) | parts.byt5()
    pipe = diffusers.HunyuanImagePipeline(scheduler=parts.flow(7.0), vae=vae, **made, transformer=transformer)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 140, 8
    return Family("hunyuan_image", pipe, {"height": 32, "width": 32, "distilled_guidance_scale": 3.25})


def kandinsky5_t2i() -> Family:
    transformer = parts.woken(diffusers.Kandinsky5Transformer3DModel(**KANDINSKY5))
    made = {"transformer": transformer, "vae": parts.kl_autoencoder(scaling_factor=0.36), "scheduler": parts.flow(3.0)}
    made |= parts.texts(parts.qwen_vl_encoder(), parts.qwen_vl_processor())
    pipe = diffusers.Kandinsky5T2IPipeline(**made, **parts.clip("_2"))
    pipe.resolutions = [(16, 16)]
    return Family("kandinsky5_t2i", pipe, sized(3.5, 192), unguided=UNGUIDED)


def pixart_alpha() -> Family:
    base = pixart_sigma()
    return replace(base, name="pixart_alpha", pipe=diffusers.PixArtAlphaPipeline(**base.pipe.components))


def cogview3plus() -> Family:
    sizes = {"attention_head_dim": 4, "out_channels": 4, "time_embed_dim": 8, "condition_dim": 2}
    transformer = parts.small(diffusers.CogView3PlusTransformer2DModel, **sizes, pos_embed_max_size=8)
    scheduler = diffusers.CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=4.0, timestep_spacing="trailing", clip_sample=False,
    )  # fmt: skip
    made = parts.t5() | {"vae": parts.kl_autoencoder(), "transformer": transformer, "scheduler": scheduler}
    pipe = diffusers.CogView3PlusPipeline(**made)
    return Family("cogview3plus", pipe, sized(5.0, 16), kind="epsilon", unguided=UNGUIDED)


def hunyuan_dit() -> Family:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, hidden_size=24, text_len=77,
        text_len_t5=256, activation_fn="gelu-approximate",
    )  # fmt: skip
    bert = transformers.BertConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=77,
    )  # fmt: skip
    made = {"vae": parts.kl_autoencoder()} | parts.texts(transformers.BertModel(bert), parts.byte_tokenizer())
    made |= parts.t5("_2", length=16)
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.02}
    scheduler = diffusers.DDPMScheduler(**betas, prediction_type="v_prediction")
    pipe = diffusers.HunyuanDiTPipeline(**made, transformer=transformer, scheduler=scheduler, **UNSAFE)
    pipe.tokenizer.model_max_length = 16
    call = {**SIZE, "guidance_scale": 5.0, "use_resolution_binning": False}
    return Family("hunyuan_dit", pipe, call, kind="epsilon", unguided=UNGUIDED)
