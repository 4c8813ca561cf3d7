"""The generated tasks: a row is a function of its number, the answer is what is drawn, held out is held out."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from genrl.config import load
from genrl.playground.shapes import draw
from genrl.playground.tasks import emoji, jigsaw, pairs, series, shapes
from genrl.playground.tasks.emoji import ASKS, CELL, EACH, KINDS, NAMES
from genrl.playground.tasks.tables import ANSWER, COMPARE, Nearer
from genrl.vlm import tasks
from genrl.vlm.config.files import FURTHER, GENERATED
from genrl.vlm.config.names import TASKS
from genrl.vlm.tasks import Row, Split, inversion, negated
from genrl.vlm.train import train
from genrl_rewards.scorers.objects.shapes import PALETTE
from tests.run_folders import rows


def pictures(row: Row) -> list[np.ndarray]:
    return [np.array(part) for part in row.prompt.parts if isinstance(part, Image.Image)]


def shown(row: Row) -> list[object]:
    return [np.array(part).tolist() if isinstance(part, Image.Image) else part for part in row.prompt.parts]


@pytest.mark.parametrize("name", TASKS.built_in)
def test_a_row_is_a_function_of_its_number(name: str) -> None:
    first, again = tasks.row(name, "train", 5), tasks.row(name, "train", 5)
    assert shown(first) == shown(again) and first.columns["answer"] == again.columns["answer"]
    assert any(shown(tasks.row(name, "train", k)) != shown(first) for k in range(6, 9))
    assert any(shown(tasks.row(name, "eval", k)) != shown(first) for k in range(3))
    assert set(first.columns) == {*GENERATED, *FURTHER.get(name, ())}


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_the_answer_to_a_jigsaw_restores_the_picture(seed: int) -> None:
    whole = jigsaw.view(np.random.default_rng(seed), "train")
    asked = jigsaw.full(np.random.default_rng(seed), "train")
    shown = jigsaw.pieces(np.array(asked.parts[0]))
    restored = [shown[int(number) - 1] for number in asked.answer.split()]
    assert np.array_equal(np.vstack([np.hstack(restored[:2]), np.hstack(restored[2:])]), whole)
    assert asked.level in (2, 3, 4) and sum(int(n) != k + 1 for k, n in enumerate(asked.answer.split())) == asked.level


def test_a_pair_says_where_the_second_piece_was() -> None:
    """The pieces of a picture whose quarters are told apart: sky above ground, and the shape towards the middle."""
    letters = list(jigsaw.PLACES)
    for number in range(30):
        sampled = jigsaw.pair(np.random.default_rng(number), "train")
        rows, columns = letters["ABCDEFGH".index(sampled.answer)]
        tops = [np.array(part)[:6, :, 2].mean() for part in sampled.parts[:2]]  # blue: sky is bright, ground is not
        if rows == 0 and columns:
            assert abs(tops[0] - tops[1]) < 60
        assert (rows, columns) != (0, 0) and sampled.level == abs(rows) + abs(columns)
    assert jigsaw.PLACES[(0, 1)] == "right" and jigsaw.PLACES[(-1, -1)] == "above left"


def test_a_box_holds_what_is_asked_for_and_the_point_is_in_it() -> None:
    for number in range(40):
        row = tasks.row("box", "train", number)
        box, (picture,) = row.columns["box"], pictures(row)
        words = row.columns["question"].split()
        near = (np.abs(picture.astype(int) - PALETTE[words[3]]).max(-1) < 30).nonzero()
        result = [near[1].min() / 4, near[0].min() / 4, (near[1].max() + 1) / 4, (near[0].max() + 1) / 4]
        assert np.abs(np.subtract(result, box)).max() < 1 and row.columns["answer"] == " ".join(map(str, box))
        point = tasks.row("point", "train", number)
        x, y = map(int, point.columns["answer"].split())
        left, top, right, bottom = point.columns["box"]
        assert left <= x <= right and top <= y <= bottom


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_stronger_degradations_are_farther_from_the_picture(kind: str) -> None:
    picture, rng = Image.fromarray(draw(pairs.scene(np.random.default_rng(3), "train"), 48)), np.random.default_rng(0)

    def off(strength: float) -> float:
        return float(np.abs(np.array(shapes.degraded(picture, kind, strength, rng)).astype(int) - picture).mean())

    far = [off(strength) for strength in (0.0, 0.25, 0.5, 1.0)]
    assert far[0] == 0 and far == sorted(far) and far[3] > far[1] > 0.1
    with pytest.raises(ValueError, match="no degradation 'fog': noise"):
        shapes.degraded(picture, "fog", 0.5, rng)


def test_series_are_what_they_are_called() -> None:
    sine, pulse, trend = (series.values(kind, 2, 0.0, 64) for kind in ("sine", "pulse", "trend"))
    assert np.abs(sine).max() <= 1 and (np.diff(np.sign(sine[1:-1])) != 0).sum() == 3
    assert set(pulse) == {-1.0, 1.0} and (np.diff(trend) > 0).all()
    assert (np.diff(series.values("step", 2, 0.5, 64)) > 0).sum() == 1
    assert (series.values("spike", 2, 0.5, 65) > 0.5).sum() < 6
    with pytest.raises(ValueError, match="no series 'wave': sine"):
        series.values("wave", 2, 0.0, 8)


def test_key_frames_show_the_colour_and_others_do_not() -> None:
    for number in range(30):
        row = tasks.row("key_frames", "train", number)
        colour = row.columns["question"].split()[5]
        for k, picture in enumerate(pictures(row)):
            has = (np.abs(picture.astype(int) - PALETTE[colour]).max(-1) < 20).mean() > 0.05
            assert has == (str(k + 1) in row.columns["answer"].split())
        assert row.columns["about"] == f"which shape is {colour} ?" and len(row.columns["frames"]) == shapes.FRAMES


def asked(name: str, split: Split, number: int) -> emoji.Asked:
    return ASKS[name](np.random.default_rng(number), split)


def test_the_nearer_picture_has_the_smaller_number() -> None:
    """Told either way round; what the judge is asked are words of the model that is taught."""
    task, tokenizer = Nearer("eval"), AutoTokenizer.from_pretrained("assets/tiny-vlm-pairs")
    right = 0
    for number in range(0, 80, 2):
        compared, asked = task[number], task[number + 1]
        numbers, line = compared.answer.split(), compared.parts[2].removesuffix(COMPARE.removeprefix("{prompt}"))
        one, other = int(numbers[5]), int(numbers[11])
        assert compared.parts[:2] == asked.parts[:2] and f"{line} {compared.answer}" in asked.parts[2]
        right += one == other or asked.answer == str(int(other < one))
    words = tokenizer(f"{COMPARE} {ANSWER} first 0 second 18".format(prompt="", analysis="")).input_ids
    assert right == 40 and tokenizer.unk_token_id not in words


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_held_out_pictures_and_no_others_show_a_held_out_pair(name: str, split: Split) -> None:
    for number in range(100):
        things = set(asked(name, split, number)[0].values())
        pairs = [(a, b) for a in things for b in things if a < b and (a + b) % 5 == 0]
        assert bool(pairs) == (split == "eval")


def test_answers_are_what_the_cells_hold() -> None:
    for number in range(150):
        for split in ("train", "eval"):
            kinds = Counter(KINDS[k // EACH] for k in asked("category", split, number)[0].values())
            (first, many), (_, fewer) = kinds.most_common()
            assert asked("category", split, number)[2] == first and many > fewer
            cells, question, answer, _ = asked("count", split, number)
            assert sum(KINDS[k // EACH] == question.split()[2] for k in cells.values()) == int(answer)
            cells, question, answer, _ = asked("place", split, number)
            (cell,) = [c for c, k in cells.items() if NAMES[k] == question.split()[3]]
            row, column = answer.split()
            assert (cell // 3, cell % 3) == (emoji.ROWS.index(row), emoji.COLUMNS.index(column))
            cells, question, answer, _ = asked("combination", split, number)
            where = {NAMES[k]: divmod(c, 3) for c, k in cells.items()}
            off = np.subtract(where[answer], where[question.split()[-2]]).tolist()
            steps = {"left": [0, -1], "right": [0, 1], "above": [-1, 0], "below": [1, 0]}
            assert off == steps[question.split()[2]]


def test_what_is_held_out_tells_no_answer() -> None:
    """The thing asked for and the thing that is the answer are no held-out pair in either split."""
    for number in range(200):
        _, question, answer, _ = asked("combination", "eval", number)
        assert (NAMES.index(question.split()[-2]) + NAMES.index(answer)) % 5
    answers = defaultdict(Counter)
    for split in ("train", "eval"):
        for number in range(400):
            answers[split][asked("place", split, number)[2]] += 1
        assert len(answers[split]) == 9 and max(answers[split].values()) < 80


def test_a_glyph_stands_in_its_cell_and_nothing_elsewhere() -> None:
    for thing in range(0, len(NAMES), 7):
        shown = np.array(emoji.picture(np.random.default_rng(thing), {5: thing})).astype(int)
        off = np.abs(shown - shown[0, 0]).sum(-1) > 0
        inside = np.zeros_like(off)
        inside[CELL : 2 * CELL, 2 * CELL :] = True
        assert off[inside].mean() > 0.1 and not off[~inside].any()
    assert len({glyph.tobytes() for glyph in emoji.sheet_glyphs()}) == len(NAMES) == len(set(NAMES)) == 96


OPTIONS = ["Lied on", "Took", "Put down", "Washed"]
COLUMNS = {"options": OPTIONS, "answer": "(C)"}
ROWS = [{"video": f"{k}.mp4", "question": f"What did person {k} do ?", **COLUMNS} for k in range(400)]


def parts(row: dict[str, str]) -> tuple[str, dict[str, str]]:
    question, *options = row["prompt"].split("\n")
    return question, dict(option.split(". ", 1) for option in options)


def test_the_right_options_of_an_inverted_question_are_the_wrong_ones() -> None:
    numbers, places, turned = [], [], 0
    for row in ROWS:
        made = inversion(row)
        question, options = parts(made)
        said = {options[letter] for letter in made["answer"].split(", ")}
        assert made["video"] == row["video"] and made["options"] == list(options.values())
        if "didn't" not in question:
            assert question == row["question"] and list(options.values()) == OPTIONS and said == {"Put down"}
            continue
        turned += 1
        assert said == set(options.values()) - {"Put down"} and "Put down" in options.values()
        assert set(options.values()) <= set(OPTIONS) and len(set(options.values())) == len(options)
        assert list(options) == list(ascii_uppercase[: len(options)])
        numbers.append(len(said))
        places.append(list(options.values()).index("Put down"))
    assert 160 < turned < 240
    assert set(numbers) == {1, 2, 3} and min(numbers.count(n) for n in (1, 2, 3)) > turned / 5
    assert set(places) == {0, 1, 2, 3}


def test_a_question_is_negated_by_its_verb() -> None:
    for question, wanted in (
        ("What did the person do with the clothes?", "What didn't the person do with the clothes?"),
        ("why are they here", "why aren't they here"),
        ("Did the ball hit it?", "Didn't the ball hit it?"),
        ("What will happen next?", "What won't happen next?"),
        ("What happened after that?", "What didn't happen after that?"),
        ("Which object moves?", None),
        ("Why?", None),
    ):
        assert negated(question) == wanted


def test_letters_and_tags_of_a_data_set_are_read_and_several_right_ones_stay() -> None:
    lettered = [f"({letter}) {text}" for letter, text in zip(ascii_uppercase, OPTIONS, strict=False)]
    row = {"problem": "What did he do ?", "options": lettered, "solution": "<answer>A, D</answer>"}
    assert inversion(row)["prompt"] == "What did he do ?\nA. Lied on\nB. Took\nC. Put down\nD. Washed"
    assert inversion(row)["answer"] == "A, D"
    plain = {"problem": "Which moved ?", "options": ["A. The cup", "B. A. Smith"], "solution": "<answer>B</answer>"}
    assert inversion(plain)["prompt"] == "Which moved ?\nA. The cup\nB. A. Smith"


# -- Their configurations run as they stand, in miniature: the embedded model speaks their answers
ROOT = Path(__file__).resolve().parents[3]
SMALL = ["evaluation.every=0", "evaluation.blind=false", "trackers=[]"]
FEW = ["generation.prompts_per_iteration=2", "iterations=1", "checkpoint.every=1"]
FILES = {
    **dict.fromkeys(("jigsaw", "jigsaw_pair", "box", "emoji", "q_hawkeye", "time_master", "k_frames", "spine"), FEW),
    "stable_reinforce": ["generation.prompts_per_iteration=8", *FEW[1:]],
    "lmm_r1": [*FEW, "stages=[{iterations: 1, task: {name: sums}}, {iterations: 1}]", "iterations=2"],
    "med_vl_thinker": [*FEW, "task.rows=12"],
    "reg_grpo_augmented": FEW,
    "syn_grpo": [*FEW, "iterations=2", "synthesis.num_inference_steps=2"],
}
STAGED = ("time_master_sft", "patho_r1", "k_frames_sft", "med_vl_thinker_sft", "conan_cold_start")
"""With stages of supervised fine-tuning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_configuration_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "configs" / "vlm" / f"{name}.yaml", [*SMALL, *FILES[name], f"output={tmp_path / 'run'}"])
    last = rows(train(config))[-1]
    assert last["rollout/cut"] < 0.5, "answers are shorter than max_new_tokens"
    assert all(value is not None for value in last.values())
    assert ("synthesis/drawn" in last) == (name == "syn_grpo")


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_all_stages_of_a_configuration_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / "vlm" / f"{name}.yaml"
    stages = [stage.model_dump(mode="json", exclude_unset=True) | {"iterations": 1} for stage in load(file).stages]
    short = [f"stages={json.dumps(stages)}", f"iterations={len(stages)}", "task.rows=128", f"output={tmp_path / 'run'}"]
    config = load(file, [*SMALL, *FEW[:1], *short])
    taught = [part.trainer.algorithm == "sft" for part in config.parts]
    assert ["target/tokens_mean" in row for row in rows(train(config))] == taught
