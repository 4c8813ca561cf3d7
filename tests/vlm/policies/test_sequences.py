"""Policies that draw by tokens, fill masks, and make things of codes: what they draw is what they score."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import silu

import genrl_rewards
from genrl.playground.tasks import making
from genrl.vlm.policies import codes
from genrl.vlm.policies.codes import BEGIN, CODE, DONE, END, WORD, CodePolicy
from genrl.vlm.policies.image_tokens import TRAINED, ImagePolicy
from genrl.vlm.policies.masked_formats import open_masked
from genrl.vlm.policies.masked_text import MaskedPolicy
from genrl.vlm.policies.processor import Prompt, Turn
from genrl.vlm.tasks import row
from genrl.vlm.train import train
from genrl_rewards.scorers.objects.shapes import BACKGROUND, COLOURS, PALETTE
from genrl_rewards.scorers.texts.tunes import sound_quality, text_fit
from tests.vlm import vlm_runs

ASSETS = Path(__file__).resolve().parents[3] / "assets"
CAPTIONS = ("a red circle", "a blue star and a green square", "a yellow triangle")
Any3 = ImagePolicy | MaskedPolicy | CodePolicy


def prompts(texts: tuple[str, ...]) -> list[Prompt]:
    return [Prompt((text,), where=text) for text in texts]


@pytest.fixture(scope="module")
def janus() -> ImagePolicy:
    return ImagePolicy(str(ASSETS / "tiny-janus"), guidance=2.0)


def dllm(samples: int | None = None, steps: int | None = None) -> MaskedPolicy:
    return MaskedPolicy(str(ASSETS / "tiny-dllm"), length=9, samples=samples, steps=steps)


@pytest.fixture(scope="module")
def shapes() -> CodePolicy:
    return CodePolicy(str(ASSETS / "tiny-bodies"))


def sampled_and_scored(policy: Any3, texts: tuple[str, ...], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(sampler's log-probabilities, the trainer's, mask) of two answers to each prompt."""
    encoded = [policy.encode(prompt) for prompt in prompts(texts)]
    sampled = policy.sample(encoded, 2, temperature, [(0, text) for text in texts])
    group = torch.arange(len(texts)).repeat_interleave(2)
    scored = policy.log_probs(encoded, sampled.tokens, sampled.mask, group=group, temperature=temperature)
    return sampled.log_prob, scored.log_prob.detach(), sampled.mask


def test_what_is_drawn_is_what_is_scored(shapes: CodePolicy) -> None:
    for guidance, temperature in ((2.0, 1.0), (1.0, 0.7)):
        policy = ImagePolicy(str(ASSETS / "tiny-janus"), guidance=guidance)
        sampler, trainer, _ = sampled_and_scored(policy, CAPTIONS, temperature)
        assert torch.allclose(sampler, trainer, atol=2e-5) and float(sampler.std()) > 0.01
    sampler, trainer, mask = sampled_and_scored(dllm(), ("what is 3 plus 4 ?", "what is 9 plus 9 ?"), 1.0)
    assert torch.allclose(sampler, trainer * mask, atol=2e-5) and float(sampler[mask].std()) > 0.01
    sampler, trainer, mask = sampled_and_scored(shapes, ("a red circle", "a blue square"), 1.0)
    assert torch.allclose(sampler, trainer, atol=2e-5) and bool((trainer[~mask] == 0).all())


