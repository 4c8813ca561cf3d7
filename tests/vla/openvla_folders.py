"""Tiny OpenVLA-OFT folders in the published layout, of names as in openvla/openvla-7b."""

import json
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.vla.published import Shapes, layout, random_weights

WORDS = "in what action should the robot take to put the red green blue block left right far zone touch ? : out".split()

TINY = Sizes(
    vocabulary=256 + 64, padded=64, words=384, width=48, layers=2, mlp=96, heads=4, side=32, seen=80,
    dino=Sizes(name="dummy_dinov2", width=48, depth=3, mlp=96, patch=8, patches=16, registers=4),
    siglip=Sizes(name="dummy_siglip", width=32, depth=3, mlp=64, patch=8, patches=16, registers=None),
)  # fmt: skip
DINO, SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"
REAL = Sizes(
    vocabulary=32000, padded=64, words=32064, width=4096, layers=32, mlp=11008, heads=32, side=224, seen=2176,
    dino=Sizes(name=DINO, width=1024, depth=24, mlp=4096, patch=14, patches=256, registers=4),
    siglip=Sizes(name=SIGLIP, width=1152, depth=27, mlp=4304, patch=14, patches=256, registers=None),
)  # fmt: skip


def shapes(s: Sizes) -> Shapes:
    """Names and shapes of openvla/openvla-7b."""
    towers: Shapes = {}
    for tower, kind, size in (("featurizer", "dinov2", s.dino), ("fused_featurizer", "siglip", s.siglip)):
        towers |= {f"vision_backbone.{tower}.{name}": shape for name, shape in layout(kind, size).items()}
    return towers | layout("openvla", s)


def config(s: Sizes, stats: dict[str, Any] | None) -> dict[str, Any]:
    """config.json as OpenVLA's classes save it, what is read and some that is not."""
    text = {"model_type": "llama", "pad_token_id": s.vocabulary, "vocab_size": s.vocabulary + s.padded}
    if s.width != 4096:  # the published one leaves its sizes to transformers' defaults
        text |= {"hidden_size": s.width, "num_hidden_layers": s.layers, "intermediate_size": s.mlp}
        text |= {"num_attention_heads": s.heads, "num_key_value_heads": s.heads}
    return {
        "architectures": ["OpenVLAForActionPrediction"], "model_type": "openvla",
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"}, "image_resize_strategy": "resize-naive",
        "image_sizes": [s.side, s.side], "n_action_bins": 256, "norm_stats": stats, "pad_to_multiple_of": s.padded,
        "text_config": text, "timm_model_ids": [s.dino.name, s.siglip.name], "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
    }  # fmt: skip


def bounds(low: list[float], high: list[float], mask: list[bool] | None = None) -> dict[str, Any]:
    """Statistics of actions or states."""
    result = {"q01": low, "q99": high, "min": low, "max": high, "mean": [0.0] * len(low), "std": [1.0] * len(low)}
    return result | ({"mask": mask} if mask else {})


TABLE = {"action": bounds([-1.0] * 3, [1.0] * 3), "proprio": bounds([-1.0, -1.0, 0.0], [1.0] * 3)}
"""Of MiniTable: moves of x and y, and the grip, which holds where it is positive."""


def write(
    folder: Path,
    *,
    sizes: Sizes = TINY,
    stats: dict[str, Any] | None = None,
    shards: int = 2,
    dtype: torch.dtype = torch.float32,
    head: bool = False,
    proprio: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A tiny folder with random weights, which it returns; stats: of the data sets, MiniTable's by default."""
    folder.mkdir(parents=True, exist_ok=True)
    stats = {"minitable": TABLE} if stats is None else stats
    weights = random_weights(shapes(sizes), seed, dtype)
    for name in weights:
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "layernorm.weight", "scale_factor")):
            weights[name] = 1.0 + weights[name]
        if name.endswith("pos_embed"):
            weights[name] = weights[name] / weights[name].std().clamp(min=1e-6)  # else a place says nothing
    names = sorted(weights)
    index = {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        held = {name: weights[name] for name in names[n::shards]}
        save_file(held, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
    if shards > 1:
        size = sum(value.numel() * value.element_size() for value in weights.values())
        listing = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    (folder / "config.json").write_text(json.dumps(config(sizes, stats), indent=2))
    colours = [{"mean": [0.484375, 0.455078125, 0.40625], "std": [0.228515625, 0.2236328125, 0.224609375]}]
    colours += [{"mean": [0.5] * 3, "std": [0.5] * 3}]
    pictures = {"means": [[0.485, 0.456, 0.406], [0.5] * 3], "stds": [[0.229, 0.224, 0.225], [0.5] * 3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures | {"tvf_normalize_params": colours}))
    (folder / "configuration_prismatic.py").write_text("raise SystemExit('remote code was executed')\n")
    tokenizer(folder)
    width = len(next(iter(stats.values()))["action"]["q01"])
    if head:
        held = random_weights(layout("action_head", Sizes(width=sizes.width, numbers=width)), 1, dtype)
        torch.save(held, folder / "action_head--150_checkpoint.pt")
    if proprio:
        numbers = len(next(iter(stats.values()))["proprio"]["q01"])
        own = random_weights(layout("proprio_projector", Sizes(width=sizes.width, numbers=numbers)), 2, dtype)
        torch.save(own, folder / "proprio_projector--150_checkpoint.pt")
    return weights


def tokenizer(folder: Path) -> None:
    """Words in the place of Llama's pieces; the first numbers are Llama's: unknown, begin, end, then the empty one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", "\u2581", *dict.fromkeys(WORDS)]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    inner.save(str(folder / "tokenizer.json"))


def observation(
    batch: int = 3, side: int = 32, cameras: tuple[str, ...] = ("observation.image",), state: int = 0
) -> Any:
    rng = torch.Generator().manual_seed(0)
    seen = {name: torch.randint(256, (batch, side, side, 3), generator=rng, dtype=torch.uint8) for name in cameras}
    return seen | ({"observation.state": torch.randn(batch, state, generator=rng)} if state else {})
