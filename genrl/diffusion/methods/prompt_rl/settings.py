"""Flow-GRPO with a language model that rewrites the prompts, both trained (PromptRL, arXiv 2602.01382)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.run_config import FileFinding
from genrl.config.section import NonNegative, Whole
from genrl.diffusion.config.schema import Calls, Guided, Refusable
from genrl.diffusion.config.sections import Rewriter
from genrl.diffusion.steps.settings import Windowed

if TYPE_CHECKING:
    from genrl.data.prompts import PromptRows
    from genrl.diffusion.config.schema import Config

METRICS = {
    "rewriter/format": MetricDoc(
        "share of the answers that end and hold one new prompt between their tags, which the text encoders take whole",
        "Goes to 1 early. For the others the original prompt is rendered.",
        "share 0..1",
    ),
    "rewriter/gain": MetricDoc(
        "mean over prompts of the mean reward of refined samples less that of retained ones, format left out",
        "What the rewriting is worth in this iteration; below 0 it harms. It shrinks again where the flow model learns "
        "to draw the prompts as they are.",
        "weighted sum",
    ),
    "rewriter/distinct": MetricDoc(
        "different new prompts of a group / all its refined samples, mean over groups",
        "Near 1 / (n - m): one answer to each prompt is left, and the language model has little to learn from.",
        "share 0..1",
    ),
    "rewriter/tokens": MetricDoc("tokens of an answer, its end included, mean", "At max_new_tokens: answers are cut."),
    "rewriter/loss": MetricDoc(
        "mean over answers of the token mean of kl_weight k3 - exp(l - sg l) A", "Its value says little: l - sg l is 0."
    ),
    "rewriter/kl": MetricDoc(
        "k3 = exp(d) - d - 1, d = l_ref - l, mean over tokens; before the update",
        "Distance from the language model before training. 0 in the first iteration.",
        "nats per token",
    ),
    "rewriter/ratio/max_abs_dev": MetricDoc(
        "max over tokens of |exp(l - l_old) - 1|, l recomputed for training, l_old as it was sampled",
        "0 up to rounding: the policy that is trained is the one that wrote. Large in half precision for tokens of "
        "small probability.",
    ),
    "rewriter/ratio/mean_abs_dev": MetricDoc(
        "mean over tokens of |exp(l - l_old) - 1|", "As its maximum; above 0.05 in the first iteration the run stops."
    ),
    "rewriter/grad_norm": MetricDoc("norm of the language model's gradient before clipping", "As `grad_norm`."),
    "timing/rewrite_s": MetricDoc("wall time of writing the new prompts", "Beside `timing/sample_s`.", "s", False),
    "eval_rewritten/<name>_mean": MetricDoc(
        "as `eval/<name>_mean`, for pictures of rewritten prompts, scored against the original prompts",
        "What a user of both models gets; `eval/<name>_mean` is what one of the flow model alone gets.",
        "the reward's own",
    ),
    "eval_rewritten/<name>_std": MetricDoc("as `eval/<name>_std`", "As there.", "the reward's own"),
    "eval_rewritten/<name>_failed": MetricDoc("as `eval/<name>_failed`", "As there.", "samples"),
    "eval_rewritten/total_mean": MetricDoc("as `eval/total_mean`", "As `eval_rewritten/<name>_mean`."),
    "eval_rewritten/total_se": MetricDoc("as `eval/total_se`", "As there."),
}


class PromptRL(Windowed):
    """Flow-GRPO with a language model that rewrites the prompts, both trained (arXiv 2602.01382)."""

    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "trains a language model beside the pipeline, which each process computes whole",
        "sampling.buckets": "lays out the samples of a prompt by its own rewritings",
    }
    title: ClassVar[str] = "PromptRL"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["prompt_rl"] = "prompt_rl"
    """Which trainer."""
    rewriter: Rewriter
    """The language model."""
    retained: Whole = 2
    """Samples of each group that use the original prompt (PromptRL: 2 of 8)."""
    kl_weight: NonNegative = 1e-2
    """Weight of the divergence of the flow model from its start (PromptRL: 0.01)."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        size = config.sampling.group_size
        if self.retained >= size:
            text = f"the language model learns from none of {size} samples; use {size - 1} or less (PromptRL: 2 of 8)"
            yield ("trainer.retained", "sampling.group_size"), text
        yield from self.rewriter.problems()
        if config.model.offload.text_encoders == "encode_then_free":
            text = f"{self.algorithm} rewrites prompts, so that they cannot be encoded ahead; write between"
            yield ("model.offload.text_encoders", "trainer.algorithm"), text

    def calls(self, config: Config, guided: Guided) -> Calls:
        """Prompts are evaluated as they are, and rewritten."""
        return super().calls(config, guided)._replace(evaluated=2)

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """Whether the language model can be one."""
        yield from self.rewriter.file_problems(notes)
