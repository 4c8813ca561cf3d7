"""What runs of vision-language models log, whatever their method."""

from __future__ import annotations

from collections.abc import Mapping

from genrl.config.method import MetricDoc

LANGUAGE = {
    "eval/accuracy_mean": MetricDoc(
        "held-out questions whose most probable answer is right (first reward >= `evaluation.right_at`) / questions",
        "The figure of a model.",
        "share 0..1",
    ),
    "eval/accuracy_low": MetricDoc(
        "lower end of the 95 % Wilson interval of `eval/accuracy_mean`", "What more questions could show.", "share 0..1"
    ),
    "eval/accuracy_high": MetricDoc(
        "upper end of the 95 % Wilson interval of `eval/accuracy_mean`", "What more questions could show.", "share 0..1"
    ),
    "eval/accuracy_blind": MetricDoc(
        "the same with black pictures, before and after training",
        "What can be guessed. Where `eval/accuracy_mean` is no higher, the model does not see what is asked, and "
        "reinforcement sharpens its guesses only.",
        "share 0..1",
    ),
    "rollout/tokens_mean": MetricDoc(
        "mean number of tokens of an answer, its end included", "Grows where longer answers pay.", "tokens"
    ),
    "rollout/cut": MetricDoc(
        "answers that `max_new_tokens` ended / answers",
        "High: they are scored as they stand; allow more tokens, or punish length.",
        "share 0..1",
    ),
    "rollout/rounds": MetricDoc(
        "rounds of sampling in the iteration (`trainer.resample`)", "Grows as more groups are without spread.", "rounds"
    ),
    "rollout/kept": MetricDoc(
        "groups that are trained on / groups that were sampled",
        "Falls to 0 as all answers become right: there is nothing left to learn.",
        "share 0..1",
    ),
    "rescue/failed": MetricDoc(
        "groups that no answer was right of, after the warm-up / groups",
        "Falls as the model learns by itself. Stays: hints are too weak, or lead to what it cannot say alone.",
        "share 0..1",
    ),
    "rescue/rescued": MetricDoc(
        "of these, those for which help brought a right answer / all of them", "Low: give stronger hints.", "share 0..1"
    ),
    "rescue/level": MetricDoc(
        "mean number of the hint that brought it, 1 = the first", "Falls as weaker hints are enough.", "from 1"
    ),
    "synthesis/drawn": MetricDoc(
        "descriptions that passed the check and were rendered / descriptions, of those that became due",
        "The rest are worth 0. Falls: the model writes what the check cannot read.",
        "share 0..1",
    ),
    "synthesis/diversity_mean": MetricDoc(
        "mean over these descriptions of what they are worth: normalised entropy of the answers to their pictures",
        "Up to 1, where all answers to a picture differ.",
        "0 to 1",
    ),
    "sampler/gap_mean": MetricDoc(
        "mean of |log-prob of the trainer - log-prob of the sampler| over tokens, before the update",
        "About 1e-7 in float32, 1e-3 in bfloat16. More: the two see different inputs. With `generation.staleness`: "
        "how far the model has moved since then.",
        "nats",
    ),
    "tokens_per_s": MetricDoc(
        "tokens of the answers / seconds of sampling and scoring them", "Speed.", "tokens/s", False
    ),
}

SECTIONS = {"Vision-language models": LANGUAGE}
"""By the headings of docs/metrics.md."""


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
