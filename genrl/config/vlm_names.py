"""What policies and tasks are called, and where they are found: built in, installed, or in a file (`plugins`)."""

from __future__ import annotations

from genrl.config.plugins import Group

OUTPUTS = Group(
    "output",
    {
        "text": "genrl.vlm.policies.policy:Policy",
        "image": "genrl.vlm.policies.image_tokens:ImagePolicy",
        "masked_text": "genrl.vlm.policies.masked_text:MaskedPolicy",
        "voxels": "genrl.vlm.policies.codes:CodePolicy",
        "audio": "genrl.vlm.policies.codes:CodePolicy",
        "music": "genrl.vlm.policies.music_tokens:MusicPolicy",
        "music_reward": "genrl.vlm.policies.music_tokens:MusicRewardPolicy",
    },
    "genrl.policies",
)
"""Classes, as `genrl.vlm.policies.contract` says."""
FORMATS = Group(
    "format",
    {
        name: f"genrl.vlm.tasks.formats:{name}"
        for name in ("chartqa", "clevr", "docvqa", "inversion", "mathvista", "refcoco", "scienceqa")
    },
    "genrl.formats",
)
"""Functions from a row of a data set to the columns of a question, as `genrl.vlm.tasks.formats` says."""
TASKS = Group(
    "task",
    {
        "count": "genrl.vlm.tasks.shapes:count",
        "colour": "genrl.vlm.tasks.shapes:colour",
        "shapes": "genrl.vlm.tasks.shapes:either",
        "jigsaw": "genrl.vlm.tasks.jigsaw:full",
        "jigsaw_pair": "genrl.vlm.tasks.jigsaw:pair",
        "box": "genrl.vlm.tasks.jigsaw:box",
        "point": "genrl.vlm.tasks.jigsaw:point",
        "quality": "genrl.vlm.tasks.quality:rated",
        "better": "genrl.vlm.tasks.quality:better",
        "series": "genrl.vlm.tasks.series:which",
        "key_frames": "genrl.vlm.tasks.clips:keys",
        "what": "genrl.vlm.tasks.clips:what",
        "scenes": "genrl.vlm.tasks.scenes:number",
        "emoji": "genrl.vlm.tasks.emoji:mixed",
        "emoji_category": "genrl.vlm.tasks.emoji:category",
        "emoji_count": "genrl.vlm.tasks.emoji:count",
        "emoji_place": "genrl.vlm.tasks.emoji:place",
        "emoji_combination": "genrl.vlm.tasks.emoji:combination",
        "pairs": "genrl.vlm.tasks.pairs:Consistent",
        "sums": "genrl.vlm.tasks.sums:plus",
        "captions": "genrl.vlm.tasks.captions:text",
        "bodies": "genrl.vlm.tasks.bodies:text",
        "tunes": "genrl.vlm.tasks.tunes:text",
    },
    "genrl.tasks",
)
"""Functions or classes, as `genrl.vlm.tasks` says."""
