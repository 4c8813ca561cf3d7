"""Policies of fifteen families on tiny random checkpoints: padding, sharing and sampling change no log-probability."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.config import ConfigError, check_files
from genrl.config.loading import load_located
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.engines.generation import Completions, Sampling, _next_token, generate
from genrl.vlm.policies.loading import use_liger
from genrl.vlm.policies.log_probs import IMPOSSIBLE
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Prompt, without_opened
from tests.run_folders import tiered
from tests.vlm import tiny_checkpoints, vlm_runs

ROUNDING = 2e-5
"""Per token, float32. Largest of 1,000 tokens of each family against the model's own forward: 1.0e-5."""
N, LENGTH = 3, 6


def picture(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def questions(seed: int = 0) -> list[Prompt]:
    """One image, two of other sizes with a system turn, none: three lengths."""
    return [
        Prompt(("Count ", picture(seed, 24, 40), " the dots.")),
        Prompt((picture(seed + 1, 36, 36), "?", picture(seed + 2, 40, 20), " same?"), system="Be brief"),
        Prompt(("No picture.",)),
    ]


def sample(policy: Policy, prompts: list[Encoded], n: int = N, name: str = "") -> Completions:
    return generate(policy, prompts, n, Sampling(LENGTH), [(0, 0, f"{name}{i}") for i in range(len(prompts))])


def alone(policy: Policy, prompt: Encoded, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of one row [T] by the model's own forward: no padding, no positions given, all logits."""
    ids = torch.cat([prompt.tokens.ids, tokens])[None]
    kinds = {k: torch.cat([v, torch.zeros_like(tokens)])[None] for k, v in prompt.tokens.kinds.items()}
    pixels = {k: v.to(policy.dtype) if v.is_floating_point() else v for k, v in prompt.tokens.pixels.items()}
    logits = policy.model(input_ids=ids, **kinds, **pixels, use_cache=False).logits[0]
    logits = logits[prompt.length - 1 : -1].index_fill(1, policy.forbidden, -torch.inf) / temperature
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


FAST = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_next", "gemma3", "kimi_k25")
EVERY = pytest.mark.parametrize("family", tiered(tiny_checkpoints.FAMILIES, FAST))


def one_by_one(policy: Policy, prompts: list[Encoded], written: Completions) -> Tensor:
    want = torch.zeros_like(written.log_prob, dtype=policy.dtype)
    for row, number in enumerate(written.group.tolist()):
        kept = written.mask[row]
        want[row, kept] = alone(policy, prompts[number], written.tokens[row, kept])
    return want


@EVERY
def test_batched_padded_shared_and_sampled_equal_one_by_one(load: Callable[[str], Policy], family: str) -> None:
    policy = load(family)
    prompts = [policy.encode(prompt) for prompt in questions()]
    assert len({prompt.length for prompt in prompts}) == 3
    written = sample(policy, prompts)
    assert written.tokens.shape[0] == N * len(prompts) and not torch.isin(written.tokens, policy.forbidden).any()
    with torch.no_grad():
        want = one_by_one(policy, prompts, written)
        arguments = (prompts, written.tokens, written.mask)
        shared = policy.log_probs(*arguments, group=written.group)
        plain = policy.log_probs(*arguments, group=written.group, share_prefix=False)
        # the last two rows and no others, in another order: what else is in the batch does not matter
        few = torch.tensor([8, 0])
        part = policy.log_probs(prompts, written.tokens[few], written.mask[few], group=written.group[few])
        other = [policy.encode(questions(7)[0]), *prompts[1:]]
        unlike = policy.log_probs(other, *arguments[1:], group=written.group).log_prob
    for got in (written.log_prob, shared.log_prob, plain.log_prob):
        assert (got - want).abs().max() < ROUNDING
    assert (part.log_prob - want[few]).abs().max() < ROUNDING
    assert (unlike - want)[:N].abs().max() > 100 * ROUNDING > ROUNDING > (unlike - want)[N:].abs().max()
    longest, rows, steps = max(p.length for p in prompts), len(written.group), written.tokens.shape[1]
    assert (shared.positions, shared.images) == (3 * longest + rows * (steps - 1), 3)
    assert (plain.positions, plain.images) == (rows * (longest + steps - 1), rows)
    again = generate(policy, prompts[1:2], 2, Sampling(LENGTH), [(0, 0, "1")])
    length = again.tokens.shape[1]
    assert torch.equal(again.tokens * again.mask, (written.tokens * written.mask)[N : N + 2, :length])
    other_key = generate(policy, prompts[1:2], 2, Sampling(LENGTH), [(0, 1, "1")])
    assert not torch.equal(other_key.tokens * other_key.mask, again.tokens * again.mask)


@pytest.mark.parametrize("lora", [VLMLoRA(rank=2), None], ids=["lora", "full"])
@pytest.mark.parametrize("family", tiered(tiny_checkpoints.FAMILIES, ("qwen2_5_vl",)))
def test_blocks_that_are_computed_again_change_no_bit(folder, family: str, lora: VLMLoRA | None) -> None:
    result: list[tuple[Tensor, list[Tensor], int]] = []
    for again in (False, True):
        policy = Policy(str(folder(family)), lora=lora)
        if again:
            policy.checkpoint_blocks()
        prompts = [policy.encode(prompt) for prompt in questions()]
        written = sample(policy, prompts, n=1)
        arguments = (prompts, written.tokens, written.mask)
        with torch.no_grad():
            before = policy.log_probs(*arguments, group=written.group, share_prefix=False).log_prob
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            now = policy.log_probs(*arguments, group=written.group, share_prefix=False).log_prob
        assert torch.equal(now, before)
        now.sum().backward()
        gradients = [p.grad for p in policy.parameters if p.grad is not None]
        assert not any(module.training for module in policy.model.modules())
        result.append((before, gradients, sum(kept.values())))
    (value, gradients, much), (same, also, little) = result
    assert torch.equal(value, same) and len(gradients) == len(also) > 0
    assert all(map(torch.equal, gradients, also)) and any(bool(g.any()) for g in gradients)
    assert little < much


@EVERY
def test_gradients_reach_the_language_models_adapters_alone(load: Callable[[str], Policy], family: str) -> None:
    policy = load(family)
    prompts = [policy.encode(prompt) for prompt in questions()[:1]]
    tokens, mask, group = torch.tensor([[65, 66, 67], [70, 71, 0]]), torch.ones(2, 3), torch.tensor([0, 0])
    mask[1, 2] = 0
    shared, plain = (gradients_of(policy, prompts, tokens, mask, group, share) for share in (True, False))
    assert all("lora" in name and "vision" not in name and "visual" not in name for name in shared)
    projections = 5 if family == "kimi_k25" else 4
    assert len(shared) == 2 * projections * 2  # two layers, two matrices
    for name, value in shared.items():
        assert bool(value.any())
        assert torch.allclose(value, plain[name], atol=1e-5 * max(1.0, float(value.abs().max())))


def gradients_of(
    policy: Policy, prompts: list[Encoded], tokens: Tensor, mask: Tensor, group: Tensor, share: bool
) -> dict[str, Tensor]:
    policy.log_probs(prompts, tokens, mask, group=group, share_prefix=share).log_prob.sum().backward()
    result = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return result


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_all_weights_train_and_sharing_gives_the_same_gradient_to_the_vision_tower(folder, family: str) -> None:
    policy = Policy(str(folder(family)))
    prompts = [policy.encode(prompt) for prompt in questions()[:2]]
    tokens, mask, group = torch.arange(65, 77).reshape(4, 3), torch.ones(4, 3), torch.tensor([0, 0, 1, 1])
    shared, plain = (gradients_of(policy, prompts, tokens, mask, group, share) for share in (True, False))
    assert sum("vision" in name or "visual" in name for name in shared) > 5
    for name, value in shared.items():
        assert torch.allclose(value, plain[name], atol=1e-5 * max(1.0, float(value.abs().max()))), name
    with pytest.raises(ValueError, match="load a second Policy"), policy.reference():
        pass


def test_stop_tokens_end_an_answer_and_stand_in_its_mask(load: Callable[[str], Policy]) -> None:
    policy = load("llava")
    prompts = [policy.encode(questions()[2])]
    free = sample(policy, prompts, n=4)
    stop = int(free.tokens[0, 2])
    ended = generate(policy, prompts, 4, Sampling(LENGTH, stop_ids=(stop,)), [(0, 0, "0")])
    assert ended.finish[0] == "stop"
    for row in range(4):
        ids = free.tokens[row].tolist()
        ends = [place for place, token in enumerate(ids) if token in (stop, *policy.stop_ids)]
        length = min([place + 1 for place in ends] or [LENGTH])
        assert ended.mask[row].sum() == length and ended.finish[row] == ("stop" if ends else "length")
        assert ended.tokens[row, :length].tolist() == ids[:length]
        assert torch.allclose(ended.log_prob[row, :length], free.log_prob[row, :length], atol=ROUNDING)
        assert not ended.log_prob[row, length:].any()


def test_placeholders_are_never_sampled_however_likely(folder: Callable[[str], Path]) -> None:
    for family in ("qwen2_5_vl", "smolvlm"):
        policy = Policy(str(folder(family)), lora=VLMLoRA(rank=2))
        head = policy.model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)).index_fill(0, policy.forbidden, 50.0))
        prompts = [policy.encode(prompt) for prompt in questions()[:1]]
        written = sample(policy, prompts)
        assert not torch.isin(written.tokens, policy.forbidden).any()
        scored = policy.log_probs(prompts, written.tokens, written.mask, group=written.group)
        assert (scored.log_prob - written.log_prob).abs().max() < ROUNDING


