"""Reward: are the requested objects there, in number, colour and place? GenEval (Ghosh et al. 2023, 2310.11513)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
from PIL import Image as Images
from PIL.Image import Image

from genrl_rewards.contract import check_choice
from genrl_rewards.models.clip_model import ClipScorer
from genrl_rewards.models.pixels import frames, from_pil, mean_over_frames
from genrl_rewards.pictures import pil_list
from genrl_rewards.scorers.objects.detection import Detector, Thing
from genrl_rewards.scorers.objects.geometry import COLOURS, Box, Verdict, check

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"
CREDITS = ("partial", "strict", "relaxed")
OUTSIDE = (0x99, 0x99, 0x99)  # the colour around a thing in its crop


class ColourClassifier:
    """The colour of a thing: the one of ten descriptions that is nearest to its crop, by CLIP."""

    def __init__(self, model: str, device: str):
        self.clip = ClipScorer(model, model, device, "geneval")
        self._texts: dict[str, torch.Tensor] = {}

    def colours(self, picture: Image, name: str, things: Sequence[Thing]) -> list[str]:
        """One of `COLOURS` for each thing; `name` is that of their class."""
        if not things:
            return []
        crops = [crop(picture, thing) for thing in things]
        # One by one: crops are of different sizes.
        embeds = [self.clip.embed_images(from_pil(c)) for c in crops]
        similar = torch.nn.functional.normalize(torch.cat(embeds).float(), dim=-1) @ self._classes(name).T
        return [COLOURS[i] for i in similar.argmax(1).tolist()]

    def _classes(self, name: str) -> torch.Tensor:
        if name not in self._texts:
            forms = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
            texts = [form.format(colour, name) for colour in COLOURS for form in forms]
            # Unit vectors, their mean, and that at unit length again: CLIP's own way to make one class of several
            # phrasings.
            unit = torch.nn.functional.normalize(self.clip.embed_texts(texts), dim=-1)
            means = unit.view(len(COLOURS), len(forms), -1).mean(1)
            self._texts[name] = torch.nn.functional.normalize(means, dim=-1)
        return self._texts[name]


def crop(picture: Image, thing: Thing) -> Image:
    """The part of the picture in the thing's box, at least a pixel, grey outside its mask if it has one."""
    if thing.mask is not None:
        picture = Images.composite(picture, Images.new("RGB", picture.size, OUTSIDE), Images.fromarray(thing.mask))
    left, top, right, bottom = thing.box[:4]
    x, y = min(int(left), picture.width - 1), min(int(top), picture.height - 1)
    return picture.crop((x, y, max(x + 1, math.ceil(right)), max(y + 1, math.ceil(bottom))))


class GenEval:
    """Are the requested objects there, in number, colour and place? A detector, CLIP and GenEval's rules, in [0, 1].

    `credit`   `partial` (default): the mean of a term for each thing requested; `strict`: 1 if exactly those are there;
               `relaxed`: 1 if at least those are, which is the published benchmark's rule
    `detector` hub id or folder; see `genrl_rewards.scorers.objects.detection.Detector`
    `clip`     hub id or folder of the CLIP that classifies colours
    `threshold`, `counting_threshold` lowest confidence, the second for rows whose column `tag` is `counting`: .3 and
               .9, which suit Mask2Former. A zero-shot detector's confidences are lower: try .1 to .3 for both

    Rows are GenEval's: `include` is a list of {class, count, color?, position?: [relation, index]}, `tag` its kind. In
    a `counting` row, one more than requested is too many for `relaxed`, too. All three credits, and the means of the
    terms of count, colour and position, are parts. A video gets the mean over its frames.
    """

    def __init__(
        self,
        credit: str = "partial",
        detector: str = DETECTOR,
        clip: str = CLIP,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        device: str = "cpu",
    ):
        check_choice("geneval: unknown credit", credit, CREDITS)
        self.credit, self.threshold, self.counting_threshold = credit, threshold, counting_threshold
        self.detector = Detector(detector, device, "geneval")
        self.colours = ColourClassifier(clip, device)

    def to(self, device: str) -> None:
        """Move both models."""
        self.detector.to(device)
        self.colours.clip.to(device)

    def __call__(
        self, images: torch.Tensor, include: list[Any], tag: list[str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pictures = pil_list(frames(images))
        per_row = len(pictures) // max(len(tag), 1)
        rows = [(picture, include[i // per_row], tag[i // per_row]) for i, picture in enumerate(pictures)]
        columns = torch.tensor([astuple(self.verdict(*row)) for row in rows], dtype=torch.float64)
        parts = {field.name: mean_over_frames(columns[:, k], images) for k, field in enumerate(fields(Verdict))}
        return parts[self.credit], parts

    def verdict(self, picture: Image, include: Sequence[Mapping[str, Any]], tag: str) -> Verdict:
        """The verdict on one picture. Raises ValueError for a row that is not GenEval's."""
        _check_row(include)
        counting = tag == "counting"
        names = [item["class"] for item in include]
        things = self.detector.find(picture, names, self.counting_threshold if counting else self.threshold)
        by_box = {thing.box: thing for row in things.values() for thing in row}

        def colour_of(name: str, boxes: Sequence[Box]) -> list[str]:
            return self.colours.colours(picture, name, [by_box[box] for box in boxes])

        excluded = [{"class": item["class"], "count": item["count"] + 1} for item in include] if counting else []
        return check(
            {"include": include, "exclude": excluded},
            {name: [thing.box for thing in row] for name, row in things.items()},
            colour_of,
        )


def _check_row(include: Any) -> None:
    rows = include if isinstance(include, list) else []
    for i, item in enumerate(rows):
        right = isinstance(item, Mapping) and isinstance(item.get("class"), str) and item.get("count", 0) >= 1
        place = item.get("position", ["above", 0]) if right else ("", 0)
        is_valid = (
            len(place) == 2 and place[0] in ("left of", "right of", "above", "below") and 0 <= place[1] < max(i, 1)
        )
        if not right or item.get("color", "red") not in COLOURS or not is_valid:
            raise ValueError(
                f"geneval: item {i} of column 'include' is {item!r}; it must be {{class, count, color?, position?}}, "
                f"count from 1, color one of {', '.join(COLOURS)}, position [relation, index of an earlier item]"
            )
    if not rows:
        raise ValueError(f"geneval: the column 'include' must hold a list of requested things, not {include!r}")
