"""`genrl export`, `genrl watch`, `genrl report` and `genrl replay`: what is made of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from genrl.cli.arguments import Best, RunFolder, best_of, refuse, run_config

if TYPE_CHECKING:
    from genrl.runtime.loop.replay import Replay


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(export)
    app.command()(watch)
    app.command()(report)
    app.command()(replay)


def export(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to write; new or empty. With --push: RUN/hub/NAME.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Checkpoint after this many iterations; default: the newest.")
    ] = None,
    best: Best = False,
    full: Annotated[bool, typer.Option("--full", help="Write the whole pipeline, with a LoRA merged into it.")] = False,
    form: Annotated[
        Literal["diffusers", "kohya", "comfyui"], typer.Option("--format", help="Form of a LoRA's file.")
    ] = "diffusers",
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload it to this repository.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Of a repository that --push makes.")] = False,
) -> None:
    """Write a run's model for plain diffusers: the LoRA or the whole pipeline, with a model card; or a policy.

    Example: `genrl export runs/quickstart --out my-lora`, then `pipe.load_lora_weights("my-lora")`

    Of a pipeline's LoRA, `--format kohya` writes the names of A1111 and Forge (U-Nets), `--format comfyui` those of
    ComfyUI; each file is loaded again and compared.

    A policy is written in LeRobot's layout: `genrl export runs/vla/flow_sde --out my-policy`; a vision-language model
    as transformers saves it (a LoRA as PEFT does; `--full` merges it).

    `--push org/name` uploads the folder with the card, the configuration and pictures.
    """
    from genrl.interface.using import export as write

    run_config(run)
    if best:
        refuse({"--step": step}, "--best, which is a step")
        step = best_of(run)
    if out is None:
        if push is None:
            raise typer.BadParameter("give the folder to write, or --push ORG/NAME", param_hint="--out")
        from genrl.runtime.folder import hub

        hub.check_repo(push)
        out = run / "hub" / push.partition("/")[2]  # a folder of the run that is written anew
        shutil.rmtree(out, ignore_errors=True)
    write(run, out, step=step, full=full, form=form, push=push, private=private)
    typer.echo(f"written to {out}")
    if push is not None:
        typer.echo(f"uploaded to {push}")


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; they may not be there yet.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve a live page of one or several runs: state, time left, curves, pictures, rewards, warnings.

    Example: `genrl watch runs/quickstart runs/other --open`

    Only this machine can open it. It reads run folders and changes nothing; Ctrl-C ends it. From another machine:
    `ssh -L 8400:localhost:8400 HOST genrl watch RUN --port 8400`.
    """
    from genrl.runtime.show.pages.live import Live, Server

    server = Server(Live(runs), port)
    for run in runs:
        if not run.exists():
            from genrl.config.folders import near

            typer.echo(f"{run} is not there yet; the page shows it once it is{near(run)}")
    typer.echo(f"{server.url}  (Ctrl-C ends it)")
    if open_page:
        typer.launch(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("stopped watching; the runs go on")
    finally:
        server.server_close()


def report(run: RunFolder) -> None:
    """Make one offline HTML page of a run: curves, pictures, settings, timings.

    Example: `genrl report runs/quickstart`
    """
    run_config(run)
    from genrl.runtime.show.report import write_report

    typer.echo(f"written to {write_report(run)}")


def replay(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="Folder of a dump, RUN/dumps/step-...")],
    run: Annotated[Path | None, typer.Option(help="Run folder; default: the one that the dump is in.")] = None,
) -> None:
    """Run the micro-batch that stopped a run again, and show where its numbers stop being finite.

    Example: `genrl replay runs/quickstart/dumps/step-000012-loss-rank-0`
    """
    from genrl.runtime.loop.replay import replay as run_again

    print_replay(run_again(dump, run))


def print_replay(replayed: Replay) -> None:
    """Print the tensors of a dump and of its replay, and the place where they stop being finite."""
    from rich.table import Table

    from genrl.cli.tables import console, safe
    from genrl.runtime.loop.guards import statistics

    dump = replayed.dump
    console.print(
        f"{safe(dump.where)} not finite at step {dump.step}, trainer {safe(dump.info['settings']['algorithm'])}"
    )
    console.print(f"weights: {safe(replayed.weights)}")
    for title, tensors in (("recorded", replayed.recorded), ("run again", replayed.tensors)):
        table = Table("tensor", "shape", "min", "max", "mean", "NaN", "inf", title=title, title_justify="left")
        for name, tensor in tensors.items():
            figures = statistics(tensor)
            numbers = ("-" if figures[key] is None else f"{figures[key]:.4g}" for key in ("min", "max", "mean"))
            table.add_row(
                safe(name),
                " x ".join(map(str, tensor.shape)) or "-",
                *numbers,
                str(figures["nan"]),
                str(figures["inf"]),
            )
        console.print(table)
    for line in replay_verdict(replayed):
        console.print(f"[bold]{safe(line)}[/bold]", soft_wrap=True)


def replay_verdict(replayed: Replay) -> Iterator[str]:
    """Say where the numbers stop being finite."""
    from genrl.runtime.loop.guards import non_finite

    inputs = non_finite({k: v for k, v in replayed.dump.batch.items() if not k.startswith("weights/")})
    if inputs:
        yield f"not finite before training began: {', '.join(inputs)}. Look at the weights that sampled, and the dtype"
    if replayed.module:
        yield f"first module whose output is not finite: {replayed.module}"
    elif bad := non_finite({k: v for k, v in replayed.tensors.items() if k != "gradient"}):
        yield f"all modules gave finite outputs; not finite is {bad[0]}, which is computed from them"
    elif replayed.gradients:
        yield (
            f"the forward pass is finite; {len(replayed.gradients)} parameters have a gradient that is not. The one "
            f"nearest the output: {replayed.gradients[-1]}"
        )
    elif not inputs:
        yield "everything is finite this time: other weights (see above), another device or other software"
