"""python -m benchmarks.claims [next | table | verdicts]: what is stored, what is missing, and making it."""

from __future__ import annotations

import argparse
import os
import signal
from collections import Counter
from pathlib import Path

from benchmarks import claims
from benchmarks.claims import plan, stored, work


def status(given: plan.Plan, kept: dict[str, stored.Stored]) -> str:
    """A line for every recipe with missing runs, most valuable first, and the sums."""
    missing = plan.missing(given, kept)
    lines = ["priority  missing  CPU minutes  run"]
    counts = Counter(recipe.name for recipe, _ in missing)
    total = 0.0
    for name in dict.fromkeys(recipe.name for recipe, _ in missing):
        recipe = given.recipes[name]
        seeds = [str(seed) for one, seed in missing if one is recipe]
        new = [seed for seed in seeds if f"{name}-{seed}" not in kept]
        cost = counts[name] * plan.minutes(recipe, kept)
        total += cost
        note = f"seeds {', '.join(seeds)}" + ("" if new else ": their diversity")
        lines.append(f"{recipe.priority:8}  {counts[name]:2} of {recipe.seeds}  {cost:11.0f}  {name} ({note})")
    wanted = sum(recipe.seeds for recipe in given.recipes.values())
    shown = {key.rpartition("-")[0] for key in kept}
    further = sum(recipe.name in shown for recipe, _ in missing)
    lines.append(f"{len(kept)} runs stored; of {wanted} wanted {len(missing)} missing, {total / 60:.1f} CPU hours:")
    lines.append(f"{further} further seeds of what pages show, {len(missing) - further} of what no page says yet")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=claims.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    runs = commands.add_parser("next", help="make the most valuable missing runs; may run several times at once")
    runs.add_argument("--minutes", type=float, default=60.0, help="of the clock; default: 60")
    runs.add_argument("--folder", type=Path, default=Path("runs/claims"), help="of runs under way; all share it")
    runs.add_argument("--only", default="", metavar="PATTERN", help="only runs whose name matches, as style/")
    runs.add_argument("--nice", type=int, default=work.NICE, help=f"default: {work.NICE}")
    pages = commands.add_parser("table", help="write the marked tables of the pages, and their figures")
    pages.add_argument("--check", action="store_true", help="only say which are not current")
    commands.add_parser("verdicts", help="say of every claim whether it is shown")
    given = parser.parse_args()
    known, kept = plan.read(), stored.read()
    if given.command == "next":
        os.nice(given.nice)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is under way saves and stops
        try:
            made = work.work(known, given.minutes, given.folder, only=given.only)
        except KeyboardInterrupt:
            raise SystemExit("stopped; the next call goes on from there") from None
        print(f"stored: {', '.join(made) or 'none'}. `python -m benchmarks.claims table` puts them onto the pages.")
    elif given.command == "table":
        from benchmarks.claims import tables

        changed = tables.write(known, kept, check=given.check)
        print("\n".join(map(str, changed)) or "all are current")
        raise SystemExit(bool(given.check and changed))
    elif given.command == "verdicts":
        from benchmarks.claims import tables

        print(tables.verdicts(known, kept))
    else:
        print(status(known, kept))


if __name__ == "__main__":
    main()
