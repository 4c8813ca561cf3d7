"""A random Qwen2-VL of 70,000 numbers in the true format, whose vocabulary has Yes and No as single tokens."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from PIL.Image import Image

from genrl_rewards.scorers.judges.vlm import LocalVLM
from tests.rewards.tiny_clip import byte_symbols  # first: it makes transformers importable beside any torchvision

from transformers import (  # isort: skip
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

NAMES = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
SPECIAL = [f"<|{name}|>" for name in NAMES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("Yes", "No", "yes", "no", "ĠYes")


def spelled(words: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary in which these words are single tokens, and its merges."""
    vocabulary = {symbol: i for i, symbol in enumerate(byte_symbols())}
    merges: list[tuple[str, str]] = []
    for word in words:
        built = word[0]
        for letter in word[1:]:
            if (built, letter) not in merges:
                merges.append((built, letter))
                vocabulary.setdefault(built + letter, len(vocabulary))
            built += letter
    return vocabulary, merges


def tokenizer() -> Qwen2Tokenizer:
    vocabulary, merges = spelled(WORDS)
    made = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.pad_token = made.eos_token = "<|endoftext|>"
    made.chat_template = TEMPLATE
    return made


def config(made: Qwen2Tokenizer, size: int | None = None) -> Qwen2VLConfig:
    image, video, start = made.convert_tokens_to_ids([f"<|{name}|>" for name in (*NAMES[6:], "vision_start")])
    text = {"vocab_size": size or len(made), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        tie_word_embeddings=False,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )


def randomise(model: torch.nn.Module) -> None:
    """Larger weights than a new model has, so that pictures count."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)


def save(folder: Path) -> Path:
    made = tokenizer()
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=16 * 16, max_pixels=32 * 32).save_pretrained(folder)
    randomise(model := Qwen2VLForConditionalGeneration(config(made)))
    model.generation_config.eos_token_id = made.eos_token_id
    model.generation_config.pad_token_id = made.pad_token_id
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def published_pixels(folder: Path) -> Path:
    """The folder, whose image processor has the limits of published files, under their keys."""
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"min_pixels": 3136, "max_pixels": 12845056}))
    return folder


def save_comparing(folder: Path, pictures: Sequence[Image]) -> Path:
    """The random Qwen2-VL with a head that answers in one token: 0 or 1, by what of its features depends most on the
    order of two pictures, and ? (which is no answer) for the tenth in which that is least sure."""
    save(folder)
    vlm, made = LocalVLM(str(folder), "float32"), tokenizer()
    pairs = list(itertools.combinations(pictures, 2))
    with torch.no_grad():
        seen = [
            torch.cat([vlm.model.model(**vlm.inputs([[*pair, "0"]]))[0][:, -1] for pair in order])
            for order in (pairs, [pair[::-1] for pair in pairs])
        ]
    turned, both, mean = seen[0] - seen[1], torch.cat(seen), torch.cat(seen).mean(0)
    scale = torch.linalg.inv(torch.linalg.cholesky(both.T.cov() + 1e-6 * torch.eye(len(mean))))
    direction = scale.T @ torch.linalg.eigh(scale @ turned.T.cov() @ scale.T)[1][:, -1]
    unsure = ((both - mean) @ direction).abs().quantile(0.1)
    tokens, end = made.convert_tokens_to_ids(["0", "1", "?"]), made.eos_token_id
    vlm.model.lm_head.weight.data[tokens] = torch.stack([direction, -direction, 0 * direction])
    bias = torch.stack([-mean @ direction, mean @ direction, unsure]).tolist()
    vlm.model.generation_config.update(
        suppress_tokens=[token for token in range(len(made)) if token not in (*tokens, end)],
        begin_suppress_tokens=[end],
        sequence_bias=[[[token], value] for token, value in zip(tokens, bias, strict=True)],
        exponential_decay_length_penalty=(0, 1e6),
    )
    vlm.model.save_pretrained(folder)
    return folder
