"""Find named things in pictures: transformers' zero-shot and closed-set detectors, and instance segmentation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402

from rewards.contract import nearest  # noqa: E402
from rewards.models.checkpoints import model_type, pretrained  # noqa: E402
from rewards.scorers.objects.geneval_check import Box  # noqa: E402

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

logger = logging.getLogger(__name__)

OWL = ("owlv2", "owlvit")
GROUNDING = ("grounding-dino", "mm-grounding-dino")
CLOSED = ("detr", "conditional_detr", "deformable_detr", "rt_detr", "rt_detr_v2", "yolos", "d_fine", "lw_detr")
MASKED = ("mask2former",)
SAME_THING = 0.5  # intersection over union above which two boxes of a zero-shot detector are one thing
PER_CLASS = 16  # most boxes of a class in a picture, as in GenEval

# GenEval's names that detectors trained on COCO have otherwise.
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
    """A box, and the pixels of the thing, bool [H, W], where the detector tells them."""

    box: Box
    mask: np.ndarray | None = None


class Detector:
    """A detector by hub id or folder: OWL-ViT, OWLv2, (MM-)Grounding-DINO, DETR and its kin, YOLOS, Mask2Former.

    ValueError for a checkpoint of another architecture, and for a class that a closed-set detector does not know.
    """

    def __init__(self, model: str, device: str = "cpu", reward: str = "detector"):
        self.kind, self.reward, self.name = model_type(model, reward), reward, model
        if self.kind in (*OWL, *GROUNDING):
            architecture = transformers.AutoModelForZeroShotObjectDetection
            self.processor = transformers.AutoProcessor.from_pretrained(model, backend="pil")
        elif self.kind in (*CLOSED, *MASKED):
            architecture = (
                transformers.AutoModelForUniversalSegmentation
                if self.kind in MASKED
                else transformers.AutoModelForObjectDetection
            )
            self.processor = transformers.AutoImageProcessor.from_pretrained(model, backend="pil")
        else:
            known = ", ".join((*OWL, *GROUNDING, *CLOSED, *MASKED))
            raise ValueError(f"{reward}: {model!r} is a {self.kind!r} model, which is no detector known here: {known}")
        self.model: Any = pretrained(architecture, model, types=(), reward=reward).to(device)
        self.device = device
        self.labels = {str(label).lower(): int(i) for i, label in self.model.config.id2label.items()}
        logger.info("detector %s (%s)", model, self.kind)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        self.device = device

    @torch.no_grad()
    def find(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        """Things of each name with a confidence above `threshold`, the most confident first, at most 16 of a name."""
        distinct = list(dict.fromkeys(names))
        if self.kind in OWL:
            rows = self._owl(picture, distinct, threshold)
        elif self.kind in GROUNDING:
            rows = {name: self._grounded(picture, name, threshold) for name in distinct}
        else:
            rows = self._closed(picture, distinct, threshold)
        return {name: sorted(rows[name], key=lambda thing: -thing.box.score)[:PER_CLASS] for name in distinct}

    def _owl(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        asked = [f"a photo of a {name}" for name in names]
        inputs = self.processor(text=[asked], images=picture, return_tensors="pt").to(self.device)
        size = [(picture.height, picture.width)]
        (found,) = self.processor.post_process_grounded_object_detection(
            self.model(**inputs), threshold=threshold, target_sizes=size
        )
        rows = _things(found, picture)
        labels = found["labels"].tolist()
        return {
            name: merged([thing for thing, label in zip(rows, labels, strict=True) if label == i])
            for i, name in enumerate(names)
        }

    def _grounded(self, picture: Image, name: str, threshold: float) -> list[Thing]:
        """One name at a time: every box is then of it, and no phrase has to be matched to a name."""
        inputs = self.processor(text=f"a {name.lower()}.", images=picture, return_tensors="pt").to(self.device)
        (found,) = self.processor.post_process_grounded_object_detection(
            self.model(**inputs),
            inputs["input_ids"],
            threshold=threshold,
            text_threshold=threshold,
            target_sizes=[(picture.height, picture.width)],
        )
        return merged(_things(found, picture))

    def _closed(self, picture: Image, names: Sequence[str], threshold: float) -> dict[str, list[Thing]]:
        wanted = {self._label(name): name for name in names}
        inputs = self.processor(images=picture, return_tensors="pt").to(self.device)
        outputs, size = self.model(**inputs), [(picture.height, picture.width)]
        rows: dict[str, list[Thing]] = {name: [] for name in names}
        if self.kind in MASKED:
            (found,) = self.processor.post_process_instance_segmentation(
                outputs, threshold=threshold, target_sizes=size, return_binary_maps=True
            )
            for segment, mask in zip(found["segments_info"], _maps(found["segmentation"]), strict=True):
                if segment["label_id"] in wanted and mask.any():
                    rows[wanted[segment["label_id"]]].append(_of_mask(mask, segment["score"]))
            return rows
        (found,) = self.processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=size)
        for thing, label in zip(_things(found, picture), found["labels"].tolist(), strict=True):
            if label in wanted:
                rows[wanted[label]].append(thing)
        return rows

    def _label(self, name: str) -> int:
        for spelling in (name.lower(), COCO_NAMES.get(name.lower(), "")):
            if spelling in self.labels:
                return self.labels[spelling]
        raise ValueError(
            f"{self.reward}: the detector {self.name!r} has no class {name!r}.{nearest(name, self.labels)} It knows "
            f"{len(self.labels)} classes; a zero-shot detector takes any name"
        )


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    common = max(width, 0.0) * max(height, 0.0)
    area = sum((box.right - box.left) * (box.bottom - box.top) for box in (a, b))
    return common / (area - common) if area > common else 0.0


def merged(things: Sequence[Thing]) -> list[Thing]:
    """Without those that overlap a more confident one by half: a zero-shot detector sees a thing several times."""
    kept: list[Thing] = []
    for thing in sorted(things, key=lambda thing: -thing.box.score):
        if all(overlap(thing.box, other.box) <= SAME_THING for other in kept):
            kept.append(thing)
    return kept


def _things(found: Any, picture: Image) -> list[Thing]:
    limits = torch.tensor([picture.width, picture.height] * 2, dtype=torch.float32)
    boxes = torch.minimum(found["boxes"].cpu().float().clamp_min(0), limits).tolist()
    return [Thing(Box(*box, score)) for box, score in zip(boxes, found["scores"].tolist(), strict=True)]


def _maps(found: Any) -> list[np.ndarray]:
    """The masks of an instance segmentation; it gives one map of -1 where nothing was found."""
    maps = torch.as_tensor(found)
    return [m.numpy() for m in (maps > 0.5)] if maps.ndim == 3 else []


def _of_mask(mask: np.ndarray, score: float) -> Thing:
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    box = Box(float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1), float(score))
    return Thing(box, mask)
