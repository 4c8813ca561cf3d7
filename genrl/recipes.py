"""The recipes that come with the package: where they are, and how one is written into a folder of one's own."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import genrl_rewards
from genrl.config.yaml_source import plain

_COMMENT = re.compile(r"(^|\s)#.*")
_ASSET = re.compile(r"assets/[\w./-]*\w")
_CODE = re.compile(r"(?:configs|rewards/genrl_rewards)/[\w/]+\.py")
_INCLUDE = re.compile(r"^include: *(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A YAML file of `configs`. name: what it is called, which with its path below `configs` is unique."""

    name: str
    file: Path

    @property
    def written(self) -> str:
        """Name of its file in a folder of one's own."""
        return self.name.replace("/", "_") + ".yaml"

    @property
    def text(self) -> str:
        """What is in the file."""
        return self.file.read_text(encoding="utf-8")

    @property
    def values(self) -> Mapping[str, Any]:
        """Keys that it has, on top of those of the file that it includes."""
        written: dict[str, Any] = plain(self.text)
        base = (
            plain((self.file.parent / written["include"]).read_text(encoding="utf-8")) if "include" in written else {}
        )
        return {**base, **written}


def root() -> Path:
    """The folder of `configs` and `assets`: of an installed wheel within the package, else the clone itself."""
    package = Path(__file__).parent
    return package / "shipped" if (package / "shipped").is_dir() else package.parent


def shipped(name: str) -> Path | None:
    """What comes with the package under a name as pages write it, `assets/...` or `configs/...`: in a clone that is
    where it stands, and in any other folder it is found all the same."""
    place = root() / name
    return place if name.startswith(("assets/", "configs/")) and place.exists() else None


def recipes() -> list[Recipe]:
    """All that travel with this installation. A name is that of the file, with its folders where two are called so."""
    configs = root() / "configs"
    files = sorted(configs.rglob("*.yaml"))
    times = Counter(file.stem for file in files)

    def name(file: Path) -> str:
        return file.relative_to(configs).with_suffix("").as_posix() if times[file.stem] > 1 else file.stem

    return [Recipe(name(file), file) for file in files]


def find(name: str) -> Recipe:
    """The recipe of this name, or of this path: `sd15_ddpo`, `diffusion/sd15_ddpo`, `configs/diffusion/sd15_ddpo.yaml`.
    Raises ValueError with the nearest ones."""
    query = name.removeprefix("configs/").removesuffix(".yaml")
    available = recipes()
    for recipe in available:
        if query in (recipe.name, recipe.file.relative_to(root() / "configs").with_suffix("").as_posix()):
            return recipe
    from rapidfuzz import process

    near = [match for match, _, _ in process.extract(query, [recipe.name for recipe in available], limit=3)]
    raise ValueError(f"no recipe is called {name!r}; did you mean {', '.join(near)}? `genrl init` lists all")


def write(recipe: Recipe, folder: Path) -> list[Path]:
    """Write a recipe into a folder, with all that it names beside it; returns what was written, its own file first.

    Names in it are changed to those in the folder. A file that is there and differs is an error, before anything is
    written.
    """
    plan = dict(_plan(recipe, folder))
    for target, source in plan.items():
        if target.is_file() and (not isinstance(source, str) or target.read_text(encoding="utf-8") != source):
            if isinstance(source, str) or target.read_bytes() != source.read_bytes():
                raise ValueError(f"{target} is there already, with other content; give another folder: --to FOLDER")
    for target, source in plan.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, str):
            target.write_text(source, encoding="utf-8")
        elif source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)
    return list(plan)


def missing(recipe: Recipe, folder: Path) -> list[str]:
    """Files of prompts or questions that a written recipe names and its folder lacks: data of one's own."""
    sections = [recipe.values[key] for key in ("prompts", "task") if isinstance(recipe.values.get(key), dict)]
    named = [str(section.get(key) or "") for section in sections for key in ("train", "eval")]
    files = [name.removeprefix("assets/") for name in named if name.endswith((".txt", ".jsonl"))]
    return [name for name in files if not (folder / name).exists() and not (folder / "assets" / name).exists()]


def _plan(recipe: Recipe, folder: Path) -> Iterator[tuple[Path, str | Path]]:
    """(what is written, its text or what it is a copy of), the recipe itself first."""
    by_name = {item.file.relative_to(root() / "configs").with_suffix("").as_posix(): item for item in recipes()}
    files = {item.file: item for item in by_name.values()}
    yield folder / recipe.written, _moved(recipe, by_name, files)
    text = _COMMENT.sub("", recipe.text)
    if base := _INCLUDE.search(text):
        yield from _plan(files[(recipe.file.parent / base[1]).resolve()], folder)
    for path in dict.fromkeys(_CODE.findall(text)):
        package, _, inside = path.partition("/genrl_rewards/")
        yield folder / Path(path).name, Path(genrl_rewards.__file__).parent / inside if inside else root() / package
    for path in dict.fromkeys(_ASSET.findall(text)):
        if path.startswith("assets/prompts/"):
            yield folder / path.removeprefix("assets/"), root() / path
        else:  # a model, or a folder whose rows name pictures in it
            path = "/".join(path.split("/")[:2])
            yield folder / path, root() / path


def _moved(recipe: Recipe, known: Mapping[str, Recipe], files: Mapping[Path, Recipe]) -> str:
    """The text of a recipe, with the names that things have beside it."""

    def included(match: re.Match[str]) -> str:
        return f"include: {files[(recipe.file.parent / match[1]).resolve()].written}"

    text = _INCLUDE.sub(included, recipe.text)
    paths = "|".join(sorted(known, key=len, reverse=True))  # the longest, where one begins with another
    text = re.sub(rf"configs/({paths})\.yaml\b", lambda match: known[match[1]].written, text)
    text = re.sub(rf"runs/({paths})\b", lambda match: f"runs/{known[match[1]].written.removesuffix('.yaml')}", text)
    text = _CODE.sub(lambda match: match[0].rpartition("/")[2], text)
    return text.replace("assets/prompts/", "prompts/")