class TestPictures:
    def test_the_most_probable_codes_are_those_of_transformers_with_its_guidance(self, janus: ImagePolicy) -> None:
        asked = janus.processor(text=list(CAPTIONS), generation_mode="image", padding=True, return_tensors="pt")
        wanted = janus.model.generate(**asked, generation_mode="image", do_sample=False, guidance_scale=2.0)
        encoded = [janus.encode(prompt) for prompt in prompts(CAPTIONS)]
        actual = janus.sample(encoded, 1, 0.0, [(k,) for k in range(3)])
        assert torch.equal(actual.tokens, wanted)
        decoded = janus.model.decode_image_tokens(wanted)  # [B, H, W, 3], of mean .5 and std .5
        assert torch.allclose(actual.made["images"].permute(0, 2, 3, 1), (decoded * 0.5 + 0.5).clamp(0, 1), atol=1e-6)

    def test_a_picture_depends_on_its_own_caption_and_key(self, janus: ImagePolicy) -> None:
        encoded = [janus.encode(prompt) for prompt in prompts(CAPTIONS)]
        together = janus.sample(encoded, 2, 1.0, [(7, text) for text in CAPTIONS])
        alone = janus.sample(encoded[1:2], 2, 1.0, [(7, CAPTIONS[1])])
        assert torch.equal(together.tokens[2:4], alone.tokens) and not torch.equal(alone.tokens[0], alone.tokens[1])

    def test_chunks_change_nothing_and_only_what_draws_is_trained(self, janus: ImagePolicy) -> None:
        encoded = [janus.encode(prompts(CAPTIONS)[0])]
        sampled = janus.sample(encoded, 2, 1.0, [(0,)])
        options = {"group": torch.zeros(2, dtype=torch.int64), "entropy": True}
        arguments = (encoded, sampled.tokens, sampled.mask)
        whole, parts = (janus.log_probs(*arguments, chunk=chunk, **options) for chunk in (1024, 5))
        assert torch.allclose(whole.log_prob, parts.log_prob, atol=1e-6)
        assert whole.entropy is not None and bool((whole.entropy > 0).all())
        parts.log_prob.sum().backward()
        moved = {name.split(".")[1] for name, p in janus.model.named_parameters() if p.grad is not None}
        assert moved == set(TRAINED)
        janus.model.zero_grad()


