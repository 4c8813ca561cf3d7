"""Tasks, policies and recipes from files: checked, trained, evaluated, resumed; what they lack is said."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import ConfigError, check_files, load_located
from genrl.vlm.policies.folder import open_policy
from genrl.vlm.recipe.surrogates import Clip
from genrl.vlm.rollout.data import Questions
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import vlm_runs

ROOT = Path(__file__).resolve().parents[2]
TASKS = '''
class Sums:
    """Questions that are read."""
    def __init__(self, split):
        self.answers = range(2, 12) if split == "train" else range(12, 15)
    def __len__(self):
        return len(self.answers)
    def __getitem__(self, number):
        return (f"what is {self.answers[number] - 1} plus 1 ?",), str(self.answers[number]), number

def wrong(rng, split):
    return "what ?"
'''
POLICIES = '''
from genrl.vlm.policies.codes import CodePolicy
from genrl.vlm.policies.policy import Policy

class Careful(Policy):
    """A vision-language model that is loaded in its own way."""
    @classmethod
    def open(cls, config, device, path):
        made = cls(path, device=device)
        made.model.get_input_embeddings().weight.requires_grad_(False)
        return made

class Bodies(CodePolicy):
    """A policy that samples its answers itself."""
    @classmethod
    def open(cls, config, device, path):
        return cls(path, device=device)

class Incomplete:
    sees = False
    @classmethod
    def open(cls, config, device, path):
        return cls()
'''
METHODS = '''
from genrl.config.section import Positive
from genrl.vlm.methods.answers.settings import Answers
from genrl.vlm.methods.answers.train import loss, train

class Scaled(Answers):
    """A recipe with a key of its own."""
    scale: Positive = 1.0
    """What it does."""
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    page = (ROOT / "docs" / "vlm_tasks.md").read_text()
    (example,) = re.findall(r"```python\n(# stripes\.py.*?)```", page, re.DOTALL)
    (tmp_path / "tasks.py").write_text(example + TASKS)
    (tmp_path / "policies.py").write_text(POLICIES)
    (tmp_path / "methods.py").write_text(METHODS)
    return tmp_path


def test_a_task_from_a_file(code: Path) -> None:
    task = {"name": f"{code / 'tasks.py'}:stripes"}
    config = vlm_runs.config(code, task=task)
    assert check_files(config, {})[-1] == f"task.name: training runs the code of {task['name']}"
    held_out, trained = Questions(config, "eval"), Questions(config, "train")
    assert held_out[3].name == "stripes/eval/3" and held_out[3].columns["shade"] % 2 == 0
    assert trained[3].columns["shade"] % 2 == 1 and trained[3].columns["question"] == held_out[3].columns["question"]
    evaluation = {"every": 1, "questions": 8, "blind": False}
    own = {"rewards": [{"name": "exact"}, vlm_runs.low(code)], "evaluation": evaluation, "iterations": 2}
    assert_resumes(train, vlm_runs.config(code, task=task, **own), code)
    assert rows(code / "run")[-1]["eval/accuracy_mean"] is not None
    read = vlm_runs.config(code, task={"name": f"{code / 'tasks.py'}:Sums"})  # questions that are read
    assert len(Questions(read, "train")) == 10 and len(Questions(read, "eval")) == 3
    assert Questions(read, "train")[4].columns["answer"] == "6"
    judged = CliRunner().invoke(app, ["eval", str(code / "run"), "--num-prompts", "4"])
    assert judged.exit_code == 0 and "right answers" in judged.output


def test_a_vision_language_model_that_is_loaded_in_its_own_way(code: Path) -> None:
    output = f"{code / 'policies.py'}:Careful"
    config = vlm_runs.config(code, vlm={"output": output})
    assert rows(train(config))[-1]["updates"] > 0
    policy = open_policy(config)
    assert not policy.model.get_input_embeddings().weight.requires_grad


def test_a_policy_that_samples_its_answers_itself(code: Path) -> None:
    changes = {
        "vlm": {"path": str(vlm_runs.MODEL.parent / "tiny-bodies"), "output": f"{code / 'policies.py'}:Bodies"},
        "task": {"name": "bodies"},
        "generation": {"prompts_per_iteration": 2, "group_size": 2, "max_new_tokens": 24},
        "rewards": [{"name": "shapes"}],
        "evaluation": {"every": 1, "questions": 4},
    }
    run = train(vlm_runs.config(code, **changes))
    assert rows(run)[-1]["rollout/tokens_mean"] > 0 and (run / "samples" / "step-000001.png").is_file()


def test_what_cannot_be_found_is_said(code, monkeypatch) -> None:
    for changes, key, text in (
        ({"task": {"name": "shape"}}, "task.name", "unknown task 'shape'; did you mean shapes?"),
        ({"task": {"name": "tasks.py:strips"}}, "task.name", "did you mean stripes?"),
        ({"task": {"name": "tasks.py:wrong"}}, "task.name", "gives no question"),
        ({"vlm": {"output": "imge"}}, "vlm.output", "unknown output 'imge'; did you mean image?"),
        ({"vlm": {"output": "policies.py:Carefull"}}, "vlm.output", "did you mean Careful?"),
    ):
        monkeypatch.chdir(code)
        with pytest.raises(ConfigError, match=key) as caught:
            vlm_runs.config(code, **changes)
            check_files(*load_located(code / "tiny.yaml"))
        assert text in str(caught.value) and "tiny.yaml:" in str(caught.value)


def test_a_recipe_from_a_file_is_completed_as_one_built_in(code: Path) -> None:
    trainer = {"algorithm": f"{code / 'methods.py'}:Scaled", "scale": 2.0, "surrogate": {"high": 0.3}}
    config = vlm_runs.config(code, trainer=trainer)
    assert config.trainer.recipe(config).surrogate == Clip(low=0.2, high=0.3)
    with pytest.raises(ConfigError) as caught:
        vlm_runs.config(code, trainer={**trainer, "scal": 1, "surrogate": {"hihg": 0.3}})
    assert "did you mean trainer.scale?" in str(caught.value)
    assert "did you mean trainer.surrogate.high?" in str(caught.value)


def test_what_a_policy_lacks_is_said(code: Path) -> None:
    config = vlm_runs.config(code, vlm={"output": f"{code / 'policies.py'}:Incomplete"})
    with pytest.raises(ValueError, match="Incomplete has no check_room, device, encode, greedy, log_probs"):
        open_policy(config)
    config = vlm_runs.config(code, vlm={"output": f"{code / 'tasks.py'}:stripes"})
    with pytest.raises(ValueError, match="stripes is no policy: a class with open"):
        open_policy(config)
