"""Parts of tiny pipelines, made in code with random weights: tokenizers, text encoders, autoencoders.

Nothing here reads a file or the network. Tokenizers work on bytes or characters, so that any prompt
has tokens; encoders have one or two layers of 16 to 32 channels.
"""

import inspect
import string
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import diffusers
import torch
import transformers
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from genrl.diffusion.policy.trajectory import Batch

Network = TypeVar("Network", bound=nn.Module)
BYTES = sorted(ByteLevel.alphabet())
PROMPTS = ("a red star", "two blue dogs")
KEYS = ((7, 0, 0), (7, 0, 1))
QWEN_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]


@dataclass(frozen=True)
class Family:
    """A tiny pipeline and how to call it.

    `call` holds the arguments besides prompt, steps and generator, with guidance on where the
    pipeline has any; `unguided` holds what to change to have one model call per step.
    """

    name: str
    pipe: diffusers.DiffusionPipeline
    call: dict[str, object]
    kind: Literal["flow", "epsilon"] = "flow"
    media: Literal["image", "video", "audio"] = "image"
    unguided: dict[str, object] = field(default_factory=dict)
    inputs: dict[str, list[object]] = field(default_factory=dict)
    """Further arguments with one entry per prompt; they fit two prompts."""

    def batch(self, **changes: object) -> Batch:
        """Two prompts in four steps, with `changes` of the arguments."""
        sampling = {"num_inference_steps": 4, **self.call, **changes}
        return Batch([*PROMPTS], [*KEYS], sampling, inputs=self.inputs)


_TEXTS = ("joint_attention_dim", "pooled_projection_dim", "text_embed_dim", "text_embed_2_dim", "text_dim")
SMALL = {
    **dict.fromkeys(("num_layers", "num_single_layers", "num_refiner_layers"), 1),
    **{"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "sample_size": 8},
    **dict.fromkeys((*_TEXTS, "caption_channels", "caption_projection_dim"), 32),  # as the text encoders below
}


def small(kind: type[Network], **sizes: object) -> Network:
    """A denoiser of this class with the sizes of `SMALL` that it has, unless told others."""
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: size for name, size in SMALL.items() if name in known} | sizes)


def woken(network: Network) -> Network:
    """`network` with small random numbers where it starts from zeros, by which its blocks would do nothing."""
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return network


def picture(size: int = 16) -> Image.Image:
    """The conditioning picture of editing and image-to-video families: diagonal ramps."""
    ramp = torch.arange(size * size).view(size, size) * 255 // (size * size)
    return Image.fromarray(torch.stack([ramp, ramp.T, 255 - ramp], dim=-1).byte().numpy())


def pictures(size: int = 16) -> list[Image.Image]:
    return [picture(size), picture(size).rotate(90)]


def clip_tokenizer(max_length: int = 77) -> transformers.CLIPTokenizer:
    """Byte-level CLIP tokenizer without merges; the end token has the highest id, as in the real one."""
    tokens = [*BYTES, *(byte + "</w>" for byte in BYTES), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip(number: str = "", kind: type[Network] = transformers.CLIPTextModel) -> dict[str, object]:
    config = transformers.CLIPTextConfig(
        vocab_size=514, bos_token_id=512, eos_token_id=513, pad_token_id=513, hidden_size=32, projection_dim=32,
        intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=77,
    )  # fmt: skip
    return texts(kind(config), clip_tokenizer(), number)


def clip_projection(number: str = "") -> dict[str, object]:
    return clip(number, transformers.CLIPTextModelWithProjection)


def t5_tokenizer(max_length: int = 32) -> transformers.T5TokenizerFast:
    """Unigram tokenizer over single printable characters."""
    characters = [(character, -3.0) for character in string.printable if not character.isspace()]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *characters]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=max_length)


def t5(
    number: str = "", hidden: int = 32, kind: type[Network] = transformers.T5EncoderModel, length: int = 32
) -> dict[str, object]:
    sizes = {"vocab_size": 128, "d_model": hidden, "d_kv": 8, "d_ff": 37, "num_layers": 1, "num_heads": 4}
    encoder = kind(kind.config_class(**sizes, relative_attention_num_buckets=8))
    return texts(encoder, t5_tokenizer(length), number)


def umt5() -> dict[str, object]:
    return t5(kind=transformers.UMT5EncoderModel)


# A chat template which takes both forms of a message: a string, or a list of parts.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}"
)


