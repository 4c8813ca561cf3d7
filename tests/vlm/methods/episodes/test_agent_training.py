"""Tiny whole runs of agents: the gradient of an update by hand, warm-up, lost environments, groups, the commands."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.vlm.common import Estimated
from genrl.vlm.environments.hosts import Outcome, Say
from genrl.vlm.episodes import episodes
from genrl.vlm.episodes import evaluate as episodes_evaluate
from genrl.vlm.episodes.critic import Rows
from genrl.vlm.episodes.run import Acted, EpisodesRun
from genrl.vlm.methods.episodes.train import learn
from genrl.vlm.policies.policy import Policy
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm.by_hand import assert_same, gradients, naive_log_probs, watched
from tests.vlm.methods.episodes import agent_runs


def own_log_probs(run: EpisodesRun, acted: Rows) -> list[Tensor]:
    """Of each turn's tokens [n]."""
    return naive_log_probs(run.policy, acted.prompts, acted.tokens, acted.mask, run.config.generation.temperature)


def an_update(run: EpisodesRun, monkeypatch: pytest.MonkeyPatch) -> tuple[Acted, Estimated, dict[str, Tensor], Any]:
    """What was acted and estimated in the first iteration, the gradient of its first step, and the figures."""
    seen = watched(run, monkeypatch)
    acted, _ = run.act()
    ready, _ = run.estimate(acted)
    figures = learn(run, acted, ready)
    return acted, ready, seen[0], figures


@pytest.mark.parametrize("preset", ["vl_dac", "poad", "token_ppo", "ma_rlhf"])
def test_the_gradient_of_the_first_update_is_that_of_the_formula(preset: str, tmp_path, monkeypatch) -> None:
    """A new critic values everything at 0, so advantages are discounted sums of rewards; at ratio 1 the surrogate is A
    times the log-probability, and the KL to the same weights has no gradient."""
    config = agent_runs.config(tmp_path, preset, trainer={"regularisers": [{"name": "value"}]})
    with agent_runs.opened(config) as run:
        acted, ready, result, figures = an_update(run, monkeypatch)
        assert acted.walk is not None and figures["ratio/mean"] == 1.0 == figures["ratio/max"]
        steps = acted.walk.decisions
        assert len(steps) == 3 and {len(step) for step in steps} == {4}
        credit = torch.zeros(3, 4, dtype=torch.float64)
        for slot in range(4):
            ahead = 0.0
            for k in (2, 1, 0):
                one = steps[k][slot]
                ahead = one.reward + 0.95 * 0.95 * ahead * (not one.terminated)
                credit[k, slot] = ahead
        log_probs = own_log_probs(run, acted.rows)
        lengths = torch.tensor([len(one) for one in log_probs])
        if preset == "vl_dac":  # the mean of each step's tokens, of an advantage that all of them share
            advantage = (credit.flatten() - credit.mean()) / (credit.std() + 1e-8)
            loss = -sum(a * one.mean() for a, one in zip(advantage.tolist(), log_probs, strict=True)) / 12
        else:  # the mean of all tokens; gamma counts between actions (POAD) or tokens, lambda from token to token
            by_token: dict[int, list[float]] = {}
            for slot in range(4):
                running = 0.0
                for k in (2, 1, 0):
                    one, n = steps[k][slot], int(lengths[k * 4 + slot])
                    running = one.reward + 0.95 * 0.95 * running * (not one.terminated)
                    own = []
                    for t in range(n - 1, -1, -1):
                        own.append(running)
                        if preset != "ma_rlhf" or t == n - 1 or t % 5 == 0:  # lambda counts five tokens, and the last
                            running *= 0.95 * (0.95 if preset == "token_ppo" else 1.0)
                    running = own[-1]
                    by_token[k * 4 + slot] = own[::-1]
            every = torch.tensor([value for row in range(12) for value in by_token[row]], dtype=torch.float64)
            whitened = ((every - every.mean()) / (every.std() + 1e-8)).split(lengths.tolist())
            loss = -sum((a.float() * one).sum() for a, one in zip(whitened, log_probs, strict=True)) / lengths.sum()
        assert credit.unique().numel() > 3
        loss.backward()
        assert_same(result, gradients(run))


