"""From the settings of SPO to its sampling plan, a caterpillar (`genrl.mdp.plan`). No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genrl.mdp.plan import SamplingPlan, caterpillar

if TYPE_CHECKING:
    from genrl.config.schema import Sampling
    from genrl.diffusion.methods.spo.settings import SPO


def candidate_plan(sampling: Sampling, settings: SPO, *, last: bool) -> SamplingPlan:
    """How one chain is drawn: the steps from `first` on split into candidates, of which one goes on.

    last: whether the last step is drawn and compared too, as DDIM's; otherwise it is deterministic. With it or without,
    the model calls of sampling are first + 1 + k (T - first - 1): all candidates of a step but the last are evaluated.
    Training evaluates each compared state twice, by the policy and by the reference, where its comparison counts.
    """
    steps = sampling.num_inference_steps
    drawn = steps if last else steps - 1
    noise = dict.fromkeys(range(drawn), settings.noise_level or 0.0)
    return caterpillar(steps, noise=noise, first=settings.first, candidates=settings.candidates)
