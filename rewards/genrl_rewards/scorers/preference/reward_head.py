"""Rewards: HPSv3 and EditReward, Qwen vision-language models with a scoring head in place of the vocabulary.

The head reads the hidden state at the token <|Reward|>, which ends the instruction. Positions are sequential, as in the
authors' own forward passes: these pass embeddings to the language model without the picture's grid, and the heads were
trained that way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from genrl_rewards.contract import Scored
from genrl_rewards.models.checkpoints import (
    check_type,
    fill,
    find,
    no_init_weights,
    qwen_pictures,
    read_weights,
    tokenizer_of,
    torch_dtype,
    transformers,
)
from genrl_rewards.models.pixels import in_batches
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import shown
from genrl_rewards.scorers.judges.vlm import Question, QwenInputs

logger = logging.getLogger(__name__)

TOKEN = "<|Reward|>"
PLACE = "{text_prompt}"
CLOSING = f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
PIXELS = 256 * 28 * 28  # of every picture, as nearly as its shape and the patches allow
BATCH = 4


def head(weights: Mapping[str, torch.Tensor], what: str) -> torch.nn.Sequential:
    """The scoring head, D -> 1024 -> 16 -> 2 with ReLU between, in float32; sizes are read from the weights."""
    names = ("0", "3", "5")
    lacking = [f"{name}.weight" for name in names if f"{name}.weight" not in weights]
    if lacking:
        raise ValueError(f"{what} has no scoring head: it lacks {', '.join(lacking)}")
    shapes = [weights[f"{name}.weight"].shape for name in names]
    first, second, last = (torch.nn.Linear(into, out) for out, into in shapes)
    relu, dropout = torch.nn.ReLU, torch.nn.Dropout(0.05)
    module = torch.nn.Sequential(first, relu(), dropout, second, relu(), last)
    fill(module, {name: value.float() for name, value in weights.items()}, f"{what}: its scoring head")
    return module.eval().requires_grad_(False)


def backbone_name(name: str) -> str | None:
    """A backbone weight's name in transformers' Qwen2VLModel and Qwen2_5_VLModel; None for an unused weight.

    There are checkpoints with the names of before transformers 4.52, and with later ones.
    """
    if name.startswith(("lm_head.", "rm_head")):
        return None
    name = name.removeprefix("model.")
    return name if name.startswith(("visual.", "language_model.")) else f"language_model.{name}"


def filled_backbone(base: str, weights: Mapping[str, torch.Tensor], what: str, dtype: torch.dtype) -> Any:
    """The Qwen2-VL or Qwen2.5-VL that a checkpoint holds beside its heads, made by the configuration of `base`.

    Raises ValueError, beginning with `what`, where the weights are not those of such a model.
    """
    renamed = {new: value for name, value in weights.items() if (new := backbone_name(name)) is not None}
    if "language_model.embed_tokens.weight" not in renamed:
        raise ValueError(f"{what} is not a reward model of this kind: it has {', '.join(list(weights)[:3])}...")
    config = transformers.AutoConfig.from_pretrained(base)
    # The authors added tokens, and the base's configuration does not know of them.
    config.text_config.vocab_size = len(renamed["language_model.embed_tokens.weight"])
    make: Any = transformers.AutoModel.from_config
    with no_init_weights():
        model = make(config, dtype=dtype)
    fill(model, renamed, what)
    return model.eval().requires_grad_(False)


def tokens_of(base: str, added: Sequence[str], model: Any, what: str) -> tuple[Any, list[int]]:
    """The tokenizer of `base` with these tokens, and their ids. Raises ValueError where the model has too few."""
    # On the right: positions are counted from the left here, and padding there would shift them.
    tokenizer: Any = tokenizer_of(base, "reward_head", padding_side="right")
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    ids, size = tokenizer.convert_tokens_to_ids(list(added)), model.config.text_config.vocab_size
    if max(ids) >= size:
        raise ValueError(f"{what} has {size} tokens; {added[-1]} of {base!r} is {max(ids)}")
    return tokenizer, ids


class RewardHead:
    """A Qwen2-VL or Qwen2.5-VL with scoring heads, from one `file` with the weights of backbone and heads.

    `base` is the hub id or folder of the model that it was made from, for configuration, tokenizer and image processor;
    `prefixes` are those of the heads' names. Raises ValueError if file and base do not fit together.
    """

    def __init__(self, base: str, file: Path, prefixes: Sequence[str], dtype: str, device: str, reward: str):
        check_type(base, ("qwen2_vl", "qwen2_5_vl"), reward)
        weights, what = read_weights(file), f"{reward}: {file}"
        self.model = filled_backbone(base, weights, what, torch_dtype(dtype, reward)).to(device)
        heads = [head({n.removeprefix(p): v for n, v in weights.items() if n.startswith(p)}, what) for p in prefixes]
        self.heads = torch.nn.ModuleList(heads).to(device)
        tokenizer, (self.token,) = tokens_of(base, [TOKEN], self.model, what)
        self._inputs = QwenInputs(tokenizer, qwen_pictures(base, PIXELS, PIXELS))
        logger.info("%s: %s on %s", reward, what, base)

    def to(self, device: str) -> None:
        """Move the backbone and the heads."""
        self.model.to(device)
        self.heads.to(device)

    @torch.no_grad()
    def scores(self, questions: Sequence[Question], which: int = 0) -> torch.Tensor:
        """Output of head `which` for each question: [N, 2], mean and log standard deviation, float32 on the CPU."""
        return in_batches(lambda batch: self._scores(batch, which), BATCH, questions)

    def _scores(self, questions: Sequence[Question], which: int) -> torch.Tensor:
        device = self.model.device
        inputs = {name: value.to(device) for name, value in self._inputs(questions).items()}
        tokens = inputs["input_ids"]
        hidden = self.model(
            input_ids=tokens,
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs["pixel_values"].to(self.model.dtype),
            image_grid_thw=inputs["image_grid_thw"],
            position_ids=torch.arange(tokens.shape[1], device=device).expand(3, *tokens.shape),
        ).last_hidden_state
        outputs: torch.Tensor = self.heads[which](hidden[tokens == self.token].float())
        return outputs.cpu()


class HPSv3:
    """Human preference for the prompt: HPSv3, a Qwen2-VL of 7 billion parameters with a scoring head, about -5 to 15.

    (Ma et al. 2025, arXiv 2508.03789.)

    `instruction` the text that the checkpoint was trained with, which belongs to its authors: `file.py:INSTRUCTION` of
                  their repository (MizzenAI/HPSv3, hpsv3/dataset/data_collator_qwen.py), or a `file.txt` of it, with
                  its placeholder `{text_prompt}`. Another wording gives other scores
    `model`       hub id, folder or file of the checkpoint (HPSv3.safetensors)
    `base`        hub id or folder of the Qwen2-VL-7B-Instruct that it was made from; its weights are not needed
    `dtype`       `bfloat16` (default), `float32`, `float16`; the head is in float32

    The score is the head's mean; its standard deviation is the part `sigma`. A video gets the mean over its frames.
    """

    def __init__(
        self,
        instruction: str,
        model: str = "MizzenAI/HPSv3",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.instruction = judge.read(instruction, "hpsv3", holding=PLACE)
        file = find(model, ["HPSv3.safetensors"], "hpsv3")
        self.scorer = RewardHead(base, file, ["rm_head."], dtype, device, "hpsv3")
        self.to = self.scorer.to

    def __call__(self, pil_images: list[Any], prompts: list[str]) -> Scored:
        rows = [shown(pictures) for pictures in pil_images]
        questions: list[Question] = [
            [picture, judge.put(self.instruction, PLACE, prompt) + CLOSING]
            for row, prompt in zip(rows, prompts, strict=True)
            for picture in row
        ]
        outputs = torch.split(self.scorer.scores(questions), [len(row) for row in rows])
        sigma = [part[:, 1].exp().mean().item() for part in outputs]
        return [part[:, 0].mean().item() for part in outputs], {"sigma": sigma}


class EditReward:
    """Quality of an edit: EditReward, a Qwen2.5-VL with two scoring heads, unbounded (2025, arXiv 2509.26346).

    `following`, `quality` the two texts that the checkpoint was trained with, which belong to its authors: constants of
               a file of their repository (TIGER-AI-Lab/EditReward), `EditReward/dataset/prompts.py:CONSTANT` with
               INSTRUCTION_EDIT_FOLLOWING and INSTRUCTION_EDIT_QUALITY, or a `file.txt` of each. Another wording gives
               other scores
    `model`    hub id or folder of the checkpoint (model.safetensors or model.pth)
    `base`     hub id or folder of the model that it was made from; its weights are not needed
    `dtype`    as in `hpsv3`

    The mean of two heads, each of which reads its own instruction (parts `following`, `quality`). The source picture is
    the file in the column `source_image`; the prompt is the instruction to edit by.
    """

    def __init__(
        self,
        following: str,
        quality: str,
        model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B",
        base: str = "Qwen/Qwen2.5-VL-7B-Instruct",
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.texts = [judge.read(text, "editreward", holding=PLACE) for text in (following, quality)]
        file = find(model, ["model.safetensors", "model.pth"], "editreward")
        prefixes = ["rm_heads.head_0.", "rm_heads.head_1."]
        self.scorer = RewardHead(base, file, prefixes, dtype, device, "editreward")
        self.to = self.scorer.to

    def __call__(self, pil_images: list[Image], prompts: list[str], source_images: list[Image]) -> Scored:
        means = []
        for which, text in enumerate(self.texts):
            rows = zip(source_images, pil_images, prompts, strict=True)
            questions: list[Question] = [[a, b, judge.put(text, PLACE, p) + CLOSING] for a, b, p in rows]
            means.append(self.scorer.scores(questions, which)[:, 0])
        scores = torch.stack(means).mean(0)
        return scores.tolist(), {"following": means[0].tolist(), "quality": means[1].tolist()}
