"""Methods from a file or an installed package: checked, told apart and written back as the built-in ones are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from genrl.config import ConfigError, dump, load
from genrl.config import method as methods
from genrl.config.json_schemas import definitions, keys_in, node_at, schema_of
from genrl.config.method import code_of, outside
from genrl.diffusion.config.schema import Config

OWN = '''
from genrl.diffusion.config.schema import DiffusionMethod
from genrl.config.section import Positive


class Own(DiffusionMethod):
    """One of our own."""

    strength: Positive = 1.0
    """How much."""
    {field}


def train(run, settings): ...
def loss(settings, policy, recorded): ...
'''
BASE = """
model: {{path: assets/tiny-t2i}}
prompts: {{train: a.txt, eval: b.txt}}
rewards: [{{name: shapes}}]
trainer: {{algorithm: "{algorithm}", {rest}}}
"""


@pytest.fixture
def method(tmp_path: Path) -> Callable[..., str]:
    def write(text: str = OWN, name: str = "own.py") -> str:
        path = tmp_path / name
        path.write_text(text.replace("{field}", ""))
        return f"{path}:Own"

    return write


def loaded(tmp_path: Path, algorithm: str, rest: str = "") -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(BASE.format(algorithm=algorithm, rest=rest))
    config = load(path)
    assert isinstance(config, Config)
    return config


def refusal(tmp_path: Path, algorithm: str, rest: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, algorithm, rest)
    assert len(error.value.problems) == 1
    return str(error.value.problems[0])


@pytest.mark.filterwarnings("error")
def test_a_file_is_loaded_and_written_back(tmp_path: Path, method: Callable[..., str]) -> None:
    name = method()
    config = loaded(tmp_path, name, "strength: 2")
    assert config.trainer.model_dump() == {"algorithm": name, "strength": 2.0}
    assert code_of(config.trainer).train(None, None) is None
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml") == config
    settings = outside(name, "diffusion")(strength=3)
    assert Config(**{**dict(config), "trainer": settings}).trainer is settings


def test_its_keys_are_described(method: Callable[..., str]) -> None:
    data = {"trainer": {"algorithm": method()}}
    assert keys_in(schema_of(data))["trainer.strength"]["description"] == "How much."
    assert data["trainer"]["algorithm"] in (node_at(("trainer", "algorithm"), data) or {})["enum"]
    own = outside(data["trainer"]["algorithm"], "diffusion")
    assert data["trainer"]["algorithm"] in str(definitions((own,))["Config"]["properties"]["trainer"])


def test_unknown_names(tmp_path: Path, method: Callable[..., str]) -> None:
    text = refusal(tmp_path, "flow_gpro")
    assert "run.yaml:5: trainer.algorithm: unknown method 'flow_gpro'; did you mean flow_grpo?" in text
    assert text.endswith("or name a file: path/file.py:Name")
    assert "has no 'Onw'; did you mean Own?" in refusal(tmp_path, method().replace(":Own", ":Onw"))
    assert "own.py?" in refusal(tmp_path, method().replace("own.py", "ovn.py"))


def test_what_is_no_method_or_not_its_key_is_refused(tmp_path: Path, method: Callable[..., str]) -> None:
    for old, new, rest, said in (
        ("", "", "strenght: 2", "trainer.strenght: unknown key; did you mean trainer.strength? keys of trainer:"),
        ("", "", "strength: -1", "trainer.strength: found -1 (a whole number); allowed: a number above 0"),
        ("", "", "beta: 1", "trainer.beta: unknown key; it belongs to another trainer.algorithm"),
        ("{field}", "sampling: Positive = 1.0", "", "has a key 'sampling', which is a section of every run"),
        ("{field}", "metrics: Positive = 1.0", "", "has a key 'metrics', which hides what Method declares"),
        ("def loss", "def lost", "", "a method defines loss(settings, policy, recorded)"),
        ("def train(run, settings)", "def train(run)", "", "own.py defines train(run); train(run, settings) is called"),
        ("recorded)", "recorded, more)", "", "loss(settings, policy, recorded) is called"),
        ("(DiffusionMethod)", "", "", "derive it from genrl.diffusion.config.schema.DiffusionMethod"),
        ("{field}", 'kind = "vla"', "", "is a method for vla runs, and this is a diffusion run"),
    ):
        assert said in refusal(tmp_path, method(OWN.replace(old, new) if old else OWN), rest)


def test_a_folder_of_two_files(tmp_path: Path, method: Callable[..., str]) -> None:
    head, functions = OWN.split("def train")
    name = method(head, name="settings.py")
    assert "has no train and no loss in" in refusal(tmp_path, name)
    (tmp_path / "train.py").write_text("def train" + functions)
    assert code_of(loaded(tmp_path, name).trainer).module.__file__ == str(tmp_path / "train.py")


def test_installed_methods(tmp_path: Path, method: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    from genrl.config.json_schemas import json_schema

    method(name="own_installed.py")
    monkeypatch.syspath_prepend(tmp_path)
    points = EntryPoints([EntryPoint(name="own", value="own_installed:Own", group=methods.ENTRY_POINTS)])
    monkeypatch.setattr("importlib.metadata.entry_points", points.select)
    assert type(loaded(tmp_path, "own").trainer).__name__ == "Own"
    assert "own" in json_schema()["$defs"]["Config"]["properties"]["trainer"]["discriminator"]["mapping"]
    assert "did you mean own?" in refusal(tmp_path, "owm")
