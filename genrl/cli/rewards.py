"""`genrl rewards`, `genrl score` and `genrl serve`. No torch before a reward is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genrl.cli.arguments import default_device, key_values

if TYPE_CHECKING:
    from genrl.data.picture_rows import Result, Row
    from genrl_rewards.loading import Listed

SHOWN = 6
"""Of rewards that are found all is shown if they are no more, so that it fits a screen."""
RewardName = Annotated[
    str, typer.Argument(metavar="REWARD", help="A name that `genrl rewards` lists, or path/to/file.py:Name.")
]
RewardArgs = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the reward; may be given several times."),
]
Device = Annotated[str | None, typer.Option(help="Default: the accelerator (cuda, mps, xpu), else cpu.")]
Precision = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the reward's own.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command("rewards")(list_rewards)
    app.command()(score)
    app.command()(serve)


def list_rewards(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Show those with these words in what is said of them.")
    ] = None,
) -> None:
    """List the rewards that can be named in a configuration, built in and installed; with words, what they score.

    Example: `genrl rewards`, and `genrl rewards text`
    """
    import genrl_rewards
    from genrl.cli.tables import console, safe
    from genrl_rewards.scorers.texts.completions import listing_texts

    kinds = {"of pictures, videos and sounds": genrl_rewards.listing(), "of texts (section `vlm`)": listing_texts()}
    if words:
        _search(words, kinds)
        return
    for title, rows in kinds.items():
        console.print(f"[bold]{safe(title)}[/bold]")
        for origin in dict.fromkeys(row.origin for row in rows):
            names = safe(", ".join(row.name for row in rows if row.origin == origin))
            console.print(names if origin == "built-in" else f"{safe(origin)}: {names}", overflow="fold")
    console.print("your own: path/to/file.py:function_or_class, of images or completions, and of columns")
    console.print("what one scores, takes and gives: genrl rewards NAME, or any word: genrl rewards text")


def _search(words: Sequence[str], kinds: Mapping[str, Sequence[Listed]]) -> None:
    """Print the rewards that all words speak of. Raises BadParameter where there is none."""
    from genrl.cli.tables import console, safe
    from genrl_rewards.contract import nearest

    rows = [(kind, row) for kind, listed in kinds.items() for row in listed]
    terms = [word.lower() for word in words]
    named = [(kind, row) for kind, row in rows if [row.name] == list(words)]
    matching = named or [(kind, row) for kind, row in rows if all(word in " ".join(row).lower() for word in terms)]
    if not matching:
        hint = nearest(words[0], [row.name for _, row in rows])
        raise typer.BadParameter(f"no reward speaks of {' '.join(words)!r}.{hint}", param_hint="WORD")
    for kind, row in matching:
        name = f"[bold]{safe(row.name)}[/bold]"
        if len(matching) > SHOWN:
            console.print(f"{name}: {safe(row.doc)}", no_wrap=True, overflow="ellipsis")
            continue
        console.print(f"{name} ({safe(f'{kind}, {row.origin}')})", overflow="fold")
        console.print(f"    {safe(row.doc)}\n    takes {safe(row.needs)}; gives {safe(row.range)}")


def score(
    reward: RewardName,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...", help="Pictures, folders of them, or .jsonl files.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt of all pictures that have none.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write, .jsonl or .csv; default: JSONL on stdout.")] = None,
    arg: RewardArgs = None,
    remote: Annotated[
        str | None, typer.Option(metavar="URL", help="Let the `genrl serve` of this reward score.")
    ] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="Score in a separate process.")] = False,
    venv: Annotated[str | None, typer.Option(help="Score with the Python of this virtual environment.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per call of the reward.")] = 16,
    device: Device = None,
    dtype: Precision = None,
) -> None:
    """Score pictures by a reward: files, a folder, or a JSONL with rows `{"image": "a.png", "prompt": "..."}`.

    Example: `genrl score ocr samples --prompt 'a sign that says "OPEN"' --out scores.csv`
    """
    import genrl_rewards
    from genrl.cli.tables import printable
    from genrl.data.picture_rows import rows_of, score_rows

    if out is not None and out.suffix not in (".jsonl", ".csv"):
        raise typer.BadParameter(f"{out} must end in .jsonl or .csv", param_hint="--out")
    skipped: list[str] = []

    def skip(problem: str) -> None:
        skipped.append(problem)
        typer.secho(printable(f"skipped: {problem}"), fg=typer.colors.YELLOW, err=True)

    rows: list[Row] = []
    for row in rows_of(images, prompt):
        if isinstance(row, str):
            skip(row)
        else:
            rows.append(row)

    from genrl_rewards.placing import open_reward

    where: dict[str, Any] = {"remote": remote} if remote else {"isolate": venv or isolate, "dtype": dtype}
    with ExitStack() as stack:
        opened = open_reward(reward, key_values(arg, "crop=ink", "--arg"), device=device or default_device(), **where)
        stack.callback(genrl_rewards.close, opened)
        results = score_rows(opened, rows, name=reward, batch_size=batch_size, skip=skip)
    _write(results, out)
    scores = [result.score for result in results if result.score == result.score]
    mean = f"; mean {sum(scores) / len(scores):.4f}" if scores else ""
    without = len(results) - len(scores)
    typer.secho(f"{len(scores)} scored, {without} without a score, {len(skipped)} skipped{mean}", err=True)
    if not results:
        raise typer.Exit(1)


def _write(results: Sequence[Result], out: Path | None) -> None:
    """Write a file by its suffix, whole or not at all; without a name JSONL on stdout."""
    from genrl.data.picture_rows import write_csv, write_jsonl
    from genrl.runtime.folder.run import write_atomic

    if out is None:
        return write_jsonl(results, sys.stdout)
    content = StringIO(newline="")
    (write_csv if out.suffix == ".csv" else write_jsonl)(results, content)
    write_atomic(out, content.getvalue())


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
    max_pixels: Annotated[int, typer.Option(min=1, help="Most pixels in a request, over all its pictures.")] = 2**25,
) -> None:
    """Serve a reward over HTTP, for runs here or on other machines: `remote: http://HOST:PORT` in their configuration.

    A token is read from the environment variable GENRL_REWARD_TOKEN, here and by the runs.

    Example: `genrl serve pickscore --port 8600`
    """
    from genrl_rewards.loading import load, resolve
    from genrl_rewards.service import serve as server
    from genrl_rewards.service.wire import Limits

    token = os.environ.get(server.TOKEN_VARIABLE, "")
    server.check_address(host, token)
    server.require_extra()
    resolve(reward)
    bound = server.listen(host, port)
    loaded = load(reward, key_values(arg, "crop=ink", "--arg"), device=device or default_device(), dtype=dtype)

    from genrl_rewards.service.http_app import app

    limits = Limits(max_bytes, max_images, max_pixels)
    bound.listen()
    address = f"[{host}]" if ":" in host else host
    typer.echo(f"{reward} is served at http://{address}:{bound.getsockname()[1]}", err=True)
    server.run(app(loaded, reward, token=token, limits=limits), bound)
