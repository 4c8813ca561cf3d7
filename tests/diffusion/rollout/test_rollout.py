"""Who draws which sample from which noise, and how scores come together."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config, shared_out
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout import rollout
from genrl.diffusion.rollout.forest import Samples
from genrl.diffusion.rollout.rollout import Rollouts, Sheet, Worker, to_bytes
from genrl.diffusion.rollout.scoring import Scorers, Scoring, score_metrics
from genrl.mdp.noise import derive_seed
from genrl.objectives.groups import group_advantages
from genrl_rewards.compose import Component
from tests.diffusion import runs


def tiny_config(**sampling: Any) -> Config:
    chosen = {"num_inference_steps": 2, "guidance_scale": 1.0, "height": 16, "width": 16}
    chosen |= {"prompts_per_iteration": 3, "group_size": 3, "batch_size": 2}
    return runs.unloaded(sampling={**chosen, "pipeline_args": {"max_sequence_length": 4}, **sampling}, seed=11)


ROWS = [Prompt(text, {"wanted": k}) for k, text in enumerate(["a star", "a dog", "a cat", "a tree"])]


def painted(policy: Any, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Samples:
    """A stand-in for a model: one number per sample, from its key."""
    final = torch.tensor([[derive_seed(*key) % 1000 / 1000] for key in batch.keys])
    return Samples(slots, batch, final, torch.ones(3), [])


def plain(final: Tensor) -> Tensor:
    return final.view(-1, 1, 1, 1).expand(-1, 3, 4, 4).clone()


def first_pixel(images: Tensor) -> list[float]:
    return images[:, 0, 0, 0].tolist()


def gather(
    config: Config, *, process: int = 0, num_processes: int = 1, iteration: int = 0, rows: list[Prompt] = ROWS,
    scorers: Mapping[str, Callable[..., Any]] | None = None, weights: Mapping[str, float] | None = None,
    done: list[int] | None = None,
) -> Rollouts:  # fmt: skip
    """An iteration as one process of several would call it; scores of the other processes stay NaN."""
    scorers = scorers or {"pixel": first_pixel}
    components = {label: Component(1.0 if weights is None else weights[label]) for label in scorers}
    policy: Any = SimpleNamespace(decode=lambda batch, final: plain(final))
    worker = Worker(process, num_processes, advance=(done if done is not None else []).append)
    sheet = Sheet.of(config, rows, iteration, num_processes=num_processes)
    jobs, size = rollout.jobs_of(config, sheet, worker), config.sampling.batch_size
    finishing = rollout.draw_here(jobs, policy, painted, worker, size, under=nullcontext, beat=lambda: None)
    opened = Scorers(dict(scorers), components)
    with Scoring(opened, sheet.rows, sheet.group.tolist(), background=config.sampling.score_in_background) as scoring:
        return rollout.gathered(sheet, rollout.handed_on(finishing, scoring, worker), scoring, worker, running={})


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5, 8])
def test_processes_share_out_one_iteration(num_processes: int) -> None:
    """Each sample once, from its own noise. Ends are agreed in `advance`: all processes call it equally often."""
    config = tiny_config()
    alone = gather(config)
    calls: list[list[int]] = [[] for _ in range(num_processes)]
    parts = [gather(config, process=p, num_processes=num_processes, done=done) for p, done in enumerate(calls)]
    assert len({len(done) for done in calls}) == 1
    assert sum(sum(done) for done in calls) == 9 * num_processes  # each speaks for all
    positions = [position for part in parts for position in part.mine]
    assert sorted(positions) == list(range(len(alone.mine) if num_processes in (1, 5) else len(positions)))
    assert {slot: key for part in parts for slot, key in keys(part, "keys").items()} == keys(alone, "keys")
    most = max(sum(len(one.slots) for one in part.mine.values()) for part in parts)
    assert most == {1: 9, 2: 5, 3: 3, 5: 2, 8: 2}[num_processes]
    for part in parts:
        assert part.prompts == alone.prompts and torch.equal(part.group, alone.group)
        assert all(one.slots == part.slots[position] for position, one in part.mine.items())
        assert all(torch.equal(one.images, to_bytes(plain(one.final))) for one in part.mine.values())
    # The scores of one process are those of its slots; together they are all of them.
    scores = torch.stack([part.scored.values["pixel"] for part in parts])
    assert ((~scores.isnan()).sum(dim=0) == 1).all()
    assert torch.equal(scores.nansum(dim=0), alone.scored.values["pixel"])


def keys(result: Rollouts, name: str) -> dict[int, Any]:
    """By slot."""
    of = ((one.slots, getattr(one.batch, name)) for one in result.mine.values())
    return {slot: key for slots, some in of for slot, key in zip(slots, some, strict=True)}


def test_keys_name_seed_iteration_and_slot() -> None:
    """A group may share its initial noise; the noise of steps stays each one's own."""
    result = gather(tiny_config(), iteration=4)
    assert keys(result, "keys") == {slot: (11, 4, slot) for slot in range(9)}
    assert all(one.batch.initial_keys is None for one in result.mine.values())
    result = gather(tiny_config(same_initial_noise=True), iteration=4)
    assert keys(result, "initial_keys") == {slot: (11, 4, "group", slot // 3) for slot in range(9)}
    assert len(set(keys(result, "keys").values())) == 9
    result = rollout.call_arguments(tiny_config(guidance_scale=None).sampling)
    assert result == {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 4}


def test_samples_without_a_score_are_left_out_and_counted() -> None:
    """The total is the weighted sum; a weight of zero is left out, whatever its scores."""

    def dogs_only(images: Tensor, prompts: list[str]) -> list[float | None]:
        return [x if text == "a dog" else None for x, text in zip(first_pixel(images), prompts, strict=True)]

    scorers = {"one": lambda images: [1.0] * len(images), "dogs": dogs_only}
    scorers["watched"] = lambda images: [math.nan] * len(images)
    weights = {"one": 2.0, "dogs": -1.0, "watched": 0.0}
    result = gather(tiny_config(prompts_per_iteration=4), scorers=scorers, weights=weights)
    dogs = torch.tensor([text == "a dog" for text in result.prompts])
    assert dogs.sum() == 3 and torch.equal(result.total.isnan(), ~dogs)
    torch.testing.assert_close(result.total[dogs], 2.0 - result.scored.values["dogs"][dogs])
    metrics = score_metrics(result.scored, result.total)
    assert metrics["reward/one_mean"] == 1.0 and metrics["reward/one_std"] == 0.0
    assert metrics["reward/dogs_failed"] == 9.0
    assert metrics["reward/watched_failed"] == 12.0 and math.isnan(metrics["reward/watched_mean"])
    assert metrics["reward/total_mean"] == pytest.approx(float(result.total[dogs].mean()))
    assert metrics["reward/total_std"] == pytest.approx(float(result.total[dogs].std(correction=0)))
    advantages = group_advantages(result.total, result.group, scale="global")
    assert torch.equal(advantages != 0, dogs) and advantages.isfinite().all()


def test_a_reward_may_fail_now_and_then_and_not_often() -> None:
    calls = iter(range(1000))

    def shaky(images: Tensor) -> list[float]:
        if next(calls) in (2, 9, 10):
            raise OSError("the camera is broken")
        return first_pixel(images)

    result = gather(tiny_config(prompts_per_iteration=5), scorers={"shaky": shaky})  # 2 of 15 samples, in 8 calls
    assert int(result.total.isnan().sum()) == 2
    assert score_metrics(result.scored, result.total)["reward/shaky_failed"] == 2.0
    with pytest.raises(genrl_rewards.RewardFailed, match=r"(?s)'shaky' raised for 4 of 9 samples.*camera is broken"):
        gather(tiny_config(), scorers={"shaky": shaky})
    with pytest.raises(ValueError, match="reward 'short' returned 1 numbers for 2 samples"):
        gather(tiny_config(), scorers={"short": lambda images: [1.0]})


@pytest.mark.parametrize("leaves", [1, 3])
@pytest.mark.parametrize(("updates", "num_processes"), [(1, 2), (2, 1), (3, 2), (3, 3), (2, 3)])
def test_the_samples_of_an_update_do_not_depend_on_the_number_of_processes(
    updates: int, num_processes: int, leaves: int
) -> None:
    """Chains and trees: each once, in micro-batches of no more than the configuration says."""
    config = tiny_config(prompts_per_iteration=5, batch_size=3)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"updates_per_iteration": updates})})
    sheets = [Sheet.of(config, ROWS, 1, leaves=leaves, num_processes=count) for count in (1, num_processes)]
    alone, shared = ([sorted(sum(s.plan[a:b], [])) for a, b in pairwise(s.bounds)] for s in sheets)
    assert alone == shared and len(alone) == updates and all(alone)
    assert sorted(sum(alone, [])) == list(range(0, 15, leaves))
    assert all(len(one) <= 3 for sheet in sheets for one in sheet.plan)
    assert updates == 1 or len({str(Sheet.of(config, ROWS, k, leaves=leaves).plan) for k in range(9)}) > 2


def test_groups_and_sizes_are_not_cut() -> None:
    """24 samples in one micro-batch, for two processes: one that a method compares in whole groups."""
    assert shared_out([24], 2) == [12, 12] and shared_out([24], 5) == [5, 5, 5, 5, 4]
    assert shared_out([24], 2, 8) == [16, 8] and shared_out([24], 4, 8) == [8, 8, 8]
    assert shared_out([32, 32, 32], 2) == [24] * 4 and shared_out([32, 32, 32], 2, 32) == [32] * 3
    assert shared_out([9, 9, 9, 2], 2) == [8, 7, 7, 7] and shared_out([9, 9], 2) == [9, 9]
