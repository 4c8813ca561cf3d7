"""A denoiser in shards over two processes (gloo), without training: see test_distributed for whole runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genrl.runtime.folder import checkpoint
from tests.diffusion import runs, shards

pytestmark = pytest.mark.slow


def run(folder: Path, target: Callable[..., None], *arguments: object) -> None:
    processes = runs.start_ranks(2, target, str(folder), *arguments, log=folder / "log")
    codes = runs.wait(processes, 180)
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in folder.glob("log*"))


@pytest.mark.parametrize("halfway", [False, True])
def test_velocities_of_unequal_levels(tmp_path: Path, halfway: bool) -> None:
    """Guided SD3 does not take one timestep per sample, which shows before its denoiser is called; another model's
    denoiser may raise within. The processes have one and two different noise levels."""
    run(tmp_path, shards.velocities, halfway)
    for rank in range(2):
        actual = load_file(tmp_path / f"velocity-{rank}.safetensors")
        wanted = shards.moved(*shards.tiny(sharded=False), rank, 1.0 if halfway else 4.5)
        for k, velocity in enumerate(wanted):
            torch.testing.assert_close(actual[str(k)], velocity, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(wanted[0], wanted[1], rtol=1e-2) and torch.equal(actual["0"], actual["2"])


def test_no_process_gathers_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, shards.states)
    assert [(tmp_path / f"whole-{rank}").read_text() for rank in range(2)] == ["0", "0"]
    path = tmp_path / "step-000001"
    saved = checkpoint.load(path).tensors
    _, untrained = shards.tiny(sharded=False)
    assert saved.keys() == {"weights", "snapshot-average", "optimizer"}
    assert saved["weights"].keys() == saved["snapshot-average"].keys() == untrained.named.keys()
    assert len(saved["optimizer"]) == 3 * len(untrained.named)  # two moments and the count of each
    assert all(torch.equal(saved["snapshot-average"][key], p) for key, p in untrained.named.items())
    assert all(saved["weights"][key].shape == p.shape for key, p in untrained.named.items())
    assert any(not torch.equal(saved["weights"][key], p) for key, p in untrained.named.items())
    written = [sum(file.stat().st_size for file in (path / "shards").rglob(f"shard-{rank:05d}-*")) for rank in (1, 2)]
    assert 0.4 < written[0] / sum(written) < 0.6


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_our_blocks_in_shards(tmp_path: Path, family: str) -> None:
    """They are put in before the blocks are sharded, and run with the weights that FSDP gathers for these."""
    run(tmp_path, shards.fused, family)
    gradients: dict[str, torch.Tensor] = {}
    for rank in range(2):
        actual = load_file(tmp_path / f"fused-{rank}.safetensors")
        with torch.compiler.set_stance("force_eager"):  # a compiled block costs a minute
            wanted = shards.replayed(*shards.tiny(False, shards.ALL, family), family, rank)
        for i in (0, 1):
            assert torch.equal(actual[f"recorded-{i}"], actual[f"replayed-{i}"])
            torch.testing.assert_close(actual[f"recorded-{i}"], wanted[f"recorded-{i}"], rtol=1e-5, atol=1e-6)
        for key in wanted.keys() - {f"{kind}-{i}" for kind in ("recorded", "replayed") for i in (0, 1)}:
            gradients[key] = gradients.get(key, 0.0) + wanted[key] / 2  # FSDP leaves the mean of the processes'
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max() + 1))
