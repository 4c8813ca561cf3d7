"""The scripts of the pages on the Python interface run as they stand, and the notebooks are those that were run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


NOTEBOOKS = ["text_to_image", "vision_language", "policy_in_simulation"]
FEW = {
    **{"num_inference_steps": 3, "group_size": 3, "prompts_per_iteration": 2, "batch_size": 3},
    "pipeline_args": {"max_sequence_length": 2},
}


def run(code: str, known: dict[str, Any], page: str) -> None:
    exec(compile(code, page, "exec"), known)


def test_the_script_for_trl_and_ours_learn_from_the_same_data(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    data, theirs, ours = blocks(root / "docs" / "from_trl.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")
    known: dict[str, Any] = {}
    run(data, known, "docs/from_trl.md")
    assert set(known["answers"]) == set("23456")
    run(theirs, dict(known), "docs/from_trl.md")
    run(ours, known, "docs/from_trl.md")
    assert known["result"].complete and all(row["updates"] > 0 for row in known["result"].metrics)


def test_the_call_in_the_readme_trains(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few, short samples: the defaults draw 64 pictures an iteration, in 10 steps with 256 tokens."""
    code = next(block for block in blocks(root / "README.md") if "genrl.train" in block)
    assert code.count("    iterations=2,\n") == 1
    code = code.replace("    iterations=2,\n", f"    iterations=2,\n    sampling={FEW},\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")
    known: dict[str, Any] = {}
    run(code, known, "README.md")
    assert known["result"].complete and known["result"].lora.is_dir()
    assert {"reward/colourful_mean", "reward/shapes_mean"} <= known["result"].metrics[-1].keys()


@pytest.mark.slow
def test_the_page_of_the_interface_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(root / "assets")
    known: dict[str, Any] = {}
    given = '{"num_inference_steps": 4, "group_size": 4, "prompts_per_iteration": 4}'
    train, *others = blocks(root / "docs" / "python.md")
    assert train.count(given) == 1
    for block in (train.replace(given, str(FEW)), *others):
        run(block, known, "docs/python.md")
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
def test_the_notebooks_run(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        cell.source = cell.source.replace('output=f"runs/', 'output=f"/tmp/')
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(root / "docs" / "notebooks")}}).execute()
    assert all(cell["execution_count"] for cell in book.cells if cell["cell_type"] == "code")
