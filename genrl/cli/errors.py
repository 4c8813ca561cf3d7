"""What a user must put right is printed as one red text without a traceback; a defect of genrl keeps its traceback."""

from __future__ import annotations

import errno
import os
import re
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import genrl
import genrl_rewards

PACKAGES = tuple(str(Path(package.__path__[0])) + os.sep for package in (genrl, genrl_rewards))

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR)


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
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    if number in _CLOSED and isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {os.strerror(error.errno or 0)}"
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
