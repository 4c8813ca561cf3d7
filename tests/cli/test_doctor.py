"""`genrl doctor`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genrl.runtime.show import sheet
from genrl.runtime.show.sheet import ContactSheet, Look
from genrl_rewards.rows import read_as
from genrl_rewards.scorers.texts.completions import load_text
from tests.cli.commands import run


@pytest.mark.slow
def test_doctor(folder: Path) -> None:
    result = json.loads(run("doctor", "--json"))
    assert result["packages"]["torch"] and result["torch"]["device"] in ("cpu", "cuda", "mps", "xpu")
    assert result["torch"]["torchvision"] in ("absent", "works", "declared") and isinstance(result["advice"], list)
    assert result["kernels"]["compile"] and result["kernels"]["joint_attention"]
    assert "torch" in run("doctor")


def test_doctor_lists_accelerators_of_any_kind_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their properties where they have some, unlike MPS."""
    from genrl.cli import doctor

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=f"Card {device.index}", total_memory=(device.index + 1) * 2**30)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    cards = ["Card 0, 1.0 GB, bfloat16 True", "Card 1, 2.0 GB, bfloat16 True"]
    known = SimpleNamespace(get_device_properties=properties, is_bf16_supported=lambda: True)
    for module, said in ((known, cards), (SimpleNamespace(), ["there", "there"])):
        monkeypatch.setattr(torch, "get_device_module", lambda kind, module=module: module)
        result = doctor._torch()
        assert [value for key, value in result.items() if key.startswith("xpu:")] == said
    from genrl.cli.doctor import advice

    report = {"system": {"free_disk_gb": 1.5}, "packages": {"torch": "2", "peft": None}}
    report |= {"torch": {"device": "cpu", "torchvision": "declared"}}
    report |= {"threads": {"torch_threads": 4, "usable_cores": 4}, "simulators": {"libero": "LIBERO lacks bddl: pip"}}
    text = "\n".join(advice(report))
    for part in ("pip install peft", "torchvision does not fit", "OMP_NUM_THREADS=1", "1.5 GB of disk", "lacks bddl"):
        assert part in text


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("quickstart", ["reward shapes", "shapes/strict", "drawn, as rewards see it, 64 x 64"]),
        pytest.param("vlm/quickstart", ["exact expects", "as number", "shown to the model"], marks=pytest.mark.slow),
        pytest.param("vlm/vl_dac", ["said, step 1", "return"], marks=pytest.mark.slow),
        pytest.param("vla/flow_sde", ["film, ", "observation.state[2]", "success"], marks=pytest.mark.slow),
        pytest.param("vla/sft_act", ["action[0]", "normalised"], marks=pytest.mark.slow),
    ],
)
def test_doctor_draws_the_samples_of_a_run(config: str, said: list[str], tmp_path: Path) -> None:
    """A page with their pictures inside, and nothing in the run's own folder."""
    place = tmp_path / "sheet"
    options = ["--out", str(place), f"output={tmp_path / 'run'}"]
    run("doctor", str(ROOT / "configs" / f"{config}.yaml"), *options)
    page = (place / "sheet.html").read_text()
    assert all(text in page for text in said) and not (tmp_path / "run").exists()
    record = json.loads((place / "sheet.json").read_text())
    assert len(record["looks"]) == sheet.SHOWN and page.count("data:image/png") == len(list(place.glob("*.png")))


def test_doctor_refuses_a_policy_that_does_not_act_by_itself(tmp_path: Path) -> None:
    file = ROOT / "configs" / "vla" / "diwa.yaml"
    text = run("doctor", str(file), "--out", str(tmp_path / "sheet"), code=2)
    assert "acts through its world model" in text and "nothing to look at before" in text


def test_a_sheet_says_what_is_padded_without_score_and_how_answers_are_read(tmp_path: Path) -> None:
    for rule, columns, said in (
        ("numeric", {"answer": "minus 5"}, "-5.0, read as number"),
        ("exact", {"answer": 3.0}, "('3', '3.0'), read as number"),
        ("math", {"answer": "5x+3"}, "'$5x+3$', read as formula"),
        ("choice", {"answer": "(b)"}, "{'B'}, read as"),
        ("numeric", {"answer": "several 3 4"}, "refused: the expected answer is"),
        ("numeric", {}, "the row has no column 'answer'"),
        ("exact", {"answer": None}, "read as nothing"),
    ):
        assert said in read_as(load_text(rule), columns)
    # And shows what comes from outside as text.
    raw = {"state": torch.tensor([[0.0], [10.0]])}
    numbers = sheet.dimensions(raw, {"state": torch.tensor([[-1.0, 0.0], [1.0, 0.0]])})
    assert numbers[1][:5] == ["state[0]", "0", "10", "-1.000", "1.000"] and numbers[2][1] == "padded"
    assert sheet.score_text(float("nan")) == "no score"
    sheet.save(ContactSheet([Look("<script>", {"reward": "<b>"}, [("p", torch.ones(3, 4, 4))])], numbers), tmp_path)
    page = sheet.write_page(tmp_path, "x").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "p, 4 x 4" in page
    assert sheet.read(tmp_path / "none") == {"looks": [], "numbers": []}
