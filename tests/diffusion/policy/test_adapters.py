"""Adapters of every type, of text encoders too: replay, plain diffusers' files, merging, going on, frozen ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config import LoRA
from genrl.diffusion.files.export import export, save_lora
from genrl.diffusion.policy.adapters import activate, load_lora, trainable
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.train import open_policy, trainable_weights
from genrl.runtime.folder import checkpoint
from genrl.runtime.weights.weights import REFERENCE, Weights
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import resumed
from tests.diffusion.tiny_parts import KEYS, PROMPTS
from tests.run_folders import tiered

BATCH = Batch([*PROMPTS], [*KEYS], {**runs.CALL, "num_inference_steps": 3})


def made(**keys: Any) -> tuple[Policy, Weights]:
    policy = Policy(FAMILIES["sd3"]().pipe)
    lora = LoRA.model_validate({"rank": 4, "alpha": 8.0} | keys)
    return policy, trainable(policy.denoisers, lora, pipe=policy.pipe)


@torch.no_grad()
def sample(policy: Policy) -> Tensor:
    return policy.generate(BATCH)


def saved(folder: Path, seed: int = 0, **keys: Any) -> tuple[Policy, Path]:
    policy, weights = made(**keys)
    runs.move(weights, seed)
    save_lora(policy, folder, BATCH)
    return policy, folder


def test_ranks_of_layers_keep_the_scale_and_encoders_that_diffusers_does_not_load_are_refused(tmp_path: Path) -> None:
    policy, weights = made(ranks={"transformer": 6, r"0\.attn\.to_q": 2})
    ranks = {key.split(".lora_A")[0]: p.shape[0] for key, p in weights.named.items() if ".lora_A." in key}
    assert {rank for key, rank in ranks.items() if key.endswith("0.attn.to_q")} == {2}
    assert {rank for key, rank in ranks.items() if not key.endswith("0.attn.to_q")} == {6}
    scales = {m.scaling["default"] for m in policy.denoiser.modules() if hasattr(m, "scaling") and m.scaling}
    assert scales == {2.0}
    runs.move(weights)
    save_lora(policy, tmp_path / "lora", BATCH)
    with pytest.raises(ValueError, match=r"model\.lora\.ranks: no adapted layer's name ends in to_query"):
        made(ranks={"to_query": 2})
    policy = Policy(FAMILIES["lumina2"]().pipe, trains_encoders=True)
    with pytest.raises(ValueError, match="diffusers loads no adapters of a Lumina2Pipeline's text encoders"):
        trainable(policy.denoisers, LoRA(rank=4, text_encoders=True), pipe=policy.pipe)


def test_goes_on_from_a_file_and_refers_to_it(tmp_path: Path) -> None:
    """From the file alone: rank and alpha are its own. One of another model is refused."""
    first, folder = saved(tmp_path / "lora", rank=2, alpha=6.0, type="dora")
    policy = Policy(FAMILIES["sd3"]().pipe)
    weights = trainable(policy.denoisers, LoRA.model_validate({"from": str(folder)}), pipe=policy.pipe)
    weights.snapshot(REFERENCE)
    config = policy.denoiser.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_dora) == (2, 6, True)
    start = sample(policy)
    assert torch.equal(start, sample(first)) and weights.is_lora
    runs.move(weights, 1)
    assert not torch.equal(sample(policy), start)
    with weights.reference():
        assert torch.equal(sample(policy), start)
    save_lora(policy, tmp_path / "again", BATCH)
    flux = Policy(FAMILIES["flux"]().pipe)
    with pytest.raises(ValueError, match="is of another model"):
        trainable(flux.denoisers, LoRA.model_validate({"from": str(folder)}), pipe=flux.pipe)


def test_frozen_ones_stay_active_and_as_they_are(tmp_path: Path) -> None:
    """Training one beside two: they act, have no gradient, and are no part of what is saved."""
    _, one = saved(tmp_path / "one", 1)
    _, two = saved(tmp_path / "two", 2, rank=2)
    base = FAMILIES["sd3"]().pipe
    load_lora(base, str(one), "one")
    load_lora(base, str(two), "two")
    base.set_adapters(["one", "two"])
    plain = Policy(base)
    expected = sample(plain)
    policy, weights = made(frozen=[str(one), str(two)])
    weights.snapshot(REFERENCE)
    assert torch.equal(sample(policy), expected)
    names = {name for name, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert names == {key.removeprefix("transformer.") for key in weights.named}
    kept = {n: p.clone() for n, p in policy.denoiser.named_parameters() if ".frozen_" in n}
    assert kept and all(".default." in name for name in names)
    runs.move(weights)
    after = sample(policy)
    assert not torch.equal(after, expected)
    save_lora(policy, tmp_path / "trained", BATCH)
    assert torch.equal(sample(policy), after)
    assert {name for name, p in policy.denoiser.named_parameters() if p.requires_grad} == names
    assert all(torch.equal(p, kept[n]) for n, p in policy.denoiser.named_parameters() if n in kept)
    with weights.reference():
        assert torch.equal(sample(policy), expected)
    load_lora(base, str(tmp_path / "trained"), "trained")
    base.set_adapters(["trained", "one", "two"])
    torch.testing.assert_close(sample(plain), after, rtol=1e-5, atol=1e-5)
    activate(policy.denoiser)
    assert torch.equal(sample(policy), after)


BOTH = {"text_encoder", "text_encoder_2"}
ENCODERS = {"sd15": {"text_encoder"}, "sdxl": BOTH, "sd3": BOTH, "flux": {"text_encoder"}}
KERNELS = {"sd15": Kernel("ddim", 1.0), "sdxl": Kernel("ddim", 1.0)}
ON: dict[str, Any] = {"model": {"lora": {"rank": 4, "alpha": 8, "text_encoders": True}}}


def moved(family: str) -> tuple[Policy, Weights, Batch]:
    result = FAMILIES[family]()
    policy = Policy(result.pipe, trains_encoders=True)
    weights = trainable(policy.denoisers, LoRA(rank=4, alpha=8.0, text_encoders=True), pipe=policy.pipe)
    runs.move(weights)
    return policy, weights, result.batch(num_inference_steps=3).take([0, 1, 0])


@pytest.mark.parametrize("family", tiered(ENCODERS, ("sd3",)))
def test_replay_gradients_reference_and_file(family: str, tmp_path: Path) -> None:
    """On policy, with gradients in every encoder; without adapters the loaded pipeline; the file loads in diffusers."""
    policy, weights, batch = moved(family)
    assert {name.partition(".")[0] for name in weights.named} - policy.denoisers.keys() == ENCODERS[family]
    assert all(p.dtype == torch.float32 for p in weights.parameters)
    with torch.no_grad():
        trajectory = policy.roll_out(batch, KERNELS.get(family, Kernel("flow_sde", 0.7)), (0, 1))
    replayed = policy.replay(trajectory.step(1))
    assert torch.equal(replayed.log_prob.detach(), trajectory.log_probs[1])
    replayed.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    for encoder in ENCODERS[family]:
        grads = [p.grad for name, p in weights.named.items() if name.startswith(f"{encoder}.")]
        assert any(grad is not None and bool(grad.abs().max() > 0) for grad in grads)
    save_lora(policy, tmp_path, batch.take([0]))
    plain = FAMILIES[family]().pipe
    with torch.no_grad():
        untouched, wanted = Policy(FAMILIES[family]().pipe).roll_out(batch).final, policy.roll_out(batch).final
        assert not torch.equal(wanted, untouched)
        with weights.reference():
            assert torch.equal(policy.roll_out(batch).final, untouched)
        load_lora(plain, str(tmp_path))
        torch.testing.assert_close(Policy(plain).roll_out(batch).final, wanted, rtol=1e-4, atol=1e-4)


def test_stored_encodings_are_refused_beside_a_frozen_one_of_an_encoder(folder: Path, model: Path) -> None:
    policy, _, batch = moved("sd3")
    save_lora(policy, folder / "lora", batch)
    kept = {"encodings": str(folder / "kept"), "lora": {"frozen": [str(folder / "lora")]}}
    with pytest.raises(ValueError, match=r"model.encodings: a LoRA of model.lora.frozen adapts the text_encoder"):
        trainable_weights(config := runs.config(folder, model, model=kept), open_policy(config, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo", "kl_weight": 0.01}, {"algorithm": "diffusion_nft"}])
def test_a_run_resumes_to_the_bit(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    config = runs.config(folder, model, trainer=trainer, **ON)
    run = resumed(config, folder)
    one, two = (checkpoint.load(run / "checkpoints" / f"step-{k:06d}").tensors["weights"] for k in (1, 2))
    changed = {name.partition(".")[0] for name, value in two.items() if not torch.equal(one[name], value)}
    assert changed == {"transformer", "text_encoder", "text_encoder_2"}
    rows = runs.rows(run)[1:]
    assert all(row["updates"] > 0 for row in rows)
    assert rows[0].get("ratio/max_abs_dev", 0.0) == 0.0
    export(run, folder / "whole", full=True)  # it compares what it merged with the run's
    with pytest.raises(ValueError, match="text encoders are adapted, too"):
        export(run, folder / "kohya", form="kohya")
