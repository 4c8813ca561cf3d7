"""Prompts with images, and the tokens and pixel tensors that a checkpoint's own processor makes of them.

One prompt is prepared once, alone; the sampler and the trainer both read what came out, so they cannot resize an image
differently. Batches are put together from prepared prompts, so no pixel row is ever found by an offset.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.processing_utils import ProcessorMixin

from genrl.vlm.policies.videos import Clip, qwen_with_videos, video_arguments
from genrl_rewards.models.accounts import accounted
from genrl_rewards.models.checkpoints import tokenizer_of
from genrl_rewards.pictures import open_picture

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PLACEHOLDERS = tuple(
    "image_token video_token vision_start_token vision_end_token fake_image_token global_image_token global_image_tag "
    "boi_token eoi_token audio_token image_start_token image_end_token video_start_token video_end_token "
    "start_image_token end_image_token image_break_token".split()
)
"""Tokens of a processor or tokenizer that stand for, or around, what is not text; configurations have them as
`<name>_id`."""

_Mixin: Any = ProcessorMixin  # its signatures are typed in part only
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")

Parts = tuple[str | Image.Image | Path | Clip, ...]


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    parts: Parts


@dataclass(frozen=True)
class Prompt:
    """What is to be answered. `parts`: texts, images (PIL, or a file's path) and clips in the order in which the model
    gets them.

    where: file and row that the prompt comes from; errors name it. before: the turns of the conversation that it ends,
    the user's and the model's. begun: how the answer begins; it is not the model's choice. broken: why the row that it
    comes from cannot be asked.
    """

    parts: Parts
    system: str | None = None
    where: str = "prompt"
    before: tuple[Turn, ...] = ()
    begun: str = ""
    broken: str = ""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All of the conversation, this one included."""
        return (*self.before, Turn("user", self.parts))

    @property
    def pieces(self) -> Parts:
        """The parts of all of its turns."""
        return tuple(part for turn in self.turns for part in turn.parts)


@dataclass(frozen=True)
class Tokens:
    """What the processor made of one prompt.

    ids int64 [P]; kinds: further tensors [P] that the model reads per token (`mm_token_type_ids`: 1 on images, 2 on
    videos); pixels: what the vision tower reads, with images (or rows of images, patches) along dimension 0.
    text, pictures: what they were made of; an engine with a processor of its own is given these pictures (RGB).
    """

    ids: Tensor
    kinds: dict[str, Tensor]
    pixels: dict[str, Tensor]
    text: str = ""
    pictures: tuple[Image.Image, ...] = ()


class QwenPictures(transformers.Qwen2VLProcessor):
    """The processor of Qwen2-VL, 2.5-VL and 3-VL without its video half, which needs torchvision to be made.

    All three prepare images alike; patch size, merge size and limits come from the checkpoint's image processor.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.vision_start_token, self.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        _Mixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class SmolPictures(transformers.SmolVLMProcessor):
    """SmolVLM's processor without its video half, which needs torchvision and num2words to be made."""

    def __init__(self, image_processor: Any, tokenizer: Any, image_seq_len: int, chat_template: str | None) -> None:
        self.fake_image_token = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self.image_token = getattr(tokenizer, "image_token", "<image>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token = getattr(tokenizer, "video_token", "<video>")
        self.global_image_token = getattr(tokenizer, "global_image_token", "<global-img>")
        self.image_seq_len = image_seq_len
        _Mixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def load_processor(path: str, kind: str) -> Any:
    """The processor of a checkpoint (hub id or folder) of model type `kind`.

    Qwen's and SmolVLM's prepare images with Pillow's resizing: the same numbers with and without torchvision. SmolVLM's
    is made without its video half; so is Qwen's where there is no torchvision. Raises ValueError where there is no
    image processor or no chat template.
    """
    try:
        processor = _by_pillow(path, kind) if kind in (*QWEN, "smolvlm") else _auto(path)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{path!r} ({kind}) has no processor that can be loaded: {error}. A vision-language policy needs an image "
            "processor (preprocessor_config.json) beside its tokenizer: save the processor of the original model there"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"{path!r} ({kind}) has no image processor, only a {type(processor).__name__}: save the processor of the "
            "original model beside the weights (preprocessor_config.json)"
        )
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    if not processor.chat_template:
        raise ValueError(f"{path!r} has no chat template: save one as chat_template.jinja beside the weights")
    return processor


def _by_pillow(path: str, kind: str) -> Any:
    tokenizer = tokenizer_of(path, "policy")
    settings, _ = _Mixin.get_processor_dict(path)
    template = settings.get("chat_template") or tokenizer.chat_template
    if kind in QWEN:
        pictures: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(path)
        processor = qwen_with_videos(path, kind, pictures, tokenizer, template)
        return QwenPictures(pictures, tokenizer, template) if processor is None else processor
    images = transformers.SmolVLMImageProcessorPil.from_pretrained(path)
    return SmolPictures(images, tokenizer, settings.get("image_seq_len", 169), template)


def _auto(path: str) -> Any:
    auto: Any = transformers.AutoProcessor
    with accounted(f"the processor of {path!r}"):
        return auto.from_pretrained(path)


def placeholder_ids(config: Any, processor: Any) -> list[int]:
    """Ids that only a processor may write. A policy that samples one of them breaks the training forward."""
    ids = {getattr(config, f"{name}_{end}", None) for name in PLACEHOLDERS for end in ("id", "index")}
    vocabulary = processor.tokenizer.get_vocab()
    ids |= {vocabulary.get(token) for token in placeholder_tokens(processor)}
    return sorted(token for token in ids if isinstance(token, int))


def placeholder_tokens(processor: Any) -> list[str]:
    """Text of these ids, as far as the processor or its tokenizer names them (Gemma's: what an image becomes)."""
    named = [getattr(held, name, None) for held in (processor, processor.tokenizer) for name in PLACEHOLDERS]
    return list(dict.fromkeys(token for token in named if isinstance(token, str)))


class Unreadable(ValueError):
    """A picture that is missing, or that cannot be opened."""


def named_error(where: str, error: Exception) -> str:
    """What was raised for a row, with its name, and the kind of what is no message of ours."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text if where in text else f"{where}: {text}"


def open_image(source: Image.Image | Path, where: str) -> Image.Image:
    """RGB (`genrl_rewards.open_picture`). Raises Unreadable where that refuses it, naming it and the prompt."""
    try:
        return open_picture(source)
    except ValueError as error:
        raise Unreadable(f"{where}: {error}; save it again or leave it out") from error


class Pixels(NamedTuple):
    """The least and the most width x height of a picture; None = as the processor has it."""

    least: int | None = None
    most: int | None = None

    def fitted(self, picture: Image.Image) -> Image.Image:
        """The picture, larger or smaller where it is outside, in its own proportions to a pixel."""
        width, height = picture.size
        area = width * height
        area_wanted = max(area, self.least or area)
        area_wanted = min(area_wanted, self.most or area_wanted)
        if area_wanted == area:
            return picture
        # rounded so that the limit holds
        to_whole, scale = math.floor if area_wanted < area else math.ceil, math.sqrt(area_wanted / area)
        size = (max(1, to_whole(width * scale)), max(1, to_whole(height * scale)))
        return picture.resize(size, Image.Resampling.BICUBIC)


def check_pixels(pixels: Pixels, processor: Any) -> None:
    """Raises ValueError for limits that a processor of Qwen's, which has its own, would not keep."""
    limits = getattr(processor.image_processor, "size", None) or {}
    least, most = (limits.get(key) for key in ("shortest_edge", "longest_edge"))  # of Qwen's, areas
    if not isinstance(processor.image_processor, transformers.Qwen2VLImageProcessorPil) or not least or not most:
        return
    for key, value in (("min_pixels", pixels.least), ("max_pixels", pixels.most)):
        if value is not None and not least <= value <= most:
            text = f"{value:,} is outside of what this checkpoint's processor keeps, {least:,} to {most:,}"
            raise ValueError(f"task.{key}: {text} (size in preprocessor_config.json)")


def without_clips(prompt: Prompt) -> Prompt:
    """A prompt with the frames of its clips as pictures."""

    def shown(parts: Parts) -> Parts:
        return tuple(piece for part in parts for piece in (part.frames if isinstance(part, Clip) else (part,)))

    before = tuple(turn._replace(parts=shown(turn.parts)) for turn in prompt.before)
    return replace(prompt, before=before, parts=shown(prompt.parts))


def tokenize(
    prompt: Prompt, processor: Any, per_token: Sequence[str], pixels: Pixels = Pixels(), *, videos: bool = False
) -> Tokens:
    """Chat template, images and tokens of one prompt, ready for the answer.

    per_token: names of the [P] tensors beside the ids that the model reads. pixels: limits of the pictures, which an
    engine is given in this size, too. videos: whether the processor is given clips as videos, else their frames as
    pictures.
    Raises ValueError for unreadable images, and for a text that holds the token of a place for an image.
    """
    if prompt.broken:
        raise Unreadable(prompt.broken)
    if not videos:
        prompt = without_clips(prompt)
    parts, placeholders = prompt.pieces, placeholder_tokens(processor)
    for text in [prompt.system or "", *(part for part in parts if isinstance(part, str))]:
        held = [token for token in placeholders if token in text]
        if held:
            raise ValueError(
                f"{prompt.where}: the text holds {held[0]!r}, which stands for an image: put images in parts"
            )

    def opened(source: Image.Image | Path) -> Image.Image:
        return pixels.fitted(open_image(source, prompt.where))

    pictures = [opened(part) for part in parts if not isinstance(part, str | Clip)]
    clips = [part for part in parts if isinstance(part, Clip)]
    frames = [[opened(frame) for frame in clip.frames] for clip in clips]
    text = written(prompt, processor)
    tensors = processor(
        text=[text],
        images=[pictures] if pictures else None,
        add_special_tokens=_adds_special(text, processor),
        return_tensors="pt",
        **video_arguments(clips, frames, processor, prompt.where),
    )
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor) and name != "attention_mask"}
    ids = tensors.pop("input_ids")[0]
    kinds = {name: tensors.pop(name)[0] for name in PER_TOKEN if name in tensors}
    kinds = {name: kind for name, kind in kinds.items() if name in per_token}
    return Tokens(ids, kinds, tensors, text, tuple(pictures))


