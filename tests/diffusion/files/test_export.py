"""Trained weights in plain diffusers: the same pictures, pixel for pixel, or no file at all."""

import ast
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.loaders import StableDiffusionLoraLoaderMixin
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from genrl.config import LoRA, dump
from genrl.data import prompts
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.files import formats
from genrl.diffusion.files.export import ExportError, export, probe_of, save_lora, write_card
from genrl.diffusion.files.formats import form_problem
from genrl.diffusion.policy.adapters import loads_lora, trainable
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.sample import load, sample
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run, write_atomic
from genrl.runtime.weights.weights import Weights
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES, saved

ARGUMENTS: dict[str, Any] = {**runs.CALL, "num_inference_steps": 3, "guidance_scale": 2.0}
PROBE = Batch(["a red star"], [("probe", 0)], ARGUMENTS)
PROMPTS = ["a red star", "two blue dogs"]
WEIGHTS = "pytorch_lora_weights.safetensors"


def moved() -> tuple[Policy, Weights]:
    policy = Policy(FAMILIES["sd3"]().pipe)
    weights = trainable(policy.denoisers, LoRA(rank=4, alpha=16.0))
    runs.move(weights, size=0.2)
    return policy, weights


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    runs.write_folder(folder)
    changes = {"optimizer": {"lr": 0.1}, "iterations": 2, "checkpoint": {"every": 1}, "ema": {"decay": 0.5}}
    return train(runs.config(folder, model, **changes))


def picture(pipe: Any, seed: int, prompt: str = PROMPTS[0]) -> np.ndarray:
    """As files have it, of eight bits."""
    return (runs.picture(pipe, seed, prompt, **ARGUMENTS) * 255).round().astype(np.uint8)


def test_adapter_in_plain_diffusers_is_what_genrl_samples(trained: Path, model: Path, tmp_path: Path) -> None:
    paths = sample(
        load(Model(path=str(model)), str(trained / "lora")), PROMPTS, tmp_path / "ours", seed=7, arguments=ARGUMENTS
    )
    pipe = DiffusionPipeline.from_pretrained(model)
    untrained = picture(pipe, 7)
    pipe.load_lora_weights(trained / "lora")
    for k, path in enumerate(paths):
        assert np.array_equal(np.asarray(Image.open(path)), picture(pipe, 7 + k, PROMPTS[k]))
    assert not np.array_equal(untrained, picture(pipe, 7))


def test_every_checkpoint_holds_the_averaged_adapter(trained: Path) -> None:
    for step in (1, 2):
        folder = Run(trained).checkpoints / f"step-{step:06d}"
        average = load_file(folder / "snapshot-average.safetensors")
        adapter = load_file(folder / "lora" / WEIGHTS)
        assert len(adapter) == len(average) > 0
        for key, tensor in average.items():
            assert torch.equal(adapter[key.replace(".default.weight", ".weight")], tensor)
    last = load_file(folder / "lora" / WEIGHTS)
    final = load_file(trained / "lora" / WEIGHTS)
    assert all(torch.equal(final[key], tensor) for key, tensor in last.items())
    present = load_file(folder / "weights.safetensors")
    assert any(not torch.equal(present[key], average[key]) for key in present)


def corrupt(path: Path, how: str) -> None:
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata() or {})
    tensors = load_file(path)
    if how == "value":
        next(t for key, t in sorted(tensors.items()) if "lora_B" in key)[0, 0] += 0.5
    elif how == "names":
        tensors = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
    else:
        metadata.clear()
    save_file(tensors, path, metadata=metadata)


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    **{how: functools.partial(corrupt, how=how) for how in ("value", "names", "metadata")},
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "gone": Path.unlink,
}


def corrupting(monkeypatch: pytest.MonkeyPatch, how: str, call: int = 0) -> None:
    """From now on, between writing and reading back in that call."""
    kind = type(FAMILIES["sd3"]().pipe)
    write, calls = kind.save_lora_weights, iter(range(100))

    @functools.wraps(write)
    def written(folder: Path, **arguments: Any) -> None:
        write(folder, **arguments)
        if next(calls) == call:
            CORRUPTIONS[how](Path(folder) / WEIGHTS)

    monkeypatch.setattr(kind, "save_lora_weights", staticmethod(written))


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_file_that_does_not_give_the_model_back_is_refused(tmp_path: Path, how: str, monkeypatch: Any) -> None:
    """And the model in training is unharmed, then and after a file that does; random numbers too."""
    policy, weights = moved()
    before, random = policy.generate(PROBE).detach(), torch.get_rng_state()
    names = [(name, p.requires_grad) for name, p in policy.denoiser.named_parameters()]
    with monkeypatch.context() as patch:
        corrupting(patch, how)
        with pytest.raises(ExportError, match="the adapter in .*lora"):
            save_lora(policy, tmp_path / "lora", PROBE)
    for again in (False, True):
        assert torch.equal(policy.generate(PROBE), before) and torch.equal(torch.get_rng_state(), random)
        assert [(name, p.requires_grad) for name, p in policy.denoiser.named_parameters()] == names
        assert list(policy.denoiser.peft_config) == ["default"] and all(p.requires_grad for p in weights.parameters)
        if not again:
            save_lora(policy, tmp_path / "again", PROBE)


