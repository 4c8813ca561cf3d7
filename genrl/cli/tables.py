"""What the commands print: tables for people. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from genrl.cli.doctor import Report
    from genrl.config import Config
    from genrl.diffusion.replay import Replay

console = Console(highlight=False)


def printable(text: str) -> str:
    """Without terminal control characters: what is printed may come from prompts, keys and model files."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def safe(text: str) -> str:
    """Printable, and not read as rich's markup."""
    return escape(printable(text))


def print_check(config: Config, notes: Sequence[str]) -> None:
    """Remarks, the plan of an iteration, and the memory of one process."""
    from genrl.config.estimate import memory, plan, read_components
    from genrl.config.files import model_folder

    folder = model_folder(config)
    components = read_components(folder, config.model.variant) if folder else ()
    console.print("[green]valid[/green]")
    for note in notes:
        console.print(f"[yellow]{safe(note)}[/yellow]")
    console.print(_plan_table(config, plan(config, components)))
    guided = plan(config, components).guidance == 2
    if not components:
        if guided:
            console.print("guidance is counted as a second model call; where it is an input of the model, halve these")
        where = "is not on this machine" if folder is None else "holds no networks"
        console.print(f"memory: not estimated, because {safe(config.model.path)} {where}")
        return
    console.print(_component_table(components))
    console.print(_memory_table(memory(config, components)))
    if config.sampling.guidance_scale is None and guided:
        console.print("guidance_scale is the pipeline's default here, counted as two model calls per step")


def _plan_table(config: Config, found: Any) -> Table:
    sampling = config.sampling
    table = Table(title="one iteration", title_justify="left", show_header=False)
    step = f" x {found.guidance} (guidance)" if found.guidance > 1 else ""
    moves = " on average" if getattr(config.trainer, "window", None) is not None else ""
    table.add_row(
        "samples", f"{found.images:,}", f"{sampling.prompts_per_iteration} prompts x {sampling.group_size} each"
    )
    table.add_row("micro-batches", f"{found.micro_batches:,}", f"of {sampling.batch_size} samples")
    each = found.sample_calls / found.guidance / found.images
    shared = each != sampling.num_inference_steps  # by trees, or by a tail in fewer steps
    calls = f"{_count(each)} calls" if shared else f"{sampling.num_inference_steps} steps"
    table.add_row(
        "model calls, sampling",
        _count(found.sample_calls),
        f"{found.images} samples x {calls}{step}{moves if shared else ''}",
    )
    table.add_row(
        "model calls, training",
        _count(found.train_calls),
        f"{_count(found.trained_steps)} trained steps{moves}; {_count(found.backward_calls)} "
        f"{'of sampling ' if getattr(config.trainer, 'keep_graph', False) else ''}with gradient cost about 3 times",
    )
    trainer = config.trainer
    table.add_row("optimiser steps", f"{trainer.updates * trainer.epochs:,}", "")
    table.add_section()
    table.add_row("iterations", f"{config.iterations:,}", f"{found.optimizer_steps:,} optimiser steps in all")
    calls = f"{found.evaluation_calls:,} model calls each"
    table.add_row("evaluations", f"{found.evaluations:,}", calls if found.evaluations else "off")
    table.add_row("model calls of the run", f"{found.total_calls(config.iterations):,}", "forward, counted per sample")
    return table


def _count(number: float) -> str:
    """With one decimal where it is the mean of a window that moves."""
    return f"{round(number, 1):,}".removesuffix(".0")


def _component_table(components: Sequence[Any]) -> Table:
    table = Table("component", "class", "parameters", "on disk", "note", title="model", title_justify="left")
    for part in components:
        row = (part.name, part.kind, f"{part.num_parameters:,}", _size(part.num_file_bytes), part.note)
        table.add_row(*map(safe, row))
    return table


def _memory_table(parts: Sequence[tuple[str, int]]) -> Table:
    table = Table("part", "size", title="memory of one process (estimate), beside the libraries", title_justify="left")
    for name, size in parts:
        table.add_row(safe(name), _size(size))
    table.add_section()
    table.add_row("sum", _size(sum(size for _, size in parts)))
    return table


def _size(num_bytes: int) -> str:
    if num_bytes <= 0:
        return "-"
    exponent = min(3, int(math.log(num_bytes, 1000)))
    return f"{num_bytes / 1000**exponent:.3g} {('B', 'kB', 'MB', 'GB')[exponent]}"


