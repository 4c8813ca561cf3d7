"""Our attention processors for diffusers' SD3(.5), FLUX, Qwen-Image and Wan: where attention kernels go in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.kernels.fused import fused, qk_norm_rope
from genrl.kernels.joint_attention import joint_attention
from genrl.kernels.machine import AttentionBackend

Angles = tuple[Tensor, Tensor] | None
FAMILIES = "Stable Diffusion 3 and 3.5, FLUX.1, Qwen-Image and Wan"


@dataclass
class Switches:
    """What the processors and blocks of a model run; read at every call."""

    fused: bool = False
    """Whether `genrl.kernels.fused` compiles what lies between the matrix products, which puts our blocks in."""
    attention: AttentionBackend | None = None
    """None: as `auto`, or diffusers' own processors where `fused` is off too."""


class Norm(Protocol):
    """An RMS norm; `eps` None: that of the dtype."""

    eps: float | None
    weight: Tensor | None


@dataclass
class Processor:
    """What our processors share. `called` says that the model goes through it."""

    switches: Switches
    called: bool = field(default=False, init=False)

    def normed(self, projected: Tensor, norm: Norm | None, heads: int, angles: Angles) -> Tensor:
        """[B, S, H D] -> [B, S, H, D], normalised (by head, or all heads together) and turned."""
        x: Tensor = projected.unflatten(-1, (heads, -1))
        if norm is None and angles is None:
            return x
        if norm is None:
            raise ValueError("a model that turns queries without normalising them first is none of " + FAMILIES)
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        inputs = x, norm.weight, *(angles or (None, None)), eps
        turned: Tensor = fused(qk_norm_rope, *inputs) if self.switches.fused else qk_norm_rope(*inputs)
        return turned

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, S, H, D] -> [B, S, H D]"""
        self.called = True
        same = value.dtype  # under autocast a query may be wider
        output = joint_attention(
            query.to(same), key.to(same), value, mask=mask, backend=self.switches.attention or "auto"
        )
        return output.flatten(2, 3)


class JointProcessor(Processor):
    """SD3, FLUX, Qwen-Image: image and text tokens attend to each other; in FLUX's later blocks they are one stream."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> Any:
        text, heads = encoder_hidden_states, attn.heads
        count = 0 if text is None else text.shape[1]
        of_image, of_text = _angles(image_rotary_emb, count)
        q = self.normed(attn.to_q(hidden_states), attn.norm_q, heads, of_image)
        k = self.normed(attn.to_k(hidden_states), attn.norm_k, heads, of_image)
        v = attn.to_v(hidden_states).unflatten(-1, (heads, -1))
        if text is None:
            return _out(attn, self.attend(q, k, v, _joint_mask(attention_mask, None, hidden_states)))
        tq = self.normed(attn.add_q_proj(text), attn.norm_added_q, heads, of_text)
        tk = self.normed(attn.add_k_proj(text), attn.norm_added_k, heads, of_text)
        tv = attn.add_v_proj(text).unflatten(-1, (heads, -1))
        mask = _joint_mask(attention_mask, encoder_hidden_states_mask, hidden_states)
        q, k, v = (torch.cat(both, 1) for both in ((tq, q), (tk, k), (tv, v)))
        joint = self.attend(q, k, v, mask)
        words, image = joint[:, :count], joint[:, count:]
        # SD3's last block has no use for the text any more
        return _out(attn, image.contiguous()), words if attn.to_add_out is None else attn.to_add_out(words.contiguous())


class WanProcessor(Processor):
    """Wan: self-attention with rotary positions, or cross-attention to a text (and a picture before it); the norms are
    over all heads together."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        source, picture = hidden_states, None
        if encoder_hidden_states is not None:
            source = encoder_hidden_states
            if attn.add_k_proj is not None:  # the text has 512 tokens, the picture what is before them
                picture, source = source[:, :-512], source[:, -512:]
        angles = None
        if rotary_emb is not None:
            angles = rotary_emb[0][0, :, 0, 0::2], rotary_emb[1][0, :, 0, 1::2]
        q = self.normed(attn.to_q(hidden_states), attn.norm_q, attn.heads, angles)
        k = self.normed(attn.to_k(source), attn.norm_k, attn.heads, angles)
        output = self.attend(q, k, attn.to_v(source).unflatten(-1, (attn.heads, -1)), attention_mask)
        if picture is not None:
            k = self.normed(attn.add_k_proj(picture), attn.norm_added_k, attn.heads, None)
            output = output + self.attend(q, k, attn.add_v_proj(picture).unflatten(-1, (attn.heads, -1)))
        return _out(attn, output)


PROCESSORS: dict[str, type[Processor]] = {
    "JointAttnProcessor2_0": JointProcessor,
    "FluxAttnProcessor": JointProcessor,
    "QwenDoubleStreamAttnProcessor2_0": JointProcessor,
    "WanAttnProcessor": WanProcessor,
}
"""Ours for diffusers', by name."""


def _angles(rotary: Any, text: int) -> tuple[Angles, Angles]:
    """cos and sin per pair, [S, D/2], of the image and of the text tokens: FLUX gives both in one pair of tables with
    every angle twice, Qwen-Image a complex table for each, SD3 nothing."""
    if rotary is None:
        return None, None
    if rotary[0].is_complex():
        image, words = ((table.real, table.imag) for table in rotary)
        return image, words
    cos, sin = rotary[0][:, 0::2], rotary[1][:, 0::2]
    return (cos[text:], sin[text:]), (cos[:text], sin[:text])


def _joint_mask(mask: Tensor | None, text: Tensor | None, image: Tensor) -> Tensor | None:
    """bool [B, 1, 1, S] over text, then image, where the texts are padded (Qwen-Image)."""
    if text is None:
        return mask
    if mask is not None:
        raise ValueError("an attention_mask beside the mask of the text: the joint mask is made from the latter alone")
    return torch.cat([text.bool(), text.new_ones(image.shape[:2], dtype=torch.bool)], 1)[:, None, None]


def _out(attn: Any, found: Tensor) -> Tensor:
    """The output projection and its dropout; FLUX's single blocks have theirs in the block."""
    if getattr(attn, "pre_only", False):
        return found
    for layer in attn.to_out:
        found = layer(found)
    return found