def test_a_failed_export_fails_the_checkpoint(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint under its final name holds an adapter that was not proven."""
    corrupting(monkeypatch, "value", call=1)
    config = runs.config(folder, model, iterations=3, evaluation={"every": 0})
    with pytest.raises(ExportError):
        train(config)
    assert runs.last_state(Path(config.output)).step == 2  # saved again when the run ended, and proven then
    train(config, Path(config.output))  # the file system is well again
    assert runs.last_state(Path(config.output)).step == 3


def test_a_loader_of_another_denoiser_is_none() -> None:
    class UNetOnly(DiffusionPipeline, StableDiffusionLoraLoaderMixin):
        """As PRXPipeline has."""

    policy, _ = moved()
    assert loads_lora(policy.pipe, policy.denoisers)
    assert not loads_lora(UNetOnly(), policy.denoisers) and not loads_lora(DiffusionPipeline(), policy.denoisers)


@pytest.mark.parametrize("ema", [{"decay": 0.5}, None], ids=["average", "no average"])
def test_export_of_full_fine_tuning(folder: Path, model: Path, ema: dict[str, float] | None) -> None:
    changes: dict[str, Any] = {"iterations": 1, "evaluation": {"every": 0}}
    run = train(runs.config(folder, model, lora=None, optimizer={"lr": 1e-2}, ema=ema, **changes))
    assert not (run / "lora").exists()
    out = export(run, folder / "out")
    pipe = DiffusionPipeline.from_pretrained(out)
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    wanted = runs.last_state(run).tensors["snapshot-average" if ema else "weights"]
    for key, p in pipe.transformer.named_parameters():
        assert torch.equal(p, wanted[f"transformer.{key}"])
    assert "load_lora_weights" not in (out / "README.md").read_text()


def test_export_of_an_adapter_and_of_the_merged_pipeline(trained: Path, model: Path, tmp_path: Path) -> None:
    adapter = export(trained, tmp_path / "adapter")
    pipe = DiffusionPipeline.from_pretrained(model)
    base = picture(pipe, 5)
    pipe.load_lora_weights(adapter)
    merged = DiffusionPipeline.from_pretrained(export(trained, tmp_path / "merged", full=True))
    assert not hasattr(merged.transformer, "peft_config")
    difference = np.abs(picture(merged, 5).astype(int) - picture(pipe, 5))
    assert difference.max() <= 1  # merging rounds
    assert np.abs(base.astype(int) - picture(pipe, 5)).max() > 1
    first = export(trained, tmp_path / "first", step=1)
    assert not torch.equal(*(next(iter(load_file(f / WEIGHTS).values())) for f in (first, adapter)))


def test_both_experts_are_merged(folder: Path) -> None:
    """Wan 2.2 has two denoisers with an adapter each; diffusers' `fuse_lora` merges the first by default."""
    family = FAMILIES["wan22"]()
    config = runs.config(folder, saved("wan22", folder), lora={"rank": 2, "alpha": 4})
    policy, probe = Policy(family.pipe), family.batch().take([0])
    run = made_run(config, policy, probe, size=0.3)
    merged = Policy(DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True)))
    base = Policy(FAMILIES["wan22"]().pipe)
    wanted, actual, before = (one.roll_out(probe).final for one in (policy, merged, base))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert float((wanted - before).abs().max()) > 0.1
    for name in ("transformer", "transformer_2"):
        pairs = zip(merged.denoisers[name].parameters(), base.denoisers[name].parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs), name


def made_run(config: Config, policy: Policy, probe: Batch, size: float = 0.1) -> Path:
    """The folder of a run that would have ended with an adapter far from its start."""
    weights, run = trainable(policy.denoisers, config.model.lora), Run(Path(config.output))
    runs.move(weights, size=size)
    write_atomic(run.config, dump(config))
    checkpoint.save(
        run.checkpoints, 1, tensors=weights.state(), state={}, keep=1,
        extra=lambda path: save_lora(policy, path / "lora", probe),
    )  # fmt: skip
    return run.folder


