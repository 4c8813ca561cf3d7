"""The Python interface: live objects in, the same runs as from a file, and everything taken again on resume."""

import doctest
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image

import genrl
from genrl.config import ConfigError, check_files, load
from genrl.config.method import KINDS, built_in
from genrl.config.plugins import import_file
from genrl.interface.objects import OURS
from genrl.vla.data.lerobot_dataset import write_dataset
from genrl_rewards.given import given, lending, take
from tests import hub_server
from tests.run_folders import rows

SMALL: dict[str, Any] = {"num_inference_steps": 2, "group_size": 4, "prompts_per_iteration": 2, "batch_size": 8}
SMALL |= {"pipeline_args": {"max_sequence_length": 2}}  # of 256 tokens, which would be most of a call's work
PROMPTS = ["a red cube", "two blue stars", "a green circle"]


def warm(images: torch.Tensor) -> torch.Tensor:
    """How much more red than blue."""
    return images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2))


class Bright:
    """An object as a reward."""

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> list[float]:
        return images.mean(dim=(1, 2, 3)).tolist()


@pytest.fixture
def pipe(root: Path) -> Any:
    return DiffusionPipeline.from_pretrained(root / "assets" / "tiny-t2i")


@pytest.fixture(scope="session")
def trained(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The folder of a run of one iteration, to be looked at."""
    model = Path(__file__).parents[2] / "assets" / "tiny-t2i"
    return made_once("interface", lambda folder: small(folder / "run", model=model, iterations=1)) / "run"


def small(output: Path, **given: Any) -> genrl.Result:
    settings: dict[str, Any] = {"prompts": PROMPTS, "rewards": [warm], "sampling": SMALL, "iterations": 2}
    settings |= {"method": genrl.DiffusionNFT(timesteps_per_sample=1, kl_weight=0), "output": output}
    return genrl.train(**{"lora": LoraConfig(r=4, lora_alpha=8), **settings, **given})


def test_a_loaded_pipeline_is_trained_in_place_and_given_back_as_diffusers_has_it(pipe: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    before, scheduler, kind = set(vars(pipe)), pipe.scheduler, type(pipe)
    given = {"rewards": [warm, Bright(), {"name": "shapes", "weight": 0}], "model": pipe}
    given |= {"prompts": [{"prompt": "a red circle", "kind": "one"}]}
    given |= {"on_iteration": lambda loop, row: seen.append((row["step"], row["reward/total_mean"]))}
    result = small(tmp_path / "run", **given)
    assert result.complete and result.folder == tmp_path / "run"
    assert repr(result) == f"<Result: {result.folder}, 2 iterations, complete, LoRA in {result.lora}>"
    assert result.pipeline is pipe and pipe.scheduler is scheduler and type(pipe) is kind and set(vars(pipe)) == before
    assert [step for step, _ in seen] == [row["step"] for row in result.metrics] == [1, 2]
    assert {"reward/warm_mean", "reward/Bright_mean", "reward/shapes_mean"} <= result.metrics[0].keys()
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert config["model"]["lora"]["rank"] == 4 and config["model"]["lora"]["alpha"] == 8.0
    assert [reward["name"] for reward in config["rewards"]] == ["python:warm", "python:Bright", "shapes"]
    assert (result.folder / "config.yaml").read_text().startswith("# python:NAME was an object")
    assert json.loads(Path(config["prompts"]["train"]).read_text()) == {"prompt": "a red circle", "kind": "one"}

    def sample(by: Any) -> np.ndarray:
        call = {"num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "np"}
        return by("a red circle", generator=torch.Generator().manual_seed(0), **call).images[0]

    trained = sample(pipe)
    plain = DiffusionPipeline.from_pretrained(str(config["model"]["path"]).removeprefix("python:"))
    untrained = sample(plain)
    plain.load_lora_weights(result.lora)
    loaded = sample(plain)
    assert np.array_equal(trained, loaded) and not np.array_equal(trained, untrained)
    with pytest.raises(ConfigError, match="has a LoRA on it already"):
        small(tmp_path / "second", model=pipe, iterations=1)
    pipe.unload_lora_weights()
    assert small(tmp_path / "second", model=pipe, iterations=1, lora={"from": str(result.lora)}).complete


def test_an_export_is_pushed_where_it_is_asked_for(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with hub_server.reached(monkeypatch, tmp_path / "cache") as server:
        with pytest.raises(ValueError, match="'stars': this is no name of a repository"):
            genrl.export(trained, tmp_path / "out", push="stars")
        with pytest.raises(ValueError, match="is of a repository; give push"):
            genrl.export(trained, tmp_path / "out", private=True)
        assert not (tmp_path / "out").exists()
        out = genrl.export(trained, tmp_path / "out", push="lab/stars", private=True)
        assert server.private == {"lab/stars": True}
        assert server.repos["lab/stars"] == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert "pytorch_lora_weights.safetensors" in server.repos["lab/stars"]


def test_an_interrupted_run_returns_and_goes_on_with_its_objects_to_the_same_bits(tmp_path: Path, root: Path) -> None:
    model = root / "assets" / "tiny-t2i"
    whole = small(tmp_path / "whole", model=model)

    def stop(loop: Any, metrics: Any) -> None:
        if loop.iteration == 1:
            raise KeyboardInterrupt

    begun = small(tmp_path / "cut", model=model, on_iteration=stop)
    assert not begun.complete and len(begun.metrics) == 1
    assert begun.lora is not None and (begun.lora / "pytorch_lora_weights.safetensors").is_file()
    with pytest.raises(ValueError, match=r"handed over again: rewards\.0\.name: python:warm$"):
        genrl.resume(begun.folder)
    with pytest.raises(ConfigError, match="was an object of a Python script"):  # the command line has no object
        check_files(load(begun.folder / "config.yaml"))
    ended = genrl.resume(begun.folder, rewards=[warm])
    assert ended.complete and rows(ended.folder) == rows(whole.folder)


@pytest.mark.slow
def test_the_command_line_goes_on_where_names_take_the_place_of_objects(trained: Path, tmp_path: Path) -> None:
    from genrl.runtime.loop.frame import train

    again = Path(shutil.copytree(trained, tmp_path / "run"))
    code = tmp_path / "mine.py"
    code.write_text("def warm(images):\n    return images.mean(dim=(1, 2, 3))\n", encoding="utf-8")
    train(load(again / "config.yaml", (f"rewards.0.name={code}:warm", "iterations=2")), again)
    assert [row["step"] for row in rows(again)] == [1, 2]


def question(k: int) -> dict[str, Any]:
    colour = ("red", "blue")[k % 2]
    return {"prompt": "Which colour?", "image": Image.new("RGB", (56, 56), colour), "answer": colour}


def brevity(completions: list[str]) -> list[float]:
    return [1 / (1 + len(text)) for text in completions]


def test_a_loaded_vision_language_model_and_rows_with_pictures(tmp_path: Path, root: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(root / "assets" / "tiny-vlm")
    processor = transformers.AutoProcessor.from_pretrained(root / "assets" / "tiny-vlm")
    before = [p.clone() for p in model.parameters()]
    settings: dict[str, Any] = {"method": "grpo", "optimizer": {"lr": 1e-3}, "iterations": 1}
    settings |= {"tasks": [question(k) for k in range(4)], "rewards": {"exact": 1.0, brevity: 1.0}}
    settings |= {"generation": {"prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 8}}
    result = genrl.train(vlm=model, processor=processor, output=tmp_path / "live", **settings)
    assert result.complete and result.model is model
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    named = genrl.train(vlm=root / "assets" / "tiny-vlm", output=tmp_path / "named", **settings)
    assert rows(result.folder) == rows(named.folder)
    saved = transformers.AutoProcessor.from_pretrained(result.folder / "model")
    assert type(saved) is type(processor)
    with pytest.raises(ValueError, match="needs its processor"):
        genrl.train(vlm=model, output=tmp_path / "no", **settings)


def test_an_environment_from_a_function_and_a_policy_from_a_run(tmp_path: Path, root: Path) -> None:
    simulator = import_file(root / "docs" / "example_simulator.py")
    episodes = (simulator.record(("red", "blue")[n % 2], n) for n in range(4))
    write_dataset(tmp_path / "corners", episodes, fps=10)
    place = {"name": simulator.make, "tasks": ["red", "blue"], "max_steps": 10, "num_envs": 4}
    common: dict[str, Any] = {"environment": place, "evaluation": {"every": 0}, "iterations": 1}
    tree: dict[str, Any] = {"policy": {"new": {"type": "tiny_flow_vla", "horizon": 4, "image_size": 32}}}
    tree |= {"demonstrations": {"dataset": str(tmp_path / "corners")}}
    tree |= {"trainer": {"steps_per_iteration": 2, "algorithm": "sft"}}
    assert genrl.train(tree, output=tmp_path / "sft", **common).complete
    imitated = genrl.resume(tmp_path / "sft", environment=place, iterations=2)  # as it was given to `train`
    tree = {"sampler": {"kind": "flow_sde", "steps": 2}, "environment": {"name": "replaced", "num_envs": 4}}
    ppo = {"policy": imitated.policy, "method": genrl.PPO(epochs=1), "output": tmp_path / "ppo"}
    result = genrl.train(tree, **ppo, **common)
    assert result.complete and result.lora is None and result.metrics[0]["step"] == 1
    written = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert written["environment"]["name"] == "python:make" and written["policy"]["path"].startswith("python:")
    with pytest.raises(ConfigError, match="cannot be sent to another; write 0"):
        elsewhere = common | {"environment": {**place, "workers": 2}}
        genrl.train(policy="assets/tiny-vla", method="ppo", output=tmp_path / "no", **elsewhere)


@pytest.mark.slow
def test_a_method_of_the_script_is_trained_and_taken_again(tmp_path: Path, root: Path) -> None:
    mine = import_file(root / "docs" / "example_method.py").RewardWeighted
    result = small(tmp_path / "run", model=root / "assets" / "tiny-t2i", method=mine(temperature=2.0), iterations=1)
    assert result.metrics[0]["rwr/weight_max"] > 0
    written = yaml.safe_load((result.folder / "config.yaml").read_text())["trainer"]
    assert written["algorithm"] == "python:RewardWeighted" and written["temperature"] == 2.0
    with pytest.raises(ValueError, match="trainer.algorithm: python:RewardWeighted"):
        genrl.resume(result.folder, rewards=[warm], iterations=2)
    assert genrl.resume(result.folder, rewards=[warm], method=mine, iterations=2).complete


def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path: Path, root: Path) -> None:
    for changes, message in (
        ({"rewards": [lambda images: images]}, "a lambda has no name"),
        ({"rewards": [3]}, r"rewards\[0\]: found an object of type int"),
        ({"rewards": 5}, r"rewards\[0\]: found an object of type int"),
        ({"prompts": []}, "there are no rows"),
        ({"prompts": Dataset.from_dict({"text": PROMPTS})}, "no column 'prompt', found 'text'"),
        ({"prompts": [{"promt": "a red cube"}]}, "no column 'prompt', found 'promt'; did you mean 'promt'"),
        ({"lora": LoraConfig(r=4, lora_dropout=0.1)}, "dropout would make the ratio differ from 1"),
        ({"sampling": {"num_inference_step": 3}}, "did you mean sampling.num_inference_steps"),
        ({"method": "diffusion_ntf"}, "diffusion_nft"),
        ({"method": genrl.PPO()}, "PPO is a method for vla runs"),
        ({"model": None}, "say what is trained"),
        ({"model": None, "environment": 3}, "environment: give a function that makes it, .* not a int"),
        ({"config": {"prompts": "a.txt"}, "prompts": None}, "prompts"),
        ({"vlm": "assets/tiny-vlm"}, "give one of model, vlm and policy"),
        ({"config": {"distributed": {"fsdp": True}}}, "fsdp"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            small(tmp_path / "run", **({"model": root / "assets" / "tiny-t2i"} | changes))
        assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_loaded_pipeline_cannot_be_asked_for_what_happens_on_loading(pipe: Any, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": {"quantize": "int8"}}, "model.quantize: the pipeline is loaded already"),
        ({"model": {"offload": {"text_encoders": "encode_then_free"}}}, "its text encoders too; write between"),
        ({"model": {"encodings": "kept"}}, "may not be what the folder's encodings were made by"),
        ({"engine": {"rollout_workers": 1}}, "Ray's workers load the pipeline themselves"),
    ]
    for config, message in refused:
        with pytest.raises(ConfigError, match=message):
            small(tmp_path / "run", model=pipe, config=config)
    with pytest.raises(ConfigError, match="cannot be sent to another"):
        small(tmp_path / "run", model=pipe, rewards=[{"name": warm, "isolate": True}])
    assert type(pipe.scheduler).__module__.startswith("diffusers")
    with pytest.raises(ConfigError, match="found an object of type Linear, not a diffusers pipeline"):
        small(tmp_path / "run", model=torch.nn.Linear(2, 2))


def test_evaluate_leaves_a_pipeline_alone_and_knows_a_run(trained: Any, pipe: Any, tmp_path: Any, root: Any) -> None:
    scheduler, before = pipe.scheduler, set(vars(pipe))
    result = genrl.evaluate(pipe, PROMPTS, [warm], num_inference_steps=2, guidance_scale=1.0)
    again = genrl.evaluate(root / "assets" / "tiny-t2i", PROMPTS, warm, num_inference_steps=2, guidance_scale=1.0)
    assert pipe.scheduler is scheduler and set(vars(pipe)) == before
    assert result == again
    of_scores = {"eval/total_mean", "eval/total_se", "eval/warm_mean", "eval/warm_std", "eval/warm_failed"}
    assert set(result) == of_scores | {"eval/high_frequencies"}
    of_run = genrl.evaluate(trained, PROMPTS, warm)
    assert of_run != result
    assert genrl.evaluate(trained, PROMPTS, warm, lora=trained / "lora") == of_run
    with pytest.raises(ValueError, match="give prompts"):
        genrl.evaluate(trained)
    written = genrl.sample(trained, PROMPTS, out=tmp_path / "pictures")
    assert len(written) == 3 and json.loads((tmp_path / "pictures" / "prompts.json").read_text())[0]["seed"] == 0
    assert np.array_equal(written[1], genrl.sample(trained, PROMPTS)[1])
    own = [{"prompt": "a cat", "height": 32}, {"prompt": "a dog"}]
    assert [sampled.size for sampled in genrl.sample(pipe, own, num_inference_steps=1)] == [(64, 32), (64, 64)]


def test_evaluate_knows_questions_and_simulators(root: Path) -> None:
    place = {"environment": {"name": "minitable", "num_envs": 16}, "evaluation": {"episodes": 16}}
    task = {"task": {"name": "count"}, "rewards": [{"name": "exact"}], "evaluation": {"questions": 8}}
    task |= {"vlm": {"path": "assets/tiny-vlm"}, "generation": {"max_new_tokens": 12}}
    asked = genrl.evaluate(root / "assets" / "tiny-vlm", config=task)
    assert 0 <= asked["eval/accuracy_blind"] <= asked["eval/accuracy_mean"] <= 1
    policy = root / "assets" / "tiny-vla"
    acting = {"policy": {"path": "assets/tiny-vla"}, "trainer": {"algorithm": "ppo"}, **place}
    acted = genrl.evaluate(policy, config=acting)
    assert 0 < acted["eval/success_mean"] < 1
    with pytest.raises(ValueError, match="prompts, seed, height: of a pipeline; here the configuration says them"):
        genrl.evaluate(policy, PROMPTS, seed=3, height=8, config=root / "configs" / "vla" / "flow_sde.yaml")


def test_score_takes_pictures_and_what_is_taken_twice_is_a_copy(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    pictures[0].save(tmp_path / "red.png")
    assert genrl.score([tmp_path / "red.png", pictures[1]], {warm: 1.0}) == {"warm": [1.0, -1.0]}
    with pytest.raises(ValueError, match="1 of them for 2 images"):
        genrl.score(pictures, [warm], ["a red square"])
    with pytest.raises(ValueError, match="one size"):
        genrl.score([pictures[0], Image.new("RGB", (4, 4))], [warm])
    thing = [1]
    with lending({"python:thing": thing}):
        assert take("python:thing") is thing
        again = take("python:thing")
        assert again == thing and again is not thing
    with pytest.raises(ValueError, match="python:thing was an object of a Python script"):
        given("python:thing")


def test_every_settings_class_is_an_attribute_and_names_of_trl_are_told_ours() -> None:
    for kind in KINDS:
        for method in built_in(kind).values():
            assert getattr(genrl, method.__name__) is method and method.__name__ in dir(genrl)
    with pytest.raises(AttributeError, match="no attribute 'DiffusionNTF'"):
        genrl.DiffusionNTF  # noqa: B018
    assert all(getattr(genrl, name) is not None for name in dir(genrl))
    for name in ("reward_funcs", "train_dataset", "peft_config", "num_generations"):
        with pytest.raises(TypeError, match=f"{name} is called {OURS[name].split()[0]}"):
            genrl.train(model="assets/tiny-t2i", **{name: []})
    with pytest.raises(TypeError, match="there is no argument modle"):
        genrl.train(modle="assets/tiny-t2i")


def test_the_examples_of_the_docstrings_run(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    known = {"genrl": genrl, "folder": tmp_path / "run", "out": tmp_path / "out"}
    run = failed = 0
    for module, names in {"training": ("train",), "using": ("sample", "evaluate", "score", "export")}.items():
        actual = importlib.import_module(f"genrl.interface.{module}")
        for name in names:
            examples = doctest.DocTestParser().get_doctest(getattr(actual, name).__doc__, known, name, None, 0)
            result = doctest.DocTestRunner().run(examples, clear_globs=False)
            known |= examples.globs
            run, failed = run + result.attempted, failed + result.failed
    assert run >= 9 and not failed
