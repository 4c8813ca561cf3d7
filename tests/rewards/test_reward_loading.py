"""From a name to a reward: built-ins, files, entry points; every way to get it wrong says what to do."""

import hashlib
import importlib
import inspect
import logging
import math
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import genrl_rewards
from genrl.diffusion.config.files import declared_columns
from genrl.diffusion.config.schema import Config
from genrl_rewards import extras, loading
from genrl_rewards.built_in import BUILT_IN
from genrl_rewards.scorers.preference.clipscore import SCALES as CLIP_SCALES
from genrl_rewards.scorers.preference.pickscore import SCALES as PICK_SCALES
from genrl_rewards.scorers.texts.ocr import VARIANTS
from tests.rewards.asking import refused, scored

MINE = '''
import functools
from math import sqrt as root
LIMIT = 3
NOTHING: int = 0

def dark(images, strength=1.0):
    return [strength] * len(images)

class Style:
    """How oily it is.

    Nothing else."""
    range = "0 to 9"
    def __init__(self, style, device, scale=2.0):
        self.style, self.device, self.scale = style, device, scale
    def __call__(self, prompts):
        return [self.scale] * len(prompts)

class Silent:
    pass

half = functools.partial(dark, strength=0.5)
try:
    import no_such_module
except ImportError:
    def fallback(images):
        return [0.0] * len(images)
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py"


def values(reward: genrl_rewards.Reward) -> list[float]:
    scores = scored(reward, images=torch.zeros(2, 3, 4, 4), prompts=["a", "b"])
    return scores.values


def test_nothing_imports_torch_until_a_reward_is_loaded(mine: str) -> None:
    code = (
        "import sys; from genrl_rewards import listing, resolve; listing()\n"
        "resolve('pickscore'); resolve('mine.py:dark')\n"
        "assert not {'torch', 'transformers', 'rapidocr'} & set(sys.modules), sorted(sys.modules)"
    )
    root = str(Path(genrl_rewards.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_listing_says_what_a_reward_takes() -> None:
    listed = genrl_rewards.listing()
    assert {"shapes", "ocr", "clipscore", "pickscore"} <= {row.name for row in listed}
    for row in listed:
        origin = genrl_rewards.resolve(row.name)
        assert origin.name == row.name and (row.doc or row.origin != "built-in")
        if row.origin == "built-in":
            reward = vars(importlib.import_module(origin.where))[origin.attribute]
            assert callable(reward) and reward.__doc__
            if not loading.BUILT_IN[row.name].needs:  # it does not depend on its args
                assert set(row.needs.split(", ")) == set(genrl_rewards.needs(reward).names)
                assert declared_columns(origin) == genrl_rewards.needs(reward).columns


def test_functions_and_classes_of_a_file(mine: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="genrl_rewards.loading"):
        assert values(genrl_rewards.load(f"{mine}:dark")) == [1.0, 1.0]
    assert hashlib.sha256(MINE.encode()).hexdigest() in caplog.text and "mine.py" in caplog.text
    assert values(genrl_rewards.load(f"{mine}:dark", {"strength": 0.25})) == [0.25, 0.25]
    assert values(genrl_rewards.load(f"{mine}:half")) == [0.5, 0.5]
    assert values(genrl_rewards.load(f"{mine}:fallback")) == [0.0, 0.0]
    style = genrl_rewards.load(f"{mine}:Style", {"style": "oil"}, device="meta")
    assert (style.style, style.device) == ("oil", "meta") and values(style) == [2.0, 2.0]
    assert genrl_rewards.load(f"{mine}:Style", {"style": "oil", "device": "cpu"}, device="meta").device == "cpu"
    Path("mine.py").write_text("import no_such_module\ndef dark(images): return []\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # the user's error
        genrl_rewards.load("mine.py:dark")


def declared(name: str) -> Any:
    return genrl_rewards.declaration(genrl_rewards.resolve(name))


@pytest.mark.parametrize(
    ("code", "args", "said"),
    [
        ("def mine(images, a=1): return [0.0] * len(images)", {"a": 2}, ""),
        ("def mine(images, a=1): return [0.0] * len(images)", {"b": 2}, "has no option b"),
        ("def mine(images, colour): return [0.0] * len(images)", {"colour": "red"}, "has no option colour"),
        ("def mine(images, *rest): return [0.0] * len(images)", {}, "takes 'rest'"),
        ("def mine(images, **rest): return [0.0] * len(images)", {}, "takes 'rest'"),
        ("def mine(images, /): return [0.0] * len(images)", {}, "takes 'images'"),
        ("async def mine(images, style): return [0.0] * len(images)", {}, ""),
        ("mine = 3", {}, "is a constant"),
        ("class mine: pass", {}, "has no __call__"),
        ("class mine:\n def __init__(self, a, device): pass\n def __call__(self, images): pass", {}, "is made with a"),
        ("class mine:\n def __init__(self, a, device): pass\n def __call__(self, images): pass", {"a": 1}, ""),
        ("class mine:\n def __init__(self, **a): pass\n def __call__(self, images): pass", {"b": 1}, ""),
        ("class mine:\n def __call__(self, images): pass", {"b": 1}, "has no option b"),
        ("class mine:\n def __call__(self, *images): pass", {}, "takes 'images'"),
        ("class base: pass\nclass mine(base): pass", {"b": 1}, None),
        ("import not_there_at_all\ndef mine(images): pass", {}, "imports not_there_at_all"),
        ("try:\n import not_there_at_all\nexcept ImportError: pass\ndef mine(images): pass", {}, ""),
        ("from functools import partial\nmine = partial(max, 1)", {}, None),
    ],
)
def test_the_source_says_what_loading_would(code: str, args: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    """Without running it; None: what only running it tells."""
    file = tmp_path / "mine.py"
    file.write_text(code)
    result = genrl_rewards.misfit(file, "mine", args, everything=False)
    assert (said in result and bool(said) == bool(result)) if said is not None else result == ""
    try:
        needs = genrl_rewards.needs(genrl_rewards.load(f"{file}:mine", args))
    except (ValueError, ModuleNotFoundError):
        assert said != ""
    else:
        assert not said and (not code.startswith(("def", "async")) or needs.names == declared(f"{file}:mine").takes)


def test_dtype_is_handed_on_or_refused(mine: str) -> None:
    Path("typed.py").write_text(
        "class Typed:\n    def __init__(self, dtype='float32'):\n        self.dtype = dtype\n"
        "    def __call__(self, images):\n        return [0.0] * len(images)\n"
    )
    assert genrl_rewards.load("typed.py:Typed").dtype == "float32"
    assert genrl_rewards.load("typed.py:Typed", dtype="bfloat16").dtype == "bfloat16"
    assert genrl_rewards.load("typed.py:Typed", {"dtype": "float16"}, dtype="bfloat16").dtype == "float16"
    for name in (f"{mine}:dark", f"{mine}:Style"):
        with pytest.raises(ValueError, match="cannot be run in bfloat16.*no parameter `dtype`"):
            genrl_rewards.load(name, {"style": "oil"} if "Style" in name else {}, dtype="bfloat16")


def test_errors_say_what_to_do(mine: str) -> None:
    for name, args, words in (
        ("pikscore", {}, "unknown reward 'pikscore'. Did you mean 'pickscore'.* Known: .*path/to/file.py:Name"),
        ("CLIPScore", {}, "Did you mean 'clipscore'"),
        ("mein.py:dark", {}, "'mein.py' does not exist .* Did you mean 'mine.py'"),
        ("nowhere/mine.py:dark", {}, "no folder 'nowhere'"),
        ("mine.py", {}, "mine.py:Name. It defines: LIMIT, NOTHING, dark, Style, Silent, half, fallback"),
        ("mine.py:darc", {}, "has no 'darc'. Did you mean 'dark'.* It defines"),
        ("mine.py:LIMIT", {}, "is a int; it must be a function or a class"),
        ("mine.py:Silent", {}, "class without __call__"),
        ("mine.py:Style", {}, "args of reward 'mine.py:Style' do not fit: missing .*'style'"),
        ("mine.py:Style", {"style": 1, "scael": 2}, "Did you mean 'scale'.* It takes: style, device, scale"),
        ("mine.py:dark", {"strenght": 2}, "Did you mean 'strength'.* It takes: strength"),
        ("mine.py:dark", {"images": 2}, "parameters with a default"),
        ("broken.py:dark", {}, "broken.py, line 2"),
    ):
        Path("broken.py").write_text("x = 1\ndef dark(:\n")
        refused(words, name, args)


def test_a_missing_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = loading.BUILT_IN["ocr"]._replace(packages=("rapidocr_not_here",))
    monkeypatch.setitem(loading.BUILT_IN, "ocr", entry)
    refused(r"needs rapidocr_not_here, .* pip install 'rapidocr", "ocr")


def install(folder: Path, package: str, entry: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[genrl.rewards]\n{entry}\n")


def test_installed_entry_points_are_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "style_pack.py").write_text(MINE)
    install(tmp_path, "style-pack", "oil = style_pack:Style\ngone = style_pack:Styel")
    (row,) = (row for row in genrl_rewards.listing() if row.name == "oil")
    assert (row.needs, row.range, row.doc) == ("prompts", "0 to 9", "How oily it is.")
    assert genrl_rewards.resolve("oil") == genrl_rewards.Origin("oil", "entry point", "style_pack", "Style")
    assert ("oil", "entry point of style-pack") in [(row.name, row.origin) for row in genrl_rewards.listing()]
    assert values(genrl_rewards.load("oil", {"style": "oil"})) == [2.0, 2.0]
    refused("style_pack has no 'Styel'. Did you mean 'Style'", "gone")


def test_a_name_claimed_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "first", "oil = first:Style\nocr = first:Ocr")
    install(tmp_path, "second", "oil = second:Style")
    with pytest.raises(ValueError, match="'oil' is claimed by .*first.* and by .*second"):
        genrl_rewards.resolve("oil")
    assert genrl_rewards.resolve("ocr").kind == "built-in"


# -- The command of an extra names its packages, whatever the index has under this package's name
def test_an_extra_is_installed_by_the_names_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.8", 'rapidocr>=3.10; extra == "ocr"']
    lines += ["triton>=3.6; platform_system == 'Linux' and extra == 'fast'"]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    assert extras.install("ocr") == "pip install 'rapidocr>=3.10'"
    assert extras.install("fast") == "pip install 'triton>=3.6'"

    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    assert extras.install("ocr") == "pip install '.[ocr]' in the folder of genrl's clone"


# -- The documentation's example runs as named
def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_page_names_an_example_that_runs_and_every_built_in_with_its_options(root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    (entry,) = yaml.safe_load(blocks(root / "docs" / "rewards.md", "yaml")[0])["rewards"]
    reward = genrl_rewards.load(entry["name"])
    images = torch.zeros(3, 3, 8, 8)
    images[0, 0], images[1, 2] = 1, 1
    scores = genrl_rewards.score(reward, images=images, prompts=["a fire", "a fire", "a blue sea"])
    assert scores.values[:2] == [1.0, 0.0] and math.isnan(scores.values[2]) and scores.failed == 0
    base = {"model": {"path": "org/name"}, "prompts": {"train": "t.txt"}, "evaluation": {"every": 0}}
    base |= {"trainer": {"algorithm": "diffusion_nft"}}
    for block in blocks(root / "docs" / "rewards.md", "yaml"):
        assert Config.model_validate(base | yaml.safe_load(block)).rewards
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    asked = {*VARIANTS, *CLIP_SCALES, *PICK_SCALES}
    for name, entry in BUILT_IN.items():
        assert f"| `{name}` |" in page
        target = vars(importlib.import_module(entry.module))[entry.attribute]
        given = {"device"} if inspect.isclass(target) else {"device", "images", "prompts"}
        asked |= inspect.signature(target).parameters.keys() - given
    assert [word for word in asked if f"`{word}`" not in page and f"`{word}:" not in page] == []
