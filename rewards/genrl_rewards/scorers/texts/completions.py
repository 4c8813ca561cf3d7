"""Scoring generated texts: rewards of this package's contract, and the reward functions of TRL unchanged.

Under the contract a text reward names `completions` and the columns it compares with. A TRL function takes `prompts`,
`completions`, further columns by name, and usually `**kwargs`. Both return a number per completion, None for no score.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from genrl_rewards.contract import Reward, Scores, call, name_of, nearest, of_its_own, optional_columns, read
from genrl_rewards.declared import declared, source_of
from genrl_rewards.extras import install
from genrl_rewards.failures import Failure, catch
from genrl_rewards.given import is_given
from genrl_rewards.loading import EMPTY, Listed, Origin, load, resolve, with_options

GIVEN = ("prompts", "completions", "completion_ids", "group")
MODULE = "genrl_rewards.scorers.texts.verifiable"
RULES = (
    *("exact", "numeric", "choice", "iou", "point_in_box", "ordering", "words", "tag_format", "majority"),
    *("indices", "rating", "diversity", "rouge", "relaxed", "anls"),
)
"""The functions of `genrl_rewards.scorers.texts.verifiable`, by name."""
MATH = ("math", "math_or_choice")
MODULES = {**dict.fromkeys(RULES, MODULE), **dict.fromkeys(MATH, "genrl_rewards.scorers.texts.mathematics")}
"""Of each rule, by name."""
BROKEN = 4
"""A reward that raises in each of the first so many calls for a part of the samples is taken to raise for all."""


def listing_texts() -> list[Listed]:
    """A row for each rule, read from their source; all give 0 to 1. `loading.listing` has the others."""
    sources = {module: source_of(module) for module in MODULES.values()}
    rules = {name: declared(sources[module], name) for name, module in MODULES.items()}
    return [Listed(name, "built-in", rule.doc, "0 to 1", ", ".join(rule.takes)) for name, rule in rules.items()]


def resolve_text(name: str) -> Origin:
    """Find what the name of a text reward leads to: one of `MODULES`, or what `rewards.resolve` finds. Imports nothing.

    Raises ValueError as `rewards.resolve` does, with the nearest rule, and where a rule's package is not installed.
    """
    if name in MATH and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            f"reward {name!r} needs the package math-verify, which is not installed: "
            f"{install('math')}, or write numeric"
        )
    if name in MODULES:
        return Origin(name, "built-in", MODULES[name], name)
    try:
        return resolve(name)
    except ValueError as error:
        if ".py" in name or is_given(name):
            raise
        raise ValueError(
            f"unknown reward {name!r}.{nearest(name, MODULES)} Rules for texts: {', '.join(MODULES)}; or name a "
            "function of your own as path/to/file.py:name"
        ) from error


def load_text(name: str, args: Mapping[str, object] = EMPTY) -> Reward:
    """A text reward with its options set. Raises ValueError as `resolve_text`, and for options that do not fit."""
    origin = resolve_text(name)
    if name not in MODULES:
        return load(name, args)
    rule: Reward = vars(importlib.import_module(origin.where))[name]
    return with_options(rule, name, args) if args else rule


def score_completions(
    reward: Reward,
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    group: Sequence[int] | None = None,
    completion_ids: Sequence[Sequence[int]] | None = None,
    conversational: bool = False,
    name: str = "",
) -> Scores:
    """N scores of N completions; NaN = no score. `columns` are those of the data set, one value per completion.

    The reward gets what its parameters name, with a default or without (`contract.optional_columns`); one with
    `**kwargs` gets everything, as in TRL. conversational: prompts
    and completions are passed as lists of messages, `[{"role": "assistant", "content": text}]`, as TRL does for
    conversational data sets (which all data sets with pictures are).
    If the reward raises, it is called again for each sample by itself, or for each group if it takes `group`. Those for
    which it raises again have no score, and the failure is recorded with their numbers; the others have no parts.
    Running out of memory ends the run. Raises ValueError for a missing column, unequal lengths, and a result of the
    wrong length or type.
    """
    name = name or name_of(reward)
    available: dict[str, Sequence[Any]] = {**(columns or {}), "prompts": prompts, "completions": completions}
    if conversational:
        available["prompts"] = [[{"role": "user", "content": text}] for text in prompts]
        available["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
    if group is not None:
        available["group"] = group
    if completion_ids is not None:
        available["completion_ids"] = completion_ids
    lengths = {key: len(values) for key, values in available.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"reward {name!r} is called with unequal numbers of rows: {lengths}")
    arguments = {key: of_its_own(available[key]) for key in _taken(reward, name, available)}
    result = catch(lambda: call(reward, arguments), len(completions))
    if not isinstance(result, Failure):
        return read(result, len(completions), name)
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group or range(len(completions))):
        members.setdefault(number, []).append(row)
    calls = _calls([*members.values()], "group" in arguments)
    return Scores.of_failure(result) if result.fatal or len(calls) == 1 else _apart(reward, arguments, calls, name)


def _calls(groups: Sequence[list[int]], whole: bool) -> list[list[int]]:
    """The rows of each call, a row or a whole group; first those of a few groups from all over the batch, since the
    answers to one question, and neighbours in a file, may fail alike."""
    calls = [*groups] if whole else [[row] for rows in groups for row in rows]
    spread = [rows if whole else rows[:1] for rows in groups[:: -(-len(groups) // BROKEN)]]
    return [*spread, *(rows for rows in calls if rows not in spread)]


def _apart(reward: Reward, arguments: Mapping[str, Sequence[Any]], calls: Sequence[list[int]], name: str) -> Scores:
    """Scores of calls for some rows each, after the one for all raised."""
    count = sum(map(len, calls))
    values, failures = [math.nan] * count, list[Failure]()
    for tried, rows in enumerate(calls, start=1):
        arguments_of = {key: [column[row] for row in rows] for key, column in arguments.items()}
        result = catch(partial(call, reward, arguments_of), len(rows))
        if isinstance(result, Failure):
            failures.append(result._replace(rows=tuple(rows)))
            # Broken for all, it would be called once for each of a thousand samples, maybe a minute each.
            if result.fatal or tried == len(failures) == min(BROKEN, len(calls)):
                return Scores.of_failure(result._replace(samples=count))
        else:
            for row, value in zip(rows, read(result, len(rows), name).values, strict=True):
                values[row] = value
    return Scores(values, failures=tuple(failures))


def _taken(reward: Reward, name: str, available: Mapping[str, Sequence[Any]]) -> list[str]:
    """Which of the available names the reward takes. Raises ValueError if one that it needs is missing."""
    parameters = inspect.signature(reward).parameters.values()
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in available]
    if missing:
        raise ValueError(
            f"reward {name!r} asks for {missing[0]!r}, but the data has {', '.join(sorted(available))}."
            f"{nearest(missing[0], available)}"
        )
    optional = optional_columns(reward, available)
    taken = [p.name for p in named if p.default is p.empty or p.name in (*GIVEN, *optional) and p.name in available]
    return [*taken, *(key for key in available if key not in {p.name for p in named})] if everything else taken
