"""What `genrl check` and `eval` do with a vision-language model: one that answers questions, or an agent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel
from rich.table import Table

from genrl.cli.arguments import default_device
from genrl.cli.tables import SHARE, add_course, console, memory_table, safe, scores_table, size, smallest, write_scores
from genrl_rewards.given import is_given

PROCESSES = 8
"""In how many the memory of a run in shards is counted."""
COUNTED = ("text", "image", "voxels", "audio", "music")
UNCOUNTED = f"only models in a folder or on the hub are counted, of output {', '.join(COUNTED)}"

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.cli.evaluate import Options
    from genrl.vlm.config.memory_estimate import Sizes
    from genrl.vlm.config.schema import VLMConfig
    from genrl.vlm.policies.policy import Policy


def summary(config: VLMConfig) -> list[RenderableType]:
    """What an iteration does, and what the method is made of."""
    renderables: list[RenderableType] = []
    for number, part in enumerate(config.parts, 1):
        named = f" of stage {number}, {part.trainer.name}" if config.stages else ""
        table = Table(title=safe(f"one iteration{named}"), show_header=False)
        for row in part.trainer.iteration(part):
            table.add_row(*map(safe, row))
        if number == len(config.parts):
            unit = "episodes" if part.trainer.learns_from == "episodes" else "questions"
            add_course(table, config.iterations, config.evaluation.every, f"{config.evaluation.questions:,} {unit}")
        renderables += [table, *_functions(part)]
    return renderables


def _functions(config: VLMConfig) -> list[RenderableType]:
    """What the method is made of, where it is made of named functions."""
    method = config.trainer
    functions = Table(title=f"the method ({safe(method.name)})", title_justify="left", show_header=False)
    recipe = method.recipe(config)
    for name, value in vars(recipe).items() if recipe is not None else ():
        if value not in ((), None, False, ""):
            functions.add_row(name, safe(_choice(value)))
    return [functions] if functions.row_count else []


def cards(config: VLMConfig, card: float | None) -> list[RenderableType]:
    """Tables of the memory of one process, and of the ways in which the model can be trained: on which card each fits,
    or, with `card` in bytes, whether on that. Without a card, how to ask where the package does not know the model.
    Raises BadParameter for a model of another kind, or whose config.json is not here."""
    from genrl.vlm.config.memory_estimate import memory, question, ways

    known = sizes_of(config, ask=card is not None)
    if known is None:
        how = f"--memory 24GB estimates it from the config.json of {config.vlm.path}"
        return [f"memory: {safe(how)}" if config.vlm.output in COUNTED else f"memory: not estimated: {UNCOUNTED}"]
    count = PROCESSES if config.distributed.fsdp else 1
    columns = ("in bfloat16", "one process", "card" if card is None else "fits")
    table = Table(*columns, title="ways of training it", title_justify="left")
    for name, changed, processes in ways(config):
        total = sum(part for _, part in memory(changed, known, processes))
        least = smallest(total)
        table.add_row(name, size(total), least if card is None else "yes" if total <= SHARE * card else f"no ({least})")
    share = f"; of one of {count} processes" if count > 1 else ""
    asked = f"{known.numbers:,} weights{share}; questions of {question(config):,} tokens"
    return [memory_table(memory(config, known, count)), asked, table]


def sizes_of(config: VLMConfig, *, ask: bool = False) -> Sizes | None:
    """Sizes of the model: of the package, or, if it is to be asked, of its config.json, for which torch is imported.
    Raises BadParameter where that cannot be."""
    from genrl.vlm.config.memory_estimate import published

    if config.vlm.output in COUNTED and not is_given(config.vlm.path):
        if known := published(config.vlm.path):
            return known
        if ask:
            from genrl.vlm.policies.loading import sizes

            with TemporaryDirectory() as place:
                return sizes(_described(config.vlm.path, Path(place)), answers=config.vlm.output == "text")
    if ask:
        raise typer.BadParameter(f"memory: {UNCOUNTED}", param_hint="--memory")
    return None


def _described(source: str, place: Path) -> str:
    """Where the config.json of a model is: its folder, the cache, or else `place`, into which the hub's copy is loaded.
    Raises BadParameter where it is nowhere."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if Path(source).expanduser().is_dir():
        return str(Path(source).expanduser())
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return source
    try:
        return str(Path(hf_hub_download(source, "config.json", local_dir=place)).parent)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        text = f"the config.json of {source} is not here, and the hub does not give it ({why}): hf download {source}"
        raise typer.BadParameter(f"{text} --include '*.json'", param_hint="--memory") from None


