"""Adapters of text encoders beside those of the denoiser: trained, switched off for the reference, and loaded again by
plain diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import LoRA
from genrl.diffusion.files.export import export, save_lora
from genrl.diffusion.policy.adapters import load_lora
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.policy.weights import trainable
from genrl.runtime.folder import checkpoint
from genrl.runtime.weights.weights import Weights
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import resumed
from tests.diffusion.policy.tiers import tiered

BOTH = {"text_encoder", "text_encoder_2"}
ENCODERS = {"sd15": {"text_encoder"}, "sdxl": BOTH, "sd3": BOTH, "flux": {"text_encoder"}}
KERNELS = {"sd15": Kernel("ddim", 1.0), "sdxl": Kernel("ddim", 1.0)}
ON: dict[str, Any] = {"model": {"lora": {"rank": 4, "alpha": 8, "text_encoders": True}}}


def moved(family: str) -> tuple[Policy, Weights, Batch]:
    found = FAMILIES[family]()
    policy = Policy(found.pipe, trains_encoders=True)
    weights = trainable(policy.denoisers, LoRA(rank=4, alpha=8.0, text_encoders=True), pipe=policy.pipe)
    runs.move(weights)
    return policy, weights, found.batch(num_inference_steps=3).take([0, 1, 0])


@pytest.mark.parametrize("family", tiered(ENCODERS, ("sd15", "sd3")))
def test_replay_gradients_reference_and_file(family: str, tmp_path: Path) -> None:
    """On policy to the bit, with gradients in every encoder; without adapters it is the pipeline that was loaded; plain
    diffusers loads both from the file."""
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


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo", "kl_weight": 0.01}, {"algorithm": "diffusion_nft"}])
def test_a_run_resumes_to_the_bit(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """And both networks move."""
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


def test_pipelines_without_such_adapters_are_refused() -> None:
    policy = Policy(FAMILIES["lumina2"]().pipe, trains_encoders=True)
    with pytest.raises(ValueError, match="diffusers loads no adapters of a Lumina2Pipeline's text encoders"):
        trainable(policy.denoisers, LoRA(rank=4, text_encoders=True), pipe=policy.pipe)
