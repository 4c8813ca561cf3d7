"""The pages for readers who begin: short sentences, commands that exist, files that load, code that runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from genrl.cli.app import app
from genrl.config import load

MOST_WORDS = 35
LOADS = {"train", "check", "plan", "encode"}
"""Commands whose first argument is a configuration: a file of the repository, or what `genrl init NAME` has written."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["index.md", "start.md", "loop.md", "gallery.md", *(f"guides/{p.name}" for p in (DOCS / "guides").iterdir())]


def prose(markdown: str) -> str:
    """Without front matter, blocks of code and the targets of links; each cell, item and heading a paragraph."""
    text = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#+|-|\d+\.) (.*)$", r"\n\2", text, flags=re.MULTILINE)
    return "\n".join(line.replace("|", "\n\n") if line.startswith("|") else line for line in text.splitlines())


def sentences(markdown: str) -> list[str]:
    """They end with a full stop, question mark, exclamation mark or colon before a space, or with the paragraph."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", prose(markdown))]
    return [one for part in paragraphs for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`\[*])", part) if one]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `genrl ...` in the page's blocks of shell, without comments."""
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["genrl"]:
            yield words[1:]


def test_sentences_are_short() -> None:
    for name in set(PAGES) - {"loop.md", "gallery.md"}:
        found = sentences((DOCS / name).read_text(encoding="utf-8"))
        long = [one for one in found if len(one.split()) > MOST_WORDS]
        assert not long, f"docs/{name}: more than {MOST_WORDS} words: {long}"


def test_commands_exist_and_their_files_load(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    group: Any = typer.main.get_command(app)
    for command, *arguments in (words for name in PAGES for words in commands(DOCS / name)):
        assert command in group.commands, f"genrl {command}"
        group.commands[command].make_context(command, list(arguments), resilient_parsing=False)
        if command in LOADS:
            changes = [word for word in arguments[1:] if "=" in word and not word.startswith("-")]
            load(recipe(root, Path(arguments[0])), changes)


def recipe(root: Path, file: Path) -> Path:
    """The recipe that a guide has written by `genrl init`, or the file as it is."""
    return root / file if (root / file).exists() else next((root / "configs").rglob(file.name))


def test_yaml_blocks_hold_in_their_recipes(root: Path, tmp_path: Path) -> None:
    """Each block, in the recipe that the page writes by `genrl init` or trains, with the blocks between."""
    for name in PAGES:
        said: dict[str, Any] = {"include": str(root / "configs" / "quickstart.yaml")}
        page = (DOCS / name).read_text(encoding="utf-8")
        places = re.finditer(r"genrl (?:init ([a-z]\w+)|train (\S+\.yaml))|```yaml\n(.*?)```", page, re.DOTALL)
        for number, (written, trained, block) in enumerate(place.groups() for place in places):
            if block is None:
                base = recipe(root, Path(f"{written}.yaml" if written else trained))
                said = said if said["include"] == str(base) else {"include": str(base)}
                continue
            said |= yaml.safe_load(block)
            file = tmp_path / f"{name.replace('/', '_')}-{number}.yaml"
            file.write_text(yaml.safe_dump(said))
            load(file)


FORM = ("Idea", "Equations", "When to use", "Settings that matter", "easured", "Cost")
SHARED = {"methods.md", "forward_process.md", "vla_offline.md"}
"""The comparison of all methods, and what four and five of them share."""


def test_every_method_has_one_page_in_one_form(root: Path) -> None:
    nav = (root / "mkdocs.yml").read_text(encoding="utf-8")
    names = re.findall(r": (\w+\.md)$", nav[nav.index("- Methods:") : nav.index("- Reference:")], re.MULTILINE)
    for name in sorted(set(names) - SHARED):
        heads = re.findall(r"^## (.*)$", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert [part for part in FORM if not any(part in head for head in heads)] == [], f"docs/{name}"


def test_the_environment_of_a_guide_is_one() -> None:
    (code,) = blocks(DOCS / "guides" / "agent.md", "python")
    known: dict[str, Any] = {}
    exec(compile(code, "docs/guides/agent.md", "exec"), known)
    room = known["Corridor"]()
    seen, _ = room.reset(seed=0)
    walks = [room.step(action) for action in [int(room.goal == 7)] * 7]
    assert seen in room.observation_space and walks[-1][4]["is_success"] is not None
    assert any(ended and paid == 1.0 and info["is_success"] for _, paid, ended, _, info in walks)


def test_start_shows_the_reward_as_it_is(root: Path) -> None:
    assert (root / "docs" / "example_reward.py").read_text().strip() in (root / "docs" / "start.md").read_text()


@pytest.mark.slow
def test_the_call_on_the_front_page_trains(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(root / "docs" / "index.md", "python")
    assert code.count("iterations=2,") == 1
    few = {"num_inference_steps": 3, "group_size": 3, "prompts_per_iteration": 2, "batch_size": 3}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")
    known: dict[str, Any] = {}
    exec(compile(code.replace("iterations=2,", f"iterations=2, sampling={few}"), "docs/index.md", "exec"), known)
    assert known["result"].complete and "reward/warm_mean" in known["result"].metrics[-1]


@pytest.mark.slow
def test_the_call_on_the_start_page_trains(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks(root / "docs" / "start.md", "python") if "genrl.train" in block)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")
    known: dict[str, Any] = {}
    exec(compile(code, "docs/start.md", "exec"), known)
    assert known["result"].complete and known["picture"].size == (64, 64)
    assert known["result"].metrics[-1]["reward/bright_mean"] > 0


def test_the_loop_shows_the_method_as_it_is(root: Path) -> None:
    """But for the comments: every line of the block is one of the method's."""
    (block,) = blocks(root / "docs" / "loop.md", "python")
    source = (root / "genrl" / "diffusion" / "methods" / "diffusion_nft" / "train.py").read_text()
    for line in (line.split("  #")[0].strip() for line in block.splitlines()):
        assert line.removesuffix(")").split("(metrics")[0] in source, line


def test_the_figures_of_the_hacked_reward_are_the_measured_ones(root: Path) -> None:
    results = (root / "docs" / "results.md").read_text()
    (row,) = [line for line in results.splitlines() if line.startswith("| [DDPO](ddpo.md) | jpeg")]
    guide = (root / "docs" / "guides" / "reward_hacking.md").read_text()
    table = re.findall(r"^\| (?:trained|watched).*\| (\S+) \| \*\*(\S+)\*\* \|$", guide, re.MULTILINE)
    assert len(table) == 2 and all(f"{start} → **{end}**" in row for start, end in table)
