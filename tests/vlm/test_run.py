"""What a run of a language model has beside its method: average, monitor, undone iterations, smaller micro-batches."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from genrl import recipes
from genrl.cli.app import app
from genrl.config import ConfigError, load
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import updating
from genrl.runtime.loop.loop import Loop
from genrl.vlm.config.memory_estimate import CAPTION, PUBLISHED, Sizes, memory, published
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.evaluate import judge
from genrl.vlm.policies.folder import load_trained, open_policy
from genrl.vlm.policies.loading import sizes
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import train
from tests.run_folders import differences, last_state, rows
from tests.vlm import fake_vllm, vlm_runs
from tests.vlm.methods.episodes import agent_runs

EVALUATED: dict[str, Any] = {"every": 1, "questions": 4, "blind": False}
AVERAGED: dict[str, Any] = {"ema": {"decay": 0.5}, "optimizer": {"lr": 1e-2}, "iterations": 2}
TWICE = {"preset": "grpo", "epochs": 2}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def copied(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loop.weights.named.items()}


def test_evaluation_and_result_are_of_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, seen = AnswersRun.evaluate, []

    def watched(self: AnswersRun, iteration: int) -> dict[str, float]:
        seen.append(copied(self.loop))
        return evaluate(self, iteration)

    monkeypatch.setattr(AnswersRun, "evaluate", watched)
    config = vlm_runs.config(tmp_path, evaluation=EVALUATED, **AVERAGED)
    run = train(config)
    tensors = last_state(run).tensors
    average = tensors["snapshot-average"]
    assert len(seen) == 3 and equal(seen[-1], average) and not equal(average, tensors["weights"])
    for policy in (Policy(str(run / "model")), load_trained(config, run)):
        result = dict(policy.model.named_parameters())
        assert all(torch.equal(result[name], value) for name, value in average.items())


@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_evaluates_the_average(tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    own = {"trainer": {"weights": []}, "generation": {"vllm": {"args": {"enable_sleep_mode": False}}}}
    config = vlm_runs.config(tmp_path, evaluation=EVALUATED, **own, **AVERAGED)
    run = train(config)
    assert all(row["sampler/gap_max"] < 1e-4 for row in rows(run)[1:])
    lines = (run / "samples" / "step-000002.jsonl").read_text().splitlines()
    result = judge(Policy(str(run / "model")), config, open_rewards(config), Questions(config, "eval"), range(4))
    assert [json.loads(line)["answer"] for line in lines] == result.texts


def left_in(place: Path, monkeypatch: pytest.MonkeyPatch, call: int, config: Any) -> tuple[Path, Path, int]:
    """The run in one go, and asked to end before its `call`-th backward pass (from 0) and resumed; after how many
    iterations it ended. config: of the name of a run folder."""
    straight = train(config("straight"))
    backward, calls = updating._backward, iter(range(10**6))

    def watched(*arguments: Any) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        backward(*arguments)

    stopped = place / "stopped"
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(updating, "_backward", watched)
        train(config("stopped"))
    after = last_state(stopped).step
    train(load(Run(stopped).config), stopped)  # type: ignore[arg-type]
    return straight, stopped, after


@pytest.mark.slow
@pytest.mark.parametrize("agent", [False, True])
def test_an_iteration_left_between_two_updates_is_undone_and_done_again(agent: bool, tmp_path, monkeypatch) -> None:
    """To the bit: with GRPO-CARE's average and the run's own; of an agent, its episodes and its critic."""
    monkeypatch.setattr(ConsistencyBonus, "average", (0.995, 1))

    def config(name: str) -> Any:
        own: dict[str, Any] = {"checkpoint": {"every": 9}, "iterations": 2, "output": str(tmp_path / name)}
        if agent:
            return agent_runs.config(tmp_path, "vl_dac", trainer={"epochs": 2}, **own)
        trainer = {"preset": "grpo_care", "epochs": 2}
        return vlm_runs.config(tmp_path, trainer=trainer, task={"rows": 6}, ema={"decay": 0.5}, **own)

    straight, stopped, after = left_in(tmp_path, monkeypatch, 3, config)
    assert after == 1 and differences(straight, stopped) == []


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    for monitor, every, message in (
        ({"reward": "exakt"}, 1, "did you mean 'exact'.* exact, tag_format, accuracy"),
        ({"reward": "accuracy"}, 0, "nothing can be watched"),
    ):
        evaluation = {**EVALUATED, "every": every, "monitor": {"tolerance": 0.1, **monitor}}
        with pytest.raises(ConfigError, match=message):
            vlm_runs.config(tmp_path, iterations=2, evaluation=evaluation)
    episodes = {"every": 1, "monitor": {"reward": "success", "tolerance": 0.1}}
    agent_runs.config(tmp_path, "grpo", evaluation=episodes)
    episodes["monitor"] = {**episodes["monitor"], "reward": "exact"}
    with pytest.raises(ConfigError, match="they are: success"):
        agent_runs.config(tmp_path, "grpo", evaluation=episodes)


def room_for(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that holds so many answers in a pass of training, after one pass; the sizes that are tried."""
    log_probs, tried = Policy.log_probs, []

    def full(policy: Policy, prompts: Any, answers: torch.Tensor, *rest: Any, **options: Any) -> Any:
        tried.append(len(answers))
        if len(tried) > 1 and len(answers) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return log_probs(policy, prompts, answers, *rest, **options)

    monkeypatch.setattr(Policy, "log_probs", full)
    return tried


