"""Flow-GRPO with a language model that rewrites the prompts, both trained (arXiv 2602.01382)."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import Count, NonNegative, Positive, Section, Text, Whole
from genrl.config.sections import LoRA, Precision
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO


class Rewriter(Section):
    """A language model that rewrites prompts, trained beside the flow model (PromptRL)."""

    path: Text
    """Folder of a saved transformers causal language model, or a hub id such as org/name."""
    revision: Text | None = None
    """Branch, tag or commit of the hub id; null = the main branch."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights and log-probabilities are always float32."""
    lora: LoRA = LoRA(rank=16, alpha=32.0)
    """Low-rank adapters; only they are trained. targets: null = all linear layers but the last."""
    instruction: Text = (
        "Rewrite this prompt for an image generator, so that the image shows exactly what it asks for. "
        "Write the new prompt between <answer> and </answer>.\n\n{prompt}"
    )
    """What it is told; {prompt} stands for the prompt. It is the user's message where the tokenizer has a chat
    template."""
    answer_tags: tuple[Text, Text] = ("<answer>", "</answer>")
    """What the new prompt is written between; an answer without them has format reward 0 and is not drawn."""
    max_new_tokens: Count = 128
    """Longest answer; one that does not end by then has format reward 0."""
    temperature: Positive = 1.0
    """Of its sampling, in training and in evaluation."""
    lr: Positive = 1e-4
    """Learning rate of its own AdamW, constant (PromptRL, all weights: 3e-7)."""
    kl_weight: NonNegative = 0.01
    """Weight of the divergence (k3) from the model before training (PromptRL: 0.01)."""
    format_weight: NonNegative = 1.0
    """Weight of the format reward, 0 or 1 per answer, beside the rewards of the pictures (PromptRL: 1)."""


class PromptRL(FlowGRPO):
    """Flow-GRPO with a language model that rewrites the prompts, both trained (arXiv 2602.01382)."""

    algorithm: Literal["prompt_rl"] = "prompt_rl"  # type: ignore[assignment]
    """Which trainer."""
    rewriter: Rewriter
    """The language model."""
    retained: Whole = 2
    """Samples of each group that are drawn from the prompt as it is (PromptRL: 2 of 8)."""
    reward_column: Text | None = None
    """Column of the prompts that names the one reward which judges their samples (PromptRL's reward tags); null = the
    weighted sum."""
    kl_weight: NonNegative = 1e-2
    """Weight of the divergence of the flow model from its start (PromptRL: 0.01)."""
