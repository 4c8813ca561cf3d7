"""Reinforcement-learning fine-tuning for generative models.

`genrl.train`, `resume`, `evaluate`, `sample`, `score` and `export` are the commands of the same names; the settings
classes of methods (`genrl.FlowGRPO`) and of sections (`genrl.Sampling`) are what a YAML file writes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from genrl.quiet import hush, watch

if TYPE_CHECKING:
    __version__: str
    from genrl.config import LoRA as LoRA
    from genrl.config import Optimizer as Optimizer
    from genrl.diffusion.config.sections import Evaluation as Evaluation
    from genrl.diffusion.config.sections import Sampling as Sampling
    from genrl.interface.training import Result as Result
    from genrl.interface.training import resume as resume
    from genrl.interface.training import train as train
    from genrl.interface.using import evaluate as evaluate
    from genrl.interface.using import export as export
    from genrl.interface.using import sample as sample
    from genrl.interface.using import score as score

_FUNCTIONS = {
    **dict.fromkeys(("Result", "train", "resume"), "genrl.interface.training"),
    **dict.fromkeys(("evaluate", "export", "sample", "score"), "genrl.interface.using"),
    **dict.fromkeys(("LoRA", "Optimizer"), "genrl.config"),
    **dict.fromkeys(("Evaluation", "Sampling"), "genrl.diffusion.config.sections"),
}

hush()
watch()


def __getattr__(name: str) -> Any:
    """Imported on first use: `import genrl` needs no torch."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("genrl-diffusion")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+unknown"
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    if name[0].isupper():  # not a module of this package, for which Python asks here first
        from genrl.config.method import KINDS, built_in

        for kind in KINDS:
            for method in built_in(kind).values():
                if method.__name__ == name:
                    return method
    raise AttributeError(f"module 'genrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    from genrl.config.method import KINDS, built_in

    methods = [method.__name__ for kind in KINDS for method in built_in(kind).values()]
    return sorted([*_FUNCTIONS, *methods, "__version__"])