def test_export_refuses_with_the_way_out(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint 7; checkpoints there: 2, 1"):
        export(trained, tmp_path / "out", step=7)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is not empty: choose another --out"):
        export(trained, tmp_path / "full")
    copy = Path(shutil.copytree(trained, tmp_path / "damaged"))
    CORRUPTIONS["cut"](Run(copy).checkpoints / "step-000002" / "lora" / WEIGHTS)
    with pytest.raises(Exception, match="is not a complete checkpoint: lora/pytorch_lora_weights.safetensors has"):
        export(copy, tmp_path / "out", step=2)


def test_card_tells_what_was_trained_and_survives_hostile_prompts(trained: Path, model: Path, folder: Path) -> None:
    text = (trained / "lora" / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == str(model) and front["library_name"] == "diffusers"
    assert {"lora", "flow_grpo", "reinforcement-learning"} <= set(front["tags"])
    rows = [row for row in runs.rows(trained) if "eval/brightness_mean" in row]
    before, after = (rows[k]["eval/brightness_mean"] for k in (0, -1))
    assert "| held-out metric | before | after |" in text
    assert rows[0]["step"] == 0 and f"| `eval/brightness_mean` | {before:.4g} | {after:.4g} |" in text
    code = text.split("```python\n")[1].split("```")[0]
    assert 'load_lora_weights("THIS_FOLDER")' in code and json.dumps("three stars") in code
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.keywords)
    arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert arguments == ARGUMENTS | {"guidance_scale": 1.0, "prompt": "three stars"}
    config = runs.config(folder, model)
    prompts = ['a "sign"\n# heading\n<script>alert(1)</script>', "`code`\u202e", "{}"]
    write_card(folder / "card", config, [], prompts)
    text = (folder / "card" / "README.md").read_text()
    assert "\n# heading" not in text
    listed = text.split("among others:")[1]
    assert '- `"a \\"sign\\"\\n# heading\\n<script>alert(1)</script>"`' in listed  # HTML in code is shown
    assert '- ``"`code`\u202e"``' in listed  # fenced by more backticks than it has
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")


# -- A LoRA for other programs: the names that they read, at the strength that was trained, or a refusal
def run_of(folder: Path, family: str, **lora: Any) -> Path:
    """A run of a family with a LoRA far from its start, at a strength that is not 1."""
    made = FAMILIES[family]()
    made.pipe.save_pretrained(folder / "base")
    trainer = {"algorithm": "flow_grpo"} | ({"kernel": "ddim", "noise_level": 1.0} if family == "sd15" else {})
    keys: dict[str, Any] = {"lora": {"rank": 4, "alpha": 6.0} | lora, "sampling": {"pipeline_args": {}}}
    config = runs.config(folder, folder / "base", trainer=trainer, **keys)
    return made_run(config, Policy(made.pipe), probe_of(config, prompts.load(config.prompts.train)[0]))


def render(folder: Path, lora: Path | None) -> torch.Tensor:
    pipe = DiffusionPipeline.from_pretrained(folder / "base")
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    generator = torch.Generator().manual_seed(3)
    made = pipe("a cat", num_inference_steps=3, height=16, width=16, generator=generator, output_type="np")
    return torch.as_tensor(made.images)


@pytest.mark.parametrize(
    ("family", "form"),
    [("sd15", "kohya"), *(pytest.param(of, "comfyui", marks=pytest.mark.slow) for of in ("sd15", "sd3"))],
)
def test_loads_anywhere_as_it_was_trained(folder: Path, family: str, form: Any) -> None:
    run = run_of(folder, family, **({} if form == "comfyui" else {"type": "rslora", "ranks": {"to_q": 2}}))
    out = export(run, folder / "out", form=form)
    names = load_file(out / f"lora_{form}.safetensors")
    start = "transformer." if family == "sd3" else "lora_unet_"
    assert all(name.startswith(start) for name in names)
    plain = export(run, folder / "plain")
    base, wanted, actual = (render(folder, lora) for lora in (None, plain, out))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert float((wanted - base).abs().max()) > 1e-3
    card = (out / "README.md").read_text()
    assert "load_lora_weights" in card and {"kohya": "kohya's names", "comfyui": "ComfyUI's names"}[form] in card
    assert "names" not in (plain / "README.md").read_text()


def test_what_acts_differently_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At another strength, as it would be without the scale."""
    run = run_of(folder, "sd15")

    def weaker(tensors: Any, file: Path, metadata: Any) -> None:
        save_file({k: v / 1.5 if "lora_up" in k else v for k, v in tensors.items()}, file, metadata=metadata)

    monkeypatch.setattr(formats, "save_file", weaker)
    with pytest.raises(ExportError, match="acts differently"):
        export(run, folder / "out", form="kohya")
    assert not (folder / "out").exists()
    with pytest.raises(ValueError, match="--format kohya: is a form of LoRAs"):
        export(run, folder / "out", full=True, form="kohya")


def test_forms_that_are_refused() -> None:
    sd3 = {"transformer": "SD3Transformer2DModel"}
    rows: list[tuple[Any, dict[str, str], str, str]] = [
        ("kohya", sd3, "lora", "write comfyui"),
        ("comfyui", {"transformer": "WanTransformer3DModel"}, "lora", "does not know"),
        ("comfyui", sd3, "lokr", "this is a lokr"),
    ]
    for form, denoisers, kind, says in rows:
        assert says in str(form_problem(form, denoisers, kind))