def test_temperature_of_the_sampler_is_that_of_the_replay(load: Callable[[str], Policy]) -> None:
    policy = load("qwen2_vl")
    prompts = [policy.encode(questions()[0])]
    written = generate(policy, prompts, N, Sampling(LENGTH, temperature=0.7), [(3,)])
    again = policy.log_probs(prompts, written.tokens, written.mask, group=written.group, temperature=0.7)
    assert (again.log_prob - written.log_prob).abs().max() < ROUNDING
    greedy = generate(policy, prompts, 2, Sampling(LENGTH, temperature=0.0), [(3,)])
    assert torch.equal(greedy.tokens[0], greedy.tokens[1])
    first = alone(policy, prompts[0], greedy.tokens[0, :1])
    every = torch.stack([alone(policy, prompts[0], torch.tensor([t])) for t in (65, 97, int(greedy.tokens[0, 0]))])
    assert first == every.max() and torch.allclose(first, greedy.log_prob[0, :1], atol=ROUNDING)


def test_draws_follow_the_distribution() -> None:
    """Equally spaced numbers give each token its probability up to the spacing, and a forbidden one nothing."""
    count = 1000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    logits = torch.tensor([0.3, 9.0, -1.0, 1.2, IMPOSSIBLE]).expand(count, -1)
    token, log_prob = _next_token(logits, uniform, 0.5, torch.tensor([1]))
    want = torch.tensor([0.3, -torch.inf, -1.0, 1.2, -torch.inf]).div(0.5).softmax(0)
    assert torch.allclose(token.bincount(minlength=5) / count, want, atol=1.5 / count)
    assert torch.allclose(log_prob, want.log()[token], atol=1e-6)


