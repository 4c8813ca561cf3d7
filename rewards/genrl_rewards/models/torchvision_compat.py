"""Make a torchvision whose compiled operators do not fit this torch importable.

Beside a CPU-only torch, the package index's torchvision fails at `import torchvision` with "operator torchvision::nms
does not exist". transformers imports torchvision if it is installed, so its CLIP (and much else) fails too: a
torchvision that cannot load is worse than none. Declaring the two operators whose shape functions torchvision registers
on import lets it load. Transforms and box arithmetic then work; the operators themselves (`torchvision.ops.nms`, JPEG
coding) stay unavailable and raise when they are called.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

_libraries: list[torch.library.Library] = []  # a declaration lasts as long as its object


@cache
def ensure() -> Literal["absent", "works", "declared"]:
    """Call this before the first import of transformers, diffusers or torchvision. Returns what it found or did.

    Does nothing if torchvision is absent, is already imported, or can load its operators.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return "absent"
    if _libraries:  # the search above called this function, where somebody watches for torchvision
        return "declared"
    if "torchvision" in sys.modules or _loads(Path(spec.origin).parent):
        return "works"
    library: Any = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    return "declared"


def _loads(folder: Path) -> bool:
    """Whether torchvision's compiled operators load; tried as torchvision itself does on import."""
    compiled = [path for path in sorted(folder.glob("_C*")) if path.suffix in (".so", ".pyd", ".dylib")]
    try:
        for path in compiled:
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return bool(compiled)
