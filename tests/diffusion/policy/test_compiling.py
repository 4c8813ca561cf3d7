"""A compiled denoiser: replay is what sampling was, names stay, and what does not fit is said. Inductor needs a minute
per graph, so most tests compile by torch's back-end `eager`, which traces and guards alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genrl.diffusion.policy import compiling
from genrl.diffusion.policy.adapters import trainable
from genrl.diffusion.policy.blocks import Switches, install
from genrl.diffusion.policy.compiling import compile_denoisers
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Kernel
from genrl.diffusion.steps.transitions import off_policy
from genrl.diffusion.train import train
from genrl.kernels.machine import compile_problem
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.run_folders import tiered


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_run_is_the_same_with_the_same_names(folder: Path, model: Path, traced: None, capsys: Any) -> None:
    """A divergence runs the model without its adapter: a graph of its own."""
    result = {}
    for compiled in (False, True):
        trainer = {"algorithm": "flow_grpo", "kl_weight": 0.1}
        output = str(folder / f"run-{compiled}")
        run = train(runs.config(folder, model, trainer=trainer, kernels={"compile": compiled}, output=output))
        assert [row["ratio/max_abs_dev"] for row in runs.rows(run)[1:]] == [0.0, 0.0]
        result[compiled] = runs.last_state(run).tensors["weights"]
    assert result[True].keys() == result[False].keys()
    for key, tensor in result[True].items():
        torch.testing.assert_close(tensor, result[False][key], atol=1e-5, rtol=1e-4)
    said = capsys.readouterr().err
    assert "compiled in" in said and "(2 of at most 16 times)" in said and "(3 of" not in said
    torch._dynamo.reset()
    assert runs.differences(run, runs.resumed(run, folder, 1)) == []


TRACED = (
    *("sd15", "sdxl", "sd3", "flux", "chroma", "sana", "qwen_image", "hidream", "z_image", "hunyuan_dit"),
    *("wan22", "ltx", "hunyuan_video", "mochi", "cogvideox", "ace_step"),
)
"""A pipeline of each kind of denoiser: the others are called alike."""


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(TRACED, ("sd15",)))
def test_no_pipeline_compiles_at_every_step(name: str, traced: None) -> None:
    """At most once per prediction and shape, but for parts that torch cuts; replay is the record."""
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    policy.denoiser.requires_grad_(True)
    lines: list[str] = []
    compile_denoisers(policy.denoisers.values(), say=lines.append)
    kernel = Kernel("ddim", 1.0) if policy.head.parametrisation == "diffusion" else Kernel("flow_sde", 0.7)
    with torch.no_grad():
        recorded = policy.roll_out(family.batch(), kernel, (0, 1, 2))
    for i, log_prob in recorded.log_probs.items():
        assert torch.equal(policy.replay(recorded.step(i)).log_prob.detach(), log_prob)
    assert 1 <= len(lines) <= 4 and len(recorded.log_probs) >= 2


def test_inputs_that_change_with_every_call_are_refused(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until sizes are halved, and counted anew."""
    monkeypatch.setattr(compiling, "MOST", 2)
    lines: list[str] = []
    denoiser = nn.Linear(2, 2)
    compile_denoisers([denoiser], say=lines.append)
    for rows in (1, 2, 1, 2):
        denoiser(torch.ones(rows, 2))
    assert [line.rsplit(" (")[1] for line in lines] == ["1 of at most 2 times)", "2 of at most 2 times)"]
    with pytest.raises(RuntimeError, match=r"kernels.compile: Linear was compiled 3 times, .* 0 \[3, 2\]: its inputs"):
        denoiser(torch.ones(3, 2))
    compiling.start_over([denoiser])
    denoiser(torch.ones(4, 2))
    assert lines[-1].rsplit(" (")[1] == "1 of at most 2 times)"


def test_what_cannot_be_compiled_is_said_before_work_starts(folder: Path, model: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"kernels.compile: CUDA graphs are of GPUs, and the model is on cpu"):
        train(runs.config(folder, model, kernels={"compile": "cuda_graphs"}))
    monkeypatch.setenv("PATH", "")
    assert compile_problem(torch.device("cpu")) == "there is no C++ compiler (g++ or clang++)"
    # a ratio that is not one names the switch
    assert off_policy(0.0, 1e-4, compiled=True) is None
    assert off_policy(1e-7, 1e-4) is not None
    with pytest.raises(RuntimeError, match=r"off by 1e-07, more than 0: .*kernels.compile: false"):
        off_policy(1e-7, 1e-4, compiled=True)


