"""The rewards of this package by name. Reading this table imports none of them."""

from __future__ import annotations

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A reward of this package. What it scores is said by the first line of its docstring."""

    module: str
    attribute: str
    range: str
    extra: str = ""
    """The extra of genrl that it needs, and the packages which that installs, by import name."""
    packages: tuple[str, ...] = ()
    needs: str = ""
    """What it takes, if that depends on an argument, so that its signature does not say it."""
    column: str = ""
    """An argument that may name a column of the prompt file; where it does not, a column of this name is ignored."""


BUILT_IN: dict[str, BuiltIn] = {
    "shapes": BuiltIn("genrl_rewards.scorers.objects.shapes", "Shapes", "0 to 1"),
    "same_shapes": BuiltIn("genrl_rewards.scorers.objects.shapes", "SameShapes", "0 to 1"),
    "emoji": BuiltIn("genrl_rewards.scorers.objects.emoji", "Emoji", "0 to 1"),
    "ocr": BuiltIn(
        "genrl_rewards.scorers.texts.ocr",
        "Ocr",
        "0 to 1",
        extra="ocr",
        packages=("rapidocr", "onnxruntime", "cv2"),
        needs="images, prompts or a column",
        column="target",
    ),
    "clipscore": BuiltIn("genrl_rewards.scorers.preference.clipscore", "ClipScore", "-1 to 1, usually .1 to .4"),
    "clip_grid": BuiltIn(
        "genrl_rewards.scorers.preference.clipscore",
        "ClipGrid",
        "0 to 1, usually .1 to .4",
        needs="images, prompts, or a column",
        column="grid",
    ),
    "pickscore": BuiltIn("genrl_rewards.scorers.preference.pickscore", "PickScore", "usually .6 to 1"),
    "aesthetic": BuiltIn("genrl_rewards.scorers.preference.aesthetic", "Aesthetic", "1 to 10, usually 4.5 to 6.5"),
    "imagereward": BuiltIn("genrl_rewards.scorers.preference.imagereward", "ImageReward", "about -2.3 to 2"),
    "hpsv2": BuiltIn(
        "genrl_rewards.scorers.preference.hpsv2", "HPSv2", "usually .20 to .34", extra="clip", packages=("open_clip",)
    ),
    "jpeg": BuiltIn("genrl_rewards.scorers.pictures.statistics", "jpeg", "0 up, in kB"),
    "sharpness": BuiltIn("genrl_rewards.scorers.pictures.statistics", "sharpness", "0 to 16"),
    "saturation": BuiltIn("genrl_rewards.scorers.pictures.statistics", "saturation", "0 to 1"),
    "dino": BuiltIn("genrl_rewards.scorers.pictures.dino", "DinoSimilarity", "-1 to 1"),
    "diversity": BuiltIn("genrl_rewards.scorers.pictures.dino", "Diversity", "0 to 2, usually below 1"),
    "safe": BuiltIn("genrl_rewards.scorers.pictures.safe", "Safe", "0 to 1"),
    "dino_adversary": BuiltIn(
        "genrl_rewards.scorers.preference.adversary", "DinoAdversary", "unbounded, about -1 to 1"
    ),
    "dino_layers_adversary": BuiltIn("genrl_rewards.scorers.preference.adversary", "DinoLayersAdversary", "0 to 1"),
    "pickscore_adversary": BuiltIn("genrl_rewards.scorers.preference.adversary", "PickScoreAdversary", "as pickscore"),
    "hpsv3": BuiltIn("genrl_rewards.scorers.preference.reward_head", "HPSv3", "about -5 to 15"),
    "editreward": BuiltIn("genrl_rewards.scorers.preference.reward_head", "EditReward", "unbounded"),
    "videoalign": BuiltIn("genrl_rewards.scorers.preference.videoalign", "VideoAlign", "usually -6 to 6"),
    "videoscore2": BuiltIn("genrl_rewards.scorers.preference.videoscore2", "VideoScore2", "0.2 to 5"),
    "unifiedreward": BuiltIn("genrl_rewards.scorers.preference.unifiedreward", "UnifiedReward", "0 to 1"),
    "judge": BuiltIn("genrl_rewards.scorers.judges.judge", "Judge", "0 to 1"),
    "questions": BuiltIn(
        "genrl_rewards.scorers.judges.questions",
        "Questions",
        "0 to 1",
        needs="pil_images and a column",
        column="questions",
    ),
    "text_judge": BuiltIn("genrl_rewards.scorers.texts.answerer", "TextJudge", "0 to 1"),
    "consistent": BuiltIn("genrl_rewards.scorers.texts.answerer", "Consistent", "0 to 2"),
    "answered": BuiltIn("genrl_rewards.scorers.texts.answerer", "Answered", "0 or 1"),
    "edit_judge": BuiltIn("genrl_rewards.scorers.judges.judge", "EditJudge", "0 to 1"),
    "paco_grid": BuiltIn(
        "genrl_rewards.scorers.pictures.paco",
        "PacoGrid",
        "0 to 1",
        needs="pil_images, prompts, or a column",
        column="grid",
    ),
    "paco_edit": BuiltIn("genrl_rewards.scorers.pictures.paco", "PacoEdit", "0 to 1"),
    "paco_group": BuiltIn("genrl_rewards.scorers.pictures.paco", "PacoGroup", "0 to 1"),
    "clap": BuiltIn("genrl_rewards.scorers.preference.clap", "ClapScore", "-1 to 1"),
    "music_preference": BuiltIn("genrl_rewards.scorers.preference.music", "MusicPreference", "unbounded"),
    "preference_judge": BuiltIn("genrl_rewards.scorers.judges.preference_judge", "PreferenceJudge", "0, .5 or 1"),
    "table_progress": BuiltIn("genrl_rewards.scorers.objects.tabletop", "TableProgress", "-4 to 0"),
    "geneval": BuiltIn("genrl_rewards.scorers.objects.geneval", "GenEval", "0 to 1"),
    "edit_move": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditMove", "0 to 1"),
    "edit_scale": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditScale", "0 to 1"),
    "edit_rotate": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditRotate", "0 to 1"),
    "edit_orient": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditOrient", "0 to 1"),
    "edit_position": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditPosition", "0 to 1"),
    "edit_keep": BuiltIn("genrl_rewards.scorers.objects.spatial_edit", "EditKeep", "at most 1"),
    "similarity": BuiltIn(
        "genrl_rewards.scorers.pictures.similarity",
        "Similarity",
        "-1 to 1",
        extra="similarity",
        packages=("torchmetrics",),
    ),
    "per_frame": BuiltIn(
        "genrl_rewards.scorers.pictures.video", "PerFrame", "that reward's", needs="images, and what that reward needs"
    ),
    "motion": BuiltIn(
        "genrl_rewards.scorers.pictures.video", "motion", "0 up, usually .005 to .05", extra="ocr", packages=("cv2",)
    ),
    "smoothness": BuiltIn(
        "genrl_rewards.scorers.pictures.video", "smoothness", "0 to 1, usually above .9", extra="ocr", packages=("cv2",)
    ),
    "steadiness": BuiltIn("genrl_rewards.scorers.pictures.video", "steadiness", "0 to 1"),
    "video_consistency": BuiltIn("genrl_rewards.scorers.pictures.video", "VideoConsistency", "-1 to 1"),
}
