"""Our attention processors and block forwards for diffusers' SD3(.5), FLUX, Qwen-Image and Wan, where our kernels go
in, and what installs them.

diffusers' own `set_attention_backend` changes nothing, and says nothing, on models whose processors do not go through
its dispatcher (SD3, Sana, PixArt, CogView4, AuraFlow, UNets). So processors are set here, one by one, and after the
first call of the denoiser every one of them must have been called.

A block of these families is, for each of its streams, with shift, scale and gate from the timestep (arXiv 2212.09748,
2403.03206):

    h  = x + gate_1 * attention(norm(x) (1 + scale_1) + shift_1)
    x' = h + gate_2 * mlp(norm(h) (1 + scale_2) + shift_2)

The arithmetic is that of `genrl.kernels.blocks`, float32 rounded where a block stores: beside diffusers' own it differs
by rounding, in sampling and replay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.normalization import AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from genrl.kernels.blocks import fused, gated, joint_attention, modulated, qk_norm_rope
from genrl.kernels.machine import AttentionBackend

Angles = tuple[Tensor, Tensor] | None
FAMILIES = "Stable Diffusion 3 and 3.5, FLUX.1, Qwen-Image and Wan"


@dataclass
class Switches:
    """What the processors and blocks of a model run; read at every call."""

    fused: bool = False
    """Whether `genrl.kernels.blocks` compiles what lies between the matrix products, which puts our blocks in."""
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


def _out(attn: Any, hidden_states: Tensor) -> Tensor:
    """The output projection and its dropout; FLUX's single blocks have theirs in the block."""
    if getattr(attn, "pre_only", False):
        return hidden_states
    for layer in attn.to_out:
        hidden_states = layer(hidden_states)
    return hidden_states


def _first(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    y: Tensor = fused(modulated, x, scale, shift, eps)
    return y


def _rest(x: Tensor, attended: Tensor, mods: Sequence[Tensor], mlp: nn.Module, eps: float = 1e-6) -> Tensor:
    """A stream from its attention's output on; mods: gate_1, shift_2, scale_2, gate_2."""
    gate, shift, scale, gate_mlp = mods
    h, y = fused(gated, x, attended, gate, scale, shift, eps)
    out: Tensor = h + gate_mlp * mlp(y)
    return out


def _finite(x: Tensor) -> Tensor:
    """Clamp numbers as these models do in float16."""
    # The largest float16: diffusers clips in the same places, since some activations of these models overflow there.
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _sd3_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: Any = None,
) -> tuple[Tensor | None, Tensor]:
    image, text, further = hidden_states, encoder_hidden_states, joint_attention_kwargs or {}
    modulation = self.norm1.linear(self.norm1.silu(temb))[:, None].chunk(9 if self.use_dual_attention else 6, -1)
    shift, scale, gate, *second = modulation[:6]
    words: Sequence[Tensor] = ()
    if self.context_pre_only:
        seen = self.norm1_context(text, temb)
    else:
        context = self.norm1_context
        words = context.linear(context.silu(temb))[:, None].chunk(6, -1)
        seen = _first(text, words[0], words[1])
    attended, of_text = self.attn(hidden_states=_first(image, shift, scale), encoder_hidden_states=seen, **further)
    if self.use_dual_attention:  # SD3.5 medium: a second attention among the image's tokens
        shift_2, scale_2, gate_2 = modulation[6:]
        alone = self.attn2(hidden_states=_first(image, shift_2, scale_2), **further)
        # The second attention read the stream before the first one's output was added, as the model was trained.
        image, attended, gate = image + gate * attended, alone, gate_2
    image = _rest(image, attended, (gate, *second), self.ff)
    if not self.context_pre_only:
        text = _rest(text, of_text, words[2:], self.ff_context)
    return None if self.context_pre_only else text, image