class TestMasks:
    def test_the_prompts_length_and_the_padding_change_nothing(self) -> None:
        policy = dllm()
        texts = ("what is 3 plus 4 ?", "4 plus 4 ?")
        encoded = [policy.encode(prompt) for prompt in prompts(texts)]
        tokens = torch.randint(7, 32, (2, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(2, 9, dtype=torch.bool)
        both = policy.log_probs(encoded, tokens, mask, group=torch.arange(2)).log_prob
        for k in range(2):
            one = policy.log_probs(encoded[k : k + 1], tokens[k : k + 1], mask[:1], group=torch.zeros(1).long())
            assert torch.allclose(one.log_prob[0], both[k], atol=1e-5)

    def test_a_place_sees_those_before_it_and_masks_after(self) -> None:
        policy = dllm()
        encoded = [policy.encode(prompts(("what is 3 plus 4 ?",))[0])]
        tokens = torch.randint(7, 32, (1, 9), generator=torch.Generator().manual_seed(1))
        result = policy.log_probs(encoded, tokens, torch.ones(1, 9).bool(), group=torch.zeros(1).long()).log_prob[0]
        for t in (0, 4, 8):
            filled = tokens.clone()
            filled[:, t:] = policy.mask_id
            ids = torch.cat([encoded[0].tokens.ids[None], filled], 1)
            logits = policy.model(input_ids=ids).logits[0, encoded[0].length + t]
            logits[policy.forbidden] = -torch.inf
            assert float(logits.log_softmax(-1)[tokens[0, t]]) == pytest.approx(float(result[t]), abs=1e-5)

    def test_the_mean_over_all_masks_is_the_bound(self) -> None:
        """E over l uniform and sets of l places, computed in full for three places."""
        policy = MaskedPolicy(str(ASSETS / "tiny-dllm"), length=3, samples=400)
        encoded = [policy.encode(prompts(("what is 3 plus 4 ?",))[0])]
        tokens = torch.tensor([[9, 12, 8]])
        total = 0.0
        for number in (1, 2, 3):
            sets = list(itertools.combinations(range(3), number))
            for places in sets:
                masked = torch.zeros(1, 3, dtype=torch.bool)
                masked[0, list(places)] = True
                total += float(policy._bound(encoded, tokens, masked, 1.0)) / (3 * len(sets))
        with torch.no_grad():
            result = policy.log_probs(encoded, tokens, torch.ones(1, 3).bool(), group=torch.zeros(1).long()).log_prob
        assert result.shape == (1, 400)
        assert float(result.mean()) == pytest.approx(total, abs=4 * float(result.std()) / 20)

    def test_a_round_keeps_its_masks_and_the_next_has_others(self) -> None:
        policy = dllm(samples=3, steps=3)
        encoded = [policy.encode(prompts(("what is 3 plus 4 ?",))[0])]
        first = policy.sample(encoded, 2, 1.0, [(0, "a")])
        group = torch.zeros(2, dtype=torch.int64)
        assert first.mask.all() and first.log_prob is None and not (first.tokens == policy.mask_id).any()
        again = [policy.log_probs(encoded, first.tokens, first.mask, group=group).log_prob for _ in range(2)]
        assert torch.equal(again[0], again[1]) and again[0].shape == (2, 3)
        policy.sample(encoded, 2, 1.0, [(1, "a")])
        other = policy.log_probs(encoded, first.tokens, first.mask, group=group).log_prob
        assert not torch.equal(other, again[0])


class TestCodes:
    def test_the_grammar(self, shapes: CodePolicy) -> None:
        red, first, own = shapes.tokenizer.get_vocab()["red"], shapes.begin_id, shapes.code_ids[0].item()
        thing = [own] * 8 + [shapes.end_id]
        tokens = torch.tensor([[red, first, *thing, red, red, first, *thing, shapes.pad_id, shapes.pad_id]])
        kinds, steps = shapes.kinds(tokens)
        inside = [CODE] * 8 + [END]
        assert kinds[0].tolist() == [WORD, WORD, *inside, WORD, WORD, BEGIN, *inside, DONE, DONE]
        assert steps[0].tolist() == [0] * 11 + [1] * 12 + [2] * 2

    def test_every_answer_can_be_decoded(self, shapes: CodePolicy) -> None:
        """At a temperature at which the model knows nothing any more, too."""
        encoded = [shapes.encode(prompt) for prompt in prompts(("a red circle",))]
        sampled = shapes.sample(encoded, 16, 50.0, [(0,)])
        things = shapes.things(sampled.tokens)
        assert things.shape == (16, 2, 8) and len(things.unique()) > 20
        assert sampled.made["images"].shape == (16, 2, 6, 3, 32, 32)

    def test_bodies_look_as_they_are_called_from_where_they_do(self) -> None:
        palette = torch.tensor([BACKGROUND, *PALETTE.values()], dtype=torch.uint8)
        blocks = torch.from_numpy(making.blocks())
        sees = genrl_rewards.load("shapes")
        views = {"circle": range(6), "square": range(6), "triangle": range(4)}
        for body, colour in itertools.product(making.BODIES, COLOURS[:2]):
            made = codes.voxels(torch.tensor([making.codes(body, colour)]), blocks)
            assert np.array_equal(made[0].numpy() > 0, making.solid(body))
            seen = codes.views(made, palette)[0]
            scores = genrl_rewards.score(sees, images=seen, prompts=[f"a {colour} {body}"] * 6).values
            assert all(scores[view] == 1 for view in views[body]), (body, colour, scores)

    def test_the_first_voxel_on_a_line_is_seen(self) -> None:
        solid = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
        solid[0, 1, 0, 3], solid[0, 2, 0, 3] = 1, 2  # two at the top right, one behind the other
        palette = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 255, 0]], dtype=torch.uint8)
        seen = codes.views(solid, palette, scale=1)[0]
        red, green = [1, 0, 0], [0, 1, 0]
        assert seen[0, :, 0, 3].tolist() == red and seen[1, :, 0, 0].tolist() == green  # on the left from behind
        assert seen[2, :, 0, 2].tolist() == red and seen[2, :, 0, 1].tolist() == green  # from the left, upright

    def test_tunes_are_heard(self) -> None:
        frames = torch.from_numpy(making.frames())
        rng = np.random.default_rng(0)
        for course, register in itertools.product(making.COURSES, making.REGISTERS):
            pitches = making.pitches(rng, course, register)
            pure, noisy = (frames[[1 + 2 * p + dirt for p in pitches]].flatten() for dirt in (0, 1))
            fits = text_fit([pure, noisy], [making.RATE] * 2, [f"{register} {course}"] * 2)
            assert fits[0] == 1.0
            good = sound_quality([pure, noisy, frames[[0] * 9].flatten()], [making.RATE] * 3)
            assert good[0] > 0.95 > good[1] + 0.05 and good[2] == 0.0
        falling = frames[[1 + 2 * p for p in (5, 4, 3, 3, 2, 2, 1, 1, 0)]].flatten()
        assert text_fit([falling], [making.RATE], ["low rising"])[0] < 0.5

    @pytest.mark.parametrize("task", ["bodies", "tunes", "captions"])
    def test_held_out_prompts_are_no_training_prompts(self, task: str) -> None:
        asked = {split: {row(task, split, k).prompt.parts for k in range(200)} for split in ("train", "eval")}
        assert asked["train"] and asked["eval"] and not asked["train"] & asked["eval"]


