"""What policies and tasks are called, and where they are found: built in, installed, or in a file (`plugins`)."""

from __future__ import annotations

from genrl.config.plugins import Group

SHAPE_FILES = ("3DVQVAE.bin", "3DVQVAE.safetensors")
"""Where ShapeLLM-Omni's codec of bodies lies: `vlm.codec`."""
BODY = 1024
"""Codes of one of its bodies, of four cells each: 16 x 16 x 16."""

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
        name: f"genrl.vlm.tasks:{name}"
        for name in ("chartqa", "clevr", "docvqa", "inversion", "mathvista", "refcoco", "scienceqa")
    },
    "genrl.formats",
)
"""Functions from a row of a data set to the columns of a question, as `genrl.vlm.tasks` says."""
TASKS = Group(
    "task",
    {
        "count": "genrl.playground.tasks.shapes:count",
        "colour": "genrl.playground.tasks.shapes:colour",
        "shapes": "genrl.playground.tasks.shapes:either",
        "jigsaw": "genrl.playground.tasks.jigsaw:full",
        "jigsaw_pair": "genrl.playground.tasks.jigsaw:pair",
        "box": "genrl.playground.tasks.jigsaw:box",
        "point": "genrl.playground.tasks.jigsaw:point",
        "quality": "genrl.playground.tasks.shapes:rated",
        "better": "genrl.playground.tasks.shapes:better",
        "series": "genrl.playground.tasks.series:which",
        "key_frames": "genrl.playground.tasks.shapes:keys",
        "what": "genrl.playground.tasks.shapes:what",
        "scenes": "genrl.playground.tasks.pairs:number",
        "emoji": "genrl.playground.tasks.emoji:mixed",
        "emoji_category": "genrl.playground.tasks.emoji:category",
        "emoji_count": "genrl.playground.tasks.emoji:count",
        "emoji_place": "genrl.playground.tasks.emoji:place",
        "emoji_combination": "genrl.playground.tasks.emoji:combination",
        "pairs": "genrl.playground.tasks.pairs:Consistent",
        "tables": "genrl.playground.tasks.tables:Nearer",
        "sums": "genrl.playground.tasks.series:plus",
        "captions": "genrl.playground.tasks.making:picture",
        "bodies": "genrl.playground.tasks.making:body",
        "tunes": "genrl.playground.tasks.making:tune",
    },
    "genrl.tasks",
)
"""Functions or classes, as `genrl.vlm.tasks` says."""
