"""The `genrl` command: one file per group of commands.

Every import beyond typer happens inside the commands: `genrl --help` and `genrl check` start without torch.

What a user must put right is printed as one red text without a traceback; a defect of genrl keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import genrl
import genrl_rewards
from genrl.cli import check, compare, doctor, evaluate, init, rewards, runs, sample, train

PACKAGES = tuple(str(Path(package.__path__[0])) + os.sep for package in (genrl, genrl_rewards))

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


class CleanErrors(TyperGroup):
    """Ends a command with the text of a user's error: exit code 2 for a ValueError, 1 once work had begun."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors, too
            raise
        except Exception as error:
            text = str(error) if isinstance(error, ValueError | RuntimeError) and is_message(error) else ""
            text = text or _of_the_disk(error)
            if not text or os.environ.get("GENRL_DEBUG"):
                raise
            from genrl.cli.tables import printable

            typer.secho(printable(text), fg=typer.colors.RED, err=True)
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _of_the_disk(error: Exception) -> str:
    """What to do about a disk that takes nothing more, or a file in the way; "" for any other error. Libraries in Rust
    tell its number in their text alone."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    if number in _CLOSED and isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {os.strerror(error.errno or 0)}; name another file or folder, or change this one"
    if number not in _FULL:
        return ""
    file = f" to {error.filename}" if isinstance(error, OSError) and error.filename else ""
    saved = "what was saved before is whole: `genrl resume FOLDER` goes on from it"
    return f"nothing can be written{file}: {os.strerror(number)}. Make room, or write elsewhere; {saved}"


def is_message(error: BaseException) -> bool:
    """Whether an error is addressed to the user: a `raise` statement in this project's own code made it.

    Never where the environment variable GENRL_DEBUG is set.
    """
    if os.environ.get("GENRL_DEBUG"):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(PACKAGES) and (frames[-1].line or "").startswith("raise ")


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


for group in (init, train, sample, evaluate, compare, check, runs, doctor, rewards):
    group.add_to(app)


def main() -> None:
    """Entry point of the `genrl` command."""
    app()
