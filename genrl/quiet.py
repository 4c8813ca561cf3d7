"""Warnings of other packages that tell nobody anything to act on are not shown; all else that they log is."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MEANINGLESS = {
    # kernels for CUDA alone; where that is, the line stays
    "torchao": r"Failed to load .*_C_(cutlass|mxfp8)",
    # diffusers 0.42 asks torchao for a class that 0.18 has no longer, to unpickle checkpoints, which is never done here
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
    # of a kernel for CPUs, on import; bitsandbytes' own way is taken, and on a CPU it quantises nothing here
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # of torchao's own enums, on import
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    # that pictures are resized by PIL then: of every image processor that transformers' lazy modules make known
    "transformers.utils.import_utils": r"requires torchvision \(not installed\); falling back to",
}
"""Name of a logger -> regular expression of a part of the warning."""


def is_worth_showing(record: logging.LogRecord) -> bool:
    """Whether a record of one of these loggers is anything else."""
    if not re.search(MEANINGLESS[record.name], record.getMessage()):
        return True
    if record.name != "torchao":
        return False
    import torch

    return torch.cuda.is_available()


def hush() -> None:
    """Leave those lines out, from here on: before the packages are imported, since they log on import."""
    for name in MEANINGLESS:
        logging.getLogger(name).addFilter(is_worth_showing)


# Makes a torchvision that does not fit this torch importable, when it is imported first.
#
# `from diffusers import ...` and transformers import it where it is installed; in a script that has imported genrl they
# work then as the command line does.


class Watcher:
    """Finds no module: it is asked before torchvision is found, and never again."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, after torchvision's operators were declared where they cannot be loaded."""
        if name == "torchvision":
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            from genrl_rewards.models.torchvision_compat import ensure  # imports torch, as torchvision does

            ensure()
        return None


def watch() -> None:
    """Watch for it from here on, unless torchvision was imported before."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())
