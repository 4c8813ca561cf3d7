"""The claims and their runs: pages show what is stored, statistics by hand, what is made next and how it goes on."""

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout

from benchmarks import diversity
from benchmarks.claims import plan, stored, tables, work
from benchmarks.claims.files import FILES
from benchmarks.claims.plan import Claim, Plan, Recipe
from benchmarks.claims.statistics import Interval, at, paired, reached, stratified, student, verdict
from benchmarks.gradient_noise import BASELINES, LEAVES, SPLITS, credit, plan_of
from genrl.cli import init
from genrl.config import load
from genrl.diffusion.train import train
from genrl.mdp.tree import grow
from genrl.runtime.folder.run import Run, read_metrics


@pytest.fixture(scope="module")
def given() -> Plan:
    return plan.read()


def test_pages_show_what_is_stored(given: Plan) -> None:
    wrong = tables.write(given, stored.read(), check=True)
    assert not wrong, f"run `python -m benchmarks.claims table`: {', '.join(map(str, wrong))} are not current"


def test_the_demo_says_what_its_stored_runs_reached() -> None:
    kept = [run for name, run in stored.read().items() if name.startswith("demos/quickstart")]
    assert {(run.get("processes", 1), run["threads"]) for run in kept} >= {(1, 1), (2, 1)}
    shares = [run["curve"][init.RIGHT][-1] for run in kept]
    assert tuple(round(share, 2) for share in (min(shares), max(shares))) == init.USUAL


def test_a_number_that_was_changed_by_hand_is_found(given: Plan, tmp_path: Path) -> None:
    kept = stored.read()
    page = tmp_path / "docs" / "vla_results.md"
    page.parent.mkdir()
    text = Path("docs/vla_results.md").read_text()
    page.write_text(re.sub(r"→ \*\*0", "→ **1", text, count=1))
    assert page in tables.write(given, kept, root=tmp_path)
    assert page.read_text() == text
    with pytest.raises(ValueError, match="no table nowhere"):
        tables.page("<!-- claims: nowhere -->\n<!-- /claims -->", "docs/x.md", given, kept)


