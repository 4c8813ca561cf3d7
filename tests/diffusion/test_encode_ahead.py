"""Prompts encoded before training: what is drawn is the same, the encoders are gone, and the disk serves other runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genrl.diffusion import before
from genrl.diffusion.policy.encoding import NotEncoded
from genrl.diffusion.policy.encoding_store import Store, open_store
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.train import encode, open_policy, train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.run_folders import tiered

AHEAD = {"text_encoders": "encode_then_free"}


def quiet(done: int, count: int) -> None: ...


def encoded_ahead(name: str, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of these prompts, plain and with encodings made ahead, pairwise."""

    def batch(*prompts: str) -> Batch:
        call = {"num_inference_steps": 2, **FAMILIES[name]().call}
        return Batch([*prompts], [("k", k) for k in range(len(prompts))], call)

    wanted = Policy(FAMILIES[name]().pipe).roll_out(batch(*texts)).final
    pipe: Any = FAMILIES[name]().pipe
    encoders = {part: getattr(pipe, part) for part in before.text_encoders(pipe) if getattr(pipe, part)}
    for part in encoders:
        setattr(pipe, part, None)
    policy = Policy(pipe, text_encoders="encode_then_free")
    with policy.memo.present(encoders):
        for text in texts:
            policy.calls.encode(batch(texts[0], text))
    assert policy.memo.encoders == []
    return wanted, policy.roll_out(batch(*texts)).final


@pytest.mark.parametrize("name", tiered("sd15 sdxl flux flux2 lumina2 sana z_image wan22 ltx".split(), ("flux",)))
def test_samples_are_the_same(name: str) -> None:
    wanted, actual = encoded_ahead(name, ["a red star", "two blue dogs in a large garden", "a red star"])
    assert torch.equal(wanted, actual)


@pytest.mark.parametrize("name", tiered(["cogview4", "qwen_image"], ("qwen_image",)))
def test_encodings_of_unequal_length_cannot_be_made_ahead(name: str) -> None:
    with pytest.raises(ValueError, match=r"model.offload.text_encoders: .* to different lengths.*write between"):
        encoded_ahead(name, ["a red star", "two blue dogs in a large garden"])


def test_the_encoders_alone_are_placed_and_gone(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here: what is asked to move to it, in order."""
    moved: list[str] = []
    to = nn.Module.to

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved.append(type(self).__name__)
        return to(self, *args, **kwargs)

    load = before.load_components

    def loaded(*args: Any) -> dict[str, nn.Module]:
        result = load(*args)
        monkeypatch.setattr(nn.Module, "to", watched)
        return result

    monkeypatch.setattr(before, "load_components", loaded)
    policy = open_policy(runs.config(folder, model, model={"offload": AHEAD}), "cpu")
    assert moved == ["CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"]
    assert [policy.pipe.components[f"text_encoder{n}"] for n in ("", "_2", "_3")] == [None, None, None]
    with pytest.raises(NotEncoded, match=r"model.offload.text_encoders: .*'another prompt'.*write between"):
        policy.pipe.encode_prompt(["another prompt"], ["another prompt"], ["another prompt"])


def test_a_full_folder_needs_no_text_encoder_and_tells_models_apart(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`genrl encode`, then a run that does not load them and draws the same; with guidance in evaluation alone. Other
    precision or encoders, other encodings; and a prompt more is encoded alone."""
    common = {"evaluation": {"every": 2, "num_prompts": 2, "guidance_scale": 3.0}}
    plain = train(runs.config(folder, model, **common))
    kept = {"offload": AHEAD, "encodings": str(folder / "encodings")}
    config = runs.config(folder, model, **common, model=kept, output=str(folder / "other"))
    count, new, written = encode(config, "cpu", quiet)
    assert (count, new) == (6, 6) and written > 0  # 4 prompts to train on, 2 held-out ones
    assert encode(config, "cpu", quiet) == (6, 0, 0)
    for changes in ({"dtype": "bfloat16"}, {"quantize": "int8"}, {"without": ["text_encoder_3", "tokenizer_3"]}):
        assert encode(runs.config(folder, model, **common, model=kept | changes), "cpu", quiet)[1] == 6
    (folder / "more.txt").write_text("\n".join([*runs.HELD_OUT, "six cats"]))
    more = {"evaluation": common["evaluation"] | {"num_prompts": 3}, "prompts": {"eval": str(folder / "more.txt")}}
    assert encode(runs.config(folder, model, **more, model=kept), "cpu", quiet)[:2] == (7, 1)
    monkeypatch.setattr(before, "load_components", lambda *_: pytest.fail("a text encoder was loaded"))
    assert runs.differences(plain, train(config)) == []


def test_a_pipelines_files_are_known_but_for_its_denoisers(folder: Path, model: Path) -> None:
    code, own, result = folder / "own.py", folder / "own", set()
    shutil.copytree(model, own)
    kept = {"path": str(own), "pipeline": f"{code}:Mine", "encodings": str(folder / "encodings")}
    config = runs.config(folder, model, model=kept)
    for file in (code, *(own / name for name in ("model_index.json", "vae/a/more.json", "transformer/config.json"))):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{file.read_text() if file.exists() else '{}'} ")
        store = open_store(config, torch.device("cpu"))
        result.add(store and store.identity)
    assert len(result) == 3


def test_the_store_is_bounded_and_survives_damage(tmp_path: Path) -> None:
    value, size = (torch.arange(1000.0), None, [torch.ones(2, 3, dtype=torch.bfloat16), "text"], 3), 5_000
    store, again, another = (Store(tmp_path, name, 5 * size) for name in ("identity", "identity", "another"))
    one = store.name(("a", 1))
    assert store.read(one) is None
    store.write(one, value)
    result = again.read(one)
    assert result is not None and torch.equal(result[0][0], value[0]) and torch.equal(result[0][2][0], value[2][0])
    assert result[0][1] is None and result[0][2][1] == "text" and result[0][3] == 3
    assert another.read(another.name(("a", 1))) is None
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert store.read(one) is None and not file.exists()
    for k in range(20):  # of five processes
        Store(tmp_path, "identity", 5 * size).write(store.name(("b", k)), value)
        assert store.read(store.name(("b", 0))) is not None  # used at every step, so never the oldest
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 5 * size
    assert store.read(store.name(("b", 1))) is None and store.read(store.name(("b", 19))) is not None
    with pytest.raises(ValueError, match=r"model.encodings: the encodings of this run alone take more"):
        for k in range(10):
            store.write(store.name(("c", k)), value)


def test_refused_where_there_is_no_folder_or_no_room(folder: Path, model: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"model.encodings: no folder is named"):
        encode(runs.config(folder, model), "cpu", quiet)
    monkeypatch.setattr(before.os, "sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"model.encodings: 6 encodings take about .* half of this machine's memory"):
        open_policy(runs.config(folder, model, model={"offload": AHEAD}), "cpu")
