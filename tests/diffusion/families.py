"""Tiny random-weight pipelines: `FAMILIES[name]()` builds one in well under a second, without network or files."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from tests.diffusion import image_families, starting_families, video_families
from tests.diffusion.tiny_parts import Family

Builder = Callable[[], Family]


def _seeded(build: Builder) -> Builder:
    """`build`, with the same random weights each time and the global random state left alone."""

    def seeded() -> Family:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            family = build()
        for component in family.pipe.components.values():
            if isinstance(component, nn.Module):
                component.eval()  # as `from_pretrained` does
        family.pipe.set_progress_bar_config(disable=True)
        return family

    return seeded


def _table(*modules: ModuleType) -> dict[str, Builder]:
    """The public functions of these modules that return a family, and their `BUILDERS`."""
    result: dict[str, Builder] = {}
    for module in modules:
        result |= {name: _seeded(build) for name, build in getattr(module, "BUILDERS", {}).items()}
        for name, build in vars(module).items():
            own = getattr(build, "__module__", None) == module.__name__ and not name.startswith("_")
            if own and getattr(build, "__annotations__", {}).get("return") is Family:
                result[name] = _seeded(build)
    return result


_EVERY = _table(image_families, starting_families, video_families)
_NOT_FITTING = ("chroma_inpaint", "sd_latent_upscaler", "ltx_i2v")


def saved(name: str, folder: Path) -> Path:
    """A family's pipeline on disk, below this folder."""
    FAMILIES[name]().pipe.save_pretrained(folder / name)
    return folder / name


FAMILIES = {name: build for name, build in _EVERY.items() if name not in _NOT_FITTING}
REFUSED = {name: _EVERY[name] for name in _NOT_FITTING}
"""Pipelines whose loop does not fit; each says why in its docstring."""

ARCHITECTURES = (
    *("sd15", "sd3", "flux", "qwen_image", "sana", "flux_kontext", "sd15_inpaint"),
    *("wan22", "cogvideox", "mochi", "ace_step"),
)
"""A family of each: UNet, joint and linear transformers, with pictures to edit or to fill, two experts, v-prediction of
videos, time that runs the other way, sound."""
