"""`genrl compare`: people judge two models blind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genrl.cli.arguments import Guidance, Height, Precision, Steps, Width, at_hand, best_of, call_arguments, refuse

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt
    from genrl.diffusion.compare import Side
    from genrl.diffusion.rollout.scoring import Scorers
    from genrl.runtime.show.compare.page import Page
    from genrl.runtime.show.compare.statistics import Share
    from genrl.runtime.show.compare.votes import Reading

Which = "run folder, LoRA (folder or file), pipeline folder or hub id"
Further = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Further pipeline arguments of both: num_frames=33.")
]
Category = Annotated[
    str | None, typer.Option(help="Column of the prompts to list results by; default: category, where it is.")
]
Beside = Annotated[bool, typer.Option("--beside", help="Write the samples into a folder beside the page, not into it.")]
Read = Annotated[
    list[Path] | None, typer.Option(help="Print what the votes of a page say; once per judge: --read FILE.")
]


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(compare)


@dataclass(frozen=True)
class Asked:
    """What the page is made of."""

    prompts: str | None
    num_prompts: int | None
    per_prompt: int
    seed: int
    out: Path
    rewards: Sequence[str]
    no_rewards: bool
    category: str | None
    question: str
    beside: bool
    fps: int


def compare(
    a: Annotated[str | None, typer.Argument(metavar="A", help=f"The first model: {Which}.", callback=at_hand)] = None,
    b: Annotated[str | None, typer.Argument(metavar="B", help="The second model, likewise.", callback=at_hand)] = None,
    pipeline_args: Further = None,
    model: Annotated[str | None, typer.Option(help="What a LoRA is put onto; default: the other model's base.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompt file or data set; default: a run's held-out one.", callback=at_hand)
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only so many, evenly spread; default: all.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Of runs: the checkpoint of the best evaluation.")] = False,
    per_prompt: Annotated[int, typer.Option(min=1, help="Pairs of every prompt, each from another noise.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Pair k starts from the noise of seed + k, for both models.")] = 0,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The page; its key goes beside it.")] = Path("compare.html"),
    num_inference_steps: Steps = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    dtype: Precision = None,
    reward: Annotated[list[str] | None, typer.Option(help="Reward to compare with people; default: the runs'.")] = None,
    no_rewards: Annotated[bool, typer.Option("--no-rewards", help="Score nothing.")] = False,
    category: Category = None,
    question: Annotated[str, typer.Option(help="What the judges are asked.")] = "Which one do you prefer?",
    beside: Beside = False,
    fps: Annotated[int, typer.Option(min=1, help="Frames per second of videos.")] = 16,
    read: Read = None,
    key: Annotated[Path | None, typer.Option(help="The page's key; default: found beside the votes or here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result of --read as JSON.")] = False,
) -> None:
    """Have people judge two models blind, on one offline page with the same prompts and noise; then read their votes.

    Example: `genrl compare org/model runs/quickstart --num-prompts 40`, then
    `genrl compare --read votes.json`

    Send the page to judges and keep its key, compare.key.json: only the key tells which side was which.
    """
    if read:
        refuse({"A": a, "--prompts": prompts, "--model": model, "--reward": reward}, "--read")
        return _tell_votes(read, key, as_json=as_json)
    refuse({"--key": key, "--json": as_json}, "making a page: it reads votes, with --read")
    if a is None or b is None:
        raise typer.BadParameter("give two models, A and B, or --read votes.json", param_hint="A B")
    from genrl.runtime.show.compare.page import check_new

    check_new(out)
    arguments = call_arguments(num_inference_steps, guidance_scale, height, width, pipeline_args)
    comparison = Asked(
        prompts, num_prompts, per_prompt, seed, out, reward or (), no_rewards, category, question, beside, fps
    )
    steps = {name: best_of(name) for name in (a, b) if best and (Path(name) / "config.yaml").is_file()}
    if is_answering(a) or is_answering(b):
        others = {"--prompts": prompts, "--per-prompt": per_prompt > 1, "--seed": seed, "--reward": reward}
        refuse(
            others | {"--model": model, "--dtype": dtype, "pipeline arguments": arguments},
            "models that answer questions",
        )
        return _make_of_answers(a, b, comparison, steps)
    from genrl.diffusion.compare import sides

    _make(*sides(a, b, model, dtype, arguments, steps), comparison, arguments)


def is_answering(name: str) -> bool:
    """Whether this is the run of a vision-language model, or of another one that answers by tokens."""
    from genrl.config import load
    from genrl.vlm.config.schema import VLMConfig

    file = Path(name) / "config.yaml"
    return file.is_file() and isinstance(load(file), VLMConfig)


def _make_of_answers(a: str, b: str, asked: Asked, steps: Mapping[str, int]) -> None:
    """Write the page of models whose pictures or sounds answer held-out questions, and its key."""
    from genrl.runtime.loop.progress import Progress
    from genrl.runtime.show.compare.page import Page
    from genrl.vlm.evaluate import compare as fill

    page = Page(asked.out, question=asked.question, beside=asked.beside)
    with Progress(1, unit="samples") as progress:
        fill(
            a, b, page, number=asked.num_prompts, column=asked.category, scores=not asked.no_rewards, steps=steps,
            begin=lambda total: progress.phase("sampling", total), advance=progress.advance,
        )  # fmt: skip
    _finish(page, {"a": {"name": a}, "b": {"name": b}})


def _make(first: Side, second: Side, asked: Asked, given: Mapping[str, Any]) -> None:
    """Write the page and its key. given: the pipeline arguments that the user wrote."""
    from genrl.diffusion.compare import compare as fill
    from genrl.diffusion.evaluate import spread
    from genrl.diffusion.rollout.rollout import check_inputs
    from genrl.interface.using import sized_rows
    from genrl.runtime.loop.progress import Progress
    from genrl.runtime.show.compare.page import Page, check_pairs

    run = second.run or first.run
    source = asked.prompts or (run.prompts.eval if run else None)
    if source is None:
        raise typer.BadParameter("give --prompts FILE (a run with prompts.eval has its own)", param_hint="--prompts")
    rows = sized_rows(source, run, given)
    rows = [rows[k] for k in spread(asked.num_prompts or len(rows), len(rows))]
    check_pairs(len(rows) * asked.per_prompt)
    column = _category(rows, asked.category, source)
    for side in (first, second):
        check_inputs(side.chosen.inputs, rows, source)
    page = Page(asked.out, question=asked.question, beside=asked.beside)
    with ExitStack() as stack, Progress(1, unit="samples") as progress:
        scorers = [stack.enter_context(closing(scorer)) for scorer in _scorers(first, second, asked)]
        fill(
            first, second, rows, page, scorers,
            seed=asked.seed, per_prompt=asked.per_prompt, column=column, fps=asked.fps,
            begin=lambda total: progress.phase("sampling", total), advance=progress.advance,
        )  # fmt: skip
    _finish(page, {"a": first.described(), "b": second.described(), "prompts": source, "seed": asked.seed})


def _finish(page: Page, models: dict[str, Any]) -> None:
    """Write the page and its key, and say what they are."""
    from genrl.cli.tables import number, size
    from genrl.runtime.show.compare.page import SECONDS_PER_PAIR

    written, key = page.write(models)
    minutes = max(1, round(len(page) * SECONDS_PER_PAIR / 60))
    what = f"{number(len(page))} pairs, {size(written.stat().st_size)}, about {minutes} min to judge"
    typer.echo(f"{written}: {what}")
    if page.identical:
        typer.echo(f"{page.identical} pairs are left out: both models made the same sample, to the byte")
    typer.echo(f"{key}: keep it; it says which side was which, and `genrl compare --read votes.json` needs it")


def _category(rows: Sequence[Prompt], column: str | None, source: str) -> str | None:
    """The column of categories: the one that was asked for, else `category` where every prompt has it."""
    name = column or "category"
    lacking = next((row for row in rows if name not in row.columns), None)
    if lacking is None:
        return name
    if column is None:
        return None
    have = ", ".join(lacking.columns) or "none beside the prompt"
    raise typer.BadParameter(
        f"{source}:{lacking.line} has no column {column!r}; its columns: {have}", param_hint="--category"
    )


def _scorers(first: Side, second: Side, asked: Asked) -> Iterator[Scorers]:
    """The rewards that `--reward` names, or those of the runs, of both where they differ."""
    from genrl.interface.using import rewards_of_run, scorers_of

    if asked.no_rewards:
        refuse({"--reward": asked.rewards}, "--no-rewards")
    elif asked.rewards:
        yield scorers_of([{"name": name} for name in asked.rewards])
    else:
        loaded: list[object] = []
        for run, name in ((first.run, first.name), (second.run, second.name)):
            rewards = () if run is None else run.rewards
            # One that is trained beside the model is another one in every run.
            new = tuple(
                reward for reward in rewards if run and (reward not in loaded or run.trainer.rewards_are == "trained")
            )
            loaded += rewards
            if run is not None and new:
                yield rewards_of_run(run.model_copy(update={"rewards": new}), Path(name))


def _tell_votes(files: Sequence[Path], key: Path | None, *, as_json: bool) -> None:
    """Print what the votes in these files say, as JSON or in tables."""
    from genrl.runtime.show.compare.votes import read

    reading = read(files, key)
    return typer.echo(json.dumps(asdict(reading), indent=1)) if as_json else _print(reading)


def _print(reading: Reading) -> None:
    from rich.table import Table

    from genrl.cli.tables import console, safe, scores_table

    judges = "1 judge" if reading.judges == 1 else f"{reading.judges} judges"
    table = scores_table(
        f"B = {reading.b} over A = {reading.a}; {judges}, {reading.total.rate.count} of {reading.shown} pairs",
        "prompts", "pairs", "B", "tie", "A", "win rate of B", "95 % interval", "pairs that B won, ties aside",
    )  # fmt: skip
    for name, tally in (("all", reading.total), *reading.categories.items()):
        counts = (tally.b, tally.ties, tally.a)
        table.add_row(safe(name), str(tally.rate.count), *map(str, counts), *_shares(tally.rate), _long(tally.decided))
    console.print(table)
    if reading.identical:
        console.print(f"{reading.identical} further prompts gave the same sample from both, and were not shown.")
    console.print(f"Left side chosen, ties aside: {_long(reading.left)}.")
    if (agreement := reading.agreement) is not None:
        alpha = "" if agreement.alpha is None else f", Krippendorff's alpha {agreement.alpha:.2f}"
        console.print(
            f"Judges agree on {agreement.pairs} pairs that several saw: {agreement.same:.0%} the same answer{alpha}."
        )
    if reading.rewards:
        predictors = Table("reward", "pairs", "agrees with people", "95 % interval", "scored equally")
        ordered = sorted(reading.rewards.items(), key=lambda item: -item[1].accuracy.value if item[1].accuracy else 0)
        for label, predictor in ordered:
            pairs = predictor.accuracy.count if predictor.accuracy else 0
            predictors.add_row(safe(label), str(pairs), *_shares(predictor.accuracy), str(predictor.equal))
        console.print(predictors)


def _shares(share: Share | None) -> tuple[str, str]:
    return ("-", "-") if share is None else (f"{share.value:.3f}", f"{share.low:.3f} to {share.high:.3f}")


def _long(share: Share | None) -> str:
    return "-" if share is None else f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f}) of {share.count}"
