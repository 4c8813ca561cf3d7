"""An exported model: its folder, which appears under its name when it is complete, its card, and the hub (by
huggingface_hub) that it goes to and configurations come from.

Parts of its card that all kinds of runs share are here, in Markdown.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from genrl import __version__
from genrl.config import RunConfig
from genrl.config.folders import hub_errors, is_hub_id, looks_local
from genrl.runtime.folder.run import Run, read_metrics, synced, write_atomic
from genrl.runtime.show import pictures
from genrl_rewards.given import is_given


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, whose content is under `final` when the block ends without an error, and not before.

    What was there gives way to it. Where the block ends by an error, or the process is killed, it is as it was.
    """
    final = final.absolute()
    is_empty = final.is_dir() and not any(final.iterdir())  # it may be where somebody works, or another disk
    beside = final if is_empty else final.parent
    temporary, old = (beside / f".{final.name}{end}.tmp-{os.getpid()}" for end in ("", "-old"))
    for path in sorted(beside.iterdir()) if beside.is_dir() else []:  # of a process that was killed
        if path.name.startswith(f".{final.name}-old.tmp-") and not final.exists():  # between the two renames below
            path.rename(final)
        elif path.name.startswith((f".{final.name}.tmp-", f".{final.name}-old.tmp-")):
            shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):  # a full disk may say so only here
            if file.is_file():
                synced(file)
        if is_empty:
            for path in list(temporary.iterdir()):
                path.rename(final / path.name)
        else:
            if final.exists():
                final.rename(old)
            try:
                temporary.rename(final)
            except OSError:
                if old.exists():
                    old.rename(final)
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def own_files(folder: Path) -> list[Path]:
    """The files of a folder, in order of their names, but for links that lead out of it. In the hub's cache all are
    links into `blobs`, which is the same repository's."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":
        inside.append(folder.parent.parent.resolve() / "blobs")
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(file.resolve().is_relative_to(place) for place in inside)
    ]


THIS_FOLDER = "THIS_FOLDER"
"""Where the code of a card names the folder that it lies in; in the place of the hub's repository, once it is there."""


def as_code(text: str) -> str:
    """Write text as code in Markdown, which shows it as it is: HTML, links and backticks too."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"


def table(rows: Sequence[Mapping[str, float | None]]) -> str:
    """The last evaluation, beside that of step 0 where there is one. rows: evaluations, by step."""
    last = rows[-1] if rows else {}
    first = rows[0] if len(rows) > 1 and rows[0].get("step") == 0 else None
    titles = ["held-out metric", *([] if first is None else ["before"]), "value" if first is None else "after"]
    lines = [titles, ["---"] * len(titles)]
    for name, value in sorted(last.items()):
        if name.startswith("eval/") and value is not None:
            numbers = [value] if first is None else [first.get(name), value]
            cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
            lines.append([as_code(name).replace("|", "\\|"), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_plain(folder: Path, config: RunConfig, base: str | None, rows: Sequence[Mapping[str, float | None]]) -> None:
    """README.md of an exported policy or vision-language model. base: what it was trained from, None = from nothing."""
    base_model = "" if base is None else f"base_model: {json.dumps(base, ensure_ascii=False)}\n"
    what = "A model" if base is None else as_code(base)
    text = f"""---
{base_model}library_name: {config.library}
tags: [reinforcement-learning, genrl, {json.dumps(config.trainer.algorithm)}]
---

# {what} trained by {as_code(config.trainer.algorithm)}

Trained by reinforcement learning with genrl {__version__}, {config.iterations} iterations.

{table(rows)}
"""
    write_atomic(folder / "README.md", text)


PREFIX = "hub:"
FORM = f"{PREFIX}org/name/path/to/config.yaml, or {PREFIX}org/name@revision/config.yaml"


def check_repo(repo: str) -> None:
    """Raises ValueError for what is no name of a repository, org/name, and where nobody is logged in."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not re-exported

    try:
        validate_repo_id(repo)
        wrong = "" if repo.count("/") == 1 else "write org/name"
    except HFValidationError as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"push {repo!r}: this is no name of a repository on the hub: {wrong}")
    if get_token() is None:
        raise ValueError(f"push {repo!r}: nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN")