def test_the_reference_is_the_model_before_training(load, folder) -> None:
    policy, base = load("llava"), Policy(str(folder("llava")))
    tokens, mask, group = torch.full((1, 3), 65), torch.ones(1, 3), torch.tensor([0])
    prompts = [policy.encode(questions()[0])]
    with torch.no_grad():
        with policy.reference():
            inside = policy.log_probs(prompts, tokens, mask, group=group).log_prob
        trained = policy.log_probs(prompts, tokens, mask, group=group).log_prob
        want = base.log_probs(prompts, tokens, mask, group=group).log_prob
    assert torch.equal(inside, want) and not torch.allclose(trained, want, atol=1e-3)


def test_bfloat16_weights_give_near_float32_log_probabilities(folder: Callable[[str], Path]) -> None:
    policy = Policy(str(folder("qwen3_vl")), lora=VLMLoRA(rank=2), dtype=torch.bfloat16)
    prompts = [policy.encode(prompt) for prompt in questions()]
    written = sample(policy, prompts)
    scored = policy.log_probs(prompts, written.tokens, written.mask, group=written.group)
    assert scored.log_prob.dtype == written.log_prob.dtype == torch.float32
    assert (scored.log_prob - written.log_prob).abs()[written.mask].mean() < 5e-2
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters)


