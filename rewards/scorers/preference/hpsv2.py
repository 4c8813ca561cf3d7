"""Reward: human preference, by HPSv2 and HPSv2.1 (Wu et al. 2023, arXiv 2306.09341).

The checkpoint is an open_clip ViT-H/14. Its weights are renamed for transformers' CLIPModel, which computes the same.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.contract import check_choice
from rewards.models import pixels
from rewards.models.checkpoints import fill, find, no_init_weights, read_weights, renamed, torch_dtype, transformers
from rewards.models.clip_model import CHUNK, cosines_with_prompts, embed_texts, projected

logger = logging.getLogger(__name__)

MODEL = "xswu/HPSv2"
TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
FILES = {
    "2.1": ("HPS_v2.1_compressed.safetensors", "HPS_v2.1_compressed.pt"),
    "2.0": ("HPS_v2_compressed.safetensors", "HPS_v2_compressed.pt"),
}
HEADS = 16  # of both towers of ViT-H/14; the weights do not show it

NAMES = {  # from open_clip's names to those of transformers' CLIPModel
    r"^(?!visual|logit_scale)": "text_model.",
    r"^visual\.": "vision_model.",
    r"\.transformer\.resblocks\.": ".encoder.layers.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"\.(token|class)_embedding": r".embeddings.\1_embedding",
    r"\.positional_embedding$": ".embeddings.position_embedding.weight",
    r"\.conv1\.": ".embeddings.patch_embedding.",
    r"\.ln_final\.": ".final_layer_norm.",
    r"\.ln_pre\.": ".pre_layrnorm.",
    r"\.ln_post\.": ".post_layernorm.",
    r"^text_model\.text_projection$": "text_projection.weight",
    r"^vision_model\.proj$": "visual_projection.weight",
}


def from_open_clip(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of an open_clip CLIP under the names that they have in transformers' CLIPModel.

    Besides the names, two things differ: open_clip has query, key and value in one matrix, and transposed projections.
    """
    converted: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        new = renamed(name, NAMES)
        if "in_proj_" in new:
            thirds = zip("qkv", value.chunk(3), strict=True)
            converted |= {new.replace("in_proj_", f"{letter}_proj."): third for letter, third in thirds}
        elif name != "attn_mask":  # a constant that older versions of open_clip saved
            converted[new] = value.T.contiguous() if "_projection." in new else value
    return converted


def build(weights: Mapping[str, torch.Tensor], what: str) -> Any:
    """The CLIPModel for open_clip weights, with these weights; its sizes are read from them.

    Raises ValueError for other weights.
    """
    needed = ("positional_embedding", "token_embedding.weight", "text_projection", "visual.conv1.weight")
    lacking = [name for name in (*needed, "visual.positional_embedding") if name not in weights]
    if lacking:
        held = ", ".join(list(weights)[:4])
        raise ValueError(f"{what} is not an open_clip CLIP: it lacks {', '.join(lacking)}; it has {held}...")
    vocabulary, width = weights["token_embedding.weight"].shape
    vision_width, _, patch, _ = weights["visual.conv1.weight"].shape
    side = round((len(weights["visual.positional_embedding"]) - 1) ** 0.5) * patch
    special = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}

    def tower(prefix: str, hidden: int) -> dict[str, Any]:
        start = f"{prefix}transformer.resblocks."
        layers = len({name.removeprefix(start).split(".")[0] for name in weights if name.startswith(start)})
        inner = len(weights.get(f"{start}0.mlp.c_fc.bias", []))
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        return {**sizes, "num_attention_heads": HEADS, "hidden_act": "gelu"}

    length = len(weights["positional_embedding"])
    text = tower("", width) | special | {"vocab_size": vocabulary, "max_position_embeddings": length}
    vision = tower("visual.", vision_width) | {"patch_size": patch, "image_size": side}
    projection = weights["text_projection"].shape[1]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)
    with no_init_weights():
        model: Any = transformers.CLIPModel(config)
    fill(model, from_open_clip({name: value.float() for name, value in weights.items()}), what)
    return model.eval().requires_grad_(False)


def clean(prompt: str) -> str:
    """What open_clip does to a text before splitting it: fix broken characters, resolve HTML, collapse spaces.

    This makes curly quotes straight, which CLIP's tokenizer in transformers does not do.
    """
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split())


class HPSv2:
    """Human preference for the prompt: HPSv2.1 or 2.0, a cosine, usually .20 to .34 (2.1) or .24 to .29 (2.0).

    Scores of the two versions are not comparable. Published tables show 100 times the score. A video gets the mean over
    its frames.

    `version`   `2.1` (default) or `2.0`
    `model`     hub id, folder or file of the checkpoint (`HPS_v2.1_compressed.pt`, open_clip's names)
    `tokenizer` hub id or folder of CLIP's tokenizer
    `dtype`     of the model: `float32` (default), `bfloat16`, `float16`
    """

    differentiable = True

    def __init__(
        self,
        version: str = "2.1",
        model: str = MODEL,
        tokenizer: str = TOKENIZER,
        dtype: str = "float32",
        device: str = "cpu",
    ):
        version = str(version)  # YAML reads 2.1 as a number
        check_choice("hpsv2: unknown version", version, FILES)
        file = find(model, FILES[version], "hpsv2")
        precision = torch_dtype(dtype, "hpsv2")
        self.model = build(read_weights(file), f"hpsv2: {file}").to(device, precision)
        self.to = self.model.to
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.size = self.model.config.vision_config.image_size
        logger.info("HPSv%s from %s", version, file)

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        with torch.no_grad():
            texts = embed_texts(self.model, self.tokenizer, [clean(prompt) for prompt in prompts])
        return cosines_with_prompts(pixels.in_batches(self._embed, CHUNK, pixels.frames(images)), texts, images)

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        images = images if pixels.wants_gradients(images) else pixels.eight_bit(images)
        square = pixels.pad_to(images.to(self.model.device), self.size)
        prepared = pixels.normalise(square, pixels.OPENAI_MEAN, pixels.OPENAI_STD)
        return projected(self.model.get_image_features(pixel_values=prepared.to(self.model.dtype))).float()
