"""Recipes and the embedded models of the first examples, as data of the package; all else is in pyproject.toml.

They are copied when a wheel is built, so that `configs` and `assets` stay at the top of the repository. A recipe
travels if all that it names does: the other embedded models are 30 MB, and who wants them has a clone.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ASSETS = ("prompts", "references", "edits", "tiny-shapes", "tiny-t2i", "tiny-vla", "tiny-vlm")


class WithRecipes(build_py):
    def run(self):
        super().run()
        if self.editable_mode:  # the clone has them (`genrl.recipes.root`)
            return
        shipped = Path(self.build_lib) / "genrl" / "shipped"
        shutil.rmtree(shipped, ignore_errors=True)  # left by an earlier build
        for name in ASSETS:
            shutil.copytree(HERE / "assets" / name, shipped / "assets" / name)
        for file in sorted((HERE / "configs").rglob("*.*")):
            if file.suffix in (".yaml", ".py") and needs(file) <= set(ASSETS):
                target = shipped / file.relative_to(HERE)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def needs(file: Path) -> set[str]:
    """The folders of assets that a recipe and the file that it includes name."""
    text = re.sub(r"(^|\s)#.*", "", file.read_text(encoding="utf-8"))
    named = set(re.findall(r"assets/([\w.-]+)", text))
    if base := re.search(r"^include: *(\S+)", text, re.MULTILINE):
        named |= needs(file.parent / base[1])
    return named


setup(cmdclass={"build_py": WithRecipes})
