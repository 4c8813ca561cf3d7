"""Find named things in pictures: transformers' zero-shot and closed-set detectors, and instance segmentation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image

from genrl_rewards.contract import nearest
from genrl_rewards.models.checkpoints import model_type, pretrained, transformers
from genrl_rewards.scorers.objects.geometry import Box
from genrl_rewards.scorers.texts.verifiable import iou_of

logger = logging.getLogger(__name__)

OWL = ("owlv2", "owlvit")
GROUNDING = ("grounding-dino", "mm-grounding-dino")
CLOSED = ("detr", "conditional_detr", "deformable_detr", "rt_detr", "rt_detr_v2", "yolos", "d_fine", "lw_detr")
MASKED = ("mask2former",)
SAME_THING = 0.5  # intersection over union above which two boxes of a zero-shot detector are the same thing
PER_CLASS = 16  # the most boxes of a class in a picture, as in GenEval

# GenEval's class names for which detectors trained on COCO have others.
COCO_NAMES = {
    "computer mouse": "mouse",
    "tv remote": "remote",
    "computer keyboard": "keyboard",
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "potted plant": "pottedplant",
    "dining table": "diningtable",
    "tv": "tvmonitor",
}


class Thing(NamedTuple):
    """A box, and the pixels of the thing, bool [H, W], if the detector gives them."""

    box: Box
    mask: np.ndarray | None = None


def thing_of_mask(mask: np.ndarray, score: float) -> Thing:
    """The thing whose pixels these are (at least one), in their bounding box."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = Box(float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1), float(score))
    return Thing(box, mask)


class Detector:
    """A detector by hub id or folder: OWL-ViT, OWLv2, (MM-)Grounding-DINO, the DETR family, YOLOS, Mask2Former.

    Raises ValueError for a checkpoint of another architecture, and for a class unknown to a closed-set detector.
    """

    def __init__(self, model: str, device: str = "cpu", reward: str = "detector"):
        self.kind, self.reward, self.name = model_type(model, reward), reward, model
        architectures: dict[tuple[str, ...], Any] = {
            (*OWL, *GROUNDING): transformers.AutoModelForZeroShotObjectDetection,
            CLOSED: transformers.AutoModelForObjectDetection,
            MASKED: transformers.AutoModelForUniversalSegmentation,
        }
        architecture = next((value for kinds, value in architectures.items() if self.kind in kinds), None)
        if architecture is None:
            kinds_known = ", ".join(kind for kinds in architectures for kind in kinds)
            raise ValueError(
                f"{reward}: {model!r} is a {self.kind!r} model, which is not a known detector: {kinds_known}"
            )
        zero_shot = self.kind in (*OWL, *GROUNDING)
        processor: Any = transformers.AutoProcessor if zero_shot else transformers.AutoImageProcessor
        # Pillow's resizing, whether or not a torchvision is installed, which would shift boxes a little.
        self.processor = processor.from_pretrained(model, backend="pil")
        self.model = pretrained(architecture, model, types=(), reward=reward).to(device)
        self.to = self.model.to
        self.labels = {str(label).lower(): int(i) for i, label in self.model.config.id2label.items()}
        logger.info("detector %s (%s)", model, self.kind)

    @torch.no_grad()
    def find(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        """For each name, at most 16 things with a confidence above `threshold`, the most confident first."""
        distinct = list(dict.fromkeys(names))
        if self.kind in OWL:
            rows = self._owl(picture, distinct, threshold)
        elif self.kind in GROUNDING:
            rows = {name: self._grounded(picture, name, threshold) for name in distinct}
        else:
            rows = self._closed(picture, distinct, threshold)
        return {name: sorted(rows[name], key=lambda thing: -thing.box.score)[:PER_CLASS] for name in distinct}

    def _owl(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        # How OWL was trained to be asked.
        texts = [f"a photo of a {name}" for name in names]
        inputs = self.processor(text=[texts], images=picture, return_tensors="pt").to(self.model.device)
        (detected,) = self.processor.post_process_grounded_object_detection(
            self.model(**inputs), threshold=threshold, target_sizes=[(picture.height, picture.width)]
        )
        rows = list(zip(_things(detected, picture), detected["labels"].tolist(), strict=True))
        return {name: merged([thing for thing, label in rows if label == i]) for i, name in enumerate(names)}

    def _grounded(self, picture: Image, name: str, threshold: float) -> list[Thing]:
        """One name at a time, so that every box is of it, and no phrase has to be matched with a name."""
        # In lower case and with a full stop at its end: how Grounding-DINO tells phrases apart.
        inputs = self.processor(text=f"a {name.lower()}.", images=picture, return_tensors="pt").to(self.model.device)
        (detected,) = self.processor.post_process_grounded_object_detection(
            self.model(**inputs),
            inputs["input_ids"],
            threshold=threshold,
            text_threshold=threshold,
            target_sizes=[(picture.height, picture.width)],
        )
        return merged(_things(detected, picture))

    def _closed(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        labels = {self._label(name): name for name in names}
        inputs = self.processor(images=picture, return_tensors="pt").to(self.model.device)
        outputs, size = self.model(**inputs), [(picture.height, picture.width)]
        rows: dict[str, list[Thing]] = {name: [] for name in names}
        if self.kind in MASKED:
            for name in ("class_queries_logits", "masks_queries_logits"):  # transformers makes the map on the CPU
                setattr(outputs, name, getattr(outputs, name).cpu())
            (segments,) = self.processor.post_process_instance_segmentation(
                outputs, threshold=threshold, target_sizes=size, return_binary_maps=True
            )
            for segment, mask in zip(segments["segments_info"], _maps(segments["segmentation"]), strict=True):
                if segment["label_id"] in labels and mask.any():
                    rows[labels[segment["label_id"]]].append(thing_of_mask(mask, segment["score"]))
            return rows
        (detected,) = self.processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=size)
        for thing, label in zip(_things(detected, picture), detected["labels"].tolist(), strict=True):
            if label in labels:
                rows[labels[label]].append(thing)
        return rows

    def _label(self, name: str) -> int:
        for spelling in (name.lower(), COCO_NAMES.get(name.lower(), "")):
            if spelling in self.labels:
                return self.labels[spelling]
        raise ValueError(
            f"{self.reward}: the detector {self.name!r} has no class {name!r}.{nearest(name, self.labels)} It knows "
            f"{len(self.labels)} classes; a zero-shot detector takes any name"
        )


def merged(things: Sequence[Thing]) -> list[Thing]:
    """Drop things that overlap a more confident one by half: a zero-shot detector finds a thing several times."""
    kept: list[Thing] = []
    for thing in sorted(things, key=lambda thing: -thing.box.score):
        if all(iou_of(thing.box[:4], other.box[:4]) <= SAME_THING for other in kept):
            kept.append(thing)
    return kept


def _things(detected: Any, picture: Image) -> list[Thing]:
    limits = torch.tensor([picture.width, picture.height] * 2, dtype=torch.float32)
    # Detectors put corners outside of the picture, where sizes and offsets would count what cannot be seen.
    boxes = torch.minimum(detected["boxes"].cpu().float().clamp_min(0), limits).tolist()
    return [Thing(Box._make((*box, score))) for box, score in zip(boxes, detected["scores"].tolist(), strict=True)]


def _maps(segmentation: Any) -> list[np.ndarray]:
    """The masks of an instance segmentation, which is a single map of -1 if nothing was found."""
    maps = torch.as_tensor(segmentation)
    return [m.numpy() for m in (maps > 0.5)] if maps.ndim == 3 else []