def test_all_turns_of_an_episode_have_its_advantage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO over groups of episodes, in passes of two: an episode is a row, whose mean is over all its turns' tokens."""
    trainer = {"regularisers": [], "micro_batch": 2}
    config = agent_runs.config(tmp_path, "grpo", trainer=trainer, generation={"group_size": 3})
    with agent_runs.opened(config) as run:
        acted, ready, result, figures = an_update(run, monkeypatch)
        assert acted.totals is not None and figures["ratio/max"] == 1.0
        turns = [int((acted.rows.row == row).sum()) for row in range(6)]
        assert max(turns) > 1, "no episode has two turns"
        reward = acted.totals.view(2, 3)
        assert acted.totals.tolist() == [episode.total for episode in run.table.episodes.values()]
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        log_probs, loss = own_log_probs(run, acted.rows), torch.zeros(())
        for row in range(6):
            own = torch.cat([log_probs[turn] for turn in (acted.rows.row == row).nonzero()[:, 0].tolist()])
            loss = loss - float(advantage[row]) * own.mean() / 6
        loss.backward()
        assert_same(result, gradients(run))


def losing(run: EpisodesRun, monkeypatch: pytest.MonkeyPatch, lost: Callable[[int, int], bool]) -> None:
    """Environments die over an answer. lost: of the slot, and how many answers its environment was given."""
    work, said = run.table.host.do, Counter[int]()

    def failing(pieces: Any) -> Any:
        worked, spoken = work(pieces), [slot for slot in pieces if isinstance(pieces[slot], Say)]
        said.update(spoken)
        return worked | {slot: Outcome(lost="died") for slot in spoken if lost(slot, said[slot])}

    monkeypatch.setattr(run.table.host, "do", failing)


def test_an_episode_whose_environment_is_lost_is_compared_with_no_other(tmp_path, monkeypatch) -> None:
    """That a process died is not the policy's doing: its group's other episodes are compared without it."""
    own = {"updates": 2, "regularisers": [{"name": "kl", "beta": 0.1}]}
    config = agent_runs.config(tmp_path, "grpo", trainer=own, generation={"group_size": 3})
    with agent_runs.opened(config) as run:
        losing(run, monkeypatch, lambda slot, said: slot == 1)
        acted, row = run.act()
        ready, _ = run.estimate(acted)
        learn(run, acted, ready)
    assert acted.totals is not None and ready.batch.advantage is not None and row["rollout/dropped"] == 1
    assert acted.totals.isnan().tolist() == [False, True, False, False, False, False]
    left = acted.totals[[0, 2]]
    wanted = (left - left.mean()) / (left.std() + 1e-4)
    tokens = [int(acted.rows.mask[acted.rows.row == row].sum()) for row in range(6)]
    assert ready.batch.mask.sum(1).tolist() == [*tokens[:1], 0, *tokens[2:]]  # nor does a KL read it
    assert sum(one.tokens for one in ready.updates) == sum(tokens) - tokens[1]
    assert ready.batch.advantage[1] == 0 and torch.allclose(ready.batch.advantage[[0, 2]], wanted)


@pytest.mark.parametrize("preset", ["vl_dac", "grpo"])
def test_an_iteration_in_which_all_environments_die_is_an_error(preset: str, tmp_path, monkeypatch) -> None:
    with agent_runs.opened(agent_runs.config(tmp_path, preset)) as run:
        losing(run, monkeypatch, lambda slot, said: True)
        with pytest.raises(RuntimeError, match="all environments hung or died in one iteration"):
            run.act()


