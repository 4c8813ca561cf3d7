"""The marked parts of the pages, made of stored runs: tables, figures, and the verdicts on a page's claims.

A page has `<!-- claims: NAME -->` and `<!-- /claims -->` where the table of that name in benchmarks/claims.yaml goes;
`verdicts` is that of the page's own claims, `papers` that of docs/papers.md.

A table has `rows` (run: title, or [title, note]; `run@place` for another
evaluation), `columns` (head: cell, benchmarks/claims/cells.py), and may have `group` (of its runs), `sort` (`METRIC PER
COST`, best first), `equal` (`METRIC PER`: rows are compared at equal cost), and `figure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.claims import cells, figures, statistics, stored
from benchmarks.claims.cells import Row
from benchmarks.claims.plan import Claim, Plan
from benchmarks.claims.stored import Stored
from genrl.runtime.folder.run import write_atomic

PAGES = ("README.md", "docs/*.md", "docs/guides/*.md")
MARKED = re.compile(r"(<!-- claims: (?P<name>[^ ]+) -->\n).*?(<!-- /claims -->)", re.DOTALL)
Spec = Mapping[str, Any]
Kept = Mapping[str, Stored]


def write(given: Plan, kept: Kept, *, check: bool = False, root: Path = Path()) -> list[Path]:
    """Bring pages and figures up to date. Returns those that were not; check: leaves them as they are."""
    stale = [(file, text) for file, text in current(given, kept, root) if not _same(file, text)]
    for file, text in stale if not check else []:
        write_atomic(file, text)
    return [file for file, _ in stale]


def current(given: Plan, kept: Kept, root: Path = Path()) -> Iterator[tuple[Path, str]]:
    """Every page with marks and every figure, as they should be."""
    for pattern in PAGES:
        for file in sorted(root.glob(pattern)):
            old = file.read_text(encoding="utf-8")
            if MARKED.search(old):
                yield file, page(old, file.relative_to(root).as_posix(), given, kept)
    for spec in given.tables.values():
        if chart := spec.get("figure"):
            yield root / chart["file"], figure(spec, given, kept)


def page(text: str, name: str, given: Plan, kept: Kept) -> str:
    """The page with its marked parts made anew. Raises ValueError for a table that there is not."""

    def made(match: re.Match[str]) -> str:
        asked = match["name"]
        if asked not in ("verdicts", "papers") and asked not in given.tables:
            raise ValueError(f"{name}: no table {asked} in benchmarks/claims.yaml")
        if asked == "verdicts":
            inner = verdicts(given, kept, name)
        elif asked == "papers":
            inner = papers(given, kept)
        else:
            inner = table(given.tables[asked], given, kept)
        return f"{match[1]}{inner}\n{match[3]}"

    return MARKED.sub(made, text)


def table(spec: Spec, given: Plan, kept: Kept) -> str:
    """Markdown. Rows without a run are left out; a table of none says so."""
    shown = rows(spec, given, kept)
    if not shown:
        return "No run is stored yet."
    columns = [column.split() for column in spec["columns"].values()]
    lines = [f"| {' | '.join(spec['columns'])} |", "| --- " * len(columns) + "|"]
    for row in shown:
        texts = [cells.CELLS[name](row, *arguments) for name, *arguments in columns]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def rows(spec: Spec, given: Plan, kept: Kept) -> list[Row]:
    """The rows that have runs, in their order."""
    all_rows = []
    for name, written in spec["rows"].items():
        run, _, place = name.partition("@")
        full = f"{spec['group']}/{run}" if "group" in spec else run
        title, note = written if isinstance(written, list) else (written, "")
        recipe = given.recipes[full]
        wanted = {seed: one for seed, one in stored.of(kept, full).items() if seed < recipe.seeds}
        if wanted:
            all_rows.append(Row(title, note, wanted, place or recipe.evaluation))
    if "equal" in spec and all_rows:
        metric, per = spec["equal"].split()
        all_seeds = set.intersection(*(set(row.runs) for row in all_rows))
        all_rows = [replace(row, runs={seed: row.runs[seed] for seed in sorted(all_seeds)}) for row in all_rows]
        spent = {per: min((c[-1][0] for row in all_rows for c in row.curves(metric, per)), default=0.0)}
        all_rows = [replace(row, spent=spent) for row in all_rows]
    if "sort" in spec:
        metric, per, cost = spec["sort"].split()
        all_rows.sort(key=lambda row: -_mean_at(row, metric, per, float(cost)))
    return all_rows


def _mean_at(row: Row, metric: str, per: str, cost: float) -> float:
    known = [value for curve in row.curves(metric, per) if (value := statistics.at(curve, cost)) is not None]
    return mean(known) if known else float("-inf")


def figure(spec: Spec, given: Plan, kept: Kept) -> str:
    """A small chart for every row, a line for every seed."""
    chart = spec["figure"]
    metric, per = chart["shows"].split()
    shown = [(_plain(row.title), row.curves(metric, per)) for row in rows(spec, given, kept)]
    width, height, columns = chart["size"]
    return figures.panels(shown, width, height, columns, chart["label"])


def _plain(title: str) -> str:
    """Without the link, and without the file before a name."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).rpartition("`: ")[2].replace("`", "")