def test_a_prompt_that_does_not_fit_is_named_before_any_work(load, monkeypatch) -> None:
    policy = load("qwen2_5_vl")
    prompts = [policy.encode(Prompt(("a",))), policy.encode(Prompt(("b" * 480,), where="row 9"))]
    monkeypatch.setattr(policy, "prefix", lambda _: pytest.fail("worked"))
    with pytest.raises(ValueError, match=r"row 9: 499 tokens of prompt .* and 40 new ones are more than the 512"):
        generate(policy, prompts, 2, Sampling(40), [(0,), (1,)])
    with pytest.raises(ValueError, match="holds '<|image_pad|>', which stands for an image".replace("|", r"\|")):
        policy.encode(Prompt(("What is an <|image_pad|>?",)))


def test_checkpoints_that_are_no_policy_say_why(folder: Callable[[str], Path], tmp_path: Path) -> None:
    for family, lacking, text in (
        ("qwen2_5_vl", ["preprocessor_config.json", "processor_config.json"], "image processor"),
        ("smolvlm", ["preprocessor_config.json", "processor_config.json"], "image processor"),
        ("llava", ["model.safetensors"], "has no weights that can be read"),
        ("llava_next", ["chat_template.jinja"], "has no chat template"),
    ):
        whole = Path(shutil.copytree(folder(family), tmp_path / family))
        for name in lacking:
            (whole / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match=text):
            Policy(str(whole))
    with pytest.raises(ValueError, match="no checkpoint of a transformers model"):
        Policy(str(tmp_path / "nothing"))
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama' model, which .* take a vision-language model"):
        Policy(str(text))
    with pytest.raises(ValueError, match=r"named \['nothing'\]. There are \['down_proj', 'gate_proj', 'k_proj'"):
        Policy(str(folder("llava")), lora=VLMLoRA(targets=("nothing",)))


def test_families_that_cannot_be_trained_say_why(tmp_path: Path) -> None:
    for config, reason in (
        ({"model_type": "minicpmv4_6"}, r"\(minicpmv4_6\) has layers of linear_attention, which keep one state"),
        ({"model_type": "florence2"}, r"\(florence2\) reads questions by an encoder"),
        ({"model_type": "kimi_vl", "auto_map": {"AutoConfig": "code.KimiVLConfig"}}, "such code is not executed"),
        ({"model_type": "internvl_chat", "auto_map": {"AutoConfig": "code.InternVLChatConfig"}}, "InternVL3-8B-hf"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "code.py").write_text("raise SystemExit('code of a checkpoint was executed')")
        with pytest.raises(ValueError, match=reason):
            Policy(str(tmp_path))


def test_an_answer_does_not_repeat_the_tag() -> None:
    for asked, text, left in (
        ("<|assistant|>\n<think>\n", "<think>\nso</think> 3", "so</think> 3"),
        ("<|assistant|>\n<think>\n", "so</think> 3", "so</think> 3"),
        ("<|assistant|>\n", "<think>so</think> 3", "<think>so</think> 3"),
        ("<|assistant|>\n<reasoning>", " <reasoning>so", "so"),
    ):
        assert without_opened(asked, text) == left


NAMES = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")


def test_the_model_of_a_run_gets_liger_kernels_once_and_without_their_loss(tmp_path, monkeypatch) -> None:
    """By a stand-in, where a GPU seems to be; other types, and no GPU or package, are refused."""
    calls: list[dict[str, Any]] = []
    made: Any = [ModuleType(name) for name in NAMES]
    made[-1].MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2_5_vl": None}
    made[-1]._apply_liger_kernel_to_instance = lambda **given: calls.append(given)
    for name, module in zip(NAMES, made, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model")
    config = vlm_runs.config(tmp_path, vlm={"path": str(model), "kernels": "liger", "lora": {"rank": 2}})
    policy = Policy.open(config, "cpu", str(model))
    assert len(calls) == 1 and calls[0].pop("model") is policy.model
    assert calls[0] == {"fused_linear_cross_entropy": False}
    with pytest.raises(ValueError, match="Liger has no kernels for 'idefics3'"):
        use_liger(SimpleNamespace(config=SimpleNamespace(model_type="idefics3")))
    assert len(calls) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="need a GPU, and there is none here"):
        use_liger(SimpleNamespace(config=SimpleNamespace(model_type="qwen2_5_vl")))
    monkeypatch.setattr("genrl.vlm.config.files.find_spec", lambda name: None)
    vlm_runs.config(tmp_path, vlm={"kernels": "liger"})
    with pytest.raises(ConfigError, match=r"vlm.kernels.*pip install liger-kernel"):
        check_files(*load_located(tmp_path / "tiny.yaml"))
