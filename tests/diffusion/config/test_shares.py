"""Equal work for all processes: who waits, for how long, and what mends it."""

from pathlib import Path

import pytest

from genrl.config import load
from genrl.diffusion.config.combinations import even, processes_problem, remedy, waiting
from tests.cli.commands import run, words

ROOT = Path(__file__).resolve().parents[3]
UNEVEN = ROOT / "configs" / "flow_grpo.yaml"
"""96 samples in batches of 32, one update."""


@pytest.mark.parametrize(
    ("context", "count", "says"),
    [
        (1, 3, None),
        (1, 4, "micro-batches for 3 only; start no more, or write sampling.batch_size=24"),
        (2, 6, None),
        (2, 3, "cannot be put in groups of 2"),
        (2, 8, "4 groups of 2 processes, but an optimiser step has micro-batches for 3 only"),
    ],
)
def test_processes_that_would_have_nothing_to_do(context: int, count: int, says: str | None) -> None:
    found = processes_problem(load(UNEVEN, [f"distributed.context={context}"]), count)
    assert found is says is None or says in str(found)


def test_waiting_is_said_with_the_batch_that_ends_it() -> None:
    text = waiting(load(UNEVEN), 2)
    assert "3 micro-batches of 32 samples" in str(text) and "about 1.50 times as fast as one;" in str(text)
    assert "; with sampling.batch_size=24 none does" in str(text)
    for count, size in ((1, 32), (3, 32), (2, 24), (4, 24)):
        assert waiting(load(UNEVEN, [f"sampling.batch_size={size}"]), count) is None


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["flow_grpo", "quickstart", "diffusion/dpo", "diffusion/tree_grpo", "diffusion/crd"])
def test_the_remedy_gives_equal_work(name: str, count: int) -> None:
    """A configuration that is taken, with updates, pairs and trees."""
    file = ROOT / "configs" / f"{name}.yaml"
    mended = load(file, remedy(load(file), count).split())
    steps = mended.trainer.cut(mended, count)
    assert len(steps) == mended.trainer.updates
    for sizes in steps:
        assert len(sizes) % count == 0 and len(set(sizes)) == 1
    assert waiting(mended, count) is None


def test_updates_are_shared_out_one_by_one() -> None:
    """4 micro-batches in 2 updates: with 3 processes each update takes as long as one micro-batch."""
    config = load(UNEVEN, ["sampling.batch_size=24", "trainer.updates_per_iteration=2"])
    assert "about 2.00 times" in str(waiting(config, 3))
    assert list(even(config)) == [1, 2] and "equal work for 1, 3 processes" in words(run("check", str(UNEVEN)))
    many = ["sampling.batch_size=2", "sampling.prompts_per_iteration=9", "sampling.group_size=9"]  # 41 micro-batches
    small_rest = load(UNEVEN, many)  # not worth a word
    assert waiting(small_rest, 2) is None and list(even(small_rest)) == []
    trees = load(ROOT / "configs" / "diffusion" / "branch_grpo.yaml")  # 6: 4 processes have 2 rounds of one
    assert list(even(trees)) == [1, 2, 3, 6]
    assert "6 micro-batches of 1 trees" in str(waiting(trees, 4)) and "about 3.00 times" in str(waiting(trees, 4))