def unexpanded(tokens: Tokens, processor: Any) -> list[int]:
    """Ids with one token for each image, which an engine with a processor of its own expands."""
    ids: list[int] = processor.tokenizer(
        tokens.text, add_special_tokens=_adds_special(tokens.text, processor)
    ).input_ids
    return ids


def written(prompt: Prompt, processor: Any, answer: str | None = None) -> str:
    """A prompt as the chat template writes it, ready for the answer; or with it, and what ends it."""
    turns = [*prompt.turns, *([] if answer is None else [Turn("assistant", (answer,))])]
    chat: list[dict[str, Any]] = [{"role": turn.role, "content": _content(turn.parts)} for turn in turns]
    if prompt.system is not None:
        chat.insert(0, {"role": "system", "content": [{"type": "text", "text": prompt.system}]})
    # not the class's own: SmolVLM's asks the video half for its defaults
    text: str = _Mixin.apply_chat_template(processor, chat, add_generation_prompt=answer is None, tokenize=False)
    return text + prompt.begun if answer is None else text


def opened_tag(asked: str) -> str:
    """The tag that a chat template leaves open for the answer, as reasoning models' do with `<think>`; "" if none."""
    match = re.search(r"<(\w+)>\s*$", asked)
    return match[0].strip() if match else ""