def test_every_claim_and_every_table_has_its_place(given: Plan) -> None:
    names = [claim.name for claim in given.claims]
    assert len(names) == len(set(names))
    for place in {claim.page for claim in given.claims}:
        file, _, anchor = place.partition("#")
        heads = re.findall(r"^#+ (.*)$", Path(file).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, place
    pages = "".join(file.read_text() for file in Path("docs").glob("*.md"))
    assert set(given.tables) | {"verdicts", "papers"} == {match["name"] for match in tables.MARKED.finditer(pages)}


def test_stored_runs_are_small_and_of_known_recipes(given: Plan) -> None:
    files = list(stored.FOLDER.glob("*/*.json"))
    assert sum(file.stat().st_size for file in files) < 30e6
    names = {file.relative_to(stored.FOLDER).as_posix().rpartition("-")[0] for file in files}
    assert names <= given.recipes.keys()
    assert "hostname" not in "".join(file.read_text() for file in files[:20])


@pytest.mark.slow
def test_every_recipe_holds(given: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "captions.txt", lambda: "a red cube\n")  # all of them take a minute to place
    for recipe in given.recipes.values():
        command = work.command_of(recipe, 0, tmp_path, Run(tmp_path / "run"))
        load(command[0], command[1:])


def test_intervals_by_hand() -> None:
    result = student([0.1, 0.3, 0.2])
    half = 4.3026527 * np.std([0.1, 0.3, 0.2], ddof=1) / 3**0.5  # the 97.5 % quantile for two degrees of freedom
    assert (result.value, result.low, result.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert student([0.4]) == Interval(0.4, float("-inf"), float("inf"), 1)
    pairs = paired([0.6, 0.9, 0.7], [0.5, 0.6, 0.5])
    assert (pairs.value, pairs.low, pairs.count) == (pytest.approx(result.value), pytest.approx(result.low), 3)


def test_the_bootstrap_draws_seeds_within_tasks() -> None:
    same = stratified([[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]])  # tasks differ, seeds do not
    assert (same.value, same.low, same.high) == pytest.approx((0.5, 0.5, 0.5))
    ends = stratified([[0.0, 1.0]])  # of two draws both are 0, or 1, in a quarter of the cases each
    assert (ends.value, ends.low, ends.high, ends.count) == (0.5, 0.0, 1.0, 2)


def test_the_rule() -> None:
    for low, high, higher, lower, same in (
        (0.01, 0.2, "shown", "denied", "not decided"),
        (-0.2, -0.01, "denied", "shown", "not decided"),
        (-0.04, 0.03, "denied", "denied", "shown"),
        (-0.04, 0.3, "not decided", "not decided", "not decided"),
        (0.06, 0.2, "shown", "denied", "denied"),
        (0.01, 0.04, "shown", "denied", "shown"),
    ):
        actual = Interval((low + high) / 2, low, high, 3)
        assert [verdict(actual, expected, 0.05) for expected in ("higher", "lower", "same")] == [higher, lower, same]
        assert verdict(Interval(0.5, 0.4, 0.6, 1), "higher", 0.05) == "not decided"


def test_values_between_evaluations() -> None:
    curve = [(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]
    assert [at(curve, cost) for cost in (0, 5, 10, 15, 20, 20.5, 22)] == [1, 2, 3, 2.5, 2, 2, None]
    assert [reached(curve, level) for level in (2.0, 3.0, 3.1)] == [5.0, 10.0, None]


def _run(**columns: list[float]) -> dict[str, Any]:
    return {"curve": {"kcalls": columns.pop("kcalls"), **{f"eval/{k}_mean": v for k, v in columns.items()}}}


def test_a_claim_compares_equal_seeds_at_equal_cost() -> None:
    recipes = {name: Recipe(name, "x.yaml") for name in ("g/a", "g/b")}
    claim = Claim("c", "docs/x.md#y", "a is ahead", "g/a", "g/b", "eval/r_mean", "higher", 0.01, per="kcalls")
    kept = {
        "g/a-0": _run(kcalls=[0, 10], r=[0.0, 1.0]),  # at 5: .5
        "g/a-1": _run(kcalls=[0, 5], r=[0.0, 0.6]),
        "g/b-0": _run(kcalls=[0, 5], r=[0.0, 0.2]),
        "g/b-1": _run(kcalls=[0, 5], r=[0.0, 0.3]),
        "g/b-2": _run(kcalls=[0, 1], r=[0.0, 0.9]),  # of no pair
    }
    known = Plan(recipes, (claim,), {})
    result, word = tables.decided(claim, known, kept)
    assert result is not None and (result.value, result.count, word) == (pytest.approx(0.3), 2, "shown")
    assert "| a is ahead | +0.300 (+0.300 to +0.300) | 2 | **shown** |" in tables.verdicts(known, kept, "docs/x.md")
    start = Claim("s", "docs/x.md#y", "it rises", "g/a", "start", "eval/r_mean", "higher", 0.01)
    assert tables.decided(start, known, kept)[0] == student([1.0, 0.6])
    assert tables.decided(claim, known, {"g/a-0": kept["g/a-0"]}) == (None, "not run")


def test_the_most_valuable_come_first() -> None:
    recipes = [Recipe("g/late", "x", seeds=1), Recipe("g/a", "x", seeds=2, priority=1)]
    recipes += [Recipe("g/b", "x", seeds=2, priority=1), Recipe("g/plain", "x", seeds=1, priority=2, diversity=True)]
    known = Plan({one.name: one for one in recipes}, (), {})
    kept: dict[str, Mapping[str, Any]] = {"g/a-0": {}, "g/plain-0": {}}
    order = [f"{recipe.name}-{seed}" for recipe, seed in plan.missing(known, kept)]
    assert order == ["g/b-0", "g/a-1", "g/b-1", "g/plain-0", "g/late-0"]  # g/plain has no diversity yet
    assert plan.missing(known, kept, ["g/b-1"])[0][1] == 1  # what was begun goes on


def _genrl(made: list[list[str]], stops: int) -> Callable[[list[str], Path, float, int], tuple[int, float]]:
    """Stands for `genrl`: the first `stops` calls end after a checkpoint, the others at the end."""

    def run(arguments: list[str], log: Path, until: float, threads: int) -> tuple[int, float]:
        made.append([*arguments, f"threads={threads}"])
        own = next((one for one in arguments if one.startswith("output=")), "").partition("=")[2]
        folder = Run(Path(own or arguments[1]))
        if arguments[0] == "train":
            folder.folder.mkdir(parents=True)
            folder.config.write_text(Path("configs/vlm/music_rl.yaml").read_text())
            folder.info.write_text(json.dumps({"git_commit": "abc", "versions": {"torch": "2"}}))
        if len(made) <= stops:
            (folder.checkpoints / "step-000001").mkdir(parents=True)
            return 143, 5.0
        rows = [{"step": 0, "eval/total_mean": 0.1}, {"step": 100, "eval/total_mean": 0.123456789, "loss": 1.0}]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0, 7.0

    return run


def test_a_run_that_was_stopped_goes_on_and_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.checkpoint, "latest", lambda folder: next(folder.glob("step-*"), None))
    monkeypatch.setattr(work, "changes_of_code", lambda: False)
    start, recipe = Recipe("g/start", "c.yaml", seeds=0), Recipe("g/x", "c.yaml", ("a={seed:g/start}/model",), seeds=1)
    recipe = replace(recipe, processes=2, threads=3)
    known, made, (runs, store) = Plan({"g/start": start, "g/x": recipe}, (), {}), [], (tmp_path / "r", tmp_path / "s")
    stub = _genrl(made, stops=1)
    assert not work.make(known, recipe, 0, runs, time.monotonic() + 9, store, stub)  # what it needs was stopped
    assert work.work(known, 0.1, runs, store, stub) == ["g/x-0"]
    assert [one[0] for one in made] == ["train", "resume", "train"]
    assert {"--nproc=2", "threads=3"} < set(made[2]) and "threads=1" in made[1]
    assert f"a={runs / 'g/start-0'}/model" in made[2] and {"seed=0", "checkpoint.keep=1"} < set(made[2])
    kept = json.loads((store / "g/x-0.json").read_text())
    wanted = {"commit": "abc", "cpu_s": 7.0, "iterations": 100, "processes": 2, "threads": 3}
    assert {name: kept[name] for name in wanted} == wanted and kept["last"] == {"step": 100, "loss": 1.0}
    assert kept["curve"] == {"step": [0, 100], "eval/total_mean": [0.1, 0.12346]}
    assert json.loads((runs / "g/start-0.cost").read_text())["cpu_s"] == 12.0  # both parts
    assert (runs / "g/start-0").exists() and not (runs / "g/x-0").exists()  # others need the first
    assert work.work(known, 0.1, runs, store, stub) == []


def test_two_at_once_and_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "changes_of_code", lambda: False)
    recipe = Recipe("g/x", "c.yaml", seeds=1)
    known = Plan({"g/x": recipe}, (), {})
    (tmp_path / "g").mkdir()
    with FileLock(tmp_path / "g/x-0.lock"), pytest.raises(Timeout):
        work.make(known, recipe, 0, tmp_path, time.monotonic() + 9, tmp_path / "s", _genrl([], 0))
    with FileLock(tmp_path / "g/x-0.lock"):
        assert work.work(known, 0.1, tmp_path, tmp_path / "s", _genrl([], 0)) == []
    tries: list[list[str]] = []

    def fails(arguments: list[str], log: Path, until: float, threads: int) -> tuple[int, float]:
        tries.append(arguments)
        return 1, 2.0

    assert work.work(known, 0.1, tmp_path, tmp_path / "s", fails) == []
    assert work.work(known, 0.1, tmp_path, tmp_path / "s", fails) == [] and len(tries) == 1
    assert "ended with 1" in (tmp_path / "g/x-0.failed").read_text()


# -- The diversity of a finished run is what its own evaluations would have logged
SMALL = (
    *("iterations=1", "sampling.prompts_per_iteration=2", "sampling.batch_size=2", "optimizer.lr=0.1", "trackers=[]"),
    *("sampling.group_size=4", "trainer.window={size: 2, high: 3}", "sampling.num_inference_steps=4"),
    *("evaluation.num_prompts=3", "evaluation.group_size=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("flow_grpo", ("ema={decay: 0.5}",)), ("prompt_rl", ())])
def test_as_the_run_evaluates(name: str, changes: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(diversity, "PROMPTS", 3)
    monkeypatch.setattr(diversity, "PICTURES", 2)
    method = plan.read().recipes[f"pipelines/{name}"]
    rewards = [reward.model_dump(mode="json", exclude_defaults=True) for reward in load(method.config).rewards]
    (tmp_path / "mine.py").write_text("from benchmarks.diversity import diversity as logged")
    rewards.append({"name": f"{tmp_path}/mine.py:logged", "weight": 0})
    images = torch.zeros(3, 3, 2, 2)
    images[1, 0] = 1  # a third of the numbers: sqrt(1 / 3) from the others, which are alike
    assert diversity.distance(images) == pytest.approx(2 / 3 * 3**-0.5)
    config = load(method.config, [*SMALL, *changes, f"rewards={json.dumps(rewards)}", f"output={tmp_path / 'run'}"])
    run = Run(train(config))
    logged = [row[f"{method.evaluation}/logged_mean"] for row in read_metrics(run.metrics)]
    assert logged[0] != pytest.approx(logged[1], abs=1e-4)
    assert diversity.measure(run, method.evaluation) == pytest.approx(logged, abs=1e-5)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ValueError, match="no checkpoint of iteration 1"):
        diversity.measure(run, method.evaluation)


# -- The estimates that benchmarks/gradient_noise.py compares
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", SPLITS)
def test_credit_is_unbiased(name: str, baseline: str) -> None:
    """An edge whose noise adds 1 to the rewards below it has credit m_e / G of it, and what is common to all leaves has
    none: so `sum of credit x grad log p` has the expectation of the gradient, whatever the tree."""
    tree = grow(plan_of(name))
    assert float(credit(tree, torch.full((LEAVES,), 3.0).double(), baseline).abs().max()) < 1e-12
    for node in range(tree.num_nodes):
        depth, first, below = (int(of[node]) for of in (tree.depth, tree.first_leaf, tree.num_leaves))
        if depth == 0 or below == LEAVES:
            continue
        raised = torch.zeros(LEAVES).double()
        raised[first : first + below] = 1.0
        assert float(credit(tree, raised, baseline)[depth - 1, first]) == pytest.approx(below / LEAVES)
