"""Random checkpoints of a few ten thousand numbers in the true formats, one per family of vision-language models."""

from __future__ import annotations

from pathlib import Path

import torch

from genrl.vlm.policies import processor as pictures  # first: it makes transformers importable beside any torchvision

from transformers import (  # isort: skip
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from transformers.models.siglip import SiglipVisionConfig  # isort: skip
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil  # isort: skip

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava", "llava_next")
QWEN = ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *PLACES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def save(family: str, folder: Path) -> Path:
    """A checkpoint with weights, tokenizer, image processor and chat template."""
    return {"smolvlm": _idefics, "idefics3": _idefics, "llava": _llava, "llava_next": _llava}.get(family, _qwen)(
        family, folder
    )


def _tokenizer(special: list[str], image: str) -> Qwen2Tokenizer:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the byte-level alphabet of GPT-2
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    made = Qwen2Tokenizer(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[])
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]})
    made.pad_token, made.eos_token = "<|endoftext|>", "<|im_end|>"
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


def _save(model: torch.nn.Module, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)  # larger than a new model's, so that images count
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.repetition_penalty = 1.5  # the makers' defaults must not reach the sampler
    model.save_pretrained(folder)


def _qwen(family: str, folder: Path) -> Path:
    made = _tokenizer([f"<|{name}|>" for name in QWEN], "<|vision_start|><|image_pad|><|vision_end|>")
    ids = {name: made.convert_tokens_to_ids(f"<|{name}|>") for name in QWEN}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "vocab_size": len(made), "rope_parameters": rope, "tie_word_embeddings": False}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    common = {"image_token_id": ids["image_pad"], "video_token_id": ids["video_pad"], "tie_word_embeddings": False}
    common |= {"vision_start_token_id": ids["vision_start"], "vision_end_token_id": ids["vision_end"]}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **common))
    elif family == "qwen2_5_vl":
        vision |= {"intermediate_size": 48, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common))
    else:
        text |= {"head_dim": 8}
        text["rope_parameters"] = {**rope, "mrope_interleaved": True}
        vision |= {"intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **common))
    _save(model, made, folder)
    made.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=16 * 16, max_pixels=32 * 32).save_pretrained(folder)
    return folder


def _idefics(family: str, folder: Path) -> Path:
    made = _tokenizer(IDEFICS, "<image>")
    text = {**TEXT, "model_type": "llama", "vocab_size": len(made), "pad_token_id": made.pad_token_id}
    vision = {**LAYERS, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    common = {"image_token_id": made.convert_tokens_to_ids("<image>"), "scale_factor": 2}
    common |= {"pad_token_id": made.pad_token_id, "vision_config": vision, "text_config": text}
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if family == "smolvlm":
        _save(SmolVLMForConditionalGeneration(SmolVLMConfig(**common)), made, folder)
        images = SmolVLMImageProcessorPil(**size)
        pictures.SmolPictures(images, made, 4, made.chat_template).save_pretrained(folder)
    else:
        _save(Idefics3ForConditionalGeneration(Idefics3Config(**common)), made, folder)
        images = Idefics3ImageProcessorPil(**size)
        Idefics3Processor(images, made, image_seq_len=4, chat_template=made.chat_template).save_pretrained(folder)
    return folder


def _llava(family: str, folder: Path) -> Path:
    made = _tokenizer(["<image>"], "<image>")
    common = {
        "vision_config": SiglipVisionConfig(**LAYERS, num_attention_heads=2, image_size=16, patch_size=4),
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(made)},
        "image_token_index": made.convert_tokens_to_ids("<image>"),
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    }
    how = {"patch_size": 4, "vision_feature_select_strategy": "full", "chat_template": made.chat_template}
    size = {"height": 16, "width": 16}
    if family == "llava":
        _save(LlavaForConditionalGeneration(LlavaConfig(**common)), made, folder)
        LlavaProcessor(SiglipImageProcessorPil(size=size), made, **how).save_pretrained(folder)
    else:  # tiles of a picture's own proportions, and the whole: as many as the picture needs
        places = [[16, 32], [32, 16], [32, 32]]
        config = LlavaNextConfig(**common, image_grid_pinpoints=places)
        _save(LlavaNextForConditionalGeneration(config), made, folder)
        images = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=places)
        LlavaNextProcessor(images, made, **how).save_pretrained(folder)
    return folder