def without_opened(asked: str, text: str) -> str:
    """An answer without the tag that begins it, where what comes before has opened it."""
    tag = opened_tag(asked)
    return text.lstrip().removeprefix(tag).lstrip("\n") if tag and text.lstrip().startswith(tag) else text


def _adds_special(text: str, processor: Any) -> bool:
    """Many templates write the token that begins a text; those that do not leave it to the tokenizer."""
    begin = processor.tokenizer.bos_token
    return begin is None or not text.startswith(begin)


def answer_ids(prompt: Prompt, text: str, processor: Any, stop_ids: Sequence[int]) -> Tensor:
    """int64 [T]: what a model would have to sample to answer `text`, the token that ends it included.

    It is what the chat template and the tokenizer make of an assistant's turn after the prompt, up to the first of
    `stop_ids`. Where prompt and answer together are no continuation of the prompt (a template that drops or adds
    something, a token across the border), the answer is tokenised alone. Raises ValueError for the token of a place for
    an image in the text.
    """
    held = [token for token in placeholder_tokens(processor) if token in text]
    if held:
        raise ValueError(f"{prompt.where}: the answer holds {held[0]!r}, which stands for an image")
    prompt = without_clips(prompt)  # what stands before the answer does not change it
    prompt_text = written(prompt, processor)
    text = without_opened(prompt_text, text)
    full_text = written(prompt, processor, text)
    special, tokenizer = _adds_special(prompt_text, processor), processor.tokenizer
    before: list[int] = tokenizer(prompt_text, add_special_tokens=special)["input_ids"]
    ids: list[int] = tokenizer(full_text, add_special_tokens=special)["input_ids"]
    if ids[: len(before)] == before:
        ids = ids[len(before) :]
    else:
        alone = full_text.removeprefix(prompt_text) if full_text.startswith(prompt_text) else text
        ids = tokenizer(alone, add_special_tokens=False)["input_ids"]
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if end is None:  # the template ends no turn
        end_token = tokenizer.eos_token_id
        return torch.tensor([*ids, end_token if end_token in stop_ids else stop_ids[0]])
    return torch.tensor(ids[: end + 1])


def _content(parts: Parts) -> list[dict[str, str]]:
    def content(part: str | Image.Image | Path | Clip) -> dict[str, str]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return {"type": "video" if isinstance(part, Clip) else "image"}

    return [content(part) for part in parts]


def join_pixels(prompts: Sequence[Tokens]) -> dict[str, Tensor]:
    """The pixel tensors of several prompts, one after the other along dimension 0.

    Where prompts have different numbers of tiles (Idefics3: dimension 1), the others get tiles of zeros, which such
    models leave out.
    """
    names = {name: None for prompt in prompts for name in prompt.pixels}
    return {name: _join([p.pixels[name] for p in prompts if name in p.pixels]) for name in names}


def _join(parts: Sequence[Tensor]) -> Tensor:
    shape = torch.tensor([part.shape[1:] for part in parts]).amax(0).tolist()
    padded = []
    for part in parts:
        missing = [pad for have, want in zip(part.shape[:0:-1], shape[::-1], strict=True) for pad in (0, want - have)]
        padded.append(torch.nn.functional.pad(part, missing) if any(missing) else part)
    return torch.cat(padded)
