"""RLFR: what tokens are charged in a run, how its flow learns, and what is refused."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config.errors import ConfigError
from genrl.objectives.groups import group_advantages
from genrl.objectives.token_advantages import leave_one_out
from genrl.vlm.config.files import file_problems
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods import extras
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.opd.train import Teachers, divergence, generalised_divergence, loss, taught
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.methods.rlfr.settings import Flow
from genrl.vlm.methods.rlfr.train import LatentFlow, Latents, latents, layers_of, noise_of, opened, shaped
from genrl.vlm.methods.verifree import train as verifree
from genrl.vlm.methods.verifree.settings import VeriFree
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.shaping import InformativeGroups, ReferenceProbability, SpreadFilter
from genrl.vlm.rollout.rollout import totals
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs
from tests.vlm.by_hand import naive_log_probs
from tests.vlm.rollouts import rollout


@pytest.fixture(autouse=True)
def _few_questions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flow, "batch_size", 4)


TARGET = "<think> i see {answer} </think> <answer> {answer} </answer>"


def config(place: Path, flow: dict[str, Any] | None = None, **changes: Any) -> VLMConfig:
    own = {"demonstrations": TARGET, "pretraining": 2, "depth": 1, "lr": 1e-2, **(flow or {})}
    trainer = {"algorithm": "rlfr", "preset": "grpo", "regularisers": [], "flow": own, **changes.pop("trainer", {})}
    return vlm_runs.config(place, trainer=trainer, **changes)


def test_hidden_states_are_those_of_the_answers_tokens_and_of_the_ones_before(tmp_path: Path) -> None:
    with vlm_runs.opened(config(tmp_path)) as run:
        answers, _ = run.draw()
        prompts = [answers.prompts[k] for k in answers.group.tolist()]
        result = latents(run.policy, prompts, answers.tokens, answers.mask, (0.5, 1.0))
        assert result.places.tolist() == [0.5] and result.states.shape == (int(answers.mask.sum()), 1, 128)
        scored = run.policy.log_probs(prompts, answers.tokens, answers.mask, group=torch.arange(16), share_prefix=False)
        kept = answers.mask.bool()
        torch.testing.assert_close(result.before[:, 0], scored.states[kept].detach())  # of the last layer
        lengths, first = answers.mask.sum(1).tolist(), 0
        for length in lengths:  # what a token's state is, is the state before the next
            own = slice(first, first + length)
            assert torch.equal(result.states[own][:-1], result.before[own][1:])
            first += length


def test_a_new_flow_is_still_and_noise_does_not_depend_on_who_draws_it() -> None:
    assert layers_of((0.25, 0.5, 0.75), 28) == [7, 14, 21] and layers_of((0.5, 0.75, 1.0), 2) == [1]
    flow = LatentFlow(8, 2, 0)
    of = Latents(torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.tensor([0.25, 0.5]))
    noise = noise_of([("a",), ("b",)], [2, 3], (2, 8))
    assert torch.equal(noise[2:], noise_of([("b",)], [3], (2, 8)))
    result = flow.deviation(of, noise, (0.8,))
    torch.testing.assert_close(result.error, (of.states - noise).square().mean((1, 2)))
    torch.testing.assert_close(result.score, 4 * result.error)
    assert torch.equal(flow.error(of, noise, torch.full((5,), 0.8)), result.error)


def test_advantages_are_those_of_the_group_less_what_the_flow_charges_from_a_token_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Flow, "most", 2)
    settings = config(tmp_path, {"coefficient": 0.5}, trainer={"micro_batch": 8})
    method: Any = settings.trainer
    with vlm_runs.opened(settings) as run:
        flow, _ = opened(run, method)
        answers, _ = run.draw()
        answers.scores["exact"][3] = answers.scores["tag_format"][3] = torch.nan
        ready = run.estimate(answers)
        result, figures = shaped(run, method, flow, answers, ready)
        advantage, mask = result.batch.advantage, answers.mask.bool()
        ours = group_advantages(totals(settings, answers.scores), answers.group, scale="group", eps=1e-4, ddof=1)
        charged = (ours.nan_to_num()[:, None] - advantage) / 0.5
        steps = charged - torch.nn.functional.pad(charged[:, 1:] * mask[:, 1:], (0, 1))  # u of each token
        assert (advantage[3] == 0).all(), "no score, nothing to learn"
        for k in range(16):
            paid = steps[k][mask[k]]
            assert k == 3 or ((paid > 1e-9).sum() <= 2 and float(paid.max()) == pytest.approx(1.0))
            assert (paid[paid > 1e-9] > 0.6).all() and (paid > -1e-9).all()
        right = answers.scores["exact"] >= 1
        assert figures["flow/charged"] > 0 and right.any() and flow.leave.weight.grad is not None
        assert float(flow.leave.weight.grad.abs().max()) > 0


@pytest.mark.slow
def test_the_flow_learns_the_right_answers(tmp_path: Path) -> None:
    result = rows(train(config(tmp_path, {"demonstrations": None}, iterations=4, optimizer={"lr": 1e-5})))
    assert result[-1]["flow/error_right"] < 0.9 * result[0]["flow/error_right"]
    assert all(row["updates"] == 1 and row["grad_norm"] > 0 and row["flow/advantage"] > 0 for row in result)


def test_a_column_of_the_demonstrations_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = [text for _, text in file_problems(config(tmp_path, {"demonstrations": "{solution}"}), [])]
    assert any("trainer.flow.demonstrations asks for the column solution" in text for text in result)


# -- On-policy distillation of language models: who reads what, what is learnt, and what is refused
TEMPLATE = "{question} i see {answer} ."


def config_of_opd_language(place: Path, changes: dict[str, Any] | None = None, **more: Any) -> VLMConfig:
    return vlm_runs.config(place, trainer={"algorithm": "opd", "preset": "dapo", **(changes or {})}, **more)


def test_a_model_that_teaches_itself_has_nothing_to_say(tmp_path: Path) -> None:
    for estimator in ("sampled", "distribution"):
        own = {"output": str(tmp_path / estimator)}
        (row,) = rows(train(config_of_opd_language(tmp_path, {"estimator": estimator, "top": None}, **own)))
        assert abs(row["teacher/gap"]) < 1e-6 and abs(row["loss"]) < 1e-6 and row["grad_norm"] < 1e-4


def test_each_question_has_its_own_teacher_and_comes_nearer_to_it(tmp_path: Path) -> None:
    teachers = {"red": {"prompt": TEMPLATE}, "other": {"path": str(vlm_runs.MODEL)}}
    changes = {"teachers": teachers, "estimator": "distribution", "top": 6, "epochs": 8}
    settings = config_of_opd_language(tmp_path, changes, optimizer={"lr": 3e-4})
    method: Any = settings.trainer
    with vlm_runs.opened(settings) as run:
        answers, _ = run.draw()
        for number, row in enumerate(answers.rows):
            row.columns["teacher"] = ("red", "other")[number % 2]
        ready = run.estimate(answers)
        teaching = Teachers(run, method)
        assert set(run.loop.memory["teachers"]) == {"red", "other"}
        result, figures = taught(run, method, teaching, answers, ready)
        batch = result.batch
        assert batch.old_log_prob is not None and bool((batch.advantage == 0).all())
        ids, said = batch.extra["teacher_ids"], batch.extra["teacher_rows"]
        mask, other = answers.mask.bool(), answers.group % 2 == 1
        # the second teacher is the model itself: its rows are the student's own, and at no distance
        options = {"group": answers.group, "temperature": 1.0}
        now = run.policy.log_probs(answers.prompts, answers.tokens, answers.mask, **options)
        far = divergence(method, run.policy, now.states, answers.mask, ids, said, 1.0)
        assert float(far[other].abs().max()) < 1e-6 < float(far[~other].max())
        # of the first, the distance by six tokens and the rest is no more than that by all
        head = run.policy.model.get_output_embeddings()
        mine = head(now.states).index_fill(-1, run.policy.forbidden, -1e30).log_softmax(-1)
        prompts = teaching.prompts(answers, teaching.names(answers))
        theirs = head(run.policy.log_probs(prompts, answers.tokens, answers.mask, **options).states)
        whole = generalised_divergence(mine, theirs.index_fill(-1, run.policy.forbidden, -1e30).log_softmax(-1), 1.0)
        assert bool((far <= whole + 1e-5)[mask].all()) and float(far[~other].sum() / whole[mask].sum()) > 0.5
        assert figures["teacher/k3"] > 0
        answering.learn(run, answers, result, loss)
        nearer = run.policy.log_probs(answers.prompts, answers.tokens, answers.mask, **options).states
        after = divergence(method, run.policy, nearer, answers.mask, ids, said, 1.0)
        assert float(after[~other].sum()) < 0.9 * float(far[~other].sum())
        run.loop.memory["teachers"]["other"] = "another"
        with pytest.raises(ValueError, match="other: the checkpoint was taught by other weights"):
            Teachers(run, method)
        answers.rows[0].columns["teacher"] = "nobody"
        with pytest.raises(ValueError, match="teacher: 'nobody', which is none of the teachers other, red"):
            teaching.names(answers)


# -- RLPR's reward: how likely the right answer is after the model's own reasoning, from whole logits, and after none
def test_it_is_that_of_whole_logits(tmp_path: Path) -> None:
    """A row without a place for the answer has 0; one that says nothing before it has that of no reasoning."""
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"preset": "rlpr"})) as run:
        answers, _ = run.draw()
        policy, row = run.policy, answers.rows[0]
        texts = ["<think> i see 3 </think> <answer> 9 </answer>", "<answer> 9 </answer>", "<think> i see 3 </think>"]
        said = [answer_ids(row.prompt, text, policy.processor, policy.stop_ids) for text in texts]
        tokens, mask = torch.zeros_like(answers.tokens), torch.zeros_like(answers.mask)
        for k, ids in enumerate(said):
            tokens[k, : len(ids)], mask[k, : len(ids)] = ids, True
        changed = replace(answers, tokens=tokens, mask=mask)
        parts = list(torch.arange(len(tokens)).split(5))
        result = extras.reference_probability(policy, changed, parts)
        assert result.shape == (len(tokens), 2) and result[2, 0] == 0
        assert result[1, 0] == pytest.approx(float(result[1, 1]), rel=1e-5)
        before = said[0][: said[0].tolist().index(said[1][0])]
        right = answer_ids(row.prompt, f"<answer> {row.columns['answer']} </answer>", policy.processor, policy.stop_ids)
        whole = torch.cat([before, right])
        with torch.no_grad():
            (own,) = naive_log_probs(policy, answers.prompts[:1], whole[None], torch.ones(1, len(whole)).bool())
        between = own[len(before) + 1 : len(before) + 1 + len(right) - 3]  # neither the tags nor the end
        assert result[0, 0] == pytest.approx(float(between.exp().mean()), rel=1e-4)
        sizes = result[:, 1].view(len(answers.rows), -1)
        assert (sizes == sizes[:, :1]).all(), "without reasoning, for all of a group"


def test_what_reasoning_gains_is_paid_and_what_it_loses_is_not_taken() -> None:
    batch = rollout()
    likely = torch.tensor([[0.9, 0.5], [0.2, 0.5]] * (len(batch.mask) // 2), dtype=torch.float64)
    batch = replace(batch, extra={**batch.extra, "reference_probability": likely})
    torch.testing.assert_close(ReferenceProbability().reward(batch)[:2], torch.tensor([0.36, 0.0], dtype=torch.float64))


def test_groups_that_spread_little_are_left_out_after_a_while() -> None:
    """By hand: deviations of 1 and .3, of which the second is below half of .65, and later .6. The reasoning's part of
    the rewards counts, and who is left makes up for who is not."""
    group, likely = torch.tensor([0, 0, 1, 1]), torch.zeros(4, 2, dtype=torch.float64)
    likely[0, 0] = 1.0
    preset = replace(PRESETS["rlpr"], transforms=(SpreadFilter(after=1, decay=0.9), InformativeGroups()))
    visits: Any = {}
    for narrow, left in ((0.6, True), (0.6, False), (1.2, True)):
        rewards = torch.tensor([1.1, 0.0, narrow, 0.0], dtype=torch.float64)  # 2 of the first with .9 of its reasoning
        batch = TokenBatch(torch.ones(4, 3).bool(), group, rewards, extra={"reference_probability": likely})
        actual = estimate(preset, batch, prompts=["a", "b"], visits=visits)
        advantage, visits = actual.batch.advantage, actual.visits
        whole = estimate(replace(preset, transforms=()), batch, prompts=["a", "b"]).batch.advantage
        assert advantage is not None and whole is not None
        wanted = whole if left else torch.cat([2 * whole[:2], 0 * whole[2:]])
        torch.testing.assert_close(advantage, wanted)
    assert visits == {"spread of rewards": (3, pytest.approx(0.9 * 0.65 + 0.1 * 0.8), 0.0)}


# -- VeriFree: the right answer in the place of the own; its gradient is that of the expected probability
def test_the_right_answer_takes_the_place_of_the_own(tmp_path: Path) -> None:
    """R is the product of whole logits; without `<answer` an answer stays as it is and is worth 0."""
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"algorithm": "verifree"})) as run:
        answers, _ = run.draw()
        policy, row = run.policy, answers.rows[0]
        texts = ["<think> i see 3 </think> <answer> 9 </answer>", "<think> i see 3 </think>"]
        said = [answer_ids(row.prompt, text, policy.processor, policy.stop_ids) for text in texts]
        tokens, mask = torch.zeros_like(answers.tokens), torch.zeros_like(answers.mask)
        for k, ids in enumerate(said):
            tokens[k, : len(ids)], mask[k, : len(ids)] = ids, True
        changed = replace(answers, tokens=tokens, mask=mask)
        result, right, paid = verifree.completed(policy, changed, 1.0, run.config.trainer)
        assert torch.equal(result.tokens[1][result.mask[1]], said[1]) and paid[1] == 0 and not right[1].any()
        own = answer_ids(row.prompt, f"<answer> {row.columns['answer']} </answer>", policy.processor, policy.stop_ids)
        begins = said[0].tolist().index(own[0])
        whole = torch.cat([said[0][:begins], own])
        assert torch.equal(result.tokens[0][result.mask[0]], whole)
        assert right[0].nonzero()[:, 0].tolist() == list(range(begins + 1, len(whole)))
        with torch.no_grad():
            (each,) = naive_log_probs(policy, answers.prompts[:1], whole[None], torch.ones(1, len(whole)).bool())
        assert float(paid[0]) == pytest.approx(float(each[begins + 1 :].sum().exp()), rel=1e-4)
        sampled = changed.sampler_log_prob[0][:begins]
        torch.testing.assert_close(result.sampler_log_prob[0][:begins], sampled)
        torch.testing.assert_close(result.sampler_log_prob[0][begins : len(whole)], each[begins:], rtol=1e-4, atol=1e-5)


def test_its_gradient_is_that_of_the_expected_probability() -> None:
    """One token of reasoning z among 3, one of answer y among 2: in closed form, over every pair of reasonings, each by
    its probability."""
    rng = torch.Generator().manual_seed(0)
    z, y = (torch.randn(*size, generator=rng, dtype=torch.float64).requires_grad_() for size in ((3,), (3, 2)))
    reasons, answers = z.log_softmax(0), y.log_softmax(1)[:, 1]
    wanted = torch.autograd.grad((reasons.exp() * answers.exp()).sum(), (z, y), retain_graph=True)
    total = torch.zeros((), dtype=torch.float64)
    preset = VeriFree().composed
    for pair in itertools.product(range(3), repeat=2):
        paid = answers[list(pair)].exp().detach()
        right = torch.tensor([[False, True]] * 2)
        gain = leave_one_out(paid, torch.zeros(2, dtype=torch.int64))
        advantage = torch.where(right, paid[:, None], gain[:, None])
        batch = TokenBatch(torch.ones(2, 2).bool(), torch.zeros(2, dtype=torch.int64), advantage=advantage, rows=2,
                           tokens=4, groups=1)  # fmt: skip
        log_prob = torch.stack([torch.stack([reasons[k], answers[k]]) for k in pair])
        share = reasons[list(pair)].sum().exp().detach()
        total = total + share * policy_loss(preset, batch.with_log_prob(log_prob)).loss
    for actual, want in zip(torch.autograd.grad(-total, (z, y)), wanted, strict=True):
        torch.testing.assert_close(actual, want)


def test_a_run_learns_right_answers_without_any_reward(tmp_path: Path) -> None:
    free = {"rewards": [{"name": "exact", "weight": 0}], "trainer": {"algorithm": "verifree"}, "iterations": 2}
    for row in rows(train(vlm_runs.config(tmp_path, **free))):
        assert 0 <= row["right/probability"] <= 1 and 0 <= row["right/placed"] <= 1
    with pytest.raises(ConfigError, match="it looks at rewards"):
        vlm_runs.config(tmp_path, trainer={"algorithm": "verifree", "filter": "spread"})
    with pytest.raises(ConfigError, match="one advantage for both"):
        vlm_runs.config(tmp_path, trainer={"algorithm": "verifree", "preset": "gspo"})
