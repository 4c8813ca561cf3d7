"""A tiny GR00T N1.7 in LeRobot's layout, written from a list of the names and shapes that LeRobot 0.6.1 gives it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import torch
from torch import Tensor

from tests.vla.published import (
    FILES,
    NUMBERS,
    WORDS,
    Shapes,
    layout,
    observed,
    random_weights,
    statistics_of,
    write_folder,
)

TINY = Sizes(
    vocabulary=40, width=64, layers=3, mlp=96, queries=64, head=32, size=16, eye=32, eye_layers=3, eye_mlp=64,
    patch=16, patches=64, deep=2, frames=2, merge=2, robots=3, state=10, action=12, horizon=8, hidden=40, expert=48,
    blocks=4, above=2, places=16,
)  # fmt: skip
REAL = Sizes(
    vocabulary=151936, width=2048, layers=16, mlp=6144, queries=2048, head=1024, size=128, eye=1024, eye_layers=24,
    eye_mlp=4096, patch=16, patches=2304, deep=3, frames=2, merge=2, robots=32, state=132, action=132, horizon=40,
    hidden=1024, expert=1536, blocks=32, above=4, places=1024,
)  # fmt: skip
SPECIAL = "<|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <|endoftext|>".split()
CAMERAS = ("observation.images.front", "observation.images.wrist")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}\
{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""


def groot_shapes(s: Sizes) -> Shapes:
    """Names and shapes of what LeRobot saves; lm_head is the tied embedding's other name."""
    return layout("groot", s)


def groot_weights(s: Sizes = TINY, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random ones, on the scale of linear layers, which those of the robots have the other way round."""
    weights = random_weights(groot_shapes(s), dtype=dtype)
    for key, value in weights.items():
        if key.endswith(".W"):
            weights[key] = value * value.shape[2] ** 0.5
    return weights


def write_tokenizer(folder: Path) -> None:
    """Words between spaces; <zero> is what Qwen has an exclamation mark for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<zero>", *SPECIAL, "user", *(word for word in WORDS if "<bos>" not in word)]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    how = {"pad_token": SPECIAL[-1], "unk_token": "<unk>", "additional_special_tokens": SPECIAL[:-1]}
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, **how)
    outer.chat_template = TEMPLATE
    outer.save_pretrained(folder / "tokenizer")


def groot_folder(
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    eye: dict[str, Any] | None = None,
    groups: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """A tiny one with two cameras, its base's description in base/; the weights by published name.

    eye: changes of how pictures are shown. groups: its actions have the base's statistics, by groups.
    """
    weights = groot_weights() if weights is None else weights
    tied = "_groot_model.backbone.model."
    metadata = {"format": "pt", f"{tied}model.language_model.embed_tokens.weight": f"{tied}lm_head.weight"}
    pack = {"embodiment_tag": settings.get("embodiment_tag", "new_embodiment")}
    steps = {"groot_n1_7_pack_inputs_v1": pack, "groot_n1_7_vlm_encode_v1": eye or {}}
    decoded = FILES / "groot_base" / "policy_postprocessor.json"
    if groups:
        base = json.loads(decoded.read_text())["steps"][0]["config"]
        pack |= {key: base[key] for key in ("raw_stats", "modality_config", "use_percentiles")}
    write_folder("groot", folder, weights, statistics_of(NUMBERS), metadata, steps, **settings)
    if groups:
        shutil.copy(decoded, folder)
        next(folder.glob("policy_postprocessor_step_0*")).unlink()
    write_tokenizer(folder)
    return weights


def groot_observation(batch: int = 3) -> dict[str, Tensor]:
    return observed(("front", "wrist"), (24, 32), batch)
