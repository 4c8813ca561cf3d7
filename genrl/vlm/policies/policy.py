"""Any transformers image-text-to-text model as a token policy: prompts with images in, log-probabilities out.

Prompts are padded on the left, completions on the right. Positions are given to the model in every call: computed by
the model's own rule for one prompt alone (three rows, time, height and width, where it has M-RoPE), then shifted into
the batch. So padding changes nothing, and a module that remembers an offset from its last call (Qwen's `rope_deltas`)
is never asked for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from genrl.kernels.prefix_attention import PrefixBackend
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.loading import Adapted, checked, loaded, use_liger, with_lora
from genrl.vlm.policies.log_probs import completion_log_probs
from genrl.vlm.policies.packing import check_packing, packed_states, prefix_shared, present
from genrl.vlm.policies.processor import (
    PER_TOKEN,
    Pixels,
    Prompt,
    Tokens,
    check_pixels,
    join_pixels,
    placeholder_ids,
    tokenize,
)
from genrl.vlm.policies.videos import FAMILIES, gone_on
from genrl_rewards.given import is_given, take

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""What M-RoPE's positions follow from, beside the ids."""


def dtype_of(config: VLMConfig) -> torch.dtype:
    """Precision of the weights of a run."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.vlm.dtype]


@dataclass(frozen=True)
class Encoded:
    """One prompt as the model takes it.

    tokens: ids [P], tensors per token, pixels; positions int64 [P], or [3, P] for M-RoPE; `next_position`: of the
    first completion token (after an image not P: M-RoPE goes on at the largest position + 1). source: what it was made
    of; None where it was read from a file.
    """

    tokens: Tokens
    positions: Tensor
    next_position: int
    where: str
    source: Prompt | None = None

    @property
    def length(self) -> int:
        return len(self.tokens.ids)


@dataclass(frozen=True)
class Replay:
    """log_prob [B, T] float32 (float64 for a float64 model), 0 where masked; entropy [B, T], or None.

    states: [B, T, H] that predict each token, which a critic reads. positions: how many token positions the language
    model computed for it, padding included; images: how many prompts went through the vision tower.
    """

    log_prob: Tensor
    entropy: Tensor | None
    states: Tensor
    positions: int
    images: int


class Body(nn.Module):
    """A model without its output layer: what its passes begin with where it is in shards, the output layer too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """The states of the base model, as it returns them."""
        return self.model.base_model(**inputs)