def _flux_block(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mods, words = (norm.linear(norm.silu(temb))[:, None].chunk(6, -1) for norm in (self.norm1, self.norm1_context))
    attended, of_text = self.attn(
        hidden_states=_first(hidden_states, mods[0], mods[1]),
        encoder_hidden_states=_first(encoder_hidden_states, words[0], words[1]),
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = _rest(hidden_states, attended, mods[2:], self.ff)
    return _finite(_rest(encoder_hidden_states, of_text, words[2:], self.ff_context)), image


def _flux_single_norm(self: Any, x: Tensor, emb: Tensor) -> tuple[Tensor, Tensor]:
    shift, scale, gate = self.linear(self.silu(emb))[:, None].chunk(3, -1)
    # diffusers' block, which stays, adds the dimension of tokens to the gate by itself.
    return _first(x, shift, scale), gate[:, 0]


def _qwen_block(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_hidden_states_mask: Tensor | None,
    temb: Tensor, image_rotary_emb: Any = None, joint_attention_kwargs: Any = None, modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mods = self.img_mod(temb)[:, None].chunk(6, -1)
    if modulate_index is not None:  # tokens of the picture to edit have the modulation of time zero
        noisy = (modulate_index == 0)[..., None]
        mods = [torch.where(noisy, *m.chunk(2)) for m in mods]
    words = self.txt_mod(temb.chunk(2)[0] if self.zero_cond_t else temb)[:, None].chunk(6, -1)
    eps = self.img_norm1.eps
    attended, of_text = self.attn(
        hidden_states=_first(hidden_states, mods[0], mods[1], eps),
        encoder_hidden_states=_first(encoder_hidden_states, words[0], words[1], eps),
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = _rest(hidden_states, attended, mods[2:], self.img_mlp, eps)
    text = _rest(encoder_hidden_states, of_text, words[2:], self.txt_mlp, eps)
    return _finite(text), _finite(image)


def _wan_block(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
) -> Tensor:
    # temb [B, 6, W], or one per token [B, S, 6, W]; modulations are float32
    modulation = self.scale_shift_table + temb.float()
    shift, scale, gate, *last = (m if temb.dim() == 4 else m[:, None] for m in modulation.unbind(-2))
    x, eps = hidden_states, self.norm1.eps
    attended = self.attn1(_first(x, shift, scale, eps), None, None, rotary_emb)
    if isinstance(self.norm2, nn.Identity):
        # Wan's modulation is float32, and diffusers rounds only the sum.
        x = (x.float() + attended * gate).to(x.dtype)
        query_input = x
    else:  # an affine norm is a modulation that does not depend on time
        affine = (self.norm2.weight.float() - 1.0, self.norm2.bias.float())
        x, query_input = fused(gated, x, attended, gate, *(t.expand_as(gate) for t in affine), eps)
    crossed = self.attn2(query_input, encoder_hidden_states, None, None)
    shift, scale, gate = last
    # The output of the cross-attention is added without a gate: one of ones makes it the same kernel.
    h, y = fused(gated, x, crossed, torch.ones_like(gate), scale, shift, eps)
    out: Tensor = (h.float() + self.ffn(y).float() * gate).to(h.dtype)
    return out


BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {
    JointTransformerBlock: _sd3_block,
    FluxTransformerBlock: _flux_block,
    AdaLayerNormZeroSingle: _flux_single_norm,  # of FLUX's single blocks, which have no second norm
    QwenImageTransformerBlock: _qwen_block,
    WanTransformerBlock: _wan_block,
}


def install(denoisers: Iterable[nn.Module], switches: Switches) -> str:
    """Put the processors and forwards that `switches` ask for into every denoiser; returns what was put in, in words.

    Raises ValueError where a denoiser is of none of the families, has a processor of another kind.
    """
    processors: list[Processor] = []
    blocks = 0
    for denoiser in denoisers:
        if switches.fused or switches.attention is not None:
            of_denoiser = _set_processors(denoiser, switches)
            processors += of_denoiser
            _verify_at_first_call(denoiser, of_denoiser)
        if switches.fused:
            count = _set_forwards(denoiser)
            if not count:
                raise ValueError(f"kernels.fused knows no block of {_name(denoiser)}; it knows {FAMILIES}")
            blocks += count
    return f"{len(processors)} attention processors and {blocks} block forwards are ours"


def _set_processors(denoiser: nn.Module, switches: Switches) -> list[Processor]:
    processors: list[Processor] = []
    for path, module in denoiser.named_modules():
        present = getattr(module, "processor", None)
        if present is None:
            continue
        ours = PROCESSORS.get(type(present).__name__)
        # Ours call `to_q`, `to_k` and `to_v`, which a module with fused projections leaves unused.
        if ours is None or getattr(module, "fused_projections", False):
            key = "kernels.attention" if switches.attention else "kernels.fused"
            raise ValueError(
                f"{key} does not fit {_name(denoiser)}: its {path} is computed by {type(present).__name__}; {FAMILIES} "
                "fit, with their own processors and separate projections"
            )
        processor = ours(switches)
        module.set_processor(processor)
        if module.processor is not processor:
            raise RuntimeError(f"{_name(denoiser)}: {path} did not take its new attention processor")
        processors.append(processor)
    if not processors:
        raise ValueError(f"kernels: {_name(denoiser)} has no attention processors; {FAMILIES} have")
    return processors


def _set_forwards(denoiser: nn.Module) -> int:
    count = 0
    for module in denoiser.modules():
        forward = BLOCKS.get(type(module))
        if forward is not None:
            # On the instance: classes stay diffusers', so that saving, sharding and peft know the module.
            module.forward = MethodType(forward, module)
            count += 1
    return count


def _verify_at_first_call(denoiser: nn.Module, processors: Sequence[Processor]) -> None:
    """After the first call every processor must have been called: a back-end that is set and not used is an error."""

    def verify(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        idle = sum(not processor.called for processor in processors)
        if idle:
            raise RuntimeError(
                f"{idle} of {len(processors)} attention processors of {_name(module)} were set and not called: the "
                "back-end that kernels asks for does not run; set kernels.attention to null and kernels.fused to false"
            )

    handle = denoiser.register_forward_hook(verify)


def _name(module: nn.Module) -> str:
    return type(module).__name__
