"""The report is one offline page, of whatever is there, in which nothing from outside is markup."""

import math
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from genrl.runtime.folder import run as runs
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run
from genrl.runtime.show.curves import chart, labels, thin, ticks
from genrl.runtime.show.pictures import save_samples
from genrl.runtime.show.report import write_report

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">"\'&amp; http://example.com/x'


def make_run(folder: Path, steps: int = 30) -> Run:
    note = HOSTILE.replace("'", "")
    run = runs.start(folder, f"iterations: {steps}\nnote: '{note}'\n", seed=0, command=[HOSTILE])
    logger = MetricLogger(run)
    for step in range(steps + 1):
        values: dict[str, float] = {"eval/total_mean": 0.25 + step / 100} if step % 10 == 0 else {}
        if step:
            loss = float("nan") if step == 7 else math.sin(step)
            values |= {"reward/total_mean": step / 50, "loss": loss, "lr": 3e-4, "timing/sample_s": 1.0}
            values |= {"timing/iteration_s": 2.0, "reward/shapes_failed": 0}
        logger.log(step, values)
        if step % 10 == 0:
            save_samples(run.samples, step, [torch.rand(3, 32, 32)] * 2, [HOSTILE, "two"], {HOSTILE: [0.5, None]})
    return run


def test_a_whole_report(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / HOSTILE.replace("/", "_")).folder).read_text(encoding="utf-8")
    tags = re.findall(r"<(\w+)((?:\s+[\w:-]+=\"[^\"]*\")*)\s*/?>", text)
    names, attributes = (
        [name for name, _ in tags],
        re.findall(r"\s([\w:-]+)=\"([^\"]*)\"", " ".join(more for _, more in tags)),
    )
    assert len(tags) == len(re.findall("<[a-z]", text)), "a tag of another form"
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(names)
    assert not any(name.startswith("on") for name, _ in attributes)
    points = {"src", "href", "srcset", "action", "xlink:href", "style"}
    assert all(value.startswith("data:image/") for name, value in attributes if name in points)
    texts = [unescape(one) for one in re.findall(">([^<]*)<", text)]
    assert texts.count(HOSTILE) >= 2 and HOSTILE not in text  # the command and the prompt, as text
    assert "30 of 30 iterations, finished" in text and "+0.300" in text
    assert names.count("svg") == 4  # headline; reward, eval, loss; timings are constant, and so is the rate
    assert "1 without a value" in text and "lr = 0.0003" in text
    assert names.count("img") == 1 + 4  # before/after and four grids
    headings = ["Reward", "Pictures", "Rewards", "Evaluation", "Update", "Time, memory and cost"]
    assert re.findall("<h2>(.*?)</h2>", text) == [*headings, "Where the time went"]
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style and "@import" not in style


def test_a_run_that_crashed_or_is_still_going_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    with run.metrics.open("a") as file:
        file.write('{"loss": 0.1, "st')
    run.config.write_text(run.config.read_text().replace("iterations: 12", "iterations: 50"))
    (run.samples / "step-000010.png").write_bytes(b"\x89PNG half")
    (run.samples / "step-000010" / "samples.json").unlink()
    text = write_report(run.folder).read_text()
    assert "12 of 50 iterations, stopped or still running" in text and "step-000010.png cannot be read" in text


def test_of_a_run_whatever_is_there_is_shown_and_a_collapse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        write_report(tmp_path)
    run = runs.start(tmp_path / "run", "iterations: 3\n", seed=0, command=["genrl"])
    text = write_report(run.folder).read_text()
    assert "No metrics were written yet" in text and "<svg" not in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "old/key": 1.5}\n{"step": 2, "old/key": null}\n')
    text = write_report(tmp_path).read_text()
    assert "<h2>Other</h2>" in text and "old/key" in text
    (tmp_path / "config.yaml").write_text("iterations: 9\n")
    rows = [{"step": 2, "eval/total_mean": 0.7}, {"step": 3, "eval/total_mean": 0.5, "collapse/total": 0.2}]
    (tmp_path / "metrics.jsonl").write_text("".join(map(runs.json_line, rows)))
    text = write_report(tmp_path).read_text()
    (warning,) = re.findall(">(collapse: [^<]*)<", text)
    assert "total lies 0.2 below its best at iteration 3; it helps: a lower optimizer.lr" in warning
    assert "3 of 9 iterations, stopped or still running" in text


SPANS = [(0, 1), (0.123, 0.987), (-5, 5), (0.99997, 1.00002), (1e-9, 3e-9), (1234567, 98765432), (3, 3), (0, 0)]


def test_ticks_are_round_ordered_and_enclose_and_those_of_steps_are_whole_and_inside() -> None:
    for low, high in SPANS:
        result = ticks(low, high, 4)
        assert 3 <= len(result) <= 8 and result == sorted(set(result))
        gap = result[1] - result[0]
        assert result[0] <= low + gap * 1e-6 and result[-1] >= high - gap * 1e-6
        texts = labels(result)
        assert len(set(texts)) == len(texts) and all(len(text) <= 9 for text in texts)
    for low, high in ((0, 120), (1, 2), (5, 5), (0, 3), (7, 100000)):
        result = ticks(low, high, 5, whole=True)
        assert result and all(low <= tick <= high and tick == int(tick) for tick in result)


@pytest.mark.parametrize("values", [[0.5, 0.5 - 1e-16, 0.5], [1e-200, 3e-200], [-1e200, 1e200], [0.0], [7.0] * 200])
def test_any_finite_values_can_be_drawn(values: list[float]) -> None:
    root = ElementTree.fromstring(chart([("x", [*map(tuple, enumerate(values))])]))
    assert all(text.text and len(text.text) <= 9 for text in root.iter("text"))
    assert all(0 <= float(circle.attrib["cy"]) <= 190 for circle in root.iter("circle"))


def test_a_chart_stays_in_its_frame_and_breaks_at_gaps_and_thinning_keeps_the_mean() -> None:
    points = [(float(step), None if step == 3 else step * 1e-3) for step in range(8)]
    root = ElementTree.fromstring(chart([('a<b>&"', points), ("other", [(0.0, -1.0), (9.0, 1.0)])]))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    line = next(node for node in root if node.get("class") == "line line-0")
    assert line.attrib["d"].count("M") == 2
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width and 0 <= float(circle.attrib["cy"]) <= height
    titles = [node.text for node in root.iter("title")]
    assert len(titles) == 9 and titles[0] == 'a<b>&", step 0: 0'
    assert "no finite value" in chart([("x", [(1.0, None)])])
    points = [(float(step), float(step)) for step in range(1600)]
    thinned = thin(points)
    assert len(thinned) == 160 and math.isclose(sum(value or 0 for _, value in thinned) / 160, 799.5)
    assert thin([(0.0, None), (1.0, 2.0)]) == [(0.0, None), (1.0, 2.0)]