def _choice(value: Any) -> str:
    """A function of the method, or several, as YAML has them."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_choice, value)) + "]"
    if not isinstance(value, BaseModel):
        return str(value)
    constants = value.model_dump(mode="json").items()
    return "{" + ", ".join(f"{key}: {constant}" for key, constant in constants if constant is not None) + "}"


def evaluate(model: Path, config: VLMConfig, options: Options) -> None:
    """Print the accuracy of a model (a run's newest, or a folder's) on held-out questions, with its interval."""
    from genrl.runtime.loop.progress import Progress
    from genrl.vlm.evaluate import held_out

    if options.num_prompts is not None:
        evaluation = config.evaluation.model_copy(update={"questions": options.num_prompts})
        config = config.model_copy(update={"evaluation": evaluation})
    policy = _opened(model, config, options)
    with Progress(1, unit="answers") as progress:
        scores, number = held_out(policy, config, lambda total: progress.phase("evaluating", total), progress.advance)
    table = _table_of("right answers", "eval/accuracy", scores, f"{model}, {number} questions")
    if "eval/accuracy_blind" in scores:
        table.add_row("with black pictures", f"{scores['eval/accuracy_blind']:.3f}", "")
    for label in (*config.reward_labels, "total"):
        table.add_row(safe(label), f"{scores[f'eval/{label}_mean']:.3f}", "")
    console.print(table)
    record = {"model": str(model), "task": config.task.model_dump(mode="json"), "questions": number}
    write_scores(options.out, record, scores)


def evaluate_agent(model: Path, config: VLMConfig, options: Options) -> None:
    """Print the success of a model (a run's newest, or a folder's) in held-out episodes, with its interval; strips of
    pictures of the first ones go into the folder `options.videos`."""
    from genrl.runtime.loop.progress import Progress
    from genrl.runtime.show.pictures import save_png
    from genrl.vlm.environments.hosts import open_host
    from genrl.vlm.episodes.episodes import Table as Slots
    from genrl.vlm.episodes.evaluate import FILMED, figures_of, judge
    from genrl.vlm.episodes.run import settings_of

    settings, number, films = settings_of(config), options.episodes or config.evaluation.questions, options.videos
    policy = _opened(model, config, options)
    with closing(open_host(settings)) as host, Progress(1, unit="episodes") as progress:
        progress.phase("acting", number)
        num_films = FILMED if films else 0
        slots = Slots(settings, host)
        judged = judge(policy, config, slots, range(number), films=num_films, advance=progress.advance)
    scores = figures_of(judged)
    table = _table_of("success", "eval/success", scores, f"{model}, {number} episodes")
    for name, value in scores.items():
        if name.endswith("_mean") and name != "eval/success_mean":
            table.add_row(safe(name.removeprefix("eval/").removesuffix("_mean")), f"{value:.3f}", "")
    console.print(table)
    if films:
        films.mkdir(parents=True, exist_ok=True)
        for place, (film, _) in enumerate(judged.films):
            save_png(film, films / f"episode-{place:02d}.png")
        typer.echo(f"{len(judged.films)} strips of episodes in {films}")
    record = {"model": str(model), "environment": settings.model_dump(mode="json"), "episodes": number}
    write_scores(options.out, record, scores)


def _opened(model: Path, config: VLMConfig, options: Options) -> Policy:
    """The model of a run's checkpoint, or in a folder, as the configuration has it."""
    from genrl.vlm.policies.folder import load_trained, open_policy

    step, device = options.step(model), default_device()
    if (model / "config.yaml").is_file():
        return load_trained(config, model, step, device)
    return open_policy(config, device, str(model))


def _table_of(what: str, name: str, scores: dict[str, float], title: str) -> Table:
    """A table of scores that begins with a share and its interval."""
    table = scores_table(title, "", "mean", "95 % interval")
    table.add_row(what, f"{scores[f'{name}_mean']:.3f}", f"{scores[f'{name}_low']:.3f} to {scores[f'{name}_high']:.3f}")
    return table
