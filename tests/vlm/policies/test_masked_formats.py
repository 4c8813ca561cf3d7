"""LLaDA's and Dream's checkpoints are read by their own names, look both ways, and are written as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import silu

from genrl.vlm.policies.masked_formats import open_masked
from genrl.vlm.policies.masked_text import MaskedPolicy
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.train import train
from tests.vlm import vlm_runs

WORDS = ["<end>", "<mask>", "<pad>", *"0123456789", "what", "is", "plus", "?", "minus"]
WORDS += ["<answer>", "</answer>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
D, H, FF, LAYERS, HEADS = 16, 4, 24, 2, 4
KINDS = ("llada", "Dream")


def weights(kind: str) -> dict[str, Tensor]:
    """Random ones, by the names of the published checkpoints."""
    torch.manual_seed(3)
    kv = HEADS if kind == "llada" else 2
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(LAYERS):
        if kind == "llada":
            at = f"model.transformer.blocks.{n}."
            shapes |= {at + "attn_norm.weight": (D,), at + "ff_norm.weight": (D,)}
            shapes |= {at + f"{one}_proj.weight": (D, D) for one in "qkv"}
            shapes |= {at + "attn_out.weight": (D, D), at + "ff_proj.weight": (FF, D)}
            shapes |= {at + "up_proj.weight": (FF, D), at + "ff_out.weight": (D, FF)}
        else:
            at = f"model.layers.{n}."
            shapes |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
            for one, width in (("q", D), ("k", kv * H), ("v", kv * H)):
                shapes |= {at + f"self_attn.{one}_proj.weight": (width, D), at + f"self_attn.{one}_proj.bias": (width,)}
            shapes |= {at + "self_attn.o_proj.weight": (D, D), at + "mlp.gate_proj.weight": (FF, D)}
            shapes |= {at + "mlp.up_proj.weight": (FF, D), at + "mlp.down_proj.weight": (D, FF)}
    ends = ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out")
    ends = ends if kind == "llada" else ("model.embed_tokens", "model.norm", "lm_head")
    sizes = ((len(WORDS), D), (D,), (len(WORDS), D))
    shapes |= {f"{name}.weight": size for name, size in zip(ends, sizes, strict=True)}
    return {name: torch.randn(size) * 0.4 + (len(size) == 1) for name, size in shapes.items()}


def settings(kind: str) -> dict[str, Any]:
    """config.json with the published keys."""
    if kind == "llada":
        own = {"d_model": D, "n_heads": HEADS, "n_kv_heads": HEADS, "n_layers": LAYERS, "mlp_hidden_size": FF}
        own |= {"embedding_size": len(WORDS), "vocab_size": len(WORDS), "max_sequence_length": 32}
        own |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "weight_tying": False, "include_bias": False}
        own |= {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True}
        return {"architectures": ["LLaDAModelLM"], "model_type": "llada", "mask_token_id": 1, "eos_token_id": 0} | own
    own = {"hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    own |= {"intermediate_size": FF, "vocab_size": len(WORDS), "max_position_embeddings": 32, "hidden_act": "silu"}
    own |= {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "use_sliding_window": False}
    return {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": 1, "pad_token_id": 2} | own


def checkpoint(folder: Path, kind: str) -> Path:
    """A tiny one, with `auto_map` to code that is not there: were it to be run, loading would fail."""
    folder.mkdir(parents=True)
    code = {"AutoModel": f"modeling_{kind.lower()}.Model", "AutoConfig": f"configuration_{kind.lower()}.Config"}
    (folder / "config.json").write_text(json.dumps(settings(kind) | {"auto_map": code}))
    save_file(weights(kind), folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    if kind == "llada":
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}
    else:  # Qwen2's files: bytes, no merges
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        special = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_dream.T", None]}}
        special |= {"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": CHAT}))
    return folder


def reference(kind: str, ids: Tensor) -> Tensor:
    """Logits [T, V] of one sequence, written from the papers' description, with none of transformers' modules."""
    w, llada = weights(kind), kind == "llada"
    eps, theta, kv = (1e-5, 5e5, HEADS) if llada else (1e-6, 1e6, 2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def turned(x: Tensor) -> Tensor:
        """Rotary positions of [T, heads, H]: each pair (k, k + H/2) as a complex number."""
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, H, 2) / H)
        z = torch.complex(x[..., : H // 2], x[..., H // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([z.real, z.imag], -1)

    def layer(x: Tensor, n: int) -> Tensor:
        at = f"model.transformer.blocks.{n}." if llada else f"model.layers.{n}."
        attention, mlp = ("", "") if llada else ("self_attn.", "mlp.")
        names = ("attn_norm", "ff_norm", "attn_out", "ff_proj", "up_proj", "ff_out")
        if not llada:
            names = ("input_layernorm", "post_attention_layernorm", "o_proj", "gate_proj", "up_proj", "down_proj")
        first, second, out, gate, up, down = names
        y = norm(x, w[at + first + ".weight"])
        q, k, v = (
            (y @ w[at + attention + f"{one}_proj.weight"].T + w.get(at + attention + f"{one}_proj.bias", 0)).view(
                len(x), -1, H
            )
            for one in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = k.repeat_interleave(HEADS // kv, 1), v.repeat_interleave(HEADS // kv, 1)
        share = (torch.einsum("ihd,jhd->hij", q, k) / H**0.5).softmax(-1)  # every place sees every other
        x = x + torch.einsum("hij,jhd->ihd", share, v).reshape(len(x), D) @ w[at + attention + out + ".weight"].T
        y = norm(x, w[at + second + ".weight"])
        inner = silu(y @ w[at + mlp + gate + ".weight"].T) * (y @ w[at + mlp + up + ".weight"].T)
        return x + inner @ w[at + mlp + down + ".weight"].T

    ends = ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out")
    wte, last, head = (
        w[f"{one}.weight"] for one in (ends if llada else ("model.embed_tokens", "model.norm", "lm_head"))
    )
    x = wte[ids]
    for n in range(LAYERS):
        x = layer(x, n)
    return norm(x, last) @ head.T


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_published_model(kind: str, tmp_path: Path) -> None:
    model, tokenizer, ahead = open_masked(str(checkpoint(tmp_path / "m", kind)), torch.float32)
    ids = torch.tensor([[5, 9, 1, 13, 1, 7], [6, 1, 8, 2, 2, 2]])
    found = model(input_ids=ids, attention_mask=torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])).logits
    assert torch.allclose(found[0], reference(kind, ids[0]), atol=2e-5)
    assert torch.allclose(found[1, :3], reference(kind, ids[1, :3]), atol=2e-5)
    assert ahead == (kind == "Dream") and tokenizer.mask_token_id == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_is_scored_where_the_model_predicts_it(kind: str, tmp_path: Path) -> None:
    """Dream predicts a place one place before it: of the first place of an answer, at the prompt's last."""
    policy = MaskedPolicy(str(checkpoint(tmp_path / "m", kind)), length=3, samples=None)
    prompt = policy.encode(Prompt(("3 4",) if kind == "llada" else ("34",), where="row"))
    asked = prompt.tokens.ids.tolist()
    assert asked == [6, 7]
    filled = torch.tensor([[5, 1, 1]])
    log_p = policy.log_rows([prompt], filled, 1.0)[0]
    logits = reference(kind, torch.tensor([*asked, 5, 1, 1]))
    logits = logits[2:] if kind == "llada" else logits[1:-1]
    logits[:, [1] if kind == "llada" else [1, 2]] = -torch.inf  # the mask, and padding that is no end
    assert torch.allclose(log_p.clamp(min=-99), logits.log_softmax(-1).clamp(min=-99), atol=2e-5)
    assert bool((log_p[:, 0] > -50).all()), "LLaDA pads by its end token, which must stay possible"


