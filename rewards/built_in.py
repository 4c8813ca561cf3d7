"""The rewards of this package by name. What is here is read without importing any of them."""

from __future__ import annotations

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A reward of this package: where it is, and what `genrl rewards` and messages say about it."""

    module: str
    attribute: str
    doc: str
    range: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    """What the extra installs, by import name."""
    needs: str = ""
    """What it takes, where its signature does not say it (it depends on an argument)."""


BUILT_IN: dict[str, BuiltIn] = {
    "shapes": BuiltIn(
        module="rewards.scorers.objects.shapes",
        attribute="Shapes",
        doc="count, colour, shape and position in the embedded world, by rules",
        range="0 to 1",
    ),
    "same_shapes": BuiltIn(
        module="rewards.scorers.objects.shapes",
        attribute="SameShapes",
        doc="do the pictures of a prompt show the same things in the same sizes, by rules of the embedded world",
        range="0 to 1",
    ),
    "ocr": BuiltIn(
        module="rewards.scorers.texts.ocr",
        attribute="Ocr",
        doc="is the quoted text of the prompt written in the image (RapidOCR)",
        range="0 to 1",
        extra="ocr",
        packages=("rapidocr", "onnxruntime", "cv2"),
        needs="images, prompts or a column",
    ),
    "clipscore": BuiltIn(
        module="rewards.scorers.preference.clipscore",
        attribute="ClipScore",
        doc="cosine of CLIP's embeddings of image and prompt",
        range="-1 to 1, usually .1 to .4",
    ),
    "pickscore": BuiltIn(
        module="rewards.scorers.preference.pickscore",
        attribute="PickScore",
        doc="human preference: PickScore v1 over 26",
        range="usually .6 to 1",
    ),
    "aesthetic": BuiltIn(
        module="rewards.scorers.preference.aesthetic",
        attribute="Aesthetic",
        doc="LAION's aesthetic predictor v2 on CLIP ViT-L/14; the prompt is ignored",
        range="1 to 10, usually 4.5 to 6.5",
    ),
    "imagereward": BuiltIn(
        module="rewards.scorers.preference.imagereward",
        attribute="ImageReward",
        doc="human preference: ImageReward v1.0, standardised",
        range="about -2.3 to 2",
    ),
    "hpsv2": BuiltIn(
        module="rewards.scorers.preference.hpsv2",
        attribute="HPSv2",
        doc="human preference: HPSv2.1 (or 2.0), a cosine",
        range="usually .20 to .34",
        extra="hps",
        packages=("ftfy",),
    ),
    "jpeg": BuiltIn(
        module="rewards.scorers.pictures.statistics",
        attribute="jpeg",
        doc="size as a JPEG of quality 95: a smoke test, and a monitor of noise",
        range="0 up, in kB",
    ),
    "sharpness": BuiltIn(
        module="rewards.scorers.pictures.statistics",
        attribute="sharpness",
        doc="variance of the Laplacian: a monitor of blur and noise",
        range="0 to 16",
    ),
    "saturation": BuiltIn(
        module="rewards.scorers.pictures.statistics",
        attribute="saturation",
        doc="mean saturation of the colours: a monitor of glaring pictures",
        range="0 to 1",
    ),
    "dino": BuiltIn(
        module="rewards.scorers.pictures.dino",
        attribute="DinoSimilarity",
        doc="likeness to a reference picture: cosine of DINOv2's or DINOv3's tokens",
        range="-1 to 1",
    ),
    "dino_adversary": BuiltIn(
        module="rewards.scorers.preference.adversary",
        attribute="DinoAdversary",
        doc="does it look like the references: a head on DINO, trained beside the model (adv_grpo)",
        range="unbounded, about -1 to 1",
    ),
    "pickscore_adversary": BuiltIn(
        module="rewards.scorers.preference.adversary",
        attribute="PickScoreAdversary",
        doc="PickScore whose last layers are trained beside the model (adv_grpo)",
        range="as pickscore",
    ),
    "hpsv3": BuiltIn(
        module="rewards.scorers.preference.reward_head",
        attribute="HPSv3",
        doc="human preference: HPSv3, a Qwen2-VL of 7 billion parameters with a scoring head",
        range="about -5 to 15",
    ),
    "editreward": BuiltIn(
        module="rewards.scorers.preference.reward_head",
        attribute="EditReward",
        doc="quality of an edit: EditReward, a Qwen2.5-VL with two scoring heads",
        range="unbounded",
    ),
    "unifiedreward": BuiltIn(
        module="rewards.scorers.preference.unifiedreward",
        attribute="UnifiedReward",
        doc="quality and fit to the prompt as UnifiedReward writes it down",
        range="0 to 1",
    ),
    "judge": BuiltIn(
        module="rewards.scorers.judges.judge",
        attribute="Judge",
        doc="a vision-language model's yes or its written score; local, or on an OpenAI-compatible server",
        range="0 to 1",
    ),
    "text_judge": BuiltIn(
        module="rewards.scorers.texts.answerer",
        attribute="TextJudge",
        doc="a language model's yes to a written answer, or its score; local, or on an OpenAI-compatible server",
        range="0 to 1",
    ),
    "consistent": BuiltIn(
        module="rewards.scorers.texts.answerer",
        attribute="Consistent",
        doc="R1-Reward's: accuracy, more where reasoning and answer agree (by a rule or a judge), and format",
        range="0 to 2",
    ),
    "answered": BuiltIn(
        module="rewards.scorers.texts.answerer",
        attribute="Answered",
        doc="does a frozen vision-language model answer rightly from the chosen frames (K-frames)",
        range="0 or 1",
    ),
    "edit_judge": BuiltIn(
        module="rewards.scorers.judges.judge",
        attribute="EditJudge",
        doc="a vision-language model's four scores of an edit, the worst counting",
        range="0 to 1",
    ),
    "paco_grid": BuiltIn(
        module="rewards.scorers.pictures.paco",
        attribute="PacoGrid",
        doc="do the cells of a grid belong together: a judge's yes over all pairs",
        range="0 to 1",
        needs="pil_images, prompts, or a column",
    ),
    "paco_edit": BuiltIn(
        module="rewards.scorers.pictures.paco",
        attribute="PacoEdit",
        doc="was a picture edited as asked and nothing else: a judge's yes to both",
        range="0 to 1",
    ),
    "paco_group": BuiltIn(
        module="rewards.scorers.pictures.paco",
        attribute="PacoGroup",
        doc="does a picture belong with the others of its group: a judge's yes over its pairs",
        range="0 to 1",
    ),
    "preference_judge": BuiltIn(
        module="rewards.scorers.judges.preference_judge",
        attribute="PreferenceJudge",
        doc="is a goal nearer in one picture than in another: a vision-language model, asked in two stages",
        range="0 or 1",
    ),
    "table_progress": BuiltIn(
        module="rewards.scorers.objects.tabletop",
        attribute="TableProgress",
        doc="how far the embedded table-top task has come, by rules on its pictures",
        range="-4 to 0",
    ),
    "geneval": BuiltIn(
        module="rewards.scorers.objects.geneval",
        attribute="GenEval",
        doc="are the asked objects there, in number, colour and place: a detector, CLIP for colours, GenEval's rules",
        range="0 to 1",
    ),
    "edit_move": BuiltIn(
        module="rewards.scorers.objects.spatial_edit",
        attribute="EditMove",
        doc="was a thing moved in the asked direction, by a detector on source and result",
        range="0 to 1",
    ),
    "edit_scale": BuiltIn(
        module="rewards.scorers.objects.spatial_edit",
        attribute="EditScale",
        doc="was a thing made larger or smaller as asked, by a detector on source and result",
        range="0 to 1",
    ),
    "edit_rotate": BuiltIn(
        module="rewards.scorers.objects.spatial_edit",
        attribute="EditRotate",
        doc="was a thing turned in the picture's plane as asked, by masks of source and result",
        range="0 to 1",
    ),
    "edit_keep": BuiltIn(
        module="rewards.scorers.objects.spatial_edit",
        attribute="EditKeep",
        doc="was a picture left alone outside the edited thing, by difference of pixels",
        range="0 to 1",
    ),
    "similarity": BuiltIn(
        module="rewards.scorers.pictures.similarity",
        attribute="Similarity",
        doc="likeness to a reference picture: SSIM, or 1 - LPIPS",
        range="-1 to 1",
        extra="similarity",
        packages=("torchmetrics",),
    ),
    "per_frame": BuiltIn(
        module="rewards.scorers.pictures.video",
        attribute="PerFrame",
        doc="any pointwise reward of pictures on frames of a video: the mean, or the least",
        range="that reward's",
        needs="images, and what that reward needs",
    ),
    "motion": BuiltIn(
        module="rewards.scorers.pictures.video",
        attribute="motion",
        doc="how much moves in a video, by optical flow",
        range="0 up, usually .005 to .05",
        extra="ocr",
        packages=("cv2",),
    ),
    "steadiness": BuiltIn(
        module="rewards.scorers.pictures.video",
        attribute="steadiness",
        doc="1 - mean difference from frame to frame of a video: a monitor of flicker",
        range="0 to 1",
    ),
    "video_consistency": BuiltIn(
        module="rewards.scorers.pictures.video",
        attribute="VideoConsistency",
        doc="does the subject stay the same through a video: DINO's class tokens",
        range="-1 to 1",
    ),
}
