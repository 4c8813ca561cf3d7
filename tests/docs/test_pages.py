"""The pages for readers who begin: commands that exist, files that load, code that runs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from genrl.cli.app import app
from genrl.cli.sample import lines
from genrl.config import ConfigError, load
from genrl.config.plugins import import_file
from genrl.diffusion.config.estimate import plan
from genrl.runtime.folder.run import read_metrics
from genrl.vlm.train import train
from tests.vlm.methods.episodes import agent_runs

LOADS = {"train", "check", "plan", "encode"}
"""Commands whose first argument is a configuration: a file of the repository, or what `genrl init NAME` has written."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
TREES = DOCS / "trees.md"
PAGES = ["index.md", "start.md", "loop.md", "gallery.md", *(f"guides/{p.name}" for p in (DOCS / "guides").iterdir())]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `genrl ...` in the page's blocks of shell, without comments."""
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["genrl"]:
            yield words[1:]


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


def test_first_steps_show_the_files_as_they_are(root: Path) -> None:
    text = (root / "docs" / "start.md").read_text()
    for file in ("configs/quickstart.yaml", "docs/example_reward.py"):
        assert (root / file).read_text().strip() in text, f"docs/start.md shows another {file}"


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


# -- What the README shows is what is in the files, and the pages it names are there
def test_readme_links_exist(root: Path) -> None:
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"


# -- docs/trees.md: its numbers are those of `genrl plan`
def test_the_plan_and_the_error_of_the_page_are_what_is_printed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (command, *text), (wrong, *said), *_ = [block.splitlines() for block in blocks(TREES, "text")]
    _, _, _, file, *overrides = command.split()
    assert text == "\n".join(lines(load(root / file, overrides))).splitlines()
    later = re.findall(r"`(trainer\.window[^`]*)`", TREES.read_text())[0].split()
    assert "ratio 0.450" in "\n".join(lines(load(root / file, later)))
    *_, file, override = wrong.split()
    with pytest.raises(ConfigError) as refused:
        load(Path(file), [override])
    assert said == str(refused.value).splitlines()


def test_the_table_of_systems_has_the_numbers_of_the_plan(root: Path) -> None:
    rows = re.findall(r"\| `([\w./]+\.yaml)` \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", TREES.read_text())
    assert len(rows) == 8
    for file, sampling, ratio, training in rows:
        config = load(root / "configs" / "diffusion" / file)
        result = plan(config)
        calls, steps = result.sample_calls / result.images, config.sampling.num_inference_steps
        assert (f"{calls:.2f}", f"{calls / steps:.3f}") == (sampling, ratio), file
        assert f"{result.train_calls / result.images:.2f}" == training, file


# -- The recipe in which a language model writes a reward: what it is asked, when its code runs, that a run uses it
GOOD = """Here it is:
```python
def reward(before, action, after):
    def far(room):
        (row, column), _ = room.pose
        return abs(row - room.goal[0]) + abs(column - room.goal[1])
    return float(far(before) - far(after)) + (5.0 if far(after) == 0 else 0.0)
```"""
RAISES = "```python\nprint('ran')\ndef reward(before, action, after):\n    return before.position[0]\n```"
NO_NUMBER = "```python\ndef reward(before, action, after):\n    return float('nan')\n```"


class Stub:
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.left, self.asked = list(answers), []

    def answers(self, questions: list[list[str]], max_tokens: int) -> list[str]:
        self.asked += [text for (text,) in questions]
        return [self.left.pop(0) for _ in questions]


@pytest.fixture
def example(root: Path) -> ModuleType:
    return import_file(root / "docs" / "example_text2reward.py")


def test_code_runs_where_it_is_asked_for_and_errors_are_shown_until_it_works(
    example: Any, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "reward.py"
    assert example.write(file, "reach it", Stub(RAISES)) == ""
    assert "before.position" in file.read_text() and capsys.readouterr().out == ""
    assert "position" in example.check(file) and "ran" in capsys.readouterr().out
    file, stub = tmp_path / "reward.py", Stub(RAISES, NO_NUMBER, GOOD)
    assert example.write(file, "reach the square", stub, run=True) == ""
    assert "reach the square" in stub.asked[0] and "frozenset" in stub.asked[0] and "failed" not in stub.asked[0]
    assert "AttributeError" in stub.asked[1] and "nan, not a finite number" in stub.asked[2]
    assert example.check(file) == ""
    assert "not a finite" in example.write(file, "x", Stub(NO_NUMBER, NO_NUMBER), run=True, tries=2)


def test_the_code_cannot_move_the_agent(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(before, action, after):\n    after.pose = (after.goal, 0)\n    return 1.0\n")
    room = example.shaped(f"{file}:reward")
    room.reset(seed=3)
    where = room.room.pose
    _, paid, terminated, _, info = room.step(0)
    assert paid == 1.0 and room.room.pose[0] == where[0] and not terminated and not info["success"]


def test_a_run_is_paid_by_it(example: Any, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    example.write(file, "reach the green square", Stub(GOOD), run=True)
    place = {"name": f"{root / 'docs' / 'example_text2reward.py'}:shaped", "options": {"reward": f"{file}:reward"}}
    config = agent_runs.config(tmp_path, "vl_dac", environment={**place, "answer": "plain", "parallel": 4, "steps": 8})
    run = train(config)
    row = read_metrics(run / "metrics.jsonl")[-1]
    assert row["rollout/env_steps"] == 32.0