@pytest.mark.parametrize(("kind", "preset"), [("llada", "bgpo"), ("Dream", "just_grpo")])
def test_both_methods_train_it_and_write_its_own_format(kind: str, preset: str, tmp_path: Path) -> None:
    few = {"prompts_per_iteration": 2, "group_size": 3, "max_new_tokens": 3, "elbo_samples": 2, "denoising_steps": 3}
    config = vlm_runs.config(
        tmp_path,
        vlm={"path": str(checkpoint(tmp_path / "m", kind)), "output": "masked_text"},
        task={"name": "sums"},
        generation=few,
        rewards=[{"name": f"{Path(__file__)}:shortness"}],
        trainer={"preset": preset},
    )
    run = train(config)
    before, after = weights(kind), load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    own = json.loads((run / "model" / "config.json").read_text())
    assert {key: own[key] for key in settings(kind)} == settings(kind)
    open_masked(str(run / "model"), torch.float32)


def shortness(completions: list[str]) -> list[float]:
    """A reward that random answers differ in."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "llada")
    (folder / "config.json").write_text(json.dumps(settings("llada") | {"alibi": True}))
    with pytest.raises(ValueError, match="alibi is True; only False is supported"):
        MaskedPolicy(str(folder), length=3, samples=None)
    fewer = {name: value for name, value in weights("llada").items() if "blocks.1.up_proj" not in name}
    (folder / "config.json").write_text(json.dumps(settings("llada")))
    save_file(fewer, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="it lacks 1 weights of LLaDA"):
        MaskedPolicy(str(folder), length=3, samples=None)