def test_an_iteration_that_runs_out_of_memory_is_done_again_in_smaller_pieces(tmp_path, monkeypatch, capsys) -> None:
    """After an update: to the bit the run that has the smaller pieces from the start. A resumed run keeps them."""
    by_hand = {**TWICE, "micro_batch": 4}
    wanted = train(vlm_runs.config(tmp_path, iterations=2, trainer=by_hand, output=str(tmp_path / "by hand")))
    with monkeypatch.context() as patched:
        tried = room_for(7, patched)
        actual = train(vlm_runs.config(tmp_path, trainer={**TWICE, "fit_batch": True}))
    said = capsys.readouterr().err
    assert "memory ran out in iteration 1 with 16 samples in a micro-batch: it is done again, with 8" in said
    assert "with 8 samples in a micro-batch: it is done again, with 4 from here on" in said
    assert tried[:3] == [16, 16, 8] and set(tried[3:]) == {4}
    train(vlm_runs.config(tmp_path, iterations=2, trainer={**TWICE, "fit_batch": True}), actual)
    first, second = last_state(actual), last_state(wanted)
    assert first.state["memory"].pop("batch_size") == 4 and first.state == second.state
    assert all(equal(tensors, second.tensors[stem]) for stem, tensors in first.tensors.items())
    assert rows(actual) == rows(wanted)


@pytest.mark.parametrize(("updates", "sizes"), [(1, [8, 4, 2, 1]), (8, [4, 2, 1])])
def test_a_process_begins_with_what_a_pass_can_have(tmp_path: Path, updates: int, sizes: list[int]) -> None:
    """Its own share of the answers, or all of one update: with more, the first halvings would change nothing."""
    trainer = {"preset": "grpo", "updates": updates}
    config = vlm_runs.config(tmp_path, generation={"prompts_per_iteration": 8, "group_size": 4}, trainer=trainer)
    process = SimpleNamespace(accelerator=SimpleNamespace(num_processes=4))
    run: Any = AnswersRun.__new__(AnswersRun)  # of which no more than these is looked at
    run.present, run.process, run.preset = config, process, None
    assert run.micro_batch_sizes() == sizes


