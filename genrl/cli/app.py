"""The `genrl` command: one file per group of commands.

Every import beyond typer happens inside the commands: `genrl --help` and `genrl check` start without torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from genrl.cli import check, collect, compare, doctor, evaluate, init, plan, rewards, runs, sample, train
from genrl.cli.errors import CleanErrors

app = typer.Typer(
    cls=CleanErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Fine-tune generative models by reinforcement learning, from one YAML file: any diffusers pipeline, "
    "policies in simulation, vision-language models.\n\n"
    "First steps: `genrl demo`; then `genrl init` lists recipes, `genrl init NAME` writes one, for `genrl check FILE` "
    "and `genrl train FILE`.",
)


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from genrl import __version__

        typer.echo(f"genrl {__version__}")
        raise typer.Exit


for group in (init, train, sample, collect, evaluate, compare, check, plan, runs, doctor, rewards):
    group.add_to(app)


def main() -> None:
    """Entry point of the `genrl` command."""
    app()
