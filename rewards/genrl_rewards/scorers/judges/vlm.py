"""Ask a vision-language model about pictures: a local transformers model, or any OpenAI-compatible server.

Both answer the same three kinds of question: how likely is "yes" compared with "no" as the next word, how likely is a
given word, and what is the whole answer. Decoding is greedy, so that an answer is a function of what was asked.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from PIL.Image import Image

from genrl_rewards.models.checkpoints import model_type, pretrained, tokenizer_of, torch_dtype, transformers
from genrl_rewards.scorers.judges.chat import ChatServer, Server

logger = logging.getLogger(__name__)

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
BATCH = 4  # questions per forward pass
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

Question: TypeAlias = Sequence[Image | str]
"""Pictures and pieces of text in the order in which the model gets them."""
Inputs: TypeAlias = Mapping[str, torch.Tensor]
"""What a model is called with, by name; a row per question."""
Endpoint: TypeAlias = Mapping[str, Any] | None
"""The keys of `genrl_rewards.scorers.judges.chat.Server`; None: the model runs here."""


class Answer(NamedTuple):
    """P(yes) / (P(yes) + P(no)), NaN if neither is among the likely next words; and P(yes) + P(no)."""

    yes: float
    mass: float


def yes_or_no(next_word: Iterable[tuple[str, float]]) -> Answer:
    """The answer in (token, log-probability) pairs of the next token.

    All spellings count ("Yes", " yes", "NO"). A small mass means that the question was not understood as one.
    """
    sums = {"yes": 0.0, "no": 0.0}
    for token, log_probability in next_word:
        word = token.strip().lower()
        if word in sums:
            sums[word] += math.exp(log_probability)
    mass = sums["yes"] + sums["no"]
    return Answer(sums["yes"] / mass if mass > 0 else math.nan, mass)


def spellings(word: str) -> frozenset[str]:
    """A word in lower case; of a number up to ten both ways to write it."""
    plain = word.strip().lower()
    number = plain if plain.isdecimal() else str(NUMBERS.index(plain)) if plain in NUMBERS else ""
    return frozenset([plain, *([number, NUMBERS[int(number)]] if number and int(number) < len(NUMBERS) else [])])


def chance(next_word: Iterable[tuple[str, float]], word: str) -> float:
    """The probability of a word in (token, log-probability) pairs of the next token, over all its spellings."""
    words = spellings(word)
    return math.fsum(math.exp(value) for token, value in next_word if token.strip().lower() in words)


class VLM(Protocol):
    """What a reward needs of a vision-language model."""

    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is compared with "no" as the first word of each answer."""

    def first_words(self, questions: Sequence[Question], words: Sequence[str]) -> list[float]:
        """How likely each answer is to begin with its one of `words`, in [0, 1]."""

    def check_words(self, words: Sequence[str]) -> None:
        """Raise ValueError for a word that no answer can begin with, as far as is known before it is asked."""

    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """The whole answers, cut at `max_tokens`."""

    def to(self, device: str) -> object:
        """Move the model, if it runs here."""


def open_vlm(model: str, server: Endpoint, dtype: str, device: str, reward: str) -> VLM:
    """The model of that name on a server, or else the local model of that hub id or folder."""
    if server is not None:
        return ChatServer(model, Server.of(server, reward))
    return LocalVLM(model, dtype, device, reward)


class LocalModel:
    """A transformers model that answers questions; `inputs` prepares what it is called with."""

    def __init__(self, model: Any, tokenizer: Any, inputs: Callable[[Sequence[Question]], Inputs]):
        self.model, self.tokenizer, self.inputs = model, tokenizer, inputs
        self.to = model.to
        self.spelled = {i: spelling(token) for token, i in tokenizer.get_vocab().items()}
        self.ids: dict[str, list[int]] = defaultdict(list)
        """Of a word in lower case, the tokens that spell it."""
        for i, token in self.spelled.items():
            self.ids[token.strip().lower()].append(i)

    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is compared with "no" as the first word, from the logits of the first token."""
        return [yes_or_no(row) for row in self._first_tokens(questions, frozenset(["yes", "no"]))]

    def first_words(self, questions: Sequence[Question], words: Sequence[str]) -> list[float]:
        """How likely each answer is to begin with its word. Raises ValueError as `check_words`."""
        self.check_words(words)
        spelt = frozenset().union(*map(spellings, words))
        rows = self._first_tokens(questions, spelt)
        return [chance(row, word) for row, word in zip(rows, words, strict=True)]

    def check_words(self, words: Sequence[str]) -> None:
        """Raise ValueError, with the nearest that is one, for a word that is no single token of the model."""
        for word in words:
            if not spellings(word) & self.ids.keys():
                near = get_close_matches(word.lower(), filter(str.isalpha, self.ids), n=1)
                hint = f" (the nearest that is one: {near[0]!r})" if near else ""
                raise ValueError(
                    f"the answer {word!r} is no single token of the model{hint}; ask for yes, no or a number as a word"
                )

    @torch.no_grad()
    def _first_tokens(self, questions: Sequence[Question], wanted: frozenset[str]) -> list[list[tuple[str, float]]]:
        """Tokens of each answer that spell one of these words, with their log-probabilities."""
        tokens = {i: self.spelled[i] for i in sorted(i for word in wanted for i in self.ids.get(word, ()))}
        rows = []
        for inputs in self._batches(questions):
            logits = self.model(**inputs, logits_to_keep=1).logits[:, -1]
            # Over the whole vocabulary, so that `mass` says how much of it yes and no have.
            log_probabilities = logits.float().log_softmax(-1)[:, list(tokens)].tolist()
            rows += [list(zip(tokens.values(), row, strict=True)) for row in log_probabilities]
        return rows

    @torch.no_grad()
    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Greedy answers."""
        answers: list[str] = []
        for inputs in self._batches(questions):
            written = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            new = written[:, inputs["input_ids"].shape[1] :]
            answers += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    def _batches(self, questions: Sequence[Question]) -> Iterator[Inputs]:
        device, floats = self.model.device, self.model.dtype
        for start in range(0, len(questions), BATCH):
            inputs = self.inputs(questions[start : start + BATCH])
            yield {k: v.to(device, floats if v.is_floating_point() else None) for k, v in inputs.items()}


