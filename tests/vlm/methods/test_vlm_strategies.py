"""Strategies of data: curriculum, pass counts, stages, augmentation, synthesis."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import Augmentation
from genrl.vlm.rollout import augment, synthesis
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.rollout.synthesis import DataServer
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import vlm_runs
from tests.vlm.rollout.test_vlm_data import pixels

ROOT = Path(__file__).resolve().parents[3]
SYNTHESIS = {
    "pipeline": str(ROOT / "assets" / "tiny-sd"),
    "ask": "how many shapes are there ?",  # which the embedded model answers in tags, so there are descriptions
    "check": "check.py:same",
    "num_inference_steps": 2,
    "guidance_scale": 1.0,
}
CHECK = """
def same(completions):
    return [float(k % 2 == 0) for k, _ in enumerate(completions)]
"""


class TestCurriculum:
    def test_easy_questions_come_first_and_all_in_the_end(self, tmp_path: Path) -> None:
        plan = {"start": 0.25, "over": 10}
        questions = Questions(vlm_runs.config(tmp_path, task={"rows": 40, "curriculum": plan}), "train")
        levels = [questions[k].columns["level"] for k in range(40)]
        early = [n for first in range(0, 40, 4) for n in questions.asked(0, first, 4)]
        assert max(levels[n] for n in early) <= sorted(levels)[9]
        late = {n for first in range(0, 400, 4) for n in questions.asked(10, first, 4)}
        assert late == set(range(40))
        assert questions.asked(3, 8, 4) == questions.asked(3, 8, 4) and len(set(questions.asked(3, 8, 4))) == 4


def test_questions_that_are_never_or_always_right_are_left_out(tmp_path: Path) -> None:
    config = vlm_runs.config(tmp_path, task={"rows": 24, "passes": 4}, iterations=1)
    train(config)
    counts = [json.loads(line) for line in (tmp_path / "run" / "passes-0.jsonl").read_text().splitlines()]
    assert [one["question"] for one in counts] == [f"shapes/train/{k}" for k in range(24)]
    assert {one["right"] for one in counts} <= set(range(5)) and len({one["right"] for one in counts}) > 2
    with vlm_runs.opened(config) as run:  # as a resumed run, it reads the counts that are there
        run.enter()
        assert list(run.questions.kept) == [k for k, one in enumerate(counts) if 0 < one["right"] < 4]
        assert set(run.questions.asked(0, 0, 16)) <= set(run.questions.kept)
    (tmp_path / "run" / "passes-0.jsonl").write_text("\n".join(json.dumps({"right": 4}) for _ in counts))
    with vlm_runs.opened(config) as run, pytest.raises(ValueError, match="0 of 24 questions are sometimes right"):
        run.enter()


class TestAugmentation:
    def test_hints_are_beginnings_of_the_reasoning(self) -> None:
        text = "<think> one two three four </think> <answer> 4 </answer>"
        assert [augment.hint(text, share) for share in (0.1, 0.5, 2.0)] == ["one", "one two", "one two three four"]
        assert augment.hint("no tags", 1.0) == ""

    def test_easy_questions_get_noise_and_hard_ones_a_hint(self, tmp_path: Path) -> None:
        truth = "{question} list {answer}"
        config = vlm_runs.config(tmp_path, augmentation={"truth": truth})
        asked: list[tuple[str, list[Row]]] = []
        with vlm_runs.opened(config) as run:
            result, _ = run.draw()
            text = "<think> i see 3 . </think> <answer> 3 </answer>"

            def ask(rows: list[Row], key: str) -> Answers:
                asked.append((key, list(rows)))
                made = run._ask(rows, key, 0, 0)
                return made if key == "changed" else Answers(**{**vars(made), "texts": [text] * len(made.texts)})

            gap = torch.tensor([0.0, -0.5, 0.5, 0.0], dtype=torch.float64)
            changed = augment.augmented(config, result, gap, ask, 0)
        (easy, hard), (again, both) = asked
        assert (easy, again) == ("told", "changed") and len(hard) == 1 and len(both) == 2
        question, answer = result.rows[2].columns["question"], result.rows[2].columns["answer"]
        assert hard[0].prompt.parts[-1] == f"{question} list {answer}"
        assert changed.rows[2].prompt.parts[-1] == f"{question} i see"  # half of the four words
        noise = pixels(changed.rows[1]).astype(int) - pixels(result.rows[1])
        assert 9 < np.abs(noise).mean() < 32 and changed.rows[1].prompt.parts[-1] == result.rows[1].prompt.parts[-1]
        for k in (0, 3):  # as hard as others: the answers stay
            texts = [answers.texts[4 * k : 4 * k + 4] for answers in (changed, result)]
            assert changed.rows[k] is result.rows[k] and texts[0] == texts[1]

    def test_a_run_compares_with_recent_iterations(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Augmentation, "window", 2)
        """By all answers of them, those of further rounds of sampling too."""
        trainer = {"preset": "dapo", "filter": "spread", "resample": 4}
        settings = {"augmentation": {"truth": "{question} list {answer}"}, "trainer": trainer}
        with vlm_runs.opened(vlm_runs.config(tmp_path, **settings)) as run:
            means = []
            for iteration in range(3):
                run.loop.iteration = iteration
                _, row = run.draw()
                means.append(row["reward/total_mean"])
            assert row["rollout/rounds"] > 1
            assert run.loop.memory[augment.RECENT] == pytest.approx(means[1:])


class TestServer:
    @pytest.mark.slow
    def test_a_picture_is_a_function_of_description_and_seed(self) -> None:
        server = DataServer(SYNTHESIS["pipeline"], 2, 1.0)
        try:
            for said, name in (("a red circle", "a"), ("two blue stars", "b"), ("a red circle", "unwanted")):
                server.submit(said, name, 1)
            first, other = server.take("a"), server.take("b")
            server.forget("unwanted")
            server.submit("a red circle", "a", 1)  # its noise is that of seed and name
            assert np.array_equal(first, server.take("a")) and not np.array_equal(first, other)
            assert server.poll() == [] and np.array(first).shape == (64, 64, 3)
            with pytest.raises(KeyError):
                server.take("never")
            server.process.terminate()
            server.process.wait(10)
            with pytest.raises(RuntimeError, match="the process that draws has ended"):
                server.submit("a red circle", "c", 1)
                server.take("c")
        finally:
            server.close()


class Painter:
    """In the place of the data server: draws a caption's name as a colour, at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, description: str, sample: str, seed: int) -> None:
        self.asked.append(sample)

    def take(self, sample: str) -> Image.Image:
        self.asked.remove(sample)
        shade = sum(map(ord, sample)) % 256
        return Image.new("RGB", (48, 48), (shade, 255 - shade, 128))

    def forget(self, sample: str) -> None:
        self.asked = [name for name in self.asked if name != sample]

    def close(self) -> None: ...


