"""Ask a vision-language model about pictures: a local transformers model, or any OpenAI-compatible server.

Both answer the same two questions of a caller: how likely is "yes" beside "no" as the next word, and what is the whole
answer. Greedy decoding, so that an answer is a function of what was asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

from rewards.models.checkpoints import model_type, pretrained, torch_dtype  # noqa: E402
from rewards.scorers.judges.chat import ChatServer, Server  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
BATCH = 4  # questions per forward

Question: TypeAlias = "Sequence[Image | str]"
"""Pictures and pieces of text in the order in which the model gets them."""


class Answer(NamedTuple):
    """P(yes) / (P(yes) + P(no)), NaN where neither is among the likely next words; and P(yes) + P(no)."""

    yes: float
    mass: float


def yes_or_no(next_word: Iterable[tuple[str, float]]) -> Answer:
    """The answer in (token, log-probability) pairs of the next token.

    All spellings count ("Yes", " yes", "NO"). A small mass says that the question was not understood as one.
    """
    sums = {"yes": 0.0, "no": 0.0}
    for token, log_probability in next_word:
        word = token.strip().lower()
        if word in sums:
            sums[word] += math.exp(log_probability)
    mass = sums["yes"] + sums["no"]
    return Answer(sums["yes"] / mass if mass > 0 else math.nan, mass)


class VLM(Protocol):
    """What a reward needs of a vision-language model."""

    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is beside "no" as the first word of each answer."""

    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """The whole answers, cut at `max_tokens`."""

    def to(self, device: str) -> None:
        """Move the model, if it is here."""


def open_vlm(model: str, server: Mapping[str, Any] | None, dtype: str, device: str, reward: str) -> VLM:
    """A model of that name on a server (keys of `Server`), or else the local model of that hub id or folder."""
    if server is not None:
        return ChatServer(model, Server.of(server, reward))
    return LocalVLM(model, dtype, device, reward)


class LocalVLM:
    """A transformers image-text-to-text model. Qwen's are prepared here with Pillow's resizing, so that torchvision
    is not needed; others by their own processor.

    ValueError for a checkpoint that is no such model, lacks weights, or has no chat template.
    """

    def __init__(self, model: str, dtype: str = "bfloat16", device: str = "cpu", reward: str = "vlm"):
        kind = model_type(model, reward)
        known = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if kind not in known:
            raise ValueError(f"{reward}: {model!r} is a {kind!r} model, which answers no questions about pictures")
        self.model = pretrained(
            transformers.AutoModelForImageTextToText, model, types=(), reward=reward, dtype=torch_dtype(dtype, reward)
        ).to(device)
        self.device = device
        if kind in QWEN:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
            self._prepare = QwenInputs(self.tokenizer, transformers.Qwen2VLImageProcessorPil.from_pretrained(model))
        else:
            processor = transformers.AutoProcessor.from_pretrained(model)
            self.tokenizer = processor.tokenizer
            self.tokenizer.padding_side = "left"
            self._prepare = ProcessorInputs(processor)
        spelled = {i: spelling(token) for token, i in self.tokenizer.get_vocab().items()}
        self._words = {i: word for i, word in sorted(spelled.items()) if word.strip().lower() in ("yes", "no")}
        logger.info("VLM %s (%s, %s)", model, kind, dtype)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        self.device = device

    @torch.no_grad()
    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is beside "no" as the first word of each answer, from the logits of the first token."""
        found = []
        for batch in _batches(questions):
            logits = self.model(**self._inputs(batch), logits_to_keep=1).logits[:, -1]
            log_probabilities = logits.float().log_softmax(-1)[:, list(self._words)].tolist()
            found += [yes_or_no(zip(self._words.values(), row, strict=True)) for row in log_probabilities]
        return found

    @torch.no_grad()
    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Greedy answers."""
        found: list[str] = []
        for batch in _batches(questions):
            inputs = self._inputs(batch)
            written = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            new = written[:, inputs["input_ids"].shape[1] :]
            found += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return found

    def _inputs(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        inputs = self._prepare(questions)
        floats = self.model.dtype
        return {k: v.to(self.device, floats if v.is_floating_point() else None) for k, v in inputs.items()}


def spelling(token: str) -> str:
    """The text of a token of a byte-level or SentencePiece vocabulary, as far as spaces go."""
    return token.replace("Ġ", " ").replace("▁", " ")


def messages(question: Question) -> list[dict[str, Any]]:
    """One user turn for a chat template: places for the pictures, and the texts."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in question]
    return [{"role": "user", "content": content}]


def pictures_of(questions: Sequence[Question]) -> list[Image]:
    """All pictures of some questions, in order."""
    return [part for question in questions for part in question if not isinstance(part, str)]


class QwenInputs:
    """Model inputs for Qwen2-VL, 2.5-VL and 3-VL: each picture's placeholder repeated once per merged patch."""

    def __init__(self, tokenizer: Any, image_processor: Any):
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template to ask questions by")
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __call__(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        place = "<|image_pad|>"
        chats = [messages(question) for question in questions]
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        pictures = pictures_of(questions)
        seen: dict[str, torch.Tensor] = {}
        if pictures:
            seen = dict(self.image_processor(images=pictures, return_tensors="pt"))
        counts = iter((seen["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist() if seen else [])
        for i, (text, question) in enumerate(zip(texts, questions, strict=True)):
            pieces = text.split(place)
            own = sum(not isinstance(part, str) for part in question)
            if len(pieces) != own + 1:
                raise ValueError(
                    f"a question with {own} pictures has {len(pieces) - 1} places {place} for them: the text must not "
                    "hold that token, and the tokenizer's chat template must be one for pictures"
                )
            texts[i] = "".join(p + place * next(counts) if k < own else p for k, p in enumerate(pieces))
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        kinds = (tokens["input_ids"] == self.tokenizer.convert_tokens_to_ids(place)).long()
        return {**tokens, **seen, "mm_token_type_ids": kinds}


class ProcessorInputs:
    """Model inputs by a checkpoint's own processor."""

    def __init__(self, processor: Any):
        if processor.chat_template is None:
            raise ValueError(f"{type(processor).__name__} has no chat template to ask questions by")
        self.processor = processor

    def __call__(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        texts = [self.processor.apply_chat_template(messages(q), add_generation_prompt=True) for q in questions]
        own = [pictures_of([question]) for question in questions]
        shown = own if any(own) else None
        return dict(self.processor(text=texts, images=shown, padding=True, return_tensors="pt"))


def _batches(questions: Sequence[Question]) -> list[Sequence[Question]]:
    return [questions[i : i + BATCH] for i in range(0, len(questions), BATCH)]
