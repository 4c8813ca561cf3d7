"""Rewards: HPSv3 and EditReward, Qwen vision-language models with a scoring head in place of the vocabulary.

The head reads the hidden state at the token <|Reward|>, which closes the instruction. Positions are plain and
sequential, as in the authors' own forward passes: they hand embeddings to the language model without the picture's
grid, and the heads were trained on that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402

from rewards.models.checkpoints import check_type, fill, find, read_weights, torch_dtype  # noqa: E402
from rewards.scorers.judges import templates  # noqa: E402
from rewards.scorers.judges.vlm import Question, QwenInputs  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

TOKEN = "<|Reward|>"
PLACE = "{text_prompt}"
CLOSING = f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
PIXELS = 256 * 28 * 28  # of every picture, as near as its shape and the patches allow
BATCH = 4


def head(weights: Mapping[str, torch.Tensor], what: str) -> torch.nn.Sequential:
    """The scoring head, D -> 1024 -> 16 -> 2 with ReLU between, in float32; sizes are read from the weights."""
    names = ("0", "3", "5")
    lacking = [f"{name}.weight" for name in names if f"{name}.weight" not in weights]
    if lacking:
        raise ValueError(f"{what} has no scoring head: it lacks {', '.join(lacking)} of it")
    linear = [torch.nn.Linear(*reversed(weights[f"{name}.weight"].shape)) for name in names]
    relu, dropout = torch.nn.ReLU, torch.nn.Dropout(0.05)
    module = torch.nn.Sequential(linear[0], relu(), dropout, linear[1], relu(), linear[2])
    fill(module, {name: value.float() for name, value in weights.items()}, f"{what}: its scoring head")
    return module.eval().requires_grad_(False)


def backbone_name(name: str) -> str | None:
    """The name in transformers' Qwen2VLModel and Qwen2_5_VLModel of a backbone weight; None for one that is unused.

    Checkpoints were saved under names of before and after transformers 4.52.
    """
    if name.startswith(("lm_head.", "rm_head")):
        return None
    name = name.removeprefix("model.")
    return name if name.startswith(("visual.", "language_model.")) else f"language_model.{name}"


class RewardHead:
    """A Qwen2-VL or Qwen2.5-VL with scoring heads.

    `base`    hub id or folder with the configuration, tokenizer and image processor that the checkpoint was made from
    `weights` everything that was saved, backbone and heads; `prefixes` those of the heads' names
    """

    def __init__(
        self,
        base: str,
        weights: Mapping[str, torch.Tensor],
        prefixes: Sequence[str],
        dtype: str,
        device: str,
        reward: str,
        what: str,
    ):
        check_type(base, ("qwen2_vl", "qwen2_5_vl"), reward)
        own = {backbone_name(name): value for name, value in weights.items() if backbone_name(name)}
        if "language_model.embed_tokens.weight" not in own:
            raise ValueError(f"{what} is no reward model of this kind: it has {', '.join(list(weights)[:3])}...")
        self.heads = [
            head({n.removeprefix(p): v for n, v in weights.items() if n.startswith(p)}, what).to(device)
            for p in prefixes
        ]
        config = transformers.AutoConfig.from_pretrained(base)
        config.text_config.vocab_size = len(own["language_model.embed_tokens.weight"])
        with no_init_weights():
            self.model = transformers.AutoModel.from_config(config, dtype=torch_dtype(dtype, reward))
        fill(self.model, own, what)
        self.model = self.model.eval().requires_grad_(False).to(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="right")
        self.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
        self.token = self.tokenizer.convert_tokens_to_ids(TOKEN)
        if self.token >= config.text_config.vocab_size:
            raise ValueError(f"{what} has {config.text_config.vocab_size} tokens; {TOKEN} of {base!r} is {self.token}")
        budget = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
        images = transformers.Qwen2VLImageProcessorPil.from_pretrained(base, size=budget)
        self._prepare = QwenInputs(self.tokenizer, images)
        self.device = device
        logger.info("%s: %s on %s", reward, what, base)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        for module in self.heads:
            module.to(device)
        self.device = device

    @torch.no_grad()
    def scores(self, questions: Sequence[Question], which: int = 0) -> torch.Tensor:
        """Output of head `which` for each question: [N, 2], mean and log standard deviation, float32 on the CPU."""
        rows = [self._scores(questions[i : i + BATCH], which) for i in range(0, len(questions), BATCH)]
        return torch.cat(rows)

    def _scores(self, questions: Sequence[Question], which: int) -> torch.Tensor:
        inputs = self._prepare(questions)
        tokens = inputs["input_ids"].to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand(3, *tokens.shape)
        hidden = self.model(
            input_ids=tokens,
            attention_mask=inputs["attention_mask"].to(self.device),
            pixel_values=inputs["pixel_values"].to(self.device, self.model.dtype),
            image_grid_thw=inputs["image_grid_thw"].to(self.device),
            position_ids=positions,
        ).last_hidden_state
        outputs: torch.Tensor = self.heads[which](hidden[tokens == self.token].float())
        return outputs.cpu()


class HPSv3:
    """Which picture people would prefer for the prompt (Ma et al. 2025, arXiv 2508.03789): about -5 to 15.

    `instruction` the text that the checkpoint was trained with, which is its authors': `file.py:INSTRUCTION` of their
                  repository (MizzenAI/HPSv3, hpsv3/dataset/data_collator_qwen.py), or a `file.txt` of it, with its
                  place `{text_prompt}`. Another wording gives other scores
    `model`       hub id, folder or file of the checkpoint (HPSv3.safetensors)
    `base`        hub id or folder of the Qwen2-VL-7B-Instruct that it was made from, without need of its weights
    `dtype`       `bfloat16` (default), `float32`, `float16`; the head is in float32

    The score is the head's mean; its standard deviation is the part `sigma`. A video scores the mean over its frames.
    """

    def __init__(
        self,
        instruction: str,
        model: str = "MizzenAI/HPSv3",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.instruction = templates.read(instruction, "hpsv3", holding=PLACE)
        file = find(model, ["HPSv3.safetensors"], "hpsv3")
        self.scorer = RewardHead(base, read_weights(file), ["rm_head."], dtype, device, "hpsv3", f"hpsv3: {file}")

    def to(self, device: str) -> None:
        """Move the model."""
        self.scorer.to(device)

    def __call__(self, pil_images: Sequence[Any], prompts: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
        rows = [list(row) if isinstance(row, list) else [row] for row in pil_images]
        questions = [
            [picture, templates.put(self.instruction, PLACE, prompt) + CLOSING]
            for row, prompt in zip(rows, prompts, strict=True)
            for picture in row
        ]
        outputs = self.scorer.scores(questions).split([len(row) for row in rows])
        sigma = [part[:, 1].exp().mean().item() for part in outputs]
        return [part[:, 0].mean().item() for part in outputs], {"sigma": sigma}


class EditReward:
    """How well a picture was edited (EditReward 2025, arXiv 2509.26346): unbounded.

    `following`, `quality` the two texts that the checkpoint was trained with, which are its authors': constants of a
               file of their repository (TIGER-AI-Lab/EditReward), `EditReward/dataset/prompts.py:CONSTANT` with
               INSTRUCTION_EDIT_FOLLOWING and INSTRUCTION_EDIT_QUALITY, or a `file.txt` of each. Another wording gives
               other scores
    `model`    hub id or folder of the checkpoint (model.safetensors or model.pth)
    `base`     hub id or folder of the model that it was made from, without need of its weights
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
        self.texts = [templates.read(text, "editreward", holding=PLACE) for text in (following, quality)]
        file: Path = find(model, ["model.safetensors", "model.pth"], "editreward")
        prefixes = ["rm_heads.head_0.", "rm_heads.head_1."]
        self.scorer = RewardHead(base, read_weights(file), prefixes, dtype, device, "editreward", f"editreward: {file}")

    def to(self, device: str) -> None:
        """Move the model."""
        self.scorer.to(device)

    def __call__(
        self, pil_images: Sequence[Image], prompts: Sequence[str], source_images: Sequence[Image]
    ) -> tuple[list[float], dict[str, list[float]]]:
        means = []
        for which, text in enumerate(self.texts):
            rows = zip(source_images, pil_images, prompts, strict=True)
            questions: list[Question] = [[a, b, templates.put(text, PLACE, p) + CLOSING] for a, b, p in rows]
            means.append(self.scorer.scores(questions, which)[:, 0])
        scores = torch.stack(means).mean(0)
        return scores.tolist(), {"following": means[0].tolist(), "quality": means[1].tolist()}
