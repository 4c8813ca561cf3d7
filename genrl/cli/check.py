"""`genrl check` and `genrl config schema`.

`genrl check --rows`: all rows of a run are prepared without its model, and those that would fail are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from genrl.cli.arguments import opened

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.config import RunConfig
    from genrl.data.prompts import Prompt
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

SUFFIXES = (".yaml", ".yml")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(check)
    config = typer.Typer(no_args_is_help=True, help="About configuration files.")
    config.command()(schema)
    app.add_typer(config, name="config")


def check(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|KEY=VALUE",
            help="YAML configurations, folders of them (subfolders too), and changes to all of them.",
        ),
    ],
    explain: Annotated[bool, typer.Option("--explain", help="List every key: value, default, meaning.")] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="Prepare every row and picture of the data; name those that would fail.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="24GB", help="A card: what fits, and which keys to change if not.")
    ] = None,
) -> None:
    """Validate configurations, and estimate the cost of one, without loading any weights.

    Example: `genrl check quickstart.yaml sampling.group_size=16 --explain`

    A configuration on the hub is written `hub:org/name/config.yaml`.

    `--memory 24GB` says whether a run fits on such a card, and if not which keys to change, in their order; of a
    vision-language model it says in which ways it can be trained there. A model need not be on this machine: most
    published ones are known, and of others the hub is asked for shapes, some hundred kB.

    `--rows` goes over all rows of the data, data sets included: pictures are opened, questions are put together, and
    those that would fail are named. It exits with code 1 if there are any.

    Several files, or a folder: `genrl check folder mine.yaml trackers=[]` prints a line for each that is valid, all
    problems of the others and a total, and exits with code 2 if any is wrong.
    """
    names, overrides = _files_and_changes(arguments)
    files = [file for name in names for file in _files(Path(name))]
    if len(names) > 1 or Path(names[0]).is_dir():
        if memory is not None:
            raise typer.BadParameter("give one file: it is asked whether one run fits", param_hint="--memory")
        if rows:
            raise typer.BadParameter("give one file: all of its rows are read", param_hint="--rows")
        if explain:
            raise typer.BadParameter("give one file: it lists the keys of one configuration", param_hint="--explain")
        raise typer.Exit(2 if _report(list(dict.fromkeys(files)), overrides) else 0)

    from genrl.cli.tables import card_bytes

    card = None if memory is None else card_bytes(memory)
    if _show(*opened(files[0], overrides), card=card, rows=rows, explain=explain):
        raise typer.Exit(1)


def _show(file: Path, changes: Sequence[str], *, card: float | None, rows: bool, explain: bool) -> int:
    """Print what one configuration is and costs, and what of it was not checked; returns how many rows would fail.
    Raises as `examine`; where files of one's own or packages are missing, the costs are printed before that."""
    from genrl.cli.tables import console, print_keys, safe

    try:
        checked = examine(file, changes, ask=True)
    except ValueError:
        _print_cost_alone(file, changes, card)
        raise
    console.print("[green]valid[/green]")
    for note in checked.notes:
        console.print(f"[yellow]{safe(note)}[/yellow]")
    for line in _read(checked.config):
        console.print(safe(line))
    for part in checked.summary:
        console.print(part)
    failing = _print_rows(checked.config) if rows else 0
    cards = _cards(file, changes, checked, card)
    for part in cards:
        console.print(part)
    if explain:
        print_keys(checked.config)
    known = any(not isinstance(part, str) for part in cards)  # a table, not a line that says why there is none
    console.print(f"not checked: {safe('; '.join(unchecked(checked.config, rows=rows, memory=known)))}")
    return failing


def _print_cost_alone(file: Path, changes: Sequence[str], card: float | None) -> None:
    """What a configuration would cost whose files or packages are not all there: who asks whether a model fits on a
    card need not have data for it. Raises ConfigError where the configuration itself is wrong."""
    from genrl.cli.tables import console
    from genrl.config import load_located

    config, _ = load_located(file, changes)
    try:
        summary = _summary(config, ask=True)
        cards = _cards(file, changes, Checked(config, [], summary), card)
    except (ValueError, OSError):
        return  # the model or the environment itself is what is wrong: the error that follows says it
    for part in (*summary, *cards):
        console.print(part)


