"""The rewards of this package by name. Reading this table imports none of them."""

from __future__ import annotations

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A reward of this package. What it scores is said by the first line of its docstring."""

    place: str
    """Its module below `genrl_rewards.scorers`."""
    attribute: str
    range: str
    extra: str = ""
    """The extra of genrl that it needs, and the packages which that installs, by import name."""
    packages: tuple[str, ...] = ()
    needs: str = ""
    """What it takes, if that depends on an argument, so that its signature does not say it."""
    column: str = ""
    """An argument that may name a column of the prompt file; where it does not, a column of this name is ignored."""

    @property
    def module(self) -> str:
        """Module that holds it."""
        return f"genrl_rewards.scorers.{self.place}"


BUILT_IN: dict[str, BuiltIn] = {
    "shapes": BuiltIn("objects.shapes", "Shapes", "0 to 1"),
    "same_shapes": BuiltIn("objects.shapes", "SameShapes", "0 to 1"),
    "emoji": BuiltIn("objects.emoji", "Emoji", "0 to 1"),
    "ocr": BuiltIn(
        "texts.ocr",
        "Ocr",
        "0 to 1",
        extra="ocr",
        packages=("rapidocr", "onnxruntime", "cv2"),
        needs="images, prompts or a column",
        column="target",
    ),
    "clipscore": BuiltIn("preference.clipscore", "ClipScore", "-1 to 1, usually .1 to .4"),
    "clip_grid": BuiltIn(
        "preference.clipscore",
        "ClipGrid",
        "0 to 1, usually .1 to .4",
        needs="images, prompts, or a column",
        column="grid",
    ),
    "pickscore": BuiltIn("preference.pickscore", "PickScore", "usually .6 to 1"),
    "aesthetic": BuiltIn("preference.aesthetic", "Aesthetic", "1 to 10, usually 4.5 to 6.5"),
    "imagereward": BuiltIn("preference.imagereward", "ImageReward", "about -2.3 to 2"),
    "hpsv2": BuiltIn("preference.hpsv2", "HPSv2", "usually .20 to .34", extra="clip", packages=("open_clip",)),
    "jpeg": BuiltIn("pictures.statistics", "jpeg", "0 up, in kB"),
    "sharpness": BuiltIn("pictures.statistics", "sharpness", "0 to 16"),
    "saturation": BuiltIn("pictures.statistics", "saturation", "0 to 1"),
    "dino": BuiltIn("pictures.dino", "DinoSimilarity", "-1 to 1"),
    "diversity": BuiltIn("pictures.dino", "Diversity", "0 to 2, usually below 1"),
    "safe": BuiltIn("pictures.safe", "Safe", "0 to 1"),
    "dino_adversary": BuiltIn("preference.adversary", "DinoAdversary", "unbounded, about -1 to 1"),
    "dino_layers_adversary": BuiltIn("preference.adversary", "DinoLayersAdversary", "0 to 1"),
    "pickscore_adversary": BuiltIn("preference.adversary", "PickScoreAdversary", "as pickscore"),
    "hpsv3": BuiltIn("preference.reward_head", "HPSv3", "about -5 to 15"),
    "editreward": BuiltIn("preference.reward_head", "EditReward", "unbounded"),
    "videoalign": BuiltIn("preference.videoalign", "VideoAlign", "usually -6 to 6"),
    "videoscore2": BuiltIn("preference.videoscore2", "VideoScore2", "0.2 to 5"),
    "unifiedreward": BuiltIn("preference.unifiedreward", "UnifiedReward", "0 to 1"),
    "judge": BuiltIn("judges.judge", "Judge", "0 to 1"),
    "questions": BuiltIn(
        "judges.questions", "Questions", "0 to 1", needs="pil_images and a column", column="questions"
    ),
    "text_judge": BuiltIn("texts.answerer", "TextJudge", "0 to 1"),
    "consistent": BuiltIn("texts.answerer", "Consistent", "0 to 2"),
    "answered": BuiltIn("texts.answerer", "Answered", "0 or 1"),
    "rubric": BuiltIn("texts.answerer", "Rubric", "at most 1"),
    "novelty": BuiltIn("texts.novelty", "Novelty", "-1 to 1"),
    "edit_judge": BuiltIn("judges.judge", "EditJudge", "0 to 1"),
    "paco_grid": BuiltIn(
        "pictures.paco", "PacoGrid", "0 to 1", needs="pil_images, prompts, or a column", column="grid"
    ),
    "paco_edit": BuiltIn("pictures.paco", "PacoEdit", "0 to 1"),
    "paco_group": BuiltIn("pictures.paco", "PacoGroup", "0 to 1"),
    "clap": BuiltIn("preference.clap", "ClapScore", "-1 to 1"),
    "music_preference": BuiltIn("preference.music", "MusicPreference", "unbounded"),
    "preference_judge": BuiltIn("judges.judge", "PreferenceJudge", "0, .5 or 1"),
    "table_progress": BuiltIn("objects.tabletop", "TableProgress", "-4 to 0"),
    "geneval": BuiltIn("objects.geneval", "GenEval", "0 to 1"),
    "edit_move": BuiltIn("objects.spatial_edit", "EditMove", "0 to 1"),
    "edit_scale": BuiltIn("objects.spatial_edit", "EditScale", "0 to 1"),
    "edit_rotate": BuiltIn("objects.spatial_edit", "EditRotate", "0 to 1"),
    "edit_orient": BuiltIn("objects.spatial_edit", "EditOrient", "0 to 1"),
    "edit_position": BuiltIn("objects.spatial_edit", "EditPosition", "0 to 1"),
    "edit_keep": BuiltIn("objects.spatial_edit", "EditKeep", "at most 1"),
    "similarity": BuiltIn(
        "pictures.similarity", "Similarity", "-1 to 1", extra="similarity", packages=("torchmetrics",)
    ),
    "per_frame": BuiltIn("pictures.video", "PerFrame", "that reward's", needs="images, and what that reward needs"),
    "motion": BuiltIn("pictures.video", "motion", "0 up, usually .005 to .05", extra="ocr", packages=("cv2",)),
    "smoothness": BuiltIn("pictures.video", "smoothness", "0 to 1, usually above .9", extra="ocr", packages=("cv2",)),
    "steadiness": BuiltIn("pictures.video", "steadiness", "0 to 1"),
    "video_consistency": BuiltIn("pictures.video", "VideoConsistency", "-1 to 1"),
}