class TestSynthesis:
    @pytest.fixture(autouse=True)
    def painter(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "check.py").write_text(CHECK)
        monkeypatch.setattr(synthesis, "DataServer", lambda *_: Painter())

    def config(self, place: Path) -> VLMConfig:
        return vlm_runs.config(place, synthesis=SYNTHESIS, iterations=2, generation={"max_new_tokens": 16})

    def test_pictures_replace_questions_and_descriptions_are_paid(self, tmp_path: Path) -> None:
        with vlm_runs.opened(self.config(tmp_path)) as run:
            first, row = run.draw()
            assert len(first.rows) == 4 and "synthesis/drawn" not in row
            (parked,) = run.loop.memory[synthesis.PARKED]
            passed = [k for k, said in enumerate(parked["descriptions"]) if said is not None]
            assert passed == [0, 2]  # the check lets every second one through, where it has an answer
            run.loop.iteration = 1
            second, row = run.draw()
            made = [one for one in second.rows if one.name.startswith("synthesis/")]
            assert len(made) == len(passed) and len(second.rows) == 5 and second.rows[-1].name.startswith("describe/")
            source = run.questions[parked["number"]]
            for one in made:
                assert one.columns == source.columns and one.prompt.parts[-1] == source.prompt.parts[-1]
                assert not np.array_equal(pixels(one), pixels(source))
            worth = second.scores["exact"][-4:]
            assert (worth[[1, 3]] == 0).all() and ((worth >= 0) & (worth <= 1)).all()
            assert row["synthesis/diversity_mean"] == pytest.approx(float(worth.mean()))
            assert second.tokens[-4:][second.mask[-4:]].tolist() == sum(parked["tokens"], [])
            ready = run.estimate(second)
            assert ready is not None and len(ready.batch.mask) == 20
            run.loop.memory |= {synthesis.PARKED: [parked], "questions": 4}
            run.loop.undo()  # memory ran out: the pictures are asked for again
            assert [row.name for row in run.draw()[0].rows] == [row.name for row in second.rows]

    def test_pictures_beyond_the_questions_are_forgotten(self, tmp_path: Path) -> None:
        few = {"max_new_tokens": 16, "prompts_per_iteration": 1}
        config = vlm_runs.config(tmp_path, synthesis=SYNTHESIS, iterations=3, generation=few)
        with vlm_runs.opened(config) as run:
            run.draw()
            painter = run.synthesis.server
            assert isinstance(painter, Painter) and len(painter.asked) == 2
            run.loop.iteration = 1
            first = [name for name in painter.asked if name.startswith("synthesis/0/")]
            run.draw()
            assert len(first) == 2 and not set(first) & set(painter.asked)  # one was taken, the other forgotten

    def test_a_resumed_run_is_the_uninterrupted_one(self, tmp_path: Path) -> None:
        config = self.config(tmp_path)
        assert_resumes(train, config, tmp_path)
        assert rows(Path(config.output))[1]["synthesis/drawn"] > 0
