"""Parts of tiny pipelines, made in code with random weights: tokenizers, text encoders, autoencoders.

Nothing here reads a file or the network. Tokenizers work on bytes or characters, so that any prompt
has tokens; encoders have one or two layers of 16 to 32 channels.
"""

from __future__ import annotations

import string

from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

BYTES = sorted(ByteLevel.alphabet())
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def clip_tokenizer(max_length: int = 32) -> CLIPTokenizer:
    """Byte-level CLIP tokenizer without merges; the end token has the highest id, as in the real one."""
    tokens = [*BYTES, *(byte + "</w>" for byte in BYTES), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip_config(hidden: int = 32, max_length: int = 32) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=514,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        hidden_size=hidden,
        projection_dim=hidden,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_length,
    )


def clip_encoder(hidden: int = 32) -> CLIPTextModel:
    return CLIPTextModel(clip_config(hidden)).eval()


def clip_projection_encoder(hidden: int = 32) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config(hidden)).eval()


def t5_tokenizer(max_length: int = 32) -> T5TokenizerFast:
    """Unigram tokenizer over single printable characters."""
    characters = [(character, -3.0) for character in string.printable if not character.isspace()]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *characters]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=max_length)


def _t5_sizes(hidden: int) -> dict[str, int]:
    sizes = {"vocab_size": 128, "d_model": hidden, "d_kv": 8, "d_ff": 37, "num_layers": 1, "num_heads": 4}
    return sizes | {"relative_attention_num_buckets": 8}


def t5_encoder(hidden: int = 32) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_sizes(hidden))).eval()


def umt5_encoder(hidden: int = 32) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(hidden))).eval()


def qwen_tokenizer() -> Qwen2Tokenizer:
    vocab = {token: index for index, token in enumerate([*BYTES, *QWEN_SPECIAL])}
    return Qwen2Tokenizer(
        vocab=vocab, merges=[], additional_special_tokens=QWEN_SPECIAL[1:], model_max_length=512
    )


def qwen_vl_encoder(hidden: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: 256 + index for index, token in enumerate(QWEN_SPECIAL)}
    text = {
        "vocab_size": 264,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "patch_size": 14,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def kl_autoencoder(latent_channels: int = 4, blocks: int = 2, **config: object) -> AutoencoderKL:
    """Image autoencoder which shrinks each side by `2 ** (blocks - 1)`."""
    channels = (8, 16, 16, 16)[:blocks]
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        norm_num_groups=4,
        **config,
    )
    return vae.eval()


_WAN_SIZES = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


def wan_autoencoder() -> AutoencoderKLWan:
    """Video autoencoder: 8 x 8 pixels and 4 frames (after the first) become one latent of 16 channels."""
    return AutoencoderKLWan(**_WAN_SIZES, temperal_downsample=[False, True, True]).eval()


def qwen_autoencoder() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(**_WAN_SIZES, temperal_downsample=[False, True, True]).eval()
