"""Preferences over pictures: pairs, a judge of the reward stack, the cache, the ensemble, new rewards for old data."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrl_rewards
from genrl.mdp.noise import keyed_noise
from genrl.playground.minitable import MiniTable, expert_chunk
from genrl.playground.minitable.world import TableWorld
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.rl_vlm_f import train as preferences
from genrl.vla.methods.rl_vlm_f.train import UNUSABLE, LabelCache, Pairs, draw_pairs, label_pairs
from genrl.vla.offline.transitions import Words
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE, TOKENS
from tests.vla.offline.test_transitions import expert_data
from tests.vla.tiny_policies import FACTS, WORDS, frames

READS = Words(WORDS)


@settings(max_examples=25)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=30), st.integers(0, 99))
def test_pairs_share_an_instruction_and_differ(lines: list[str], seed: int) -> None:
    if all(lines.count(line) == 1 for line in lines):
        with pytest.raises(ValueError, match="no two"):
            draw_pairs(lines, 5, seed=seed, round_number=0)
        return
    pairs = draw_pairs(lines, 40, seed=seed, round_number=0)
    for a, b in zip(*(side.tolist() for side in pairs), strict=True):
        assert a != b and lines[a] == lines[b]
    again, other = (draw_pairs(lines, 40, seed=seed, round_number=number) for number in (0, 1))
    assert torch.equal(pairs.first, again.first) and torch.equal(pairs.second, again.second)
    assert not (torch.equal(pairs.first, other.first) and torch.equal(pairs.second, other.second)) or len(lines) < 5
    every = draw_pairs(lines, 2000, seed=seed, round_number=0)
    partnered = {n for n, line in enumerate(lines) if lines.count(line) > 1}
    assert set(every.first.tolist()) == set(every.second.tolist()) == partnered


class Brightness:
    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, images, prompts):
        self.samples += len(prompts)
        means = images.flatten(1).mean(1)
        return [math.nan if mean == 0 else float(mean) for mean in means]


class Both:
    def __call__(self, images, prompts, pairs):
        means = images.flatten(1).mean(1)
        return [float(means[i] > means[j]) for i, j in pairs]


def grey(*levels: int) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 16, 16, 3).contiguous()


def test_labels_say_which_is_better() -> None:
    """Near scores are no preference, and missing ones no answer."""
    pairs = Pairs(torch.tensor([0, 1, 1, 3]), torch.tensor([1, 0, 2, 0]))
    for judge in (Brightness(), Both()):
        look = grey(10, 200, 200, 60).__getitem__
        assert label_pairs(judge, look, ["x"] * 4, pairs, LabelCache(None, "j")).tolist() == [0, 1, -1, 1]
    look, lines = grey(100, 110, 0).__getitem__, ["x"] * 3
    pairs = Pairs(torch.tensor([0, 0]), torch.tensor([1, 2]))
    cache = LabelCache(None, "j")
    assert label_pairs(Brightness(), look, lines, pairs, cache, margin=0.1).tolist() == [-1, UNUSABLE]
    assert label_pairs(Brightness(), look, lines, pairs, LabelCache(None, "k"), margin=0.01).tolist() == [0, UNUSABLE]
    silent = Brightness()  # an answer that could not be read is an answer
    assert label_pairs(silent, look, lines, pairs, cache).tolist() == [-1, UNUSABLE] and silent.samples == 0


def test_a_judge_is_asked_once_about_what_it_was_shown(tmp_path) -> None:
    images, lines, judge = grey(10, 200, 10, 200), ["x"] * 4, Brightness()
    cache = LabelCache(tmp_path / "labels.jsonl", "j")
    pairs = Pairs(torch.tensor([0, 1, 2, 0]), torch.tensor([1, 0, 3, 1]))  # the same two pictures, in both orders
    assert label_pairs(judge, images.__getitem__, lines, pairs, cache).tolist() == [0, 1, 0, 0]
    assert cache.asked <= 2 and len(cache) == 1
    fresh, silent = LabelCache(tmp_path / "labels.jsonl", "j"), Brightness()
    assert label_pairs(silent, images.__getitem__, lines, pairs, fresh).tolist() == [0, 1, 0, 0]
    assert silent.samples == 0 and fresh.asked == 0
    for other in (LabelCache(tmp_path / "labels.jsonl", "another judge"), fresh):
        words = ["y"] * 4 if other is fresh else lines
        assert label_pairs(silent, images.__getitem__, words, pairs, other).tolist() == [0, 1, 0, 0] and other.asked
    assert preferences.image_hash(images[0]) == preferences.image_hash(images[2]) != preferences.image_hash(images[1])
    (tmp_path / "spoilt.jsonl").write_text(json.dumps({"key": "a", "label": 1}) + "\n{broken\n")
    with pytest.raises(ValueError, match="line 2 is no label"):
        LabelCache(tmp_path / "spoilt.jsonl", "j")


def test_a_judge_that_fails_stops_the_run_and_is_asked_again() -> None:
    """One call of ten may fail; its pairs have no label and are in no cache. More may not."""
    look, lines, calls = grey(*range(11)).__getitem__, ["x"] * 11, []
    pairs, cache = Pairs(torch.arange(10), torch.arange(1, 11)), LabelCache(None, "j")

    def frail(images, prompts):
        calls.append(len(prompts))
        if len(calls) in fails:
            raise RuntimeError("no model")
        return images.flatten(1).mean(1)

    fails: tuple[int, ...] = (2,)
    labels = label_pairs(frail, look, lines, pairs, cache, batch_size=1).tolist()
    assert labels == [0, UNUSABLE] + [0] * 8 and len(cache) == 9 and len(calls) == 10
    assert label_pairs(frail, look, lines, pairs, cache, batch_size=1).tolist() == [0] * 10 and len(calls) == 11
    calls.clear()
    fails = (1, 2, 3)
    with pytest.raises(genrl_rewards.RewardFailed, match="no model"):
        label_pairs(frail, look, lines, pairs, LabelCache(None, "j"), batch_size=1)
    assert len(calls) == 3  # the first that is one too many, not the last


def ensemble(members: int = 3) -> preferences.RewardEnsemble:
    torch.manual_seed(0)
    nets = preferences.RewardEnsemble(FACTS, frame_statistics(frames()), members=members, width=32)
    for net in nets.nets:
        torch.nn.init.normal_(net.head[-1].weight)
    return nets


def test_the_most_disputed_pairs_are_chosen_and_those_without_a_preference_teach_nothing() -> None:
    nets, shown = ensemble(), {k: v for k, v in frames().items() if k != ACTION}
    candidates = draw_pairs(["x"] * len(shown[STATE]), 40, seed=0, round_number=0)
    share = preferences.preference_logits(nets, shown, candidates).sigmoid()
    spread, chosen = share.std(0), preferences.choose(nets, shown, candidates, 5)
    pairs = list(zip(*(side.tolist() for side in candidates), strict=True))
    disputed = [pairs.index(pair) for pair in zip(*(side.tolist() for side in chosen), strict=True)]
    rest = torch.tensor([p for p in range(40) if p not in disputed])
    assert spread[disputed].min() >= spread[rest].max()
    shown = {k: v for k, v in frames().items() if k != ACTION}
    pairs = Pairs(torch.tensor([0, 2]), torch.tensor([1, 3]))
    how = {"steps": 3, "batch_size": 4, "learning_rate": 1e-3, "seed": 0}
    with pytest.raises(ValueError, match="none of the 2 labels"):
        next(preferences.train_rewards(ensemble(), shown, pairs, torch.tensor([-1, -1]), **how))
    one, other = ensemble(), ensemble()
    list(preferences.train_rewards(one, shown, pairs, torch.tensor([1, -1]), **how))
    list(preferences.train_rewards(other, shown, Pairs(pairs.first[:1], pairs.second[:1]), torch.tensor([1]), **how))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_rewards_are_learned_by_the_likelihood_of_preferences() -> None:
    """Of one pair, seen from both sides: the first is better, so the second is not."""
    shown, pair = {k: v for k, v in frames().items() if k != ACTION}, Pairs(torch.tensor([0, 2]), torch.tensor([2, 0]))
    nets = ensemble()
    for net in nets.nets:
        net.head[-1].weight.data.mul_(0.1)  # else tanh is flat
    worth = nets(shown)[:, :3:2].detach()
    how = {"steps": 60, "batch_size": 8, "learning_rate": 3e-3, "seed": 0}
    steps = list(preferences.train_rewards(nets, shown, pair, torch.tensor([1, 0]), **how))
    assert steps[0]["loss"] == pytest.approx(float(-(worth[:, 0] - worth[:, 1]).sigmoid().log().mean()), rel=1e-5)
    assert steps[0]["accuracy"] == pytest.approx(float((worth[:, 0] > worth[:, 1]).float().mean()))
    logits, worth = preferences.preference_logits(nets, shown, pair), nets(shown)
    torch.testing.assert_close(logits[:, 0], worth[:, 0] - worth[:, 2])
    assert steps[-1]["accuracy"] == 1.0 and bool((logits[:, 0] > 0).all())


def test_new_rewards_do_not_depend_on_what_nobody_said() -> None:
    result, nets = expert_data(20, 0.5, one_episode=True, gamma=0.9), ensemble()
    said = keyed_noise((len(result.reward),), 1)
    blind = result._replace(reward=said, success=~result.success, terminated=~result.terminated)
    labelled, again = preferences.relabel(nets, result), preferences.relabel(nets, blind)
    assert torch.equal(labelled.reward, again.reward) and torch.equal(labelled.terminated, again.terminated)
    with torch.no_grad():
        worth = nets(result.next_observation).mean(0)
    torch.testing.assert_close(labelled.reward[result.done], worth[result.done])
    going = ~result.done
    torch.testing.assert_close(labelled.reward[going], ((1 - result.discount) * worth)[going])
    assert torch.equal(labelled.terminated, result.done) and torch.equal(labelled.action, result.action)


def test_pictures_and_instructions_are_found_again() -> None:
    env = MiniTable(6, image_size=32, chunk=1)
    seen, _ = env.reset(seed=0)
    for _ in range(12):
        seen = env.step(expert_chunk(env.state, 1))[0]
    shown = {STATE: torch.from_numpy(seen["agent_pos"]), TOKENS: READS.tokenise(env.task_description)}
    shown[ENVIRONMENT] = torch.from_numpy(seen["environment_state"])
    assert torch.equal(TableWorld().pictures(shown, 32), torch.from_numpy(seen["pixels"]))
    assert TableWorld().instructions(shown, READS) == env.task_description