def push(run: Path, folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload an exported model, with the run's configuration and pictures, to the hub's repository org/name.

    folder: as `export` wrote it; config.yaml, samples.png and what the card says of them are added to it. private: of a
    repository that does not exist yet. Returns its address. Raises RuntimeError where the hub does not take it; the
    folder is then complete, and the message says how to upload it.
    """
    from huggingface_hub import HfApi

    _accompany(run, folder, repo)
    hub = HfApi()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model trained with genrl")
    except hub_errors(ValueError) as error:
        hidden = " --private" if private else ""
        raise RuntimeError(
            f"{folder} is written, but was not uploaded to {repo}: {error}. Log in by `hf auth login` with a token "
            f"that may write there, then upload it by `hf upload {repo} {folder} .{hidden}`"
        ) from error
    return str(address)


def _accompany(run: Path, folder: Path, repo: str) -> None:
    """What is beside the weights on the hub."""
    from genrl.config import load

    config = load(run / "config.yaml")
    shutil.copyfile(run / "config.yaml", folder / "config.yaml")
    readme = folder / "README.md"
    if not readme.exists():
        rows = [row for row in read_metrics(Run(run).metrics) if "eval/total_mean" in row or _evaluates(row)]
        write_plain(folder, config, base_of(config), rows)
    picture = pictures.before_after(Run(run).samples) or _last_grid(run)
    text = f"\nThe run's settings are in `config.yaml`: `genrl train {PREFIX}{repo}/config.yaml`.\n"
    if picture is not None:
        pictures.save_png(picture, folder / "samples.png")
        text += "\n## Samples\n\n![held-out prompts, at the first and the last evaluation](samples.png)\n"
    card = readme.read_text(encoding="utf-8").replace(THIS_FOLDER, repo)
    if text not in card:  # of a push before, which failed
        readme.write_text(card + text, encoding="utf-8")
    _complete_front_matter(readme, base_of(config))


def _evaluates(row: dict[str, Any]) -> bool:
    return any(key.startswith("eval/") for key in row)


def _last_grid(run: Path) -> Any:
    from PIL import Image

    grids = sorted(path for path in Run(run).samples.glob("step-*.png") if "best-worst" not in path.name)
    return Image.open(grids[-1]) if grids else None


def base_of(config: RunConfig) -> str | None:
    """Hub id or folder of the model that a run trained; None for one made anew or handed over by a script."""
    name = config.base
    return None if name is None or is_given(name) else name


def _complete_front_matter(readme: Path, base: str | None) -> None:
    """The licence of the base model, where it is known; no `base_model` that the hub would take for one of its own."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(readme)
    # The hub refuses a card whose base model it cannot find by that name.
    if base is None or looks_local(base) or Path(base).exists():
        card.data.base_model = None
    if base is not None and (licence := licence_of(base)):
        card.data.license = licence
    card.save(readme)


def licence_of(base: str) -> str | None:
    """Licence as the card of a model says, in its folder or on the hub; None where there is no card or it cannot be
    had."""
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError

    local = Path(base).expanduser() / "README.md"
    if not local.is_file() and looks_local(base):
        return None
    try:
        card = ModelCard.load(local if local.is_file() else base, ignore_metadata_errors=True).data.license
    except hub_errors(EntryNotFoundError, ValueError):
        return None
    return card if isinstance(card, str) else None


def local_folder(name: str, kind: str = "model") -> Path:
    """The folder of this name; for a hub id, that of the repository (kind: "model" or "dataset"), downloaded into the
    hub's cache. Raises ValueError where the hub does not give it."""
    from huggingface_hub import snapshot_download

    if not is_hub_id(name):
        return Path(name).expanduser()
    try:
        # weights once, in the form that is read; pickles and other programs' checkpoints never
        skipped = ["*.bin", "*.msgpack", "*.h5", "*.onnx", "*.pkl"]
        return Path(snapshot_download(name, repo_type=kind, ignore_patterns=skipped))
    except hub_errors(ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{name}: there is no such folder, and the hub does not give it: {why}") from error


def fetch(name: str) -> tuple[Path, list[str]]:
    """A configuration from the hub, by `hub:org/name/config.yaml`: its file here, and the overrides that it needs.

    Files that it names and that lie in the repository are fetched too; other relative paths are of the folder that the
    command runs in, as always. Its `output` becomes runs/NAME: a stranger's folder is not written to. Code is not
    fetched. Raises ValueError for another form, and where the hub does not give it.
    """
    from huggingface_hub import HfApi

    repo, revision, inside = _parts(name)
    hub = HfApi()
    try:
        file = Path(hub.hf_hub_download(repo, inside, revision=revision))
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        beside = set(hub.list_repo_files(repo, revision=revision))
        overrides = [f"output=runs/{repo.partition('/')[2]}"]
        for keys, text in _texts(content if isinstance(content, dict) else {}):
            target = str(PurePosixPath(inside).parent / text)
            if target in beside and keys != "output" and not text.endswith(".py"):
                here = hub.hf_hub_download(repo, target, revision=revision)
                overrides += [] if keys == "include" else [f"{keys}={here}"]
    except hub_errors(ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{name}: the hub does not give it: {why}. Is it written {FORM}? A private one needs `hf auth login`"
        ) from error
    return file, overrides


def _parts(name: str) -> tuple[str, str | None, str]:
    """Repository, revision and file."""
    organisation, _, rest = name.removeprefix(PREFIX).partition("/")
    repo, _, inside = rest.partition("/")
    title, _, revision = repo.partition("@")
    parts = PurePosixPath(inside).parts
    if not organisation or not title or not inside.endswith((".yaml", ".yml")) or ".." in parts:
        raise ValueError(f"{name}: a configuration on the hub is written {FORM}")
    return f"{organisation}/{title}", revision or None, inside


def _texts(node: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every text of a configuration that may be a path, with its dotted key."""
    if isinstance(node, str):
        yield ".".join(keys), node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, below in items:
        yield from _texts(below, (*keys, str(key)))
