"""CPU milliseconds that a picture costs each reward that runs on one: a column of the table in docs/rewards.md.

    python -m benchmarks.reward_cost [name ...]

Rewards without a model are timed as they are. Models are made at their published size with random weights in float32:
what a forward costs does not depend on them. Writes reward_cost.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import genrl_rewards
from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

from benchmarks.common import parser, save  # noqa: E402

SIDE = 512


def clip_folder(folder: Path) -> str:
    """CLIP ViT-L/14 with a tokenizer that knows no words."""
    end = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, **end}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision | {"patch_size": 14}, projection_dim=768)
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[]).save_pretrained(folder)
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    return str(folder)


def aesthetic(folder: Path) -> genrl_rewards.Reward:
    from genrl_rewards.scorers.preference.aesthetic import HEAD_FILES, Head

    model = clip_folder(folder)
    torch.save(Head(768).state_dict(), folder / HEAD_FILES[0])
    return genrl_rewards.load("aesthetic", {"model": model, "head": model})


def imagereward(folder: Path) -> Callable[[torch.Tensor], Any]:
    """The model by itself: BLIP with a ViT-L/16 and BERT base."""
    from genrl_rewards.scorers.preference.imagereward import TOKENS, ImageRewardModel, prepare

    vision = transformers.BlipVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=224
    )
    text = transformers.BlipTextConfig(encoder_hidden_size=1024, num_attention_heads=12)
    model = ImageRewardModel(vision, text).eval()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)

    def score(images: torch.Tensor) -> torch.Tensor:
        rows = tokens.expand(len(images), -1)
        return model(prepare(images, 224), rows, torch.ones_like(rows))

    return score


def dino(folder: Path) -> Callable[[torch.Tensor], Any]:
    """DINOv2 base; the reference picture is one of the pictures."""
    transformers.Dinov2Model(transformers.Dinov2Config(image_size=518, patch_size=14)).save_pretrained(folder)
    reward = genrl_rewards.load("dino", {"model": str(folder)})
    return lambda images: reward(images, [genrl_rewards.to_pil(images[:1])[0]] * len(images))


def safe(folder: Path) -> Callable[[torch.Tensor], Any]:
    """A ViT-B/16 with two labels."""
    config = transformers.ViTConfig(id2label={0: "normal", 1: "nsfw"}, num_labels=2)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil().save_pretrained(folder)
    reward = genrl_rewards.load("safe", {"model": str(folder)})
    return lambda images: reward(genrl_rewards.to_pil(images))


def similarity(folder: Path) -> Callable[[torch.Tensor], Any]:
    reward = genrl_rewards.load("similarity")
    return lambda images: reward(images, [genrl_rewards.to_pil(images[:1])[0]] * len(images))


def geneval(folder: Path) -> Callable[[torch.Tensor], Any]:
    """Mask2Former with Swin-S by itself, 384 pixels, which is most of the cost."""
    swin = {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "image_size": 384}
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(**swin, **stages), id2label={i: f"class {i}" for i in range(80)}
    )
    transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    size = {"height": 384, "width": 384}
    transformers.Mask2FormerImageProcessorPil(size=size, num_labels=80).save_pretrained(folder)
    from genrl_rewards.scorers.objects.detection import Detector

    detector = Detector(str(folder))
    return lambda images: [detector.find(picture, ["class 1"], 0.3) for picture in genrl_rewards.to_pil(images)]


def plain(name: str) -> Callable[[Path], genrl_rewards.Reward]:
    return lambda folder: genrl_rewards.load(name)


MAKERS: dict[str, tuple[Callable[[Path], Any], int, int]] = {  # with how many pictures, and frames of each
    "jpeg": (plain("jpeg"), 16, 1),
    "sharpness": (plain("sharpness"), 16, 1),
    "saturation": (plain("saturation"), 16, 1),
    "similarity": (similarity, 4, 1),
    "motion": (plain("motion"), 2, 8),
    "smoothness": (plain("smoothness"), 2, 9),
    "steadiness": (plain("steadiness"), 2, 8),
    "dino": (dino, 2, 1),
    "safe": (safe, 4, 1),
    "aesthetic": (aesthetic, 2, 1),
    "imagereward": (imagereward, 2, 1),
    "geneval": (geneval, 2, 1),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", help=f"of {', '.join(MAKERS)}; default: all")
    given = arguments.parse_args()
    if unknown := set(given.names) - MAKERS.keys():
        arguments.error(f"no reward {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    results = {}
    generator = torch.Generator().manual_seed(0)
    print(f"| name | CPU ms a picture of {SIDE} pixels (of a video: a frame) |\n|---|---|")
    for name in given.names or MAKERS:
        make, count, length = MAKERS[name]
        shape = (count, length, 3, SIDE, SIDE) if length > 1 else (count, 3, SIDE, SIDE)
        images = torch.rand(shape, generator=generator)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            score = make(Path(folder))
            score(images[:1])  # what is done once is not counted
            start = time.process_time()
            score(images)
            spent = 1000 * (time.process_time() - start) / count / length
        results[name] = spent
        print(f"| `{name}` | {spent:.3g} |", flush=True)
    save(given.out, "reward_cost", results)


if __name__ == "__main__":
    main()
