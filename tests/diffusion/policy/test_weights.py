"""What is trained, and its snapshots."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion.config.sections import Model
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.adapters import load_lora, snapshot_base, trainable
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.train import train
from genrl.runtime.weights.weights import Weights
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import copied, equal, resumed
from tests.diffusion.tiny_parts import KEYS, PROMPTS

BATCH = Batch([*PROMPTS], [*KEYS], {**runs.CALL, "num_inference_steps": 3})
ADAPTER = LoRA(rank=4, alpha=8.0)


def tiny(lora: LoRA | None = ADAPTER, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Policy, Weights]:
    policy = Policy(FAMILIES["sd3"]().pipe.to(dtype))
    weights = trainable(policy.denoisers, lora, seed=seed)
    if lora is None:
        weights.snapshot("reference")
    return policy, weights


@torch.no_grad()
def sample(policy: Policy) -> Tensor:
    return policy.generate(BATCH)


def some_steps(policy: Policy, weights: Weights, count: int = 2) -> None:
    """Training steps on the log-probability of a recorded step; any loss would do."""
    optimizer = torch.optim.AdamW(weights.parameters, lr=1e-2)
    with torch.no_grad():
        recorded = policy.roll_out(BATCH, Kernel("flow_sde", 0.7), (0, 1))
    for _ in range(count):
        optimizer.zero_grad()
        policy.replay(recorded.step(1)).log_prob.sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_is_trained_and_in_float32(dtype: torch.dtype) -> None:
    policy, weights = tiny(dtype=dtype)
    trainable = {f"transformer.{k}": p for k, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert trainable.keys() == weights.named.keys() and trainable
    assert all(".lora_A." in key or ".lora_B." in key for key in trainable)
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert {p.dtype for p in policy.denoiser.parameters() if not p.requires_grad} == {dtype}
    attention = {key.split(".lora_")[0].rsplit("attn", 1)[1] for key in trainable}
    assert {".to_q", ".to_k", ".to_v", ".to_out.0", ".add_q_proj", ".add_k_proj", ".add_v_proj"} <= attention
    assert weights.num_parameters == sum(p.numel() for p in trainable.values())
    others = [c for n, c in policy.pipe.components.items() if isinstance(c, nn.Module) and n != "transformer"]
    assert others and not any(p.requires_grad for component in others for p in component.parameters())


def test_adapter_starts_from_the_seed_alone_and_changes_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the generators, of other devices either."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    untouched, touched = sample(policy), list[str]()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with monkeypatch.context() as patch:
        for module in (torch.cuda, torch.xpu, torch.mps):
            for name in ("manual_seed", "manual_seed_all", "seed", "set_rng_state"):
                patch.setattr(module, name, lambda *_, place=f"{module}.{name}": touched.append(place), raising=False)
        weights = trainable(policy.denoisers, ADAPTER, seed=3)
    assert touched == [] and torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sample(policy), untouched)
    torch.manual_seed(6)
    assert equal(copied(weights.named), copied(tiny(seed=3)[1].named))
    assert not equal(copied(weights.named), copied(tiny(seed=4)[1].named))


def test_unknown_targets_are_refused_and_full_fine_tuning_of_a_bfloat16_model_is_in_float32() -> None:
    """With the nearest target; full fine-tuning needs autocast: what the configuration refuses, and what it advises."""
    with pytest.raises(ValueError, match=r"model\.lora\.targets: no layer of the transformer .* is called to_query"):
        tiny(LoRA(rank=4, alpha=8.0, targets=("to_q", "to_query")))
    _, weights = tiny(LoRA(rank=4, alpha=8.0, targets=("to_q",)))
    assert all(".to_q.lora_" in key for key in weights.named)
    # what the configuration refuses, and what it advises
    policy, weights = tiny(None, dtype=torch.bfloat16)
    assert len(weights.parameters) == len(list(policy.denoiser.parameters()))
    assert {p.dtype for p in weights.parameters} == {torch.float32}
    with pytest.raises(ValueError, match="BFloat16"):
        some_steps(policy, weights)
    policy = Policy(FAMILIES["sd3"]().pipe.to(torch.bfloat16), autocast=torch.bfloat16)
    weights = trainable(policy.denoisers, None)
    before = copied(weights.named)
    some_steps(policy, weights)
    assert not equal(copied(weights.named), before)


@pytest.mark.parametrize("lora", [ADAPTER, None], ids=["lora", "full"])
def test_reference_is_the_untouched_model_after_training(lora: LoRA | None) -> None:
    """And is left again, also where the block fails."""
    untouched = sample(Policy(FAMILIES["sd3"]().pipe))
    policy, weights = tiny(lora)
    some_steps(policy, weights)
    trained, values = sample(policy), copied(weights.named)
    assert (trained - untouched).abs().max() > 1e-3
    with weights.reference():
        assert torch.equal(sample(policy), untouched)
    with pytest.raises(RuntimeError, match="planted"), weights.reference():
        raise RuntimeError("planted")
    assert torch.equal(sample(policy), trained) and equal(copied(weights.named), values)
    assert all(p.requires_grad for p in weights.parameters)
    some_steps(policy, weights, 1)  # and can still be trained
    assert not equal(copied(weights.named), values)


@pytest.mark.parametrize("lora", [ADAPTER, None], ids=["lora", "full"])
def test_snapshots_are_exchanged_by_pointer(lora: LoRA | None) -> None:
    """And do not follow training, until they are taken again."""
    policy, weights = tiny(lora)
    some_steps(policy, weights, 1)
    weights.snapshot("old")
    kept, picture = copied(weights.named), sample(policy)
    some_steps(policy, weights, 1)
    moved = copied(weights.named)
    pointers = {key: p.data_ptr() for key, p in weights.named.items()}
    held = {key: tensor.data_ptr() for key, tensor in weights.snapshots["old"].items()}
    with weights.use("old"):
        assert {key: p.data_ptr() for key, p in weights.named.items()} == held
        assert torch.equal(sample(policy), picture)
    assert {key: p.data_ptr() for key, p in weights.named.items()} == pointers
    assert {key: tensor.data_ptr() for key, tensor in weights.snapshots["old"].items()} == held
    assert equal(copied(weights.named), moved) and equal(copied(weights.snapshots["old"]), kept)
    weights.snapshot("old")
    assert equal(weights.snapshots["old"], copied(weights.named))


@pytest.mark.parametrize("lora", [ADAPTER, None], ids=["lora", "full"])
def test_state_and_restore_are_exact(lora: LoRA | None) -> None:
    policy, weights = tiny(lora)
    some_steps(policy, weights, 1)
    weights.snapshot("average")
    some_steps(policy, weights, 1)
    kept = {stem: copied(tensors) for stem, tensors in weights.state().items()}
    assert kept.keys() == {"weights", "snapshot-average"}  # and no reference: it is the model that is loaded
    trained = sample(policy)
    with weights.reference():
        untouched = sample(policy)
    other_policy, other = tiny(lora, seed=9)
    other.restore(kept | {"optimizer": {"state/0/step": torch.ones(())}})
    assert torch.equal(sample(other_policy), trained)
    with other.reference():
        assert torch.equal(sample(other_policy), untouched)
    assert all(equal(copied(tensors), kept[stem]) for stem, tensors in other.state().items())
    some_steps(other_policy, other)  # the restored tensors are the run's own: what it was given does not change
    again = {stem: copied(tensors) for stem, tensors in weights.state().items()}
    assert all(equal(again[stem], kept[stem]) for stem in kept)


@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8.0, targets=("to_q",)), LoRA(rank=8, alpha=8.0), None])
def test_a_checkpoint_of_another_adapter_is_refused(lora: LoRA | None) -> None:
    policy, weights = tiny()
    some_steps(policy, weights, 1)
    weights.snapshot("average")
    before = {stem: copied(tensors) for stem, tensors in weights.state().items()}
    with pytest.raises(ValueError, match="another model or adapter"):
        weights.restore(tiny(lora)[1].state())
    assert all(equal(copied(weights.state()[stem]), before[stem]) for stem in before)  # nothing was changed by half


def test_a_copy_without_a_trained_adapter_is_made_of_a_lora_alone() -> None:
    policy, weights = tiny()
    plain = sample(policy)
    some_steps(policy, weights)
    snapshot_base(weights, "base", goes_on=True)
    with weights.use("base"):
        assert torch.equal(sample(policy), plain)
    assert not torch.equal(sample(policy), plain)
    for kind in ("lokr", "dora"):
        _, other = tiny(ADAPTER.model_copy(update={"type": kind}))
        snapshot_base(other, "new", goes_on=False)
        with pytest.raises(ValueError, match=r"model\.lora\.from: .* give a LoRA, or begin with a new adapter"):
            snapshot_base(other, "base", goes_on=True)


# -- Quantised bases: the ratio stays 1, a run goes on to the bit, adapters fit the weights as they were published
KINDS = {"int8": "Int8Tensor", "fp8": "Float8Tensor"}


def held(kind: Any, **changes: Any) -> dict[str, Any]:
    return {"model": {"quantize": kind}, "iterations": 4, "evaluation": {"every": 2, "num_prompts": 2}, **changes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_quantised_run_is_on_policy_and_goes_on_to_the_bit(folder: Path, model: Path, kind: str) -> None:
    """The ratio is exactly 1 in the first update of every iteration, and goes on from its checkpoint."""
    straight = resumed(runs.config(folder, model, **held(kind, iterations=3)), folder)
    assert [row["ratio/max_abs_dev"] for row in runs.rows(straight) if row["step"]] == [0.0] * 3
    assert {tensor.dtype for tensor in runs.last_state(straight).tensors["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quantised(model: Path, kind: str) -> None:
    pipe = load_pipeline(Model(path=str(model), quantize=kind))
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            linear = [m for m in component.modules() if isinstance(m, torch.nn.Linear)]
            kinds = {type(module.weight.data).__name__ for module in linear}
            # transformers leaves the last projection of an encoder as it is
            wanted = {"Tensor"} if name == "vae" else {KINDS[kind]}
            assert kinds == wanted or (name.startswith("text_encoder") and kinds == {"Tensor", KINDS[kind]}), name
    one = load_pipeline(Model(path=str(model), quantize={"transformer": kind}))
    assert type(one.components["text_encoder"].text_model.encoder.layers[0].mlp.fc1.weight.data) is torch.Tensor


def test_the_adapter_fits_the_weights_that_were_published(folder: Path, model: Path) -> None:
    """In plain diffusers; and a full export is the merge into them."""
    run = train(runs.config(folder, model, **held("int8", optimizer={"lr": 0.1}, iterations=2)))
    published = DiffusionPipeline.from_pretrained(model)
    before = runs.picture(published)
    published.load_lora_weights(run / "lora")
    result = runs.picture(published)
    quantised = load_pipeline(Model(path=str(model), quantize="int8"))
    load_lora(quantised, str(run / "lora"))
    change = np.abs(result - before).mean()
    assert change > 1e-3
    assert np.abs(result - runs.picture(quantised)).mean() < 0.2 * change  # what is left is the rounding of the base
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(runs.picture(merged), result, atol=1e-3)
    assert type(merged.transformer.transformer_blocks[0].attn.to_q.weight.data) is torch.Tensor


def test_refused_before_anything_is_loaded(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[Any, str]] = [({"text_encoder_4": "int8"}, r"text_encoder_4: StableDiffusion3Pipeline has no")]
    if not torch.cuda.is_available():
        refused.append(("nf4", r"model.quantize: nf4 .*asks for a GPU.*write int8 or fp8"))
    for quantize, says in refused:
        with pytest.raises(ValueError, match=says):
            load_pipeline(Model(path=str(model), quantize=quantize))
    monkeypatch.setattr("genrl.config.sections.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model.quantize: int8 .* not installed: pip install torchao"):
        load_pipeline(Model(path=str(model), quantize="int8"))
