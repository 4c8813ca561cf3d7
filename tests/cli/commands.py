"""Commands as a user types them, and what they print."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from genrl.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-t2i"
FIXTURES = ROOT / "tests" / "fixtures" / "cli"
SMALL = f"""\
model: {{path: {MODEL}, lora: {{rank: 2}}}}
prompts: {{train: train.txt, eval: eval.txt}}
rewards:
  - name: ./mine.py:brightness
sampling:
  num_inference_steps: 2
  guidance_scale: 1.0
  prompts_per_iteration: 2
  group_size: 2
  batch_size: 2
  pipeline_args: {{max_sequence_length: 2}}
trainer: {{algorithm: diffusion_nft}}
evaluation: {{every: 1, num_prompts: 2}}
checkpoint: {{every: 1}}
trackers: []
iterations: 1
"""


def run(*arguments: str, code: int = 0) -> str:
    """What the command prints on both streams; its exit code must be `code`."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def words(text: str) -> str:
    """Without the frame and the line breaks of a terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─|]", " ", text).split())


def wrong_uses(of: str) -> Any:
    """The test is run with each `line` of arguments in this part of wrong_use.yaml, and what it `says`."""
    rows = yaml.safe_load((FIXTURES / "wrong_use.yaml").read_text())[of]
    return pytest.mark.parametrize(("line", "says"), rows)
