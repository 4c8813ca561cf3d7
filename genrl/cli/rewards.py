"""The commands `genrl score` and `genrl serve`. No torch before a reward is loaded."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

RewardName = Annotated[
    str, typer.Argument(metavar="REWARD", help="A name that `genrl rewards` lists, or path/to/file.py:Name.")
]
RewardArgs = Annotated[
    list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the reward; several times.")
]
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")]
Precision = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the reward's own.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(score)
    app.command()(serve)


def score(
    reward: RewardName,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...", help="Pictures, folders of them, or .jsonl files.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt of all pictures that come without one.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write, .jsonl or .csv; default: JSONL on stdout.")] = None,
    arg: RewardArgs = None,
    remote: Annotated[str | None, typer.Option(metavar="URL", help="Score by a `genrl serve` of this reward.")] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="Score in a process of its own.")] = False,
    venv: Annotated[str | None, typer.Option(help="Score in the Python of this virtual environment.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per call of the reward.")] = 16,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Score pictures by a reward: files, a folder, or a JSONL with rows `{"image": "a.png", "prompt": "..."}`.

    Example: `genrl score ocr samples --prompt 'a sign that says "OPEN"' --out scores.csv`
    """
    import rewards
    from genrl.cli.tables import printable
    from genrl.data import scoring
    from genrl.data.picture_rows import rows_of

    if out is not None and out.suffix not in (".jsonl", ".csv"):
        raise typer.BadParameter(f"{out} must end in .jsonl or .csv", param_hint="--out")
    skipped: list[str] = []

    def skip(problem: str) -> None:
        skipped.append(problem)
        typer.secho(printable(f"skipped: {problem}"), fg=typer.colors.YELLOW, err=True)

    rows = []
    for row in rows_of(images, prompt):
        if isinstance(row, str):
            skip(row)
        else:
            rows.append(row)

    from rewards.placing import open_reward

    where: dict[str, Any] = {"remote": remote} if remote else {"isolate": venv or isolate, "dtype": dtype}
    with ExitStack() as stack:
        opened = open_reward(reward, _arguments(arg), device=device or _device(), **where)
        stack.callback(rewards.close, opened)
        results = scoring.score_rows(opened, rows, name=reward, batch_size=batch_size, skip=skip)
    write = scoring.write_csv if out is not None and out.suffix == ".csv" else scoring.write_jsonl
    if out is None:
        write(results, sys.stdout)
    else:
        half = out.with_name(out.name + ".tmp")
        with half.open("w", encoding="utf-8", newline="") as stream:
            write(results, stream)
        half.replace(out)
    kept = [result.score for result in results if result.score == result.score]
    mean = f"; mean {sum(kept) / len(kept):.4f}" if kept else ""
    typer.secho(
        f"{len(kept)} scored, {len(results) - len(kept)} without a score, {len(skipped)} skipped{mean}", err=True
    )
    if not results:
        raise typer.Exit(1)


def serve(
    reward: RewardName,
    host: Annotated[str, typer.Option(help="Address to listen at; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8600,
    arg: RewardArgs = None,
    device: Device = None,
    dtype: Precision = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 2**28,
    max_images: Annotated[int, typer.Option(min=1, help="Most pictures in a request.")] = 1024,
    max_pixels: Annotated[int, typer.Option(min=1, help="Most pixels in a request, over all its pictures.")] = 2**26,
) -> None:
    """Serve a reward over HTTP, for runs here or on other machines: `remote: http://HOST:PORT` in their configuration.

    A token is read from the environment variable GENRL_REWARD_TOKEN, here and by the runs.

    Example: `genrl serve pickscore --port 8600`
    """
    from rewards.loading import load, resolve
    from rewards.service import serve as server
    from rewards.service.wire import Limits

    token = os.environ.get(server.TOKEN_VARIABLE, "")
    server.check_address(host, token)
    server.require_extra()
    resolve(reward)
    bound = server.listen(host, port)
    loaded = load(reward, _arguments(arg), device=device or _device(), dtype=dtype)

    from rewards.service.http_app import app

    limits = Limits(max_bytes, max_images, max_pixels)
    bound.listen()
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"{reward} is served at http://{shown}:{bound.getsockname()[1]}", err=True)
    server.run(app(loaded, reward, token=token, limits=limits), bound)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _arguments(given: list[str] | None) -> dict[str, Any]:
    from genrl.config.yaml_source import SourceError, parse

    found: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{text!r} is not key=value, for example crop=ink", param_hint="--arg")
        try:
            found[name] = parse(value).value
        except SourceError as error:
            raise typer.BadParameter(f"{text!r}: the value is not YAML: {error}", param_hint="--arg") from None
    return found