def byte_tokenizer(truncation_side: str = "right", first_token: bool = False) -> transformers.Qwen2Tokenizer:
    """Byte-level tokenizer with Qwen's special tokens; serves every decoder-only text encoder here.

    With `first_token` each text starts with a special token, so that an empty prompt has a length, and
    is padded on the left, as by the tokenizer of GLM.
    """
    vocab = {token: index for index, token in enumerate([*BYTES, *QWEN_SPECIAL])}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], additional_special_tokens=QWEN_SPECIAL[1:], model_max_length=512,
        chat_template=CHAT_TEMPLATE, truncation_side=truncation_side,
    )  # fmt: skip
    if first_token:
        first = ("<|im_start|>", vocab["<|im_start|>"])
        processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[first])
        tokenizer.backend_tokenizer.post_processor, tokenizer.padding_side = processor, "left"
    return tokenizer


def decoder_sizes(hidden: int, layers: int) -> dict[str, int]:
    """Sizes shared by the decoder-only text encoders; ids are those of `byte_tokenizer`."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 32, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return sizes | {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}


def decoder(kind: type[Network], layers: int = 2, **settings: object) -> Network:
    return kind(kind.config_class(**decoder_sizes(32, layers) | settings))


def mistral3_encoder(hidden: int = 32) -> transformers.Mistral3ForConditionalGeneration:
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", **decoder_sizes(hidden, layers=2)}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=262)
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen_vl_encoder(hidden: int = 32, layers: int = 1) -> transformers.Qwen2_5_VLForConditionalGeneration:
    ids = {token: 256 + index for index, token in enumerate(QWEN_SPECIAL)}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
    vision |= {"out_hidden_size": hidden, "fullatt_block_indexes": [0]}
    # its heads have the width of hidden / heads, whatever head_dim says, and rope's three parts are half of 8
    heads = {"num_attention_heads": hidden // 8, "num_key_value_heads": hidden // 16, "rope_parameters": rope}
    config = transformers.Qwen2_5_VLConfig(
        text_config=decoder_sizes(hidden, layers=layers) | heads, vision_config=vision,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


class PictureProcessor(transformers.Qwen2VLProcessor):
    """`Qwen2VLProcessor` without its video half, which cannot be made where torchvision is not installed."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: transformers.Qwen2Tokenizer) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def qwen_vl_processor() -> PictureProcessor:
    """Processor of the editing pipeline: pictures are shrunk to about 56 x 56 pixels, so to a few tokens."""
    return PictureProcessor(Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56), byte_tokenizer())


def kl_autoencoder(
    latent_channels: int = 4, blocks: int = 2, kind: type[Network] = diffusers.AutoencoderKL, **config: object
) -> Network:
    """Image autoencoder which shrinks each side by `2 ** (blocks - 1)`."""
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * blocks, "up_block_types": ("UpDecoderBlock2D",) * blocks}
    config |= {"latent_channels": latent_channels, "block_out_channels": (8, 16, 16, 16)[:blocks], **kinds}
    return kind(layers_per_block=1, norm_num_groups=4, **config)


def wan_autoencoder(kind: type[Network] = diffusers.AutoencoderKLWan) -> Network:
    """Video autoencoder: 8 x 8 pixels and 4 frames (after the first) become one latent of 16 channels."""
    sizes = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return kind(**sizes, temperal_downsample=[False, True, True])


def hunyuan_video_autoencoder() -> diffusers.AutoencoderKLHunyuanVideo:
    kinds = {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
    sizes = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.AutoencoderKLHunyuanVideo(**sizes, **kinds)


def oobleck_autoencoder(channels: int, sampling_rate: int) -> diffusers.AutoencoderOobleck:
    """Stereo sound autoencoder: 8 samples per latent."""
    ways = {"downsampling_ratios": [2, 4], "channel_multiples": [2, 4], "sampling_rate": sampling_rate}
    sizes = {"encoder_hidden_size": 6, "decoder_channels": 3, "decoder_input_channels": channels}
    return diffusers.AutoencoderOobleck(**sizes, **ways)


def flow(shift: float = 1.0, **settings: object) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift, **settings)


def shifting() -> diffusers.FlowMatchEulerDiscreteScheduler:
    """By the number of tokens, as FLUX's."""
    return flow(3.0, use_dynamic_shifting=True)


def texts(encoder: nn.Module, tokenizer: object, number: str = "") -> dict[str, object]:
    return {f"text_encoder{number}": encoder, f"tokenizer{number}": tokenizer}


def byt5() -> dict[str, object]:
    """The second encoder of Hunyuan's: of the letters that are to be drawn."""
    config = transformers.T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    return texts(transformers.T5EncoderModel(config), transformers.ByT5Tokenizer(), "_2")