class LocalVLM(LocalModel):
    """A transformers image-text-to-text model. The inputs of Qwen's models are prepared here, with Pillow's resizing,
    so that torchvision is not needed; those of others by their own processor.

    Raises ValueError for a checkpoint of another kind, with missing weights, or without a chat template.
    """

    def __init__(self, model: str, dtype: str = "bfloat16", device: str = "cpu", reward: str = "vlm"):
        kind = model_type(model, reward)
        if not sees(kind):
            raise ValueError(f"{reward}: {model!r} is a {kind!r} model, which answers no questions about pictures")
        architecture, precision = transformers.AutoModelForImageTextToText, torch_dtype(dtype, reward)
        loaded = pretrained(architecture, model, types=(), reward=reward, dtype=precision).to(device)
        prepare: QwenInputs | ProcessorInputs
        if kind in QWEN:
            tokenizer = tokenizer_of(model, reward, padding_side="left")
            prepare = QwenInputs(tokenizer, transformers.Qwen2VLImageProcessorPil.from_pretrained(model))
        else:
            processor: Any = transformers.AutoProcessor.from_pretrained(model)
            if not hasattr(processor, "tokenizer"):  # the class of a tokenizer alone, where there is nothing else
                raise ValueError(
                    f"{reward}: {model!r} ({kind}) has no processor of pictures that can be loaded: save that of the "
                    "original model beside the weights; some need torchvision"
                )
            tokenizer = processor.tokenizer
            tokenizer.padding_side = "left"
            prepare = ProcessorInputs(processor)
        super().__init__(loaded, tokenizer, prepare)
        logger.info("VLM %s (%s, %s)", model, kind, dtype)


def sees(kind: str) -> bool:
    """Whether models of a type take pictures and text and answer in text."""
    return kind in transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def spelling(token: str) -> str:
    """The text of a token of a byte-level or SentencePiece vocabulary, as far as spaces are concerned."""
    return token.replace("Ġ", " ").replace("▁", " ")


def messages(question: Question) -> list[dict[str, Any]]:
    """One user turn for a chat template: placeholders for the pictures, and the texts."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in question]
    return [{"role": "user", "content": content}]


def pictures_of(questions: Sequence[Question]) -> list[Image]:
    """All pictures of some questions, in order."""
    return [part for question in questions for part in question if not isinstance(part, str)]


class QwenInputs:
    """Model inputs for Qwen2-VL, 2.5-VL and 3-VL: each picture's placeholder repeated once per merged patch."""

    def __init__(self, tokenizer: Any, image_processor: Any):
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template to ask questions with")
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __call__(self, questions: Sequence[Question]) -> Inputs:
        place = "<|image_pad|>"
        chats = [messages(question) for question in questions]
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        pictures = pictures_of(questions)
        pixels = dict(self.image_processor(images=pictures, return_tensors="pt")) if pictures else {}
        counts = iter(
            (pixels["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist() if pixels else []
        )
        for i, (text, question) in enumerate(zip(texts, questions, strict=True)):
            pieces = text.split(place)
            count = len(pictures_of([question]))
            if len(pieces) != count + 1:
                raise ValueError(
                    f"a question with {count} pictures has {len(pieces) - 1} places {place} for them: the text must "
                    "not contain that token, and the tokenizer's chat template must be one for pictures"
                )
            # The model reads a placeholder for each merged patch, of which a template writes one for each picture.
            texts[i] = "".join(p + place * next(counts) if k < count else p for k, p in enumerate(pieces))
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        # Where the pictures are: rotary positions are of rows and columns there.
        kinds = (tokens["input_ids"] == self.tokenizer.convert_tokens_to_ids(place)).long()
        return {**tokens, **pixels, "mm_token_type_ids": kinds}


class ProcessorInputs:
    """Model inputs prepared by a checkpoint's own processor."""

    def __init__(self, processor: Any):
        if processor.chat_template is None:
            raise ValueError(f"{type(processor).__name__} has no chat template to ask questions with")
        self.processor = processor

    def __call__(self, questions: Sequence[Question]) -> Inputs:
        texts = [self.processor.apply_chat_template(messages(q), add_generation_prompt=True) for q in questions]
        own = [pictures_of([question]) for question in questions]
        pictures = own if any(own) else None
        # Gemma's templates write the token that begins a text, which their tokenizers add; LLaVA's leave it to them.
        begin = self.processor.tokenizer.bos_token
        adds = not (begin and all(text.startswith(begin) for text in texts))
        return dict(
            self.processor(text=texts, images=pictures, padding=True, return_tensors="pt", add_special_tokens=adds)
        )