def test_without_the_key_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(7, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(vlm_runs.config(tmp_path, trainer=TWICE))
    assert "micro-batches of 16 samples do not fit: lower trainer.micro_batch" in error.value.__notes__[0]


# -- What a run of billions of weights holds, from a config.json alone, against arithmetic by hand
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs" / "vlm" / "qwen2_5_vl_7b_fsdp.yaml"
WEIGHTS = 8_292_166_656  # what the hub says of Qwen/Qwen2.5-VL-7B-Instruct: 8.29 B


@pytest.fixture(scope="module")
def size() -> Sizes:
    """Of the published configuration of Qwen2.5-VL-7B, without weights."""
    return sizes(str(PUBLISHED / "Qwen/Qwen2.5-VL-7B-Instruct"))


def shipped(*changes: str) -> VLMConfig:
    return load(SHIPPED, list(changes))


def test_sizes_are_those_of_the_published_model(size: Sizes) -> None:
    layer = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert (size.numbers, size.layer, size.outside) == (WEIGHTS, layer, WEIGHTS - 28 * layer)
    assert size.adapted(VLMLoRA()) == 28 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    assert (size.layers, size.width, size.inner, size.keys) == (28, 3584, 18944, 512)
    parts = dict(memory(shipped("distributed.fsdp=false", "trainer.regularisers=[]"), size))
    kept = sum(parts[name] for name in parts if "weights" in name or "optimiser" in name or name == "gradients")
    assert kept == 16 * WEIGHTS and "reference" not in parts and "copy to undo an iteration" not in parts


def test_a_published_model_is_known_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a card is named or not."""
    monkeypatch.setenv("COLUMNS", "200")
    assert "24 GB" in CliRunner().invoke(app, ["check", str(SHIPPED)]).output
    said = CliRunner().invoke(app, ["check", str(SHIPPED), "--memory", "80GB"])
    assert said.exit_code == 0 and f"{WEIGHTS:,} weights; of one of 8 processes" in said.output, said.output
    assert "LoRA, nf4 (QLoRA)" in said.output and "memory" not in said.output.partition("not checked")[2]
    assert "not checked: weights and licence of Qwen/Qwen2.5-VL-7B-Instruct" in said.output


def test_every_model_that_a_recipe_names_is_known_by_its_size() -> None:
    """As its config.json in the package says, in billions. The hub counts .591 of MusicGen, .004 of them buffers."""
    known = {str(file.parent.relative_to(PUBLISHED)): str(file.parent) for file in PUBLISHED.rglob("config.json")}
    result = {name: sizes(file, answers=False) for name, file in known.items()}
    assert result == {name: published(name) for name in known}
    named = {one.values["vlm"]["path"] for one in recipes.recipes() if "vlm" in one.values}
    assert {name for name in named if not name.startswith("assets/")} <= known.keys()
    assert {name.partition("/")[2]: round(size.numbers / 1e9, 2) for name, size in result.items()} == {
        **{"Qwen2.5-VL-7B-Instruct": 8.29, "Qwen2.5-VL-3B-Instruct": 3.75, "Qwen3-VL-4B-Instruct": 4.44},
        **{"Janus-Pro-7B": 6.99, "ShapeLLM-7B-omni": 8.35, "musicgen-small": 0.59},
    }


@pytest.mark.parametrize("lora", ["null", "{rank: 4, targets: [q_proj, v_proj]}"])
@pytest.mark.parametrize("recipe", ["ar_image_grpo", "hi_grpo", "music_rl", "musicgen"])
def test_what_makes_things_by_tokens_trains_and_keeps_what_is_counted(recipe: str, lora: str) -> None:
    """Of the embedded models: the numbers that are trained, and within a quarter what a pass keeps, guided or not."""
    config = load(ROOT / f"configs/vlm/{recipe}.yaml", [f"vlm.lora={lora}"])
    assert isinstance(config, VLMConfig)
    policy, size = open_policy(config, torch.device("cpu")), sizes(config.vlm.path, answers=False)
    prompts = [policy.encode(Prompt(("a tune",), where=recipe))]
    sampled, models = policy.sample(prompts, 4, 1.0, [(0,)]), 1 + ("heads" in config.trainer.reads)
    weights, kept = {p.untyped_storage()._cdata for p in policy.model.parameters()}, dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.log_probs(prompts, sampled.tokens, sampled.mask, group=torch.zeros(4, dtype=torch.long))
    parts, new = dict(memory(config.with_micro_batch(4), size)), config.generation.max_new_tokens
    assert parts["gradients"] == 4 * models * sum(p.numel() for p in policy.parameters)
    rows, places = 2 if config.vlm.output in ("image", "music") else 1, new
    places += 0 if config.vlm.output == "music" else prompts[0].length  # whose text is no part of the sequence
    pass_of_it = rows / (rows + models - 1) * places / (CAPTION + new)
    held = sum(one.nbytes() for name, one in kept.items() if name not in weights)
    assert held == pytest.approx(parts["activations of one micro-batch (rough)"] * pass_of_it, rel=0.25)


def test_the_shipped_run_fits_on_eight_cards_of_80_gb(size: Sizes) -> None:
    parts = dict(memory(shipped(), size, 8))
    assert parts["float32 shares of the weights"] == parts["gradients"] == 4 * WEIGHTS // 8
    assert parts["optimiser state (adamw)"] == WEIGHTS and parts["reference"] == 2 * WEIGHTS // 8
    assert sum(parts.values()) < 0.92 * 80e9 < sum(dict(memory(shipped(), size, 2)).values())
    # two answers of 1,024 tokens to questions as long, 28 inputs of layers kept and one layer computed again
    layer = 10.1 * 3584 + 4 * 18944 + 2 * 512
    assert parts["activations of one micro-batch (rough)"] == round(2 * 2048 * (28 * 3584 + layer) * 2)


@pytest.mark.parametrize(("kind", "weights"), [("int8", 1.0), ("nf4", 4.127 / 8)])
def test_fewer_bits(kind: str, weights: float, size: Sizes) -> None:
    changes = ("distributed.fsdp=false", "vlm.lora={rank: 16}", f"vlm.quantize={kind}")
    parts = dict(memory(shipped(*changes), size))
    rest = 2 * (WEIGHTS - size.linear) + (2 * size.rows if kind == "int8" else 0)
    assert parts["frozen weights"] == round(weights * size.linear) + rest
    assert parts["adapters"] == parts["gradients"] == 4 * 16 * size.adapted(VLMLoRA()) and "reference" not in parts
    assert ("unpacked weights, for the backward pass" in parts) == (kind == "int8")


def test_of_an_unknown_model_check_says_what_to_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    absent = CliRunner().invoke(app, ["check", str(SHIPPED), "vlm.path=org/unknown", "--memory", "80GB"])
    assert absent.exit_code == 2 and "hf download" in absent.output
    assert CliRunner().invoke(app, ["check", str(SHIPPED)]).exit_code == 0