class Policy(Adapted):
    """A model and its processor. `model` is the transformers model, with adapters inside it if `lora` is given.

    Dropout is always off: what is trained is what sampled. Raises ValueError where the checkpoint is no image-text
    model, has no image processor or no chat template, or its logits are not a plain output layer.
    """

    sees: ClassVar[bool] = True
    samples: int | None = None

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it."""
        lora, kind = config.vlm.lora, config.vlm.quantize
        policy = cls(path, lora=lora, dtype=dtype_of(config), device=device, quantize=kind, seed=config.seed)
        if config.vlm.kernels == "liger":
            use_liger(policy.model)
        policy.prefix_attention = config.vlm.prefix_attention
        policy.shares_prompts = not config.distributed.fsdp
        policy.pixels = Pixels(config.task.min_pixels, config.task.max_pixels)
        check_pixels(policy.pixels, policy.processor)
        policy.videos &= config.generation.vllm is None  # which is given pictures
        if config.vlm.gradient_checkpointing:
            policy.checkpoint_blocks()
        if config.vlm.packing:
            check_packing(policy)
            policy.packing = True
        return policy

    def __init__(
        self,
        path: str,
        *,
        lora: VLMLoRA | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        quantize: str | None = None,
        seed: int = 0,
    ) -> None:
        """path: hub id or folder, or of a script's `Loaded`, python:NAME. lora None: all weights are trained. quantize:
        as `vlm.quantize`. seed: of the adapters' initial values."""
        loaded_parts = take(path) if is_given(path) else loaded(path, dtype, quantize)
        self.model = loaded_parts.model.requires_grad_(False)
        self.processor = loaded_parts.processor
        self.tokenizer: Any = self.processor.tokenizer
        config = checked(self.model.config, path)
        self.room: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        """Positions of the language model: prompt and completion together; None where it says nothing."""
        self.sampler: Any = None
        """A `engines.vllm.Sampler` that samples in place of this model; None: it does itself."""
        self.quantized = quantize is not None
        self.peft = None
        if lora is None:
            self.model.requires_grad_(True)
        else:
            self.peft = with_lora(self.model, lora, seed)
        # dropout would make the ratio of an untouched policy other than 1
        self.model.to(device).eval()
        self.sharded: Body | None = None
        self.device, self.dtype = torch.device(device), dtype
        self.forbidden = torch.tensor(placeholder_ids(config, self.processor), dtype=torch.int64, device=self.device)
        """Ids that stand for images: impossible for the sampler, left out of the trainer's normalisation."""
        self.stop_ids = _stop_ids(self.model, self.tokenizer, path)
        pad = self.tokenizer.pad_token_id
        # Any id does: what is padded is masked.
        self.pad_id: int = self.stop_ids[0] if pad is None else pad
        self.prefix_attention: PrefixBackend | None = None
        """Back-end by which answers attend to one copy of their prompts (`vlm.prefix_attention`); None: to one each."""
        self.shares_prompts = True
        """Whether a prompt may be computed once for all its answers. A block that is computed again would add to their
        cache twice, and one in shards has gone when the gradients of the cache come."""
        self.pixels = Pixels()
        """Limits of the size of pictures."""
        self.videos: bool = config.model_type in FAMILIES
        """Whether clips are given as videos, else as the pictures of their frames."""
        self.packing = False
        """Whether `log_probs` puts prompts and answers one after the other in one row, without padding."""
        self.checkpointed: list[torch.nn.Module] = []
        """Blocks whose activations are computed again in the backward pass."""
        self._per_token = [name for name in PER_TOKEN if name in inspect.signature(self.model.forward).parameters]

    @property
    def body(self) -> Any:
        """The model without its output layer."""
        return self.model.base_model if self.sharded is None else self.sharded

    def checkpoint_blocks(self) -> None:
        """Let backward passes compute the activations of every block again. Raises ValueError for a model
        that transformers cannot do this to."""
        layers: list[torch.nn.Module] = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            text = "has no blocks that can be computed again; write false"
            raise ValueError(f"vlm.gradient_checkpointing: {type(self.model).__name__} {text}")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.checkpointed, self.shares_prompts = layers, False

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Within the block, forward passes with gradients keep the inputs of the blocks alone. A block takes part where
        it is in training mode itself; what is inside it, dropout too, stays in evaluation mode."""
        layers = self.checkpointed if torch.is_grad_enabled() else []
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def encode(self, prompt: Prompt) -> Encoded:
        """One prompt's tokens, pixels and positions. Raises ValueError for bad images or a text with image tokens."""
        tokens = tokenize(prompt, self.processor, PER_TOKEN, self.pixels, videos=self.videos)
        ids, body = tokens.ids, self.model.base_model
        positions = torch.arange(len(ids))
        if hasattr(body, "get_rope_index"):
            positions = positions.expand(3, -1)
            if tokens.pixels:
                grids = {name: tokens.pixels[name] for name in GRIDS if name in tokens.pixels}
                rope_index, _ = body.get_rope_index(ids[None], tokens.kinds["mm_token_type_ids"][None], **grids)
                positions = gone_on(rope_index[:, 0], tokens.kinds["mm_token_type_ids"])
        kinds = {name: kind for name, kind in tokens.kinds.items() if name in self._per_token}
        return Encoded(replace(tokens, kinds=kinds), positions, int(positions.max()) + 1, prompt.where, prompt)

    def fits(self, prompt: Encoded, new_tokens: int) -> bool:
        """Whether a prompt and `new_tokens` are no more than the model's positions."""
        return self.room is None or prompt.length + new_tokens <= self.room

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where a prompt and `new_tokens` are more than the model's positions."""
        for prompt in prompts:
            if not self.fits(prompt, new_tokens):
                raise ValueError(
                    f"{prompt.where}: {prompt.length} tokens of prompt (images included) and {new_tokens} new ones are "
                    f"more than the {self.room} positions of the model: use fewer new tokens, a shorter text or "
                    "smaller images"
                )

    def inputs(
        self,
        prompts: Sequence[Encoded],
        completions: Tensor | None = None,
        *,
        row_of: Tensor | None = None,
        pixels: bool = True,
    ) -> dict[str, Tensor]:
        """Arguments of the model: prompts padded on the left to P, then `completions` int64 [B, T], one per prompt, or
        row b to prompts[row_of[b]].

        input_ids, attention_mask [B, P + T]; position_ids [B, P + T] or [3, B, P + T]; pixels of the prompts.
        Completion tokens all count in the attention mask: they stand right of all that is scored before them.
        """
        longest = max(prompt.length for prompt in prompts)
        rows = torch.arange(len(prompts)) if row_of is None else row_of.cpu()
        answers = torch.zeros(len(rows), 0, dtype=torch.int64) if completions is None else completions.cpu()
        steps = torch.arange(answers.shape[1])

        def left(tensors: Sequence[Tensor], value: int) -> Tensor:
            padded = [torch.nn.functional.pad(t, (longest - t.shape[-1], 0), value=value) for t in tensors]
            return torch.stack(padded, -2)[..., rows, :]

        after = torch.stack([(p.next_position + steps).expand(*p.positions.shape[:-1], -1) for p in prompts], -2)
        real = [torch.ones_like(p.tokens.ids) for p in prompts]
        tensors = {
            "input_ids": torch.cat([left([p.tokens.ids for p in prompts], self.pad_id), answers], 1),
            "attention_mask": torch.cat([left(real, 0), torch.ones_like(answers)], 1),
            "position_ids": torch.cat([left([p.positions for p in prompts], 0), after[..., rows, :]], -1),
        }
        for name in self._per_token:
            kinds = [p.tokens.kinds.get(name, torch.zeros_like(p.tokens.ids)) for p in prompts]
            if any(name in p.tokens.kinds for p in prompts):
                tensors[name] = torch.cat([left(kinds, 0), torch.zeros_like(answers)], 1)
        tensors |= join_pixels([p.tokens for p in prompts]) if pixels else {}
        return {k: v.to(self.device, self.dtype if v.is_floating_point() else None) for k, v in tensors.items()}

    def prefix(self, prompts: Sequence[Encoded]) -> tuple[Any, Tensor]:
        """Cache of the prompts' keys and values, with gradients, and the states [N, H] that predict the first token."""
        cache = transformers.DynamicCache(config=self.model.config.get_text_config())
        output = self.body(**self.inputs(prompts), past_key_values=cache, use_cache=True)
        return output.past_key_values, output.last_hidden_state[:, -1]

    def log_probs(
        self,
        prompts: Sequence[Encoded],
        tokens: Tensor,
        mask: Tensor,
        *,
        group: Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
        share_prefix: bool = True,
    ) -> Replay:
        """Score completions `tokens` int64 [B, T] with `mask` [B, T], row b being an answer to prompts[group[b]].

        With `packing` there is no padding, and every row has a copy of its prompt. Otherwise
        share_prefix: each prompt and its images are computed once for all its rows, which attend to its keys and
        values; otherwise once per row. The same numbers within rounding, in value and gradient.
        temperature: that of sampling. Logits exist for a part of the tokens at a time (`log_probs.py`).
        """
        if tokens.shape != mask.shape or group.shape != tokens.shape[:1]:
            raise ValueError(
                f"tokens {list(tokens.shape)}, mask {list(mask.shape)} and group {list(group.shape)} do not fit"
            )
        rows = [prompts[number] for number in group.tolist()]
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        # what stands after an answer's end is scored by nobody; a placeholder there would ask for an image
        tokens = torch.where(mask.bool(), tokens, self.pad_id)
        if self.packing:
            with self._recomputed():
                hidden, positions = packed_states(self, rows, tokens, mask)
            images = len(rows)
        elif share_prefix and self.shares_prompts:
            hidden, positions, images = self.shared(prompts, tokens, group)
        else:
            inputs = self.inputs(rows, tokens[:, :-1])
            with self._recomputed():
                hidden = self.body(**inputs, use_cache=False).last_hidden_state[:, -tokens.shape[1] :]
            positions, images = inputs["input_ids"].numel(), len(rows)
        head = self.model.get_output_embeddings()
        scores = completion_log_probs(
            hidden,
            head.weight,
            tokens,
            mask=mask,
            bias=head.bias,
            temperature=temperature,
            forbidden=self.forbidden,
            entropy=entropy,
        )
        return Replay(scores.log_prob, scores.entropy, hidden, positions, images)

    def shared(self, prompts: Sequence[Encoded], tokens: Tensor, group: Tensor) -> tuple[Tensor, int, int]:
        """States [B, T, H] of answers that attend to one copy of their prompt; how many positions, and prompts, were
        computed."""
        numbers, row_of = torch.unique(group, return_inverse=True)
        used = [prompts[number] for number in numbers.tolist()]
        row_of = row_of.to(self.device)
        cache, last = self.prefix(used)
        longest = max(prompt.length for prompt in used)
        positions, first = longest * len(used), last[row_of, None]
        # The prompt's last state predicts the only token.
        if tokens.shape[1] == 1:
            return first, positions, len(used)
        inputs = self.inputs(used, tokens[:, :-1], row_of=row_of, pixels=False)
        mask = inputs.pop("attention_mask")
        new = {name: value[..., longest:] for name, value in inputs.items()}
        if self.prefix_attention is None:
            cache.batch_select_indices(row_of)
            output = self.body(**new, attention_mask=mask, past_key_values=cache, use_cache=True)
        else:
            lengths = torch.tensor([prompt.length for prompt in used], device=self.device)
            with prefix_shared(self.model, cache, present(lengths), row_of, self.prefix_attention) as shared:
                output = self.body(**new, past_key_values=shared, use_cache=True)
        return torch.cat([first, output.last_hidden_state], 1), positions + new["input_ids"].numel(), len(used)


def _stop_ids(model: Any, tokenizer: Any, path: str) -> tuple[int, ...]:
    """Tokens that end an answer. Raises ValueError where there are none."""
    # Both: chat models end a turn by another token than the tokenizer's end of a text.
    of_model = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])} - {None}
    if not stop:
        raise ValueError(f"{path!r} has no eos_token, so no answer would ever end: set tokenizer.eos_token, save it")
    return tuple(sorted(stop))
