"""Small random detectors of four families, saved in the true format."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.rewards.tiny_clip import save_tiny_clip  # first: it makes transformers importable beside any torchvision

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", "cat", "dog", "?"]
LABELS = {0: "cat", 1: "dog", 2: "mouse"}


def _randomise(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(std=0.2)


def _save(model: torch.nn.Module, processor: Any, folder: Path) -> Path:
    _randomise(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def owl(folder: Path, version: str = "OwlViT") -> Path:
    save_tiny_clip(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 40
    layers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    made = {part: getattr(transformers, f"{version}{part}") for part in ("Config", "ForObjectDetection", "Processor")}
    config = made["Config"](
        text_config={**layers, **end, "vocab_size": 514, "max_position_embeddings": 40},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    size = {"height": 32, "width": 32}
    images = getattr(transformers, f"{version}ImageProcessorPil")(size=size, crop_size=size)
    processor = made["Processor"](image_processor=images, tokenizer=tokenizer)
    return _save(made["ForObjectDetection"](config), processor, folder)


SWIN = {"image_size": 32, "embed_dim": 8, "window_size": 2}
ATTENTION = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
EDGES = {"shortest_edge": 32, "longest_edge": 48}


def grounding(folder: Path) -> Path:
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    swin = transformers.SwinConfig(**SWIN, depths=[1] * 3, num_heads=[1] * 3, out_indices=[1, 2, 3])
    text = {"model_type": "bert", "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "intermediate_size": 16}
    layers = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 6, "num_feature_levels": 3}
    config = transformers.GroundingDinoConfig(backbone_config=swin, text_config=text, **layers, **ATTENTION)
    processor = transformers.GroundingDinoProcessor(transformers.GroundingDinoImageProcessorPil(size=EDGES), tokenizer)
    return _save(transformers.GroundingDinoForObjectDetection(config), processor, folder)


def yolos(folder: Path) -> Path:
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    layers |= {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 6}
    config = transformers.YolosConfig(**layers, id2label=LABELS, label2id={name: i for i, name in LABELS.items()})
    return _save(transformers.YolosForObjectDetection(config), transformers.YolosImageProcessorPil(size=EDGES), folder)


def mask2former(folder: Path) -> Path:
    stages = [f"stage{number}" for number in range(1, 5)]
    swin = transformers.SwinConfig(**SWIN, depths=[1] * 4, num_heads=[1] * 4, out_features=stages)
    layers = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16}
    layers |= {"dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
    labels = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
    config = transformers.Mask2FormerConfig(backbone_config=swin, num_queries=6, **layers, **labels)
    processor = transformers.Mask2FormerImageProcessorPil(size=EDGES, num_labels=3)
    return _save(transformers.Mask2FormerForUniversalSegmentation(config), processor, folder)


FAMILIES = {
    "owlvit": owl,
    "owlv2": lambda folder: owl(folder, "Owlv2"),
    "grounding-dino": grounding,
    "yolos": yolos,
    "mask2former": mask2former,
}
