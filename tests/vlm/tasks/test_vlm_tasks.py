"""The generated tasks: a row is a function of its number, the answer is what is drawn, held out is held out."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from genrl.playground.shapes import draw
from genrl.playground.tasks import clips, jigsaw, quality, scenes, series, sums
from genrl.vlm import tasks
from genrl.vlm.config.files import FURTHER, GENERATED
from genrl.vlm.config.names import TASKS
from genrl.vlm.tasks import Row
from genrl_rewards.scorers.objects.shapes import PALETTE, SHAPES, parse


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
    drawn = jigsaw.full(np.random.default_rng(seed), "train")
    shown = jigsaw.pieces(np.array(drawn.parts[0]))
    restored = [shown[int(number) - 1] for number in drawn.answer.split()]
    assert np.array_equal(np.vstack([np.hstack(restored[:2]), np.hstack(restored[2:])]), whole)
    assert drawn.level in (2, 3, 4) and sum(int(n) != k + 1 for k, n in enumerate(drawn.answer.split())) == drawn.level


def test_a_pair_says_where_the_second_piece_was() -> None:
    """The pieces of a picture whose quarters are told apart: sky above ground, and the shape towards the middle."""
    letters = list(jigsaw.PLACES)
    for number in range(30):
        drawn = jigsaw.pair(np.random.default_rng(number), "train")
        rows, columns = letters["ABCDEFGH".index(drawn.answer)]
        tops = [np.array(part)[:6, :, 2].mean() for part in drawn.parts[:2]]  # blue: sky is bright, ground is not
        if rows == 0 and columns:
            assert abs(tops[0] - tops[1]) < 60
        assert (rows, columns) != (0, 0) and drawn.level == abs(rows) + abs(columns)
    assert jigsaw.PLACES[(0, 1)] == "right" and jigsaw.PLACES[(-1, -1)] == "above left"


def test_a_box_holds_what_is_asked_for_and_the_point_is_in_it() -> None:
    for number in range(40):
        row = tasks.row("box", "train", number)
        box, (picture,) = row.columns["box"], pictures(row)
        words = row.columns["question"].split()
        near = (np.abs(picture.astype(int) - PALETTE[words[3]]).max(-1) < 30).nonzero()
        found = [near[1].min() / 4, near[0].min() / 4, (near[1].max() + 1) / 4, (near[0].max() + 1) / 4]
        assert np.abs(np.subtract(found, box)).max() < 1 and row.columns["answer"] == " ".join(map(str, box))
        point = tasks.row("point", "train", number)
        x, y = map(int, point.columns["answer"].split())
        left, top, right, bottom = point.columns["box"]
        assert left <= x <= right and top <= y <= bottom


@pytest.mark.parametrize("kind", quality.KINDS)
def test_stronger_degradations_are_farther_from_the_picture(kind: str) -> None:
    picture, rng = Image.fromarray(draw(scenes.scene(np.random.default_rng(3), "train"), 48)), np.random.default_rng(0)

    def off(strength: float) -> float:
        return float(np.abs(np.array(quality.degraded(picture, kind, strength, rng)).astype(int) - picture).mean())

    far = [off(strength) for strength in (0.0, 0.25, 0.5, 1.0)]
    assert far[0] == 0 and far == sorted(far) and far[3] > far[1] > 0.1
    with pytest.raises(ValueError, match="no degradation 'fog': noise"):
        quality.degraded(picture, "fog", 0.5, rng)


def test_scores_of_quality_are_spread_evenly_and_the_better_picture_is_the_less_degraded() -> None:
    scores = Counter(tasks.row("quality", "train", k).columns["answer"] for k in range(300))
    assert set(scores) == {f"{k / 2:.1f}" for k in range(2, 11)} and max(scores.values()) < 60
    answers = Counter(tasks.row("better", "train", k).columns["answer"] for k in range(200))
    assert 70 < answers["A"] < 130


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
        assert row.columns["about"] == f"which shape is {colour} ?" and len(row.columns["frames"]) == clips.FRAMES


def test_what_is_held_out_of_clips_tells_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every colour is asked for with every answer in both splits: none can be told by what training never showed."""
    monkeypatch.setattr(clips, "draw", lambda scene, size: np.zeros((size, size, 3), np.uint8))
    for name, answers in (("key_frames", len(clips.KEYS)), ("what", len(SHAPES))):
        for split in ("train", "eval"):
            rows = [tasks.row(name, split, k) for k in range(600)]
            assert len({(row.columns["question"], row.columns["answer"]) for row in rows}) == len(PALETTE) * answers


def test_captions_of_scenes_are_read_back() -> None:
    for number in range(20):
        columns = tasks.row("scenes", "eval", number).columns
        asked = parse(columns["caption"])
        assert asked is not None and sum(group.count for group in asked.groups) == int(columns["answer"])


def test_held_out_shares() -> None:
    shares = {
        "clips": np.mean([clips.held_out(colours) for colours in product(PALETTE, repeat=clips.FRAMES)]),
        "series": np.mean([series.held_out(n, p) for n in range(2, 5) for p in range(8)]),
        "sums": np.mean([sums.held_out(a, b) for a in range(10) for b in range(10)]),
    }
    assert all(0.2 <= share <= 0.3 for share in shares.values()), shares
    assert {sums.plus(np.random.default_rng(k), "eval").parts for k in range(50)}.isdisjoint(
        sums.plus(np.random.default_rng(k), "train").parts for k in range(200)
    )
