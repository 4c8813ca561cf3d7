"""vLLM as a sampler, on a stand-in of its interface: whole runs, weights, seeds, order, and what is refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from genrl.config import ConfigError, check_files
from genrl.runtime.loop import state
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.engines.generation import Sampling
from genrl.vlm.engines.server import Completion, Reply, Server
from genrl.vlm.engines.vllm import InProcess, Sampler, nested
from genrl.vlm.methods.answers import train as answers
from genrl.vlm.policies.folder import checkpoint_weights, stream_of
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt, unexpanded
from genrl.vlm.rollout.data import Questions
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import check_processes, train
from tests.run_folders import assert_one_run, assert_resumes, differences, rows, tiered
from tests.vlm import fake_vllm, tiny_checkpoints, vlm_ranks, vlm_runs
from tests.vlm.fake_vllm_server import Handler, serving
from tests.vlm.methods.episodes import agent_runs

VLLM: dict[str, Any] = {"vllm": {}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def questions(tmp_path: Path, policy: Policy) -> list[Any]:
    result = Questions(vlm_runs.config(tmp_path), "train")
    return [policy.encode(result[k].prompt) for k in range(3)]


@pytest.fixture
def sampler(installed: None, tmp_path: Path) -> Sampler:
    return Sampler(InProcess(vlm_runs.config(tmp_path, generation=VLLM)), Policy(str(vlm_runs.MODEL)))


ONCE = ("qwen2_5_vl", "gemma3", "kimi_k25")  # names as they are; tied weights; latent attention


@pytest.mark.parametrize("family", tiered(tiny_checkpoints.FAMILIES, ONCE))
def test_the_weights_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    """Names as saved, and of adapters the sum, as merging makes it; all other values are those on disk."""
    folder = tiny_checkpoints.save(family, tmp_path / family)
    saved, policy = load_file(folder / "model.safetensors"), Policy(str(folder), lora=VLMLoRA(rank=2))
    for parameter in policy.parameters:
        parameter.data.fill_(0.1)
    result = checkpoint_weights(policy)
    assert result.keys() == saved.keys() and policy.peft is not None
    latent = family.startswith("kimi")  # queries and keys through a narrower space
    changed = {name for name, value in result.items() if not torch.equal(value, saved[name])}
    assert len(changed) == 2 * (5 if latent else 4)  # two layers' projections
    policy.peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6)


def test_answers_are_in_the_order_of_the_questions_with_their_log_probabilities(sampler, tmp_path) -> None:
    prompts, keys = questions(tmp_path, sampler.policy), [("a",), ("b",), ("c",)]
    result = sampler.generate(prompts, 4, Sampling(12), keys)
    assert result.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    scored = sampler.policy.log_probs(prompts, result.tokens, result.mask, group=result.group)
    torch.testing.assert_close(scored.log_prob, result.log_prob, rtol=0, atol=1e-5)
    turned = sampler.generate(prompts[::-1], 4, Sampling(12), keys[::-1])
    assert turned.texts == result.texts[8:] + result.texts[4:8] + result.texts[:4]  # by key, not by place
    assert result.texts == sampler.generate(prompts, 4, Sampling(12), keys).texts
    assert result.texts != sampler.generate(prompts, 4, Sampling(12), [("d",), ("e",), ("f",)]).texts


def test_a_run_draws_with_the_weights_of_the_last_update_and_is_resumed(installed: None, tmp_path: Path) -> None:
    """An answer's log-probabilities are the trainer's, before an update and after it."""
    config = vlm_runs.config(tmp_path, generation=VLLM, optimizer={"lr": 1e-3}, iterations=2)
    assert_resumes(train, config, tmp_path)
    for row in rows(tmp_path / "run"):
        assert row["sampler/gap_max"] < 1e-4 and row["sampler/gap_k3"] < 1e-8 and row["sampler/corrected"] == 0


def test_a_run_that_goes_back_draws_with_the_weights_that_it_gets(installed: None, tmp_path: Path) -> None:
    with vlm_runs.opened(vlm_runs.config(tmp_path, generation=VLLM)) as run:
        run.loop.save()
        run.sampler.loaded = run.sampler.version
        state.go_back(run.loop, 0)
        assert run.sampler.loaded != run.sampler.version


def test_weights_are_loaded_before_drawing_and_caches_dropped(sampler: Sampler, tmp_path: Path) -> None:
    prompts, llm = questions(tmp_path, sampler.policy)[:1], sampler.engine.llm
    loaded = ["reload_weights", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]
    sampler.generate(prompts, 1, Sampling(4), [(0,)])
    assert llm.calls == [*loaded, "generate", "sleep 2"]
    llm.calls.clear()
    sampler.generate(prompts, 1, Sampling(4), [(0,)])
    assert llm.calls == ["wake_up weights", loaded[0], "wake_up kv_cache", *loaded[1:], "generate", "sleep 2"]
    sampler.engine.forgets = sampler.engine.asleep = False
    sampler.generate(prompts, 1, Sampling(4), [(0,)])
    llm.calls.clear()
    sampler.generate(prompts, 1, Sampling(4), [(0,)])
    assert llm.calls == ["generate"]  # no step was made
    sampler.stepped()
    sampler.generate(prompts, 1, Sampling(4), [(0,)])
    assert llm.calls == ["generate", *loaded, "generate"] and llm.version == "1"


def test_what_an_engine_must_not_return_is_refused(sampler: Sampler, tmp_path: Path) -> None:
    prompts = questions(tmp_path, sampler.policy)[:1]
    answer = sampler.engine.answer
    end = sampler.policy.stop_ids[0]
    good = Reply(prompts[0].tokens.ids.tolist(), [Completion([end], [-0.5], {"0"})])
    for reply, text in [
        (good._replace(prompt_ids=good.prompt_ids[1:]), r"shapes.*read other tokens \(\d+\) than the trainer"),
        (good._replace(answers=good.answers * 2), "1 answers were asked of vLLM, it returned 2"),
        (good._replace(answers=[Completion([5, 6], [-1.0, -1.0], set())]), "broke an answer off after 2 tokens"),
        (good._replace(answers=[Completion([end], [-0.5], {"7"})]), r"version \['7'\], the trainer is at 0"),
    ]:
        sampler.engine.answer = lambda asked, reply=reply: [reply]  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=text):
            sampler.generate(prompts, 1, Sampling(12), [(0,)])
    sampler.engine.answer = answer  # type: ignore[method-assign]
    assert sampler.generate(prompts, 1, Sampling(12), [(0,)]).finish


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "llava"])
def test_an_engine_gets_one_token_for_an_image(family: str, tmp_path: Path) -> None:
    policy = Policy(str(tiny_checkpoints.save(family, tmp_path)))
    picture = Questions(vlm_runs.config(tmp_path), "train")[0].prompt.parts[0]
    tokens = policy.encode(Prompt((picture, "and", picture, "?"))).tokens
    image = policy.model.config.image_token_id
    ids = unexpanded(tokens, policy.processor)
    assert ids.count(image) == len(tokens.pictures) == 2
    assert tokens.ids.tolist().count(image) > 2
    rest = iter(tokens.ids.tolist())
    assert all(i in rest for i in ids if i != image)  # the same text, in its order


# --- a server
@pytest.fixture
def server() -> Iterator[str]:
    with serving(vlm_runs.MODEL) as url:
        yield url


def test_a_server_draws_what_an_engine_in_this_process_draws(sampler: Sampler, server: str, tmp_path: Path) -> None:
    policy = sampler.policy
    for parameter in policy.parameters:  # others than the server has on disk
        parameter.data.mul_(1.05)
    prompts, keys = questions(tmp_path, policy), [("a",), ("b",), ("c",)]
    remote = Sampler(Server(server, tmp_path / "weights", str(vlm_runs.MODEL)), policy)
    one, other = (each.generate(prompts, 3, Sampling(12), keys) for each in (sampler, remote))
    assert torch.equal(one.tokens, other.tokens) and one.finish == other.finish
    torch.testing.assert_close(one.log_prob, other.log_prob, rtol=0, atol=1e-6)


def test_a_server_or_a_package_that_is_not_there_is_named_with_the_command(server: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no vLLM server answers at http://127.0.0.1:9/v1/models.*vllm serve tiny"):
        Server("http://127.0.0.1:9", tmp_path, "tiny")
    with pytest.raises(RuntimeError, match=r"/nothing answers 404: .*no such route"):
        Server(server, tmp_path, "tiny")._call("/nothing", {})
    with pytest.raises(ConfigError, match=r"generation.vllm.*pip install 'vllm"):
        check_files(vlm_runs.config(tmp_path, generation=VLLM))


# --- agents
@pytest.mark.parametrize("preset", [pytest.param("vl_dac", marks=pytest.mark.slow), "grpo"])
def test_agents_answer_by_an_engine_as_it_is_trained(installed, tmp_path, preset: str, monkeypatch) -> None:
    """Turns of episodes, and of a tool's conversation; the engine sleeps between the phases, not between the turns."""
    calls: list[list[str]] = []
    run = agent_runs.config(tmp_path, preset, generation=VLLM, iterations=2, optimizer={"lr": 1e-3})
    opened = fake_vllm.LLM.__init__

    def kept(self: Any, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        calls.append(self.calls)

    monkeypatch.setattr(fake_vllm.LLM, "__init__", kept)
    train(run)
    for row in rows(tmp_path / "run"):
        assert row["sampler/gap_max"] < 1e-4 and row["sampler/corrected"] == 0
        assert row["importance/max_abs_dev"] < 1e-4 or preset == "vl_dac"
    turns = "".join(" " if call.startswith("sleep") else "g" for call in calls[0] if call[:5] in ("gener", "sleep"))
    phases = turns.split()
    assert len(phases) >= 2 and max(map(len, phases)) > 1


# --- staleness
def older(server: str | None, staleness: int = 1, **further: Any) -> dict[str, Any]:
    generation = {**VLLM, "staleness": staleness} | ({} if server is None else {"vllm": {"url": server}})
    evaluation = {"every": 2, "questions": 8, "blind": False}
    every = {"iterations": 4, "checkpoint": {"keep": 4}, "optimizer": {"lr": 1e-3}, "evaluation": evaluation}
    return {**every, **further, "generation": generation}


@pytest.mark.slow
def test_a_server_that_draws_ahead_draws_the_same(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is asked at the time; of an adapter; with evaluations in between; resumed after any iteration."""
    own = {"vlm": {"lora": {"rank": 4}}, "trainer": {"preset": "dapo", "updates": 2}}
    ahead = train(vlm_runs.config(tmp_path, output=str(tmp_path / "ahead"), **older(server, 2, **own)))
    with monkeypatch.context() as patched:
        begin = AnswersRun.begin

        def alone(run: AnswersRun, result: Path | None) -> None:
            run.server = None
            begin(run, result)

        patched.setattr(AnswersRun, "begin", alone)
        train(vlm_runs.config(tmp_path, output=str(tmp_path / "then"), **older(server, 2, **own)))
    assert differences(ahead, tmp_path / "then") == []
    assert [row["staleness"] for row in rows(ahead) if "staleness" in row] == [0.0, 1.0, 2.0, 2.0]
    assert_one_run(train, ahead, tmp_path)


@pytest.mark.slow
def test_a_server_draws_while_the_model_is_trained(server, tmp_path, monkeypatch) -> None:
    """The answers of the last iteration are asked for while the one before is trained, not afterwards."""
    training, seen = threading.Event(), threading.Event()
    learn, begun, generated = answers.learn, [], Handler._generated

    def learned(run: Any, *arguments: Any) -> Any:
        if run.loop.iteration == 1:
            training.set()
            assert seen.wait(30)
        return learn(run, *arguments)

    def watched(self: Handler, given: dict[str, Any]) -> Any:
        begun.append(self.llm.version)
        if self.llm.version == "after 1 iterations":
            assert training.wait(30)
            seen.set()
        return generated(self, given)

    monkeypatch.setattr(answers, "learn", learned)
    monkeypatch.setattr(Handler, "_generated", watched)
    train(vlm_runs.config(tmp_path, **older(server, iterations=3) | {"evaluation": {"every": 0}}))
    assert sorted(set(begun)) == ["after 0 iterations", "after 1 iterations"]


VISION = ("embeddings.patch", "layers.0.attn.qkv_proj", "layers.0.attn.out_proj")
ENGINE = [f"vision_tower.vision_model.{name}.weight" for name in VISION]
ENGINE += ["language_model.model.layers.0.norm.weight", "language_model.lm_head.weight"]


def prefixed(name: str) -> str | None:
    """As vLLM maps names of transformers since 4.52."""
    for old, new in {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None if name == "ignored.weight" else name


def test_a_level_that_the_checkpoint_has_not_is_added() -> None:
    names = {
        "vision_tower.post_norm.weight": "vision_tower.vision_model.post_norm.weight",  # the engine has none
        "vision_tower.embeddings.patch.weight": "vision_tower.vision_model.embeddings.patch.weight",
        "vision_tower.layers.0.attn.q_proj.weight": "vision_tower.vision_model.layers.0.attn.q_proj.weight",
    }
    assert nested(names, ENGINE, str) == names
    whole = {f"model.{name}": f"model.{result}" for name, result in names.items()}
    assert nested(whole, ENGINE, prefixed) == whole


def test_what_the_engine_has_or_may_know_by_another_rule_stays() -> None:
    for names, engine, mapped in (
        (ENGINE, ENGINE, str),  # which the engine has
        (["model.language_model.layers.0.norm.weight", "ignored.weight"], ENGINE, prefixed),
        (["vision_tower.vision_model.post_norm.weight"], ENGINE, prefixed),
        (["lm_head.weight", "model.layers.0.norm.weight"], ENGINE, str),  # the root
        (["vision_tower.vision_model.layers.0.attn.v_proj.weight"], ENGINE, str),  # which it joins
        (["a.norm.weight"], ["a.x.norm.weight", "a.y.norm.weight"], str),  # a level of two
    ):
        assert nested(names, engine, mapped) == {name: name for name in names}


# -- several processes, one server
COMMON: dict[str, Any] = {
    "iterations": 3,
    "optimizer": {"lr": 1e-3},
    "evaluation": {"every": 1, "questions": 1, "blind": False},  # one process has nothing to ask
    "checkpoint": {"every": 3},
}


@contextmanager
def served(shared: bool, model: Path) -> Iterator[dict[str, Any]]:
    """Settings of one server, or of an engine in each process."""
    if not shared:
        yield {"args": {"enable_sleep_mode": False}}
        return
    with serving(model) as url:
        yield {"url": url}


def trained(place: Path, vllm: dict[str, Any], **changes: Any) -> list[Any]:
    """The metrics of a run in two processes, which answer with the weights after the last step."""
    place.mkdir()
    vlm_runs.config(place, generation={"vllm": vllm}, **COMMON, **changes)
    vlm_runs.in_processes(place, vlm_ranks.by_vllm)
    result = rows(place / "run")
    assert all(row["sampler/gap_max"] < 1e-4 for row in result[1:])
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "fsdp", "lora"), [(False, False, None), (False, True, {"rank": 2}), (True, True, None)]
)
def test_two_processes_draw_what_one_draws(shared: bool, fsdp: bool, lora: Any, tmp_path, monkeypatch) -> None:
    own = {"vlm": {"lora": lora, "gradient_checkpointing": True}}
    with served(shared, vlm_runs.MODEL) as vllm:
        two = trained(tmp_path / "two", vllm, **own, distributed={"fsdp": fsdp})
        if shared:
            assert Handler.llm.version == "3" and Handler.llm.calls.count("reload_weights") == 4
    fake_vllm.install(monkeypatch)
    (tmp_path / "one").mkdir()
    generation = {"vllm": {"args": {"enable_sleep_mode": False}}}
    one = rows(train(vlm_runs.config(tmp_path / "one", generation=generation, **COMMON, **own)))
    names = [name for name in one[-1] if name.startswith(("reward/", "eval/", "rollout/tokens")) or name == "grad_norm"]
    assert len(names) > 5 and len(one) == len(two)
    for mine, yours in zip(one, two, strict=True):
        for name in [name for name in names if name in mine]:
            assert mine[name] == pytest.approx(yours[name], rel=1e-4, abs=1e-6), name


def test_shards_are_of_several_processes_and_a_server_that_draws_ahead_is_for_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to shard over"):
        check_processes(vlm_runs.config(tmp_path, distributed={"fsdp": True}), 1)
    generation = {"staleness": 1, "vllm": {"url": "http://localhost:1"}}
    config = vlm_runs.config(tmp_path, generation=generation, iterations=2)
    check_processes(config, 1)
    with pytest.raises(ValueError, match="generation.staleness: a server samples ahead for one process"):
        check_processes(config, 2)


def test_weights_come_layer_by_layer() -> None:
    """Names are known before; a merged weight is made when its layer's turn comes, not with all others."""
    policy = Policy(str(vlm_runs.MODEL), lora=VLMLoRA(rank=2))
    stream = stream_of(policy)
    tensors = iter(stream.tensors)
    turns = [next(tensors)[0]]
    for parameter in policy.parameters:
        parameter.data.fill_(0.1)
    late = dict(tensors)
    assert [*turns, *late] == stream.names == list(checkpoint_weights(policy))
    for name, value in checkpoint_weights(policy).items():
        assert name in turns or torch.equal(late[name], value)