def test_snapshots_that_graphs_were_recorded_of_are_exchanged_by_copies() -> None:
    policy = Policy(FAMILIES["sd3"]().pipe)
    weights = trainable(policy.denoisers, None)
    weights.snapshot("old")
    torch._foreach_mul_([p.data for p in weights.parameters], 1.1)
    weights.by_copy = True
    before = {key: (p.data_ptr(), p.detach().clone()) for key, p in weights.named.items()}
    with weights.use("old"):
        assert all(torch.equal(p, weights.snapshots["old"][key]) for key, p in weights.named.items())
        assert all(p.data_ptr() == before[key][0] for key, p in weights.named.items())
    assert all(torch.equal(p, before[key][1]) for key, p in weights.named.items())


@pytest.mark.slow
def test_unequal_noise_levels_need_no_graph_per_group(folder: Path, model: Path, traced: None, capsys: Any) -> None:
    """Guided SD3 takes one timestep per call: 8 samples at levels of their own would be groups of any size."""
    sampling = {"guidance_scale": 3.0, "prompts_per_iteration": 4, "group_size": 4, "batch_size": 8}
    changes: dict[str, Any] = {"kernels": {"compile": True}, "evaluation": {"every": 0}}
    train(runs.config(folder, model, trainer={"algorithm": "diffusion_nft"}, sampling=sampling, **changes))
    said = capsys.readouterr().err
    assert "(3 of at most 16 times)" in said and "(4 of at most 16 times)" not in said


EVERYWHERE: dict[str, Any] = {
    "kernels": {"fused": True, "attention": "auto", "compile": True},
    "model": {"autocast": "bfloat16", "offload": {"text_encoders": "between"}, "slice_vae": True},
    "sampling": {"guidance_scale": 3.0, "score_in_background": True},
    "optimizer": {"lr": 1e-3},
}
SWITCHES: dict[str, dict[str, Any]] = {  # what does not go together, apart
    "kept graphs": {"trainer": {"keep_graph": True}, "evaluation": {"every": 1}},
    "trees": {"trainer": {"tree": {"ways": 2}, "window": {"size": 1}, "tail_ratio": 0.5}},
    "least memory": {
        "trainer": {"kl_weight": 0.01},
        "model": {"gradient_checkpointing": True},
        "sampling": {"fit_batch": True, "prompts_per_iteration": 4},
    },
    "no guidance in training": {"trainer": {"guidance_in_training": False, "window": {"size": 2}}},
}


@pytest.mark.parametrize("name", tiered(SWITCHES, ()))
def test_with_every_switch_on_the_first_ratio_is_one(folder: Path, model: Path, traced: None, name: str) -> None:
    names = {*EVERYWHERE, *SWITCHES[name]}
    sections = {section: EVERYWHERE.get(section, {}) | SWITCHES[name].get(section, {}) for section in names}
    sections["trainer"]["algorithm"] = "flow_grpo"
    run = train(runs.config(folder, model, **{"evaluation": {"every": 0}, **sections}, iterations=1))
    row = runs.rows(run)[-1]
    assert row["ratio/max_abs_dev"] == 0.0 and row["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_by_inductor_the_ratio_is_one(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where its graphs with and without gradients differ by 0.06 of the model's output."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else it fills a folder beside pytest's
    family = FAMILIES["sd3"]()
    family.pipe.transformer.transformer_blocks = family.pipe.transformer.transformer_blocks[1:]  # a minute each
    policy = Policy(family.pipe, autocast=torch.bfloat16)
    policy.denoiser.requires_grad_(True)
    if fused:
        install(policy.denoisers.values(), Switches(fused=True))
    else:
        compile_denoisers(policy.denoisers.values())
    names = set(policy.denoiser.state_dict())
    with torch.no_grad():
        recorded = policy.roll_out(family.batch(), Kernel("flow_sde", 0.7), (0, 1, 2))
    for i in (0, 1, 2):
        again = policy.replay(recorded.step(i))
        assert torch.equal(again.log_prob.detach(), recorded.log_probs[i])
    again.log_prob.sum().backward()
    gradients = [p.grad for p in policy.denoiser.parameters() if p.grad is not None]
    assert gradients and all(bool(g.isfinite().all()) for g in gradients)
    assert set(policy.denoiser.state_dict()) == names
