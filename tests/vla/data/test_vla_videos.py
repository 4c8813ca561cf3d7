"""Clips and contact sheets: the right frames, under the right words, in the right colour."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genrl.vla.data.videos import Clip, captioned, contact_sheet, write_clips, write_gif

GREEN, RED, WHITE = [22, 140, 62], [205, 38, 38], [255, 255, 255]


def levels(count: int) -> list[int]:
    return [30 + 200 * t // max(count - 1, 1) for t in range(count)]


def clip(count: int = 6, *, success: bool = True, size: int = 32, text: str = "put it away") -> Clip:
    frames = np.zeros((count, size, size, 3), np.uint8) + np.array(levels(count), np.uint8)[:, None, None, None]
    return Clip(frames, text, success)


@pytest.mark.parametrize(("success", "colour"), [(True, GREEN), (False, RED)])
def test_frames_have_their_caption_above_and_their_outcome_around(success: bool, colour: list[int]) -> None:
    frames = captioned(clip(success=success), 128)
    assert frames.shape[0] == 6 and frames.shape[1] % 2 == frames.shape[2] % 2 == 0
    for frame, level in zip(frames, levels(6), strict=True):
        (rows, columns) = np.nonzero((frame == level).all(-1))
        top, left = frame.shape[0] - 128 - 4, (frame.shape[1] - 128) // 2
        middle = frame[top : top + 128, left : left + 128]
        assert (middle == level).all() and rows.max() < frame.shape[0] - 3 and len(columns) >= 128 * 128
        assert frame[-2, frame.shape[1] // 2].tolist() == colour == frame[top - 2, left + 64].tolist()
        assert frame[0, 0].tolist() == WHITE
        assert (frame[: top - 4].min(-1) < 80).any()  # ink
    words = frames[:, :27]  # the instruction; the line below counts frames
    assert (words == words[0]).all() and not (frames[0] == frames[1]).all(-1)[27:46].all()
    assert (captioned(clip(success=success, text="touch it"), 128)[0, :27] != words[0]).any()


def test_a_gif_shows_every_frame_and_holds_the_last(tmp_path: Path) -> None:
    frames = captioned(clip(7), 96)
    path = write_gif(tmp_path / "a.gif", frames, 10)
    with Image.open(path) as gif:
        assert gif.n_frames == 7 and gif.info["loop"] == 0
        for number, frame in enumerate(frames):
            gif.seek(number)
            assert gif.info["duration"] == (1000 if number == 6 else 100)
            assert np.abs(np.asarray(gif.convert("RGB")).astype(int) - frame).mean() < 3
    with Image.open(write_gif(tmp_path / "fast.gif", captioned(clip(8), 96), 80)) as gif:
        assert gif.n_frames == 5 and gif.info["duration"] == 20  # 0, 2, 4, 6 and the last, at 40 a second
    with Image.open(write_gif(tmp_path / "one.gif", captioned(clip(1), 96), 10)) as gif:
        assert gif.n_frames == 1


def test_a_sheet_has_a_row_per_episode_and_its_moments(tmp_path: Path) -> None:
    """Read back from the picture: each row is framed in its colour and holds the frames it should, in order."""
    clips = [clip(9, size=100), clip(3, success=False, size=100), clip(1, size=100)]
    sheet = np.asarray(contact_sheet(clips, moments=5, size=100))
    top = 8
    for of, numbers in zip(clips, ([0, 2, 4, 6, 8], [0, 1, 2], [0]), strict=True):
        colour = GREEN if of.success else RED
        for place, number in enumerate(numbers):
            left = 170 + 4 + place * 104
            tile = sheet[top + 4 : top + 104, left : left + 100]
            assert (tile == of.frames[number]).all()
            assert sheet[top + 50, left - 2].tolist() == colour == sheet[top + 1, left + 50].tolist()
        after = 170 + 4 + len(numbers) * 104
        assert sheet[top + 50, after - 2].tolist() == colour
        assert after >= sheet.shape[1] - 8 or sheet[top + 50, after + 2].tolist() == WHITE
        assert (sheet[top : top + 60, :170].min(-1) < 80).any()
        top += 100 + 8 + 19 + 8
    assert top == sheet.shape[0]


def test_the_first_successes_and_failures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    clips = [clip(3, success=success, text=f"number {k}") for k, success in enumerate((0, 1, 0, 0, 1))]
    files = write_clips(tmp_path / "clips", clips, fps=10, each=2)
    names = ["success-00.gif", "success-01.gif", "failure-00.gif", "failure-01.gif", "sheet.png"]
    assert [path.name for path in files] == names == sorted(names, key=names.index) and all(p.is_file() for p in files)
    alone = write_gif(tmp_path / "alone.gif", captioned(clips[2]._replace(success=False)), 10)
    assert (tmp_path / "clips/failure-01.gif").read_bytes() == alone.read_bytes()
    assert write_clips(tmp_path / "none", [], fps=10) == []
