"""What a method for diffusion pipelines declares of itself beside its keys: the facts that shared code asks."""

from __future__ import annotations

from typing import ClassVar, Literal

from genrl.config.method import Kind, Method
from genrl.config.section import Count

AdvantageScale = Literal["group", "global", "none"]
Kernel = Literal["flow_sde", "dance_sde", "wan_sde", "flow_cps", "flow_ddim", "ddim"]
ReferenceKL = Literal["gaussian", "gaussian_dt", "mean_square", "velocity", "x_prediction", "k2"]


class DiffusionMethod(Method):
    """Base of the settings of methods that train a diffusion pipeline."""

    kind: ClassVar[Kind] = "diffusion"

    @property
    def updates(self) -> int:
        """Optimiser steps in one pass over the samples of an iteration."""
        return 1

    @property
    def epochs(self) -> int:
        """Passes over the samples of an iteration."""
        return 1

    def model_iterations(self, iterations: int) -> int:
        """How many of so many iterations train the model."""
        return iterations


class Updating(DiffusionMethod):
    """A method that may update the model several times from the samples of an iteration."""

    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration."""

    @property
    def updates(self) -> int:
        """Optimiser steps in one pass over the samples of an iteration."""
        return self.updates_per_iteration

    @property
    def epochs(self) -> int:
        """Passes over the samples of an iteration."""
        return self.inner_epochs
