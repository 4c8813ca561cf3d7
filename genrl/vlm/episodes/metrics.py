"""What methods that act log of their episodes, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping

from genrl.config.method import MetricDoc

ACTED: Mapping[str, MetricDoc] = {
    "rollout/invalid": MetricDoc(
        "answers that say nothing the environment can do / answers",
        "Falls first. Not near 0: the model has not learnt the form; show it by examples, or supervised.",
        "share 0..1",
    ),
    "rollout/episodes": MetricDoc(
        "episodes that ended in the iteration, over all processes",
        "What `rollout/success`, `return_mean` and `length_mean` are of.",
        "episodes",
    ),
    "rollout/too_long": MetricDoc(
        "those of `rollout/episodes` that were cut because the model has no positions left for a further answer",
        "0. Else fewer turns (`environment.max_steps`), smaller pictures, or a model of more positions.",
        "episodes",
    ),
    "eval/dropped": MetricDoc(
        "episodes of the evaluation whose environment hung or died; the other `eval/` figures are of the rest",
        "0. Many: `eval/success_mean` is of fewer, perhaps other episodes.",
        "episodes",
    ),
    "eval/too_long": MetricDoc(
        "episodes of the evaluation that were cut as those of `rollout/too_long`; they count as failures "
        "unless they had succeeded before",
        "0. As `rollout/too_long`.",
        "episodes",
    ),
    "eval/success_blind": MetricDoc(
        "`eval/success_mean` with black pictures, before training and after it",
        "What can be had without seeing. Where `eval/success_mean` is no higher, reinforcement has little to work on.",
        "share 0..1",
    ),
}
