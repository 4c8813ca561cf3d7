"""The language model of PromptRL: what it writes, how likely that was, and what it leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from genrl.diffusion.config.sections import Rewriter as Settings
from genrl.diffusion.policy.rewriter import Rewriter, load_rewriter
from tests.diffusion.tiny_parts import decoder_sizes

TINY = Path(__file__).resolve().parents[3] / "assets" / "tiny-lm"


def llama(size: int) -> torch.nn.Module:
    sizes = decoder_sizes(32, layers=2) | {"vocab_size": size, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def gpt2(size: int) -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=64))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """A language model of random weights on disk, with the tokenizer of tiny-lm and generation defaults in the way."""

    def save(kind: str) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        torch.manual_seed(0)
        model = {"llama": llama, "gpt2": gpt2}[kind](len(tokenizer))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3 if "head" not in name else 0.1)
        model.generation_config.update(do_sample=True, top_k=2, temperature=0.1, repetition_penalty=5.0)
        model.save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def settings(path: Path, **changes: object) -> Settings:
    plain = {"path": str(path), "instruction": "{prompt}", "max_new_tokens": 12}
    return Settings.model_validate(plain | changes)


def anything(text: str) -> bool:
    return True


def moved(rewriter: Rewriter, size: float = 0.05) -> Rewriter:
    source = torch.Generator().manual_seed(1)
    for parameter in rewriter.parameters:
        parameter.data += size * torch.randn(parameter.shape, generator=source)
    return rewriter


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_teacher_forcing_gives_the_log_probabilities_of_sampling(saved: Callable[[str], Path], kind: str) -> None:
    rewriter = moved(Rewriter(settings(saved(kind))))
    written = rewriter.write("a jade disc", 5, ("key", 1), anything)
    again = rewriter.log_probs(written)
    assert again.dtype == torch.float32 and again.shape == written.tokens.shape == written.mask.shape
    assert torch.allclose(again[written.mask], written.log_probs[written.mask], atol=1e-5)
    # no top-k, no greedy: the makers' defaults are off
    assert len({tuple(row) for row in written.tokens.tolist()}) == 5
    with rewriter.model.disable_adapter():
        assert not torch.allclose(rewriter.log_probs(written), again, atol=1e-3)


def test_tokens_are_drawn_from_the_model(saved: Callable[[str], Path]) -> None:
    """E log p = -entropy, and each token as often as the softmax says; sampling noise of 20,000 draws."""
    rewriter = Rewriter(settings(saved("llama"), max_new_tokens=1))
    written = rewriter.write("a jade disc", 20_000, ("key",), anything)
    with torch.no_grad():
        p = rewriter.model(**rewriter.asked("a jade disc")).logits[0, -1].double().softmax(-1)
    assert float(written.log_probs.mean()) == pytest.approx(float((p * p.log()).sum()), abs=0.04)
    result = torch.bincount(written.tokens[:, 0], minlength=len(p)).double() / 20_000
    assert float((result - p).abs().max()) < 5 * float((p.max() / 20_000).sqrt())


def test_the_new_prompt_is_what_stands_between_the_tags() -> None:
    """One pair of them, around something that the text encoders have room for, in an answer that was not cut."""
    rewriter = Rewriter(settings(TINY))

    def answered(text: str, end: bool = True) -> str | None:
        tokens = rewriter.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        tokens = torch.cat([tokens, torch.tensor([rewriter.end])]) if end else tokens
        return rewriter._new_prompt(tokens, lambda text: len(text) < 30)

    assert answered("<answer>two red circles</answer>") == "two red circles"
    assert answered("let me see <answer> two  red\ncircles </answer> there") == "two red circles"
    assert answered("<answer>two red circles</answer>", end=False) is None
    for none in (
        *("two red circles", "<answer>two red circles", "two red circles</answer>", "<answer>  </answer>"),
        *("</answer>two red circles<answer>", "</answer> junk <answer>two red circles"),
        *("<answer>a</answer><answer>b</answer>", "<answer>two red circles and a blue square</answer>"),
    ):
        assert answered(none) is None, none
    written = Rewriter(settings(TINY, max_new_tokens=3)).write("a jade disc", 3, ("key",), anything)
    assert written.texts == ["a jade disc"] * 3 and not any(written.well_formed) and bool(written.mask.all())


def test_only_the_adapter_is_trained_and_its_start_depends_on_the_seed() -> None:
    one, other = Rewriter(settings(TINY), seed=0), Rewriter(settings(TINY), seed=1)
    assert all("lora_" in name for name, p in one.model.named_parameters() if p.requires_grad)
    state = torch.random.get_rng_state()
    same = Rewriter(settings(TINY), seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    adapters = [r.state_dict()["adapter"] for r in (one, other, same)]
    assert all(torch.equal(adapters[0][key], adapters[2][key]) for key in adapters[0])
    assert any(not torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])
    written = one.write("a jade disc", 2, ("key",), anything)
    with one.model.disable_adapter():
        assert torch.equal(one.log_probs(written), other.log_probs(written))  # the second half of an adapter is 0


def test_the_saved_adapter_is_peft_s_and_writes_the_same(tmp_path: Path) -> None:
    rewriter = moved(Rewriter(settings(TINY, max_new_tokens=32)))
    rewriter.save_pretrained(tmp_path)
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
    asked = rewriter.asked("a jade disc")["input_ids"]
    assert torch.equal(plain(asked).logits, rewriter.model(asked).logits)
    again = load_rewriter(tmp_path)
    one, other = ([model.rewrite("a jade disc", (0, k)) for k in range(4)] for model in (again, rewriter))
    assert one == other
    with pytest.raises(ValueError, match="holds no rewriter"):
        load_rewriter(tmp_path / "other")


def test_what_cannot_work_is_refused(tmp_path: Path, saved: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"rewriter.path: .*nowhere cannot be loaded as a causal language model"):
        Rewriter(settings(tmp_path / "nowhere"))
    long = Rewriter(settings(saved("gpt2"), max_new_tokens=60))
    with pytest.raises(ValueError, match=r"max_new_tokens: .* more than the 64 positions"):
        long.write("a jade disc above a plum box", 1, ("key",), anything)
    folder = saved("llama")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**written, "eos_token": None}))
    with pytest.raises(ValueError, match="has no eos_token"):
        Rewriter(settings(folder))
