"""Talk2Move's arithmetic against golden numbers, turns of drawn shapes, and the rewards on small detectors."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import genrl_rewards
from genrl.playground.shapes import Scene, draw
from genrl.playground.shapes import Thing as Figure
from genrl_rewards.models.orient_anything import Orientation
from genrl_rewards.scorers.objects import geometry
from genrl_rewards.scorers.objects.detection import Thing
from genrl_rewards.scorers.objects.geometry import Box
from genrl_rewards.scorers.objects.shapes import PALETTE, outline
from genrl_rewards.scorers.objects.spatial_edit import ShapeDetector, crop
from tests.rewards import tiny_detectors, tiny_orient


def test_scores_equal_the_golden_ones(golden: Callable[[str], Any]) -> None:
    data = golden("talk2move_rewards")
    for i, (before, after) in enumerate(zip(data["box_in"], data["box_out"], strict=True)):
        a, b = Box(*before), Box(*after)
        moved = geometry.displacement_score(a, b, str(data["direction"][i]))
        assert moved == pytest.approx(data["translation_score"][i], abs=1e-9)
        assert geometry.position_score(a, b) == pytest.approx(data["position_score"][i], abs=1e-9)
        resized = geometry.scale_score(a, b, data["resize_target_ratio"][i], bool(data["resize_bigger"][i]))
        assert resized == pytest.approx(data["resize_score"][i], abs=1e-9)
        right = bool(data["rot_axis_ok"][i]), bool(data["rot_dir_ok"][i])
        turned = geometry.rotation_score(*right, data["rot_angle"][i], data["rot_target"][i])
        assert turned == pytest.approx(data["rot_score"][i], abs=1e-9)


def arrow(angle: float, size: int = 90) -> np.ndarray:
    """The letter F, turned clockwise: it looks the same after no turn."""
    picture = Image.new("L", (size, size))
    draw = ImageDraw.Draw(picture)
    for part in ((0.35, 0.2, 0.47, 0.8), (0.35, 0.2, 0.7, 0.32), (0.35, 0.45, 0.6, 0.56)):
        draw.rectangle([size * p for p in part], fill=255)
    return np.asarray(picture.rotate(-angle, Image.Resampling.BILINEAR)) > 127


@pytest.mark.parametrize("angle", [0, 7, -33, 90, -90, 145, 180])
def test_a_turn_is_found_wherever_the_thing_is_and_however_large(angle: float) -> None:
    before, after = arrow(0), arrow(angle, 60)
    moved = np.zeros((100, 130), bool)
    moved[30:90, 55:115] = after
    result = geometry.turn_between(before, moved)
    assert abs((result - angle + 180) % 360 - 180) <= 3, result


def test_turns_are_scored_by_way_and_size_and_a_disc_does_not_turn() -> None:
    assert geometry.distance(Box(0, 0, 10, 10), Box(30, 40, 40, 50), 60, 80) == pytest.approx(0.5)  # of the diagonal
    turn = geometry.turn_score
    assert turn(90, 90) == pytest.approx(1) and turn(-90, 90) == 0.5 and turn(5, 90) == 0
    assert turn(45, 90) == pytest.approx(1 - 0.5 * 45 / 180)
    assert turn(180, -180) == turn(-175, 180) + 0.5 * 5 / 180 == pytest.approx(1)
    y, x = np.mgrid[:60, :60]
    disc = (x - 30) ** 2 + (y - 30) ** 2 < 400
    assert abs(geometry.turn_between(disc, disc)) < 2
    with pytest.raises(ValueError, match="empty mask"):
        geometry.turn_between(disc, np.zeros((5, 5), bool))


def test_turns_need_masks_and_any_detector_finds(tmp_path: Path) -> None:
    yolos = str(tiny_detectors.yolos(tmp_path))
    with pytest.raises(ValueError, match="edit_rotate: .* is a 'yolos', which gives no masks; use a Mask2Former"):
        genrl_rewards.load("edit_rotate", {"detector": yolos})
    pictures = genrl_rewards.to_pil(torch.rand(2, 3, 40, 60, generator=torch.Generator().manual_seed(0)))
    mover = genrl_rewards.load("edit_move", {"detector": yolos, "threshold": 0.1})
    moved = scored(mover, pictures, pictures[::-1], object=["dog"] * 2, direction=["left", "down"])
    first = [mover.finder.detector.find(p, ["dog"], 0.1)["dog"][0].box for p in pictures]
    assert moved.values == [
        geometry.displacement_score(*first, "left"),
        geometry.displacement_score(*first[::-1], "down"),
    ]
    pytest.importorskip("scipy", reason="transformers needs it for Mask2Former: pip install 'genrl-diffusion[geneval]'")
    masks = {"detector": str(tiny_detectors.mask2former(tmp_path / "masks")), "threshold": 0.05}
    turned = scored(genrl_rewards.load("edit_rotate", masks), pictures[:1], pictures[:1], object=["dog"], angle=[90])
    assert turned.values == [0.0] and turned.parts == {"angle": [0.0], "position": [1.0]}


def test_wrong_columns_are_said() -> None:
    for name, more, words in (
        ("edit_move", {"direction": ["upp"]}, "unknown direction 'upp'. Did you mean 'up'"),
        ("edit_scale", {"factor": ["big"]}, "the column 'factor' holds 'big', which is not a number"),
        ("edit_scale", {"factor": [0]}, "must be above 0"),
    ):
        columns = {"source_image": [sketch(RED)], "object": ["red circle"], **more}
        reward = genrl_rewards.load(name, {"detector": "shapes"})
        scores = genrl_rewards.score(reward, images=torch.zeros(1, 3, 8, 8), prompts=[""], columns=columns)
        assert scores.failed == 1 and words in scores.failures[0].error


def sketch(*things: Figure) -> Image.Image:
    return Image.fromarray(draw(Scene("two", things)))


def scored(name: genrl_rewards.Reward, sources: list[Image.Image], results: list[Image.Image], **columns: list) -> Any:
    """By the rules of the small world, or by a reward that is loaded."""
    reward = genrl_rewards.load(name, {"detector": "shapes"}) if isinstance(name, str) else name
    images = torch.stack([torch.from_numpy(np.array(result)).permute(2, 0, 1) / 255 for result in results])
    asked = {"source_image": sources, "object": ["red circle"] * len(sources), **columns}
    scores = genrl_rewards.score(reward, images=images, prompts=[""] * len(sources), columns=asked)
    assert not scores.failures, scores.failures[0].traceback
    return scores


RED = Figure("red", "circle", 20.0, 40.0, 9.0)
STAR = Figure("blue", "star", 46.0, 18.0, 9.0)


def test_things_of_the_small_world_are_found_by_rule() -> None:
    result = ShapeDetector("edit_move").find(sketch(RED, STAR), ["red circle", "blue star", "red star"], 0.3)
    assert result["red star"] == [] and len(result["red circle"]) == len(result["blue star"]) == 1
    for name, thing in (("red circle", RED), ("blue star", STAR)):
        corners = outline(thing.shape) * thing.radius + (thing.x, thing.y)
        box, mask = result[name][0]
        assert np.allclose(box[:4], [*corners.min(0), *corners.max(0)], atol=1.2), name
        assert mask is not None and mask[round(thing.y), round(thing.x)]
    blob = np.array(sketch(RED, STAR))
    blob[36:60, 4:60] = PALETTE["red"]  # a bar over the circle
    for threshold, count in ((0.3, 1), (0.6, 0)):
        seen = ShapeDetector("edit_move").find(Image.fromarray(blob), ["red circle"], threshold)
        assert len(seen["red circle"]) == count
    with pytest.raises(ValueError, match=r"edit_move: the embedded world has no 'red circel'.*red circle"):
        ShapeDetector("edit_move").find(sketch(RED), ["red circel"], 0.3)
    picture = sketch(RED, STAR)
    (thing,) = ShapeDetector("edit_orient").find(picture, ["red circle"], 0.3)["red circle"]
    masked = np.asarray(crop(picture, thing))
    assert masked.shape[:2] == (round(thing.box.bottom - thing.box.top), round(thing.box.right - thing.box.left))
    assert (masked[0, 0] == 255).all() and tuple(masked[9, 9]) == PALETTE["red"]
    assert (np.asarray(crop(picture, Thing(thing.box)))[0, 0] != 255).any()


def test_edits_of_the_small_world_are_judged() -> None:
    """Right, the other way, gone; and what happened to the other thing. A place counts the same for either way."""
    right, left = replace(RED, x=38.0), replace(RED, x=13.0)
    results = [sketch(right, STAR), sketch(left, STAR), sketch(STAR), sketch(right)]
    source = [sketch(RED, STAR)] * 4
    moved, kept = scored("edit_move", source, results, direction=["right"] * 4), scored("edit_keep", source, results)
    share = 1 - 3.6 / 18  # the dead zone is a tenth of both widths
    assert moved.values == pytest.approx([share, 0, 0, share], abs=0.03)
    assert moved.parts["distance"][0] == pytest.approx(18 / (64 * math.sqrt(2)), abs=0.01)
    assert min(kept.values[:3]) > 0.99 and kept.values[3] < 0.9  # soft edges reach a pixel out of the boxes
    results = [sketch(RED, STAR), sketch(right, STAR), sketch(replace(right, y=58.0)), sketch(STAR)]
    stayed, once, both, gone = scored("edit_position", source, results).values
    assert stayed == 1 and gone == 0 and both < once < 1 and once == pytest.approx(1 - share / 2, abs=0.02)
    larger = [sketch(replace(RED, radius=9 * 1.4), STAR)] * 2
    bigger, smaller = scored("edit_scale", source[:2], larger, factor=[1.4, 0.7]).values
    assert bigger > 0.97 and smaller < bigger - 0.3
    alone = scored("edit_keep", [sketch(RED)] * 2, [sketch(RED)] * 2, object=["red circle", "blue star"]).values
    assert alone == pytest.approx([1.0, math.nan], nan_ok=True)  # what is not in the source is not kept
    never = scored("edit_move", [sketch(STAR)], [sketch(RED)], direction=["left"])
    assert math.isnan(never.values[0])
    resized = scored("edit_scale", source[:2], source[:2], factor=[1, 9])
    assert resized.values == [1, 0] and resized.parts["position"] == [1, 1]
    assert scored("edit_scale", source[:1], [sketch(replace(RED, radius=4.5), STAR)], factor=[0.5]).values[0] > 0.9


def turned(angle: float) -> Image.Image:
    """A red triangle of the small world, turned clockwise around its middle."""
    picture = Image.fromarray(draw(Scene("two", (Figure("red", "triangle", 32.0, 32.0, 14.0),))))
    return picture.rotate(-angle, Image.Resampling.BILINEAR, fillcolor=picture.getpixel((0, 0)))


@pytest.mark.parametrize("angle", [25, -40])
def test_a_turn_of_the_small_world_is_measured_by_rule(angle: int) -> None:
    columns = {"object": ["red triangle"] * 2, "angle": [angle, -angle]}
    result = scored("edit_rotate", [turned(0)] * 2, [turned(angle)] * 2, **columns)
    assert result.parts["angle"] == pytest.approx([angle] * 2, abs=3)
    assert result.values[0] > 0.98 and result.values[1] == 0.5


def test_turns_in_space_are_scored_by_axis_direction_and_angle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's formula times 1.5, over the wrap at 360 degrees, and both ways around each axis."""
    file, backbone = tiny_orient.save(tmp_path)
    reward = genrl_rewards.load("edit_orient", {"model": str(file), "backbone": str(backbone), "detector": "shapes"})
    result = scored(reward, [sketch(RED)], [sketch(RED)], axis=["azimuth"], angle=[90])
    assert result.values == [0.0] and result.parts["azimuth"] == [0.0]  # the same crop twice, by the true network
    turns = [  # axis, angle that is asked, orientations before and after, worth
        ("azimuth", 45, (350, 0, 0, 0.9), (20, 5, 0, 0.8), 1 - 0.5 * 15 / 180),
        ("azimuth", 45, (20, 0, 0, 1), (350, 0, 0, 1), 0.5),
        ("azimuth", -30, (20, 0, 0, 1), (350, 0, 0, 1), 1),
        ("polar", -45, (0, 40, 0, 1), (0, -5, 0, 1), 1),
        ("azimuth", 45, (0, 0, 10, 1), (0, 5, 55, 1), 0.5),
        ("polar", 9, (0, 0, 10, 1), (0, 9, 10, 1), 0),
        ("azimuth", 180, (0, 0, 0, 1), (185, 0, 0, 1), 1 - 0.5 * 5 / 180),
    ]
    axes, angles, before, after, worth = map(list, zip(*turns, strict=True))
    left = iter([(Orientation(*a), Orientation(*b)) for a, b in zip(before, after, strict=True)])
    monkeypatch.setattr(reward, "estimate", lambda crops: next(left))
    result = scored(reward, [sketch(RED)] * 7, [sketch(RED)] * 7, axis=axes, angle=angles)
    assert result.values == pytest.approx(worth)
    assert result.parts["azimuth"][0] == 30 and result.parts["confidence"][0] == 0.8
    assert [geometry.wrapped(a) for a in (180, -180, 190, -190, 540)] == [180, 180, -170, 170, 180]
    columns = {"source_image": [sketch(RED)], "object": ["red circle"], "axis": ["azimut"], "angle": [9]}
    wrong = genrl_rewards.score(reward, images=torch.zeros(1, 3, 8, 8), prompts=[""], columns=columns)
    assert "unknown axis 'azimut'. Did you mean 'azimuth'" in wrong.failures[0].error