def test_what_a_policy_cannot_do_is_refused(janus: ImagePolicy) -> None:
    with pytest.raises(ValueError, match="16 tokens"):
        janus.check_room([], 12)
    with pytest.raises(ValueError, match="Janus"):
        ImagePolicy(str(ASSETS / "tiny-vlm"))
    with pytest.raises(ValueError, match="has a picture"):
        dllm().encode(Prompt((Path("a.png"), "what is it ?"), where="row 3"))
    with pytest.raises(ValueError, match="codec"):
        CodePolicy(str(ASSETS / "tiny-lm"))


def test_a_conversation_is_read_whole_or_refused(janus: ImagePolicy, shapes: CodePolicy) -> None:
    turns = (Turn("user", ("what is 3 plus 4 ?",)), Turn("assistant", ("7",)))
    whole, policy = Prompt(("what is 9 plus 9 ?",), system="plus", where="row 3", before=turns), dllm()
    ids = policy.encode(whole).tokens.ids
    text = "<|system|> plus <|end|> <|user|> what is 3 plus 4 ? <|end|> <|assistant|> 7 <|end|> <|user|> what is "
    assert ids.tolist() == policy.tokenizer(f"{text}9 plus 9 ? <|end|> <|assistant|>").input_ids
    caption = replace(prompts(CAPTIONS)[0], before=turns)
    assert janus.encode(caption).length > janus.encode(prompts(CAPTIONS)[0]).length
    with pytest.raises(ValueError, match=r"row 3: .*no chat template: ask by one text, without task\.system"):
        shapes.encode(whole)


# -- LLaDA's and Dream's checkpoints are read by their own names, look both ways, and are written as they were
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
        names = [at + attention + f"{one}_proj." for one in "qkv"]
        q, k, v = ((y @ w[f"{n}weight"].T + w.get(f"{n}bias", 0)).view(len(x), -1, H) for n in names)
        q, k = turned(q), turned(k)
        k, v = k.repeat_interleave(HEADS // kv, 1), v.repeat_interleave(HEADS // kv, 1)
        share = (torch.einsum("ihd,jhd->hij", q, k) / H**0.5).softmax(-1)  # every place sees every other
        x = x + torch.einsum("hij,jhd->ihd", share, v).reshape(len(x), D) @ w[at + attention + out + ".weight"].T
        y = norm(x, w[at + second + ".weight"])
        inner = silu(y @ w[at + mlp + gate + ".weight"].T) * (y @ w[at + mlp + up + ".weight"].T)
        return x + inner @ w[at + mlp + down + ".weight"].T

    ends = tuple(f"model.transformer.{name}" for name in ("wte", "ln_f", "ff_out"))
    ends = ends if llada else ("model.embed_tokens", "model.norm", "lm_head")
    wte, last, head = (w[f"{one}.weight"] for one in ends)
    x = wte[ids]
    for n in range(LAYERS):
        x = layer(x, n)
    return norm(x, last) @ head.T


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_published_model(kind: str, tmp_path: Path) -> None:
    model, tokenizer, ahead = open_masked(str(checkpoint(tmp_path / "m", kind)), torch.float32)
    ids = torch.tensor([[5, 9, 1, 13, 1, 7], [6, 1, 8, 2, 2, 2]])
    result = model(input_ids=ids, attention_mask=torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])).logits
    assert torch.allclose(result[0], reference(kind, ids[0]), atol=2e-5)
    assert torch.allclose(result[1, :3], reference(kind, ids[1, :3]), atol=2e-5)
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
    bound = {"elbo_samples": 2} if preset == "bgpo" else {}
    few = {"prompts_per_iteration": 2, "group_size": 3, "max_new_tokens": 3, "denoising_steps": 3, **bound}
    own = {"vlm": {"path": str(checkpoint(tmp_path / "m", kind)), "output": "masked_text"}, "task": {"name": "sums"}}
    own |= {"rewards": [{"name": f"{Path(__file__)}:shortness"}], "trainer": {"preset": preset}}
    run = train(vlm_runs.config(tmp_path, generation=few, **own))
    before, after = weights(kind), load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert settings(kind).items() <= json.loads((run / "model" / "config.json").read_text()).items()
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
