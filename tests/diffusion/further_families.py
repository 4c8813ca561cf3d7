"""Tiny random-weight pipelines that make images, one function per family: those beside the best known.

The classes, the schedulers and their settings are those of the real checkpoints.
"""

from dataclasses import replace

import diffusers
import transformers
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from tests.diffusion import image_families as image
from tests.diffusion import tiny_parts as parts
from tests.diffusion.image_families import FLUX_ROPE, FLUX_VAE, SIZE, UNGUIDED, UNSAFE
from tests.diffusion.tiny_parts import Family

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
    sizes = {**image.FLUX2, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False}
    transformer = parts.small(diffusers.Flux2Transformer2DModel, **sizes)
    made = {"scheduler": parts.shifting(), "vae": parts.flux2_autoencoder(), "transformer": transformer}
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**parts.decoder_sizes(32, layers=2)))
    pipe = diffusers.Flux2KleinPipeline(**made, **parts.texts(encoder, parts.byte_tokenizer()))
    return Family("flux2_klein", pipe, image.FLUX2_CALL, unguided=UNGUIDED)


def bria() -> Family:
    made = {"transformer": diffusers.BriaTransformer2DModel(**BRIA, joint_attention_dim=32)}
    made |= {"scheduler": parts.flow(3.0), "vae": parts.kl_autoencoder(shift_factor=0.0, scaling_factor=0.13)}
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 16}
    return Family("bria", diffusers.BriaPipeline(**made, **parts.t5()), call, unguided=UNGUIDED)


def bria_fibo() -> Family:
    transformer = diffusers.BriaFiboTransformer2DModel(**BRIA, joint_attention_dim=64, text_encoder_dim=32)
    made = {"transformer": transformer, "scheduler": parts.shifting(), "vae": parts.wan_autoencoder()}
    config = transformers.SmolLM3Config(**parts.decoder_sizes(32, layers=2) | {"vocab_size": 128_004})
    made |= parts.texts(transformers.SmolLM3ForCausalLM(config), parts.byte_tokenizer())
    call = {"height": 64, "width": 64, "guidance_scale": 5.0, "max_sequence_length": 48}
    return Family("bria_fibo", diffusers.BriaFiboPipeline(**made), call, unguided=UNGUIDED)


def ovis_image() -> Family:
    transformer = parts.small(diffusers.OvisImageTransformer2DModel, in_channels=16, out_channels=16, **FLUX_ROPE)
    made = {"scheduler": parts.shifting(), "vae": parts.kl_autoencoder(**FLUX_VAE), "transformer": transformer}
    pipe = diffusers.OvisImagePipeline(**made, **parts.texts(parts.qwen3_encoder(), parts.byte_tokenizer()))
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 196}
    return Family("ovis_image", pipe, call, unguided=UNGUIDED)


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
    call = {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 192}
    return Family("kandinsky5_t2i", pipe, call, unguided=UNGUIDED)


def pixart_alpha() -> Family:
    base = image.pixart_sigma()
    return replace(base, name="pixart_alpha", pipe=diffusers.PixArtAlphaPipeline(**base.pipe.components))


def cogview3plus() -> Family:
    sizes = {"attention_head_dim": 4, "out_channels": 4, "time_embed_dim": 8, "condition_dim": 2}
    transformer = parts.small(diffusers.CogView3PlusTransformer2DModel, **sizes, pos_embed_max_size=8)
    scheduler = diffusers.CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=4.0, timestep_spacing="trailing", clip_sample=False,
    )  # fmt: skip
    made = parts.t5() | {"vae": parts.kl_autoencoder(), "transformer": transformer, "scheduler": scheduler}
    call = {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 16}
    return Family("cogview3plus", diffusers.CogView3PlusPipeline(**made), call, kind="epsilon", unguided=UNGUIDED)


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
    made |= parts.texts(parts.t5_encoder(), parts.t5_tokenizer(16), "_2")
    scheduler = diffusers.DDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.02, prediction_type="v_prediction"
    )
    pipe = diffusers.HunyuanDiTPipeline(**made, transformer=transformer, scheduler=scheduler, **UNSAFE)
    pipe.tokenizer.model_max_length = 16
    call = {**SIZE, "guidance_scale": 5.0, "use_resolution_binning": False}
    return Family("hunyuan_dit", pipe, call, kind="epsilon", unguided=UNGUIDED)
