"""The section of a language model that rewrites prompts. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from genrl.config.errors import Finding
from genrl.config.folders import PROCESSORS, no_transformers_model, read_json
from genrl.config.run_config import FileFinding
from genrl.config.section import Count, NonNegative, Positive, Section, Text
from genrl.config.sections import LowRank, Precision


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
        if wrong := no_transformers_model(".".join(key), self.path, notes):
            yield key, wrong
        if wrong or not path.is_dir():
            return
        settings, tokenizer = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
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