@pytest.mark.parametrize("preset", ["vl_dac", "poad"])
def test_a_step_whose_environment_is_lost_is_not_trained(preset: str, tmp_path, monkeypatch) -> None:
    """Nor does it end anything: the step before it is bootstrapped by the value of what the lost one was shown."""
    with agent_runs.opened(agent_runs.config(tmp_path, preset)) as run:
        losing(run, monkeypatch, lambda slot, said: (slot, said) == (1, 2))
        torch.nn.init.constant_(run.critic.layers[-1].bias, 0.5)
        acted, row = run.act()
        ready, _ = run.estimate(acted)
        learn(run, acted, ready)
    assert acted.walk is not None and row["rollout/dropped"] == 1
    assert acted.rows.tokens.shape == acted.rows.place.shape == ready.batch.mask.shape
    before, lost, after = (acted.walk.decisions[k][1] for k in range(3))
    assert lost.lost and not before.terminated and len(acted.rows.prompts) == 11
    assert not any(prompt is lost.prompt for prompt in acted.rows.prompts)
    credit = ready.batch.extra["credit"]  # of the first step, and of the one that begins the next episode
    for place, one in ((1, before), (8, after)):
        wanted = one.reward + (0.0 if one.terminated else 0.95 * 0.5) - 0.5
        own = credit[place] if preset == "vl_dac" else credit[place][acted.rows.mask[place]][-1]
        assert float(own) == pytest.approx(wanted)


TALK = """
from PIL import Image
class Talk:
    layout, help, begun = 'conversation', 'answer with one of them', ''
    def reset(self, seed, split): return (Image.new('RGB', (56, 56)), 'get to the goal')
    def step(self, text): return ('what do you see ?',), 1.0, False, False, {'valid': True}
    def render(self): ...
    def close(self): ...
"""


