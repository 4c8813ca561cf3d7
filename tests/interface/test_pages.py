"""The scripts of the pages on the Python interface run as they stand, and the notebooks are those that were run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_pages import blocks

NOTEBOOKS = ["text_to_image", "vision_language", "policy_in_simulation"]
FEW = {
    **{"num_inference_steps": 3, "group_size": 3, "prompts_per_iteration": 2, "batch_size": 3},
    "pipeline_args": {"max_sequence_length": 2},
}


@pytest.fixture(autouse=True)
def _beside_the_assets(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")


def test_the_script_for_trl_and_ours_learn_from_the_same_data(root: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    data, theirs, ours = blocks(root / "docs" / "from_trl.md", "python")
    known: dict[str, Any] = {}
    exec(data, known)
    assert set(known["answers"]) == set("23456")
    exec(theirs, dict(known))
    exec(ours, known)
    assert known["result"].complete and all(row["updates"] > 0 for row in known["result"].metrics)


@pytest.mark.parametrize(
    ("page", "metric"), [("README.md", "colourful"), pytest.param("docs/index.md", "warm", marks=pytest.mark.slow)]
)
def test_the_call_on_a_page_trains(page: str, metric: str, root: Path) -> None:
    """With few, short samples: the defaults draw 64 pictures an iteration of 10 steps."""
    code = next(block for block in blocks(root / page, "python") if "genrl.train" in block)
    assert code.count("    iterations=2,\n") == 1
    known: dict[str, Any] = {}
    exec(code.replace("    iterations=2,\n", f"    iterations=2,\n    sampling={FEW},\n"), known)
    assert known["result"].complete and known["result"].lora.is_dir()
    assert known["result"].metrics[-1][f"reward/{metric}_mean"] > -1
    assert page != "README.md" or "reward/shapes_mean" in known["result"].metrics[-1]


@pytest.mark.slow
def test_the_page_of_the_interface_runs(root: Path) -> None:
    known: dict[str, Any] = {}
    given = '{"num_inference_steps": 4, "group_size": 4, "prompts_per_iteration": 4}'
    train, *others = blocks(root / "docs" / "python.md", "python")
    assert train.count(given) == 1
    for block in (train.replace(given, str(FEW)), *others):
        exec(block, known)
    assert known["result"].complete and known["more"].complete and len(known["more"].metrics) == 3
    with pytest.raises(KeyboardInterrupt):
        known["until"](None, {"reward/warm_mean": 0.5})


def test_the_notebooks_show_what_they_did(root: Path) -> None:
    for name in NOTEBOOKS:
        held = json.loads((root / "docs" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in held["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        kinds = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})]
        assert kinds.count("image/png") >= 2
        assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
        assert str(root) not in json.dumps(held), "the path of a machine"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebooks_run(name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer iterations: that they run through and draw, not what they learn."""
    nbformat = pytest.importorskip("nbformat", reason="nbmake is not installed")
    from nbclient import NotebookClient

    book = nbformat.read(root / "docs" / "notebooks" / f"{name}.ipynb", 4)
    for cell in book.cells:
        cell.source = re.sub(r"iterations=\d+", "iterations=1", cell.source)
        cell.source = re.sub(r'"(questions|episodes|num_prompts)": \d+', r'"\1": 8', cell.source)
        cell.source = re.sub(r'"num_envs": \d+', '"num_envs": 32', cell.source)
        cell.source = re.sub(r'(prompts_per_iteration"?[:=] ?)\d+', r"\g<1>2", cell.source)
        cell.source = re.sub(r'(steps_per_iteration"?: )\d+', r"\g<1>10", cell.source)
        cell.source = cell.source.replace("batch_size=32", "batch_size=8")
        cell.source = cell.source.replace("range(2000)", "range(100)").replace("range(40)", "range(8)")
        cell.source = cell.source.replace('output=f"runs/', f'output=f"{tmp_path}/')
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where a notebook makes a folder of its own
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(root / "docs" / "notebooks")}}).execute()
    assert all(cell["execution_count"] for cell in book.cells if cell["cell_type"] == "code")