def unchecked(config: RunConfig, *, rows: bool, memory: bool) -> Iterator[str]:
    """Each thing that only training finds out. rows: those of the data were gone over; memory: it was estimated."""
    from genrl.data.prompts import is_data_set
    from genrl_rewards.given import is_given

    if config.base is not None and not is_given(config.base):
        here = Path(config.base).expanduser().exists()
        yield f"whether the weights of {config.base} load" if here else f"weights and licence of {config.base}"
    run: Any = config
    if names := [reward.name for reward in getattr(run, "rewards", ())]:
        yield f"whether the rewards load and run ({', '.join(names)})"
    data = getattr(run, "prompts", None) or getattr(run, "task", None)
    named = [getattr(data, key, None) for key in ("train", "eval")] if not rows else []
    for source in named:
        if isinstance(source, str) and not is_given(source) and is_data_set(source):
            yield f"rows of {source}"
    if (environment := getattr(run, "environment", None)) is not None:
        yield f"whether {environment.name} runs"
    if not memory:
        yield "memory"
    elif config.kind == "diffusion":
        from genrl.cli.diffusion import components_of

        if any(part.name == "unet" for part in components_of(run, ask=True)):
            yield "memory of a UNet's activations"
    yield "time, and room on the disk"


@dataclass(frozen=True)
class Checked:
    """A valid configuration, remarks on it, and tables of what it costs."""

    config: RunConfig
    notes: list[str]
    summary: Sequence[RenderableType]


def _read(config: RunConfig) -> Iterator[str]:
    """How many prompts or questions the files hold; data sets are opened when training starts."""
    from genrl.data.prompts import FILES, read
    from genrl_rewards.given import is_given

    section: Any = getattr(config, "prompts" if config.kind == "diffusion" else "task", None)
    if config.kind not in ("diffusion", "vlm"):
        return
    column, chat = (section.prompt, True) if config.kind == "vlm" else (section.column, False)
    for name in ("train", "eval"):
        source = getattr(section, name)
        if source is not None and not is_given(source) and Path(source).suffix in FILES:
            yield f"{source}: {read(source, column, chat=chat)}"


def _print_rows(config: RunConfig) -> int:
    """How many rows would fail, which are named."""
    from genrl.cli.tables import console, safe

    lines, failing = report(config)
    for line in lines:
        console.print(safe(line))
    return failing


def _cards(file: Path, overrides: Sequence[str], checked: Checked, card: float | None) -> Sequence[RenderableType]:
    """On which cards the run fits, or what it takes to fit on this one; raises BadParameter for what is no card."""
    match checked.config.kind:  # the classes of other kinds are not built
        case "diffusion":
            from genrl.cli import diffusion

            return diffusion.cards(file, overrides, cast("Config", checked.config), card)
        case "vla":
            from genrl.cli import vla

            return vla.cards(file, overrides, cast("VLAConfig", checked.config), card)
        case "vlm":
            from genrl.cli import vlm

            return vlm.cards(cast("VLMConfig", checked.config), card)
    return []


def examine(file: Path, overrides: Sequence[str] = (), *, ask: bool = False) -> Checked:
    """Validate one configuration. ask: the hub, where nothing else says how large the model is. Raises ConfigError, or
    ValueError for parts that cannot be opened."""
    from genrl.config import check_files, load_located

    config, origins = load_located(file, overrides)
    notes = check_files(config, origins)
    if not config.optimizer.is_known:
        from genrl.runtime.weights.optimizers import check_optimizer

        check_optimizer(config.optimizer)
    if (environment := getattr(config, "environment", None)) is not None and config.kind == "vlm":
        from genrl.vlm.environments.hosts import open_environment

        open_environment(environment).close()
    return Checked(config, notes, _summary(config, ask=ask))


def _summary(config: RunConfig, *, ask: bool) -> Sequence[RenderableType]:
    """Tables of what an iteration costs."""
    match config.kind:  # the classes of other kinds are not built
        case "diffusion":
            from genrl.cli import diffusion

            return diffusion.summary(cast("Config", config), ask=ask)
        case "vla":
            from genrl.cli import vla

            return vla.summary(cast("VLAConfig", config))
        case "vlm":
            from genrl.cli import vlm

            return vlm.summary(cast("VLMConfig", config))
    return []