@pytest.mark.parametrize("preset", ["poad", "grpo"])
def test_a_conversation_that_the_model_has_no_positions_for_is_cut(preset: str, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    place = {"name": f"{tmp_path / 'talk.py'}:Talk", "parallel": 2, "steps": 9}
    with agent_runs.opened(agent_runs.config(tmp_path, preset, environment=place)) as run:
        run.policy.room = 110
        acted, row = run.act()
        run.estimate(acted)
        new = run.config.generation.max_new_tokens
        lengths = [prompt.length for prompt in acted.rows.prompts]
        assert max(lengths) + new <= 110 < max(lengths) + new + 12  # another turn is eight tokens and the answer
        assert row["rollout/too_long"] == row["rollout/episodes"] >= 2 and row["rollout/success"] == 0
        if acted.walk is not None:
            cut = [(k, e) for k, step in enumerate(acted.walk.decisions) for e, one in enumerate(step) if one.truncated]
            assert cut and all(acted.walk.following[k, e] is acted.walk.decisions[k][e].prompt for k, e in cut)


def test_a_group_begins_alike_and_is_given_its_first_word(tmp_path: Path) -> None:
    with agent_runs.opened(agent_runs.config(tmp_path, "para_grpo")) as run:
        acted, _ = run.act()
        first = [int((acted.rows.row == row).nonzero()[0, 0]) for row in range(4)]
        ids = [acted.rows.prompts[turn].tokens.ids.tolist() for turn in first]
        pixels = [acted.rows.prompts[turn].tokens.pixels["pixel_values"] for turn in first]
        assert ids[0] == ids[1] and torch.equal(pixels[0], pixels[1]) and not torch.equal(pixels[0], pixels[2])
        assert run.policy.tokenizer.decode(ids[0][-1:]) == "<think>"
        second = [turn for turn in range(len(acted.rows.prompts)) if turn not in first]
        for turn in second:  # the conversation so far, with what the model said
            text = run.policy.tokenizer.decode(acted.rows.prompts[turn].tokens.ids)
            said = run.policy.tokenizer.decode(acted.rows.tokens[turn - 1][acted.rows.mask[turn - 1]])
            assert said in text


def test_the_place_of_a_picture_that_is_spelt_out_is_only_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark itself cannot be drawn, but its letters can; in the conversation so far it would ask for a picture."""
    draw = episodes.generate

    def spelt(*arguments: Any) -> Any:
        made = draw(*arguments)
        return replace(made, texts=["is it <image> ? </think>"] * len(made.texts))

    monkeypatch.setattr(episodes, "generate", spelt)
    with agent_runs.opened(agent_runs.config(tmp_path, "para_grpo")) as run:
        run.act()
        assert set(run.table.episodes[0].said) == {"is it < image> ? </think>"}


def test_an_iteration_in_which_all_episodes_end_needs_no_value_of_what_follows(tmp_path: Path) -> None:
    with agent_runs.opened(agent_runs.config(tmp_path, "vl_dac", environment={"parallel": 1, "steps": 1})) as run:
        run._next_seed = lambda slot: 0  # type: ignore[method-assign]  # whose episode has two steps
        run.estimate(run.act()[0])
        acted, _ = run.act()
        assert acted.walk is not None and acted.walk.decisions[0][0].terminated and not acted.walk.following
        _, row = run.estimate(acted)
        assert row["critic/explained_variance"] == 1.0  # of one return


def test_the_first_iterations_train_the_critic_alone(tmp_path: Path) -> None:
    config = agent_runs.config(tmp_path, "vl_dac", trainer={"critic": {"hidden": [8], "warmup": 1}}, iterations=2)
    before = Policy(str(agent_runs.MODEL)).parameters
    train(config)
    first, second = rows(tmp_path / "run")
    assert "grad_norm" not in first and first["grad_norm/critic"] > 0 < second["grad_norm"]
    assert first["ratio/max"] == 1.0  # nothing has moved
    after = Policy(str(tmp_path / "run" / "model")).parameters
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_updates_end_where_the_policy_has_moved_too_far(tmp_path: Path) -> None:
    far = {"hidden": [8], "warmup": 0, "kl_stop": 1e-9}
    for place, stop in (("never", 1e9), ("soon", 1e-9)):
        (tmp_path / place).mkdir()
        changes: dict[str, Any] = {"trainer": {"epochs": 4, "critic": {**far, "kl_stop": stop}}}
        train(agent_runs.config(tmp_path / place, "poad", optimizer={"lr": 1e-3}, **changes))
    assert rows(tmp_path / "never" / "run")[0]["updates"] == 4 > rows(tmp_path / "soon" / "run")[0]["updates"]


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent_runs.config(tmp_path, "vl_dac", evaluation={"every": 1, "questions": 3})
    file, run = tmp_path / "tiny.yaml", tmp_path / "run"
    assert CliRunner().invoke(app, ["train", str(file)]).exit_code == 0
    first, last = rows(run)
    assert first["eval/success_low"] <= first["eval/success_mean"] <= first["eval/success_high"]
    assert "eval/success_blind" in first and "eval/success_blind" in last
    assert (run / "samples" / "step-000001" / "00.png").is_file() and "Success" in (run / "report.html").read_text()
    out, films = tmp_path / "scores.json", tmp_path / "films"
    result = CliRunner().invoke(app, ["eval", str(run), "--episodes", "2", "--out", str(out), "--videos", str(films)])
    assert result.exit_code == 0 and "2 episodes" in " ".join(result.output.split())
    assert json.loads(out.read_text())["scores"]["eval/success_mean"] in (0, 0.5, 1)
    assert (films / "episode-00.png").is_file()
    assert CliRunner().invoke(app, ["eval", str(run), "--num-prompts", "2"]).exit_code == 2
    seen: list[torch.dtype] = []  # a folder is evaluated as the configuration has the model
    monkeypatch.setattr(episodes_evaluate, "judge", lambda policy, *_, **__: seen.append(policy.dtype))
    CliRunner().invoke(app, ["eval", str(agent_runs.MODEL), "--config", str(file), "vlm.dtype=bfloat16"])
    assert seen == [torch.bfloat16]