@pytest.fixture
def vgg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's cache with a VGG-16 in torchvision's file; its classifier, which LPIPS leaves out, is a single zero."""
    pytest.importorskip("torchmetrics", reason="the extra is not installed: pip install 'genrl-diffusion[similarity]'")
    import torchvision

    with torch.device("meta"):
        wanted = torchvision.models.vgg16().state_dict()
    torch.manual_seed(0)
    weights = {name: torch.zeros(1).expand(value.shape) for name, value in wanted.items()}
    for name in [name for name in weights if name.startswith("features")]:
        weights[name] = torch.randn(weights[name].shape) * (0.05 if weights[name].ndim > 1 else 0.1)
    file = tmp_path / "hub" / "checkpoints" / torchvision.models.VGG16_Weights.DEFAULT.url.rsplit("/", 1)[1]
    file.parent.mkdir(parents=True)
    torch.save(weights, file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return file


def test_lpips_sees_only_what_is_outside_the_thing(vgg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within the source's or the result's mask is exactly none; the same change beside it is one."""
    reward = genrl_rewards.load("edit_keep", {"metric": "lpips", "detector": "shapes"})
    inside, beside = np.array(sketch(RED)), np.array(sketch(RED))
    inside[36:44, 16:24] = beside[4:12, 44:52] = (250, 60, 60)  # still red
    gone = sketch()
    results = [sketch(RED), Image.fromarray(inside), gone, Image.fromarray(beside), sketch(replace(RED, x=38.0))]
    same, within, without, outside, moved = scored(reward, [sketch(RED)] * 5, results).values
    assert same == within == 1.0
    assert outside < 1 - 1e-4
    assert [without, moved] == pytest.approx([1, 1], abs=1e-6)  # soft edges, a little farther than a pixel
    blank = scored(reward, [gone], [sketch(RED)])
    assert math.isnan(blank.values[0])
    vgg.unlink()
    monkeypatch.setattr("torch.hub.download_url_to_file", Mock(side_effect=OSError("no route")))
    with pytest.raises(ValueError, match=r"edit_keep: the VGG-16 weights for 'lpips' cannot be downloaded.*no route"):
        genrl_rewards.load("edit_keep", {"metric": "lpips", "detector": "shapes"})
