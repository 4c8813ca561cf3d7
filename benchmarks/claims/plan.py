"""benchmarks/claims.yaml: recipes of runs, claims, tables; and which runs are missing, most valuable first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

FILE = Path("benchmarks/claims.yaml")
LEAST = 9
"""Priority of what no claim asks for; 1 comes first."""
EXPECTED = ("higher", "lower", "same")


@dataclass(frozen=True)
class Recipe:
    """How a run is made: `genrl train CONFIG CHANGES seed=K`.

    changes: `{run:NAME}` is the folder of that run with seed 0, which is made first, `{seed:NAME}` that with the same
    seed; `{file:NAME}` what `benchmarks.claims.files` writes. second: a scorer of weight 0 is put there where the file
    has none (`work.SECOND`). diversity: how much the pictures of a prompt differ is measured before and after.
    evaluation: where the held-out figures stand in the log. means: metrics of training of which means are kept.
    processes: that share the work; threads: of each.
    """

    name: str
    config: str
    changes: tuple[str, ...] = ()
    seeds: int = 3
    minutes: float = 10.0
    priority: int = LEAST
    second: bool = False
    diversity: bool = False
    evaluation: str = "eval"
    means: tuple[str, ...] = ()
    processes: int = 1
    threads: int = 1


@dataclass(frozen=True)
class Claim:
    """A sentence of a page that runs can decide.

    run, than: names of recipes; `start` instead of the second is the run's own figure before training. per: what the
    two are to have spent alike (`kcalls`, `ksteps`, `ktokens`, `step`), None for the ends. expected: of `run` beside
    `than`. band: differences within it count as none.
    """

    name: str
    page: str
    says: str
    run: str
    than: str
    metric: str
    expected: str
    band: float
    per: str | None = None
    seeds: int = 3
    priority: int = LEAST
    tasks: tuple[str, ...] = ()
    """Metrics of single tasks: the difference is that of their mean, with a bootstrap stratified by them."""


@dataclass(frozen=True)
class Plan:
    recipes: Mapping[str, Recipe]
    claims: tuple[Claim, ...]
    tables: Mapping[str, Mapping[str, Any]]
    papers: Mapping[str, list[tuple[str, str, str, list[str], str]]] = field(default_factory=dict)
    """By part: (paper, its idea, where it is in genrl/, names of claims, what is left out)."""


def read(file: Path = FILE) -> Plan:
    """Raises ValueError for a claim of an unknown run, and an `expected` that is none."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    recipes = {
        recipe.name: recipe
        for group, of_group in tree["runs"].items()
        for recipe in _group(group, of_group, tree["runs"])
    }
    claims = tuple(
        Claim(**(one | {"tasks": tuple(one.get("tasks", ()))}), page=page)
        for page, of_page in tree["claims"].items()
        for one in of_page
    )
    for claim in claims:
        if missing := {claim.run, claim.than} - {"start"} - recipes.keys():
            raise ValueError(f"claim {claim.name}: no run {', '.join(sorted(missing))}")
        if claim.expected not in EXPECTED:
            raise ValueError(f"claim {claim.name}: expected is {claim.expected}; there are {', '.join(EXPECTED)}")
    for claim in claims:
        for name in {claim.run, claim.than} & recipes.keys():
            old = recipes[name]
            first, seeds = min(old.priority, claim.priority), max(old.seeds, claim.seeds)
            recipes[name] = replace(old, priority=first, seeds=seeds)
    known = {claim.name for claim in claims}
    for paper, _, _, names, _ in (row for part in tree["papers"].values() for row in part):
        if missing := set(names) - known:
            raise ValueError(f"paper {paper}: no claim {', '.join(sorted(missing))}")
    return Plan(recipes, claims, tree["tables"], tree["papers"])


def _group(group: str, of_group: Mapping[str, Any], groups: Mapping[str, Any]) -> Iterator[Recipe]:
    common = of_group.get("common", {})
    for name, own in of_group["runs"].items():
        both = common | (own or {})
        changes = _flat([common.get("changes", []), (own or {}).get("changes", [])])
        file = both.pop("file", name)
        config = both.pop("config").format(file=file)
        more = {"changes": tuple(changes), "means": tuple(both.pop("means", ()))}
        yield Recipe(f"{group}/{name}", config, **(both | more))


def _flat(changes: object) -> list[str]:
    """Lists within lists, so that the file can name what several runs share."""
    return [one for part in changes for one in _flat(part)] if isinstance(changes, list) else [str(changes)]


def needs(recipe: Recipe) -> Iterator[tuple[str, bool]]:
    """The runs whose folders it needs, and whether with its own seed."""
    for change in recipe.changes:
        for kind in ("run", "seed"):
            for part in change.split(f"{{{kind}:")[1:]:
                yield part.partition("}")[0], kind == "seed"


Missing = tuple[Recipe, int]


def missing(plan: Plan, stored: Mapping[str, Mapping[str, Any]], begun: Collection[str] = ()) -> list[Missing]:
    """The runs that are not stored, or without the diversity that their row shows: by priority, then those that were
    begun, then low seeds first, so that every row has one before any has two."""
    runs = [
        (recipe, seed)
        for recipe in plan.recipes.values()
        for seed in range(recipe.seeds)
        if (kept := stored.get(f"{recipe.name}-{seed}")) is None or (recipe.diversity and not kept.get("diversity"))
    ]
    return sorted(runs, key=lambda one: (one[0].priority, f"{one[0].name}-{one[1]}" not in begun, one[1]))


def minutes(recipe: Recipe, stored: Mapping[str, Mapping[str, Any]]) -> float:
    """What a run of it costs: as those that are stored, else as the file says."""
    known = [run["cpu_s"] / 60 for key, run in stored.items() if of(key)[0] == recipe.name and run.get("cpu_s")]
    return sum(known) / len(known) if known else recipe.minutes


def of(key: str) -> tuple[str, int]:
    """Name and seed of a run."""
    name, _, seed = key.rpartition("-")
    return name, int(seed)
