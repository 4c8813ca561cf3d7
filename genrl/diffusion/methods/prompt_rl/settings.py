"""Flow-GRPO with a language model that rewrites the prompts, both trained (PromptRL, arXiv 2602.01382)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.diffusion_method import FileFinding
from genrl.config.folders import PROCESSORS, looks_local, nearest_folder, read_json
from genrl.config.method import Finding, MetricDoc
from genrl.config.section import Count, NonNegative, Positive, Section, Text, Whole
from genrl.config.sections import LowRank, Precision
from genrl.diffusion.methods.policy_gradient import Windowed

if TYPE_CHECKING:
    from genrl.config.schema import Config
    from genrl.data.prompts import PromptRows

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
}


class Rewriter(Section):
    """A language model that rewrites prompts, trained beside the flow model (PromptRL)."""

    path: Text
    """Folder of a saved transformers model, a causal language model or one that sees, or a hub id such as org/name. One
    that sees is shown the pictures of sampling.inputs before its instruction."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights and log-probabilities are always float32."""
    lora: LowRank = LowRank(rank=16, alpha=32.0)
    """Low-rank adapters of the language model, all that is trained. targets: null = all linear layers but the last."""
    instruction: Text = (
        "Rewrite this prompt for an image generator, so that the image shows exactly what it asks for. "
        "Write the new prompt between <answer> and </answer>.\n\n{prompt}"
    )
    """The instruction to the language model; {prompt} stands for the prompt. It is the user's message if the tokenizer
    has a chat template."""
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

    def problems(self) -> Iterator[Finding]:
        """What cannot work."""
        if self.dtype == "float16":
            text = "its losses are not scaled, and small gradients vanish in float16; use bfloat16 or float32"
            yield ("trainer.rewriter.dtype",), text
        if (times := self.instruction.count("{prompt}")) != 1:
            text = f"holds {{prompt}} {times} times; write it once, where the prompt is to stand"
            yield ("trainer.rewriter.instruction",), text

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """Whether its folder holds a language model, with room for answers."""
        key, path = ("trainer", "rewriter", "path"), Path(self.path).expanduser()
        if not path.is_dir():
            if looks_local(self.path):
                yield key, f"no such folder: {path}{nearest_folder(path)}"
            else:
                notes.append(f"trainer.rewriter.path: {self.path} is loaded from the hub when training starts")
            return
        settings, tokenizer = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
        if "model_type" not in settings:
            yield key, f"{path} has no config.json with a model_type, so it is no saved transformers model"
            return
        kinds, seen = settings.get("architectures") or [], settings.get("vision_config")
        if kinds and not seen and not any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
            text = f"{path} is a {', '.join(map(str, kinds))}; a rewriter is a causal language model (...ForCausalLM)"
            yield key, f"{text} or one that sees, with a vision_config"
        if seen and not any((path / name).is_file() for name in PROCESSORS):
            text = f"{path} sees, but has no image processor ({' or '.join(PROCESSORS)})"
            yield key, f"{text}; save the processor of the original model there"
        if not tokenizer:
            yield key, f"{path} has no tokenizer_config.json; save the tokenizer beside the model"
        elif tokenizer.get("eos_token") is None:
            yield key, f"the tokenizer of {path} has no eos_token, so no answer would ever end; set it and save it"
        settings |= settings.get("text_config") or {}
        room = settings.get("max_position_embeddings") or settings.get("n_positions")
        if isinstance(room, int) and self.max_new_tokens >= room:
            text = f"{self.max_new_tokens} new tokens leave no place for the prompt in {room} positions of {path}"
            yield ("trainer", "rewriter", "max_new_tokens"), f"{text}; use {room // 2} or less"


class PromptRL(Windowed):
    """Flow-GRPO with a language model that rewrites the prompts, both trained (arXiv 2602.01382)."""

    not_divided: ClassVar[str] = "trains a language model beside the pipeline, which each process computes whole"
    one_size: ClassVar[str] = "lays out the samples of a prompt by its own rewritings"
    title: ClassVar[str] = "PromptRL"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    not_fitted: ClassVar[str] = "trains another model beside this one, which no trial runs"
    pictures_per_prompt: ClassVar[int] = 2  # of the prompts as they are, and rewritten

    algorithm: Literal["prompt_rl"] = "prompt_rl"
    """Which trainer."""
    rewriter: Rewriter
    """The language model."""
    retained: Whole = 2
    """Samples of each group that use the original prompt (PromptRL: 2 of 8)."""
    reward_column: Text | None = None
    """Column of the prompts that names the one reward which judges their samples (PromptRL's reward tags); null = the
    weighted sum."""
    kl_weight: NonNegative = 1e-2
    """Weight of the divergence of the flow model from its start (PromptRL: 0.01)."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        size = config.sampling.group_size
        if self.retained >= size:
            text = f"all {size} samples of a group would keep their prompt, and the language model has nothing to"
            text = f"{text} learn from; use {size - 1} or less (PromptRL: 2 of 8)"
            yield ("trainer.retained", "sampling.group_size"), text
        yield from self.rewriter.problems()
        if config.model.offload.text_encoders == "encode_then_free":
            text = f"{self.algorithm} rewrites prompts, so that they cannot be encoded ahead; write between"
            yield ("model.offload.text_encoders", "trainer.algorithm"), text
        if self.reward_column is None:
            return
        if self.advantage_scale != "group":
            text = "prompts are judged by different rewards, each with its scale; use group"
            yield ("trainer.advantage_scale", "trainer.reward_column"), text
        if config.prompts.train.endswith(".txt"):
            text = "a .txt file has no columns; use a .jsonl file, or null"
            yield ("trainer.reward_column", "prompts.train"), text

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """Whether the language model can be one."""
        yield from self.rewriter.file_problems(notes)