def print_keys(config: Config) -> None:
    """Every key with its value, its default and its meaning."""
    for key, value, default, meaning in explained(config, ""):
        if value == default:
            console.print(f"{safe(key)}: {safe(value)}", soft_wrap=True)
        else:
            console.print(f"[bold]{safe(key)}: {safe(value)}[/bold]   (default {safe(default)})", soft_wrap=True)
        console.print(f"    [dim]{safe(meaning)}[/dim]", soft_wrap=True)


def explained(section: BaseModel, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, value, default, meaning) of every leaf below `section`."""
    for name, value in section:
        field = type(section).model_fields[name]
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from explained(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from explained(item, f"{key}.{index}.")
        else:
            default = "required" if field.is_required() else _written(field.default)
            yield key, _written(value), default, field.description or ""


def _written(value: Any) -> str:
    """The value as YAML would have it."""
    if isinstance(value, BaseModel):
        return "a section"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_scores(metrics: Mapping[str, float], title: str) -> None:
    """Scores by metric name."""
    table = Table("metric", "value", title=safe(title), title_justify="left")
    for name, value in sorted(metrics.items()):
        table.add_row(safe(name), f"{value:.4f}")
    console.print(table)


def print_replay(found: Replay) -> None:
    """The tensors of a dump and of its replay, and the place where they stop being finite."""
    from genrl.runtime.guards import statistics

    dump = found.dump
    console.print(
        f"{safe(dump.where)} not finite at step {dump.step}, trainer {safe(dump.info['trainer']['algorithm'])}"
    )
    console.print(f"weights: {safe(found.weights)}")
    for title, tensors in (("recorded", found.recorded), ("run again", found.tensors)):
        table = Table("tensor", "shape", "min", "max", "mean", "NaN", "inf", title=title, title_justify="left")
        for name, tensor in tensors.items():
            of = statistics(tensor)
            numbers = ("-" if of[key] is None else f"{of[key]:.4g}" for key in ("min", "max", "mean"))
            table.add_row(
                safe(name), " x ".join(map(str, tensor.shape)) or "-", *numbers, str(of["nan"]), str(of["inf"])
            )
        console.print(table)
    for line in replay_verdict(found):
        console.print(f"[bold]{safe(line)}[/bold]", soft_wrap=True)


def replay_verdict(found: Replay) -> Iterator[str]:
    """Where the numbers stop being finite, in words."""
    from genrl.runtime.guards import non_finite

    given = non_finite({k: v for k, v in found.recorded.items() if k in ("state", "next_state", "clean", "old")})
    if given:
        yield f"not finite before training began: {', '.join(given)}. Look at the weights that sampled, and model.dtype"
    if found.module:
        yield f"first module whose output is not finite: {found.module}"
    elif bad := non_finite({k: v for k, v in found.tensors.items() if k != "gradient"}):
        yield f"all modules gave finite outputs; not finite is {bad[0]}, which is computed from them"
    elif found.gradients:
        yield (
            f"the forward pass is finite; {len(found.gradients)} parameters have a gradient that is not. The one "
            f"nearest the output: {found.gradients[-1]}"
        )
    elif not given:
        yield "everything is finite this time: other weights (see above), another device or other software"


def print_rewards() -> None:
    """The rewards that can be named."""
    import rewards
    from rewards.scorers.texts.completions import listing_texts

    for title, rows in (("of pictures", rewards.listing()), ("of texts (section `vlm`)", listing_texts())):
        table = Table(title=title, title_justify="left")
        for column in ("name", "origin", "takes", "range", "what it scores"):
            table.add_column(column, overflow="fold")  # a name that is cut cannot be written into a configuration
        for row in rows:
            table.add_row(*map(safe, (row.name, row.origin, row.needs, row.range, row.doc)))
        console.print(table)
    console.print(
        "your own: name: path/to/file.py:function_or_class (a function of images or completions, and of columns)"
    )


def print_doctor(report: Report, advice: Sequence[str]) -> None:
    """One table per section, then the advice."""
    from genrl.cli.doctor import OPTIONAL

    for section, findings in report.items():
        table = Table(title=section, title_justify="left", show_header=False)
        for name, value in findings.items():
            purpose = f" ({OPTIONAL[name]})" if section == "optional" and name in OPTIONAL else ""
            shown = "-" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
            table.add_row(safe(name + purpose), safe(shown))
        console.print(table)
    for line in advice:
        console.print(f"[yellow]{safe(line)}[/yellow]")
    if not advice:
        console.print("[green]nothing looks wrong[/green]")