def decided(claim: Claim, given: Plan, kept: Kept) -> tuple[statistics.Interval | None, str]:
    """The difference that a claim is about, None without a pair; and its verdict, or "not run"."""
    ours, theirs = (_row(name, given, kept) for name in (claim.run, claim.than))
    if ours is None or (theirs is None and claim.than != "start"):
        return None, "not run"
    if claim.tasks:
        of_tasks = [_pairs(ours, theirs, task, claim.per) for task in claim.tasks]
        if not all(of_tasks):
            return None, "not run"
        difference = statistics.stratified([[one - other for one, other in pairs] for pairs in of_tasks])
    else:
        pairs = _pairs(ours, theirs, claim.metric, claim.per)
        if not pairs:
            return None, "not run"
        difference = statistics.paired(*zip(*pairs, strict=True))
    return difference, statistics.verdict(difference, claim.expected, claim.band)


def _row(name: str, given: Plan, kept: Kept) -> Row | None:
    runs = stored.of(kept, name)
    return Row(name, "", runs, given.recipes[name].evaluation) if runs else None


def _pairs(ours: Row, theirs: Row | None, metric: str, per: str | None) -> list[tuple[float, float]]:
    """(figure of the run, what it is compared with) at every seed that both have."""
    mine = ours.by_seed(metric, per or "step")
    if theirs is None:
        return [(curve[-1][1], curve[0][1]) for curve in mine.values() if len(curve) > 1]
    other = theirs.by_seed(metric, per or "step")
    both = sorted(mine.keys() & other.keys())
    if per is None:
        return [(mine[seed][-1][1], other[seed][-1][1]) for seed in both]
    cost = min((curve[-1][0] for seed in both for curve in (mine[seed], other[seed])), default=0.0)
    values = [(statistics.at(mine[seed], cost), statistics.at(other[seed], cost)) for seed in both]
    return [(one, two) for one, two in values if one is not None and two is not None]


def verdicts(given: Plan, kept: Kept, name: str | None = None) -> str:
    """A table of the claims of a page, or of all, that have runs: a page does not say what none was made for."""
    chosen: Sequence[Claim] = [claim for claim in given.claims if name in (None, claim.page.partition("#")[0])]
    lines, without = list[str](), 0
    for claim in chosen:
        difference, word = decided(claim, given, kept)
        without += difference is None
        if difference is not None:
            lines.append(f"| {claim.says} | {cells.interval(difference)} | {difference.count} | **{word}** |")
    head = ["| claim | difference (95 %) | pairs | |", "| --- | --- | --- | --- |"] if lines else []
    rest = [f"Claims whose runs are still to be made: {without}."] if without else []
    return "\n".join([*head, *lines, *([""] if head and rest else []), *rest])


def papers(given: Plan, kept: Kept) -> str:
    """A table for each part: where a paper's idea lives, and what runs say of it."""
    claims = {claim.name: claim for claim in given.claims}
    lines = []
    for part, rows_of_part in given.papers.items():
        lines += [f"## {part}", "", "| paper | idea | in `genrl/` | what runs here say | left out |"]
        lines.append("| --- " * 5 + "|")
        for title, idea, where, names, left_out in rows_of_part:
            words = {name: decided(claims[name], given, kept)[1] for name in names}
            says = [_linked(claims[name], word) for name, word in words.items() if word != "not run"]
            without = list(words.values()).count("not run")
            says += [f"not run: {without}"] if without else []
            lines.append(f"| {title} | {idea} | `{where}` | {'<br>'.join(says)} | {left_out} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _linked(claim: Claim, word: str) -> str:
    """A claim with its verdict, linked to the table that has its figures."""
    return f"{claim.says.removeprefix('... ')}: [{word}]({claim.page.removeprefix('docs/')})"


def _same(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") == text