def _files_and_changes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and folders, and changes: what has an equals sign and is not the name of something that exists."""
    overrides = [text for text in arguments if "=" in text and not Path(text).exists()]
    names = [text for text in arguments if text not in overrides]
    if not names:
        raise typer.BadParameter("no file or folder is among these arguments", param_hint="FILE")
    for name in names:
        if not Path(name).exists() and Path(name).suffix not in SUFFIXES:
            text = f"{name}: no such file or folder; a change is written key=value, for example optimizer.lr=1e-4"
            raise typer.BadParameter(text, param_hint="FILE")
    return names, overrides


def _files(path: Path) -> list[Path]:
    """The file itself, or the configurations in a folder and its subfolders, hidden ones aside."""
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise typer.BadParameter(f"{path}: no .yaml or .yml file in this folder", param_hint="FILE")
    return files


def _report(files: Sequence[Path], overrides: Sequence[str]) -> int:
    """Print a line for each valid file, and all problems of the others; returns how many are wrong."""
    from genrl.cli.app import is_message
    from genrl.cli.tables import console, safe

    wrong = 0
    for file in files:
        try:
            notes = len(examine(*opened(file, overrides)).notes)
        except (ValueError, RuntimeError) as error:
            if not is_message(error):
                raise
            wrong += 1
            text = safe(str(error)).replace("\n", "\n       ")
            console.print(f"[red]wrong[/red]  {safe(str(file))}\n       {text}", soft_wrap=True)
        else:
            remarks = f", {notes} remark{'s' if notes > 1 else ''}" if notes else ""
            console.print(f"[green]valid[/green]  {safe(str(file))}{remarks}", soft_wrap=True)
    console.print(f"{len(files)} files: {len(files) - wrong} valid, {wrong} wrong")
    return wrong


def schema(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Whose methods from outside are to be in it, too.")
    ] = None,
) -> None:
    """Print the JSON schema of configuration files, for completion in editors.

    Example: `genrl config schema > genrl.schema.json`, and as the first line of a YAML file
    `# yaml-language-server: $schema=genrl.schema.json`
    """
    import json

    from genrl.config import load
    from genrl.config.json_schemas import json_schema

    typer.echo(json.dumps(json_schema(type(load(file).trainer) for file in files or ()), indent=1))


LISTED = 20
Finding = tuple[str, str | None]
"""A row's name, and what is wrong with it."""


def rows_of(config: RunConfig) -> Iterator[Finding]:
    """Every row of the files and data sets of a run. Raises ValueError for a source that cannot be read at all."""
    if config.kind == "diffusion":
        yield from _prompts(cast("Config", config))
    elif config.kind == "vlm":
        yield from _questions(cast("VLMConfig", config))


def report(config: RunConfig) -> tuple[list[str], int]:
    """Lines for the user, and how many rows would fail."""
    from genrl_rewards.pictures import remarks

    rows, wrong = 0, list[str]()
    for name, problem in rows_of(config):
        rows += 1
        if problem is not None:
            wrong.append(problem if name in problem else f"{name}: {problem}")
    lines = [*wrong[:LISTED], *([f"... and {len(wrong) - LISTED} more"] if len(wrong) > LISTED else [])]
    counted = [f"{count} {kind}" for kind, count in remarks().items()]
    if counted:
        lines.append(f"pictures: {', '.join(counted)} (plain: of one single colour)")
    return [*lines, f"rows: {rows:,} read, {len(wrong):,} would fail"], len(wrong)


def _prompts(config: Config) -> Iterator[Finding]:
    from genrl.data.prompts import read
    from genrl.data.rows import PREFERENCE_COLUMNS

    image_columns = {*config.sampling.inputs.values(), *PREFERENCE_COLUMNS}
    for source in (config.prompts.train, config.prompts.eval):
        if source is None:
            continue
        parsed = read(source, config.prompts.column)
        yield from ((row.where, row.problem) for row in parsed.skipped)
        for row in parsed.rows:
            yield f"{source}:{row.line}", _pictures(row, image_columns, [*config.sampling.inputs.values()])


def _pictures(row: Prompt, known: set[str], needed: list[str]) -> str | None:
    """What is wrong with the first picture of a row that cannot be opened, or that is missing."""
    from genrl.data.rows import input_problem
    from genrl_rewards.pictures import open_picture

    for column in needed:
        if problem := input_problem(column, row.columns):
            return f"{problem} (sampling.inputs)"
    for column, value in row.columns.items():
        if (column in known or column.endswith("image")) and isinstance(value, str):
            try:
                open_picture(value)
            except ValueError as error:
                return f"{column}: {error}"
    return None


def _questions(config: VLMConfig) -> Iterator[Finding]:
    from genrl.vlm.policies.processor import open_image, without_clips
    from genrl.vlm.rollout.data import Questions

    task = config.task
    if task is None or config.environment is not None:
        return
    for split, source in (("train", task.train), ("eval", task.eval)):
        if task.name is not None or source is None:
            continue  # made, not read
        questions = Questions(config, "train" if split == "train" else "eval", counted=True)
        for number in range(len(questions)):
            row = questions.row(number)
            problem: str | None = row.prompt.broken or None
            try:
                for part in without_clips(row.prompt).pieces if problem is None else ():
                    if not isinstance(part, str):
                        open_image(part, row.name)  # type: ignore[arg-type]
            except ValueError as error:
                problem = str(error)
            yield row.name, problem
