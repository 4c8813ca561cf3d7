"""Rows as people have them: encodings x line ends x columns, and pictures in every form that is about."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from genrl.data import rows as row_module
from genrl.data.picture_rows import Row, rows_of
from genrl.data.preferences import as_tensor, check_set, open_set
from genrl.data.prompts import Prompt, PromptError, load, read
from genrl.data.rows import lines_of
from genrl.data.sizes import sized, unread
from genrl_rewards.given import lending

ENDS = (b"\n", b"\r\n", b"\r")
TEXTS = ["a red circle", "ein Bär", "赤い円", "# left out", "", "  wide  ", "a\tb"]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), max_size=9),
    end=st.sampled_from(ENDS),
    suffix=st.sampled_from([".txt", ".jsonl"]),
    begin=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    last=st.booleans(),
    block=st.sampled_from([1, 2, 7, 1000]),
)
def test_every_line_is_a_row_whatever_ends_it(tmp_path_factory, texts, end, suffix, begin, last, block) -> None:
    lines = [json.dumps({"prompt": text, "k": k}) if suffix == ".jsonl" else text for k, text in enumerate(texts)]
    raw = begin + end.join(line.encode() for line in lines) + end * last
    file = tmp_path_factory.mktemp("rows") / f"p{suffix}"
    file.write_bytes(raw)
    kept = [(k + 1, text) for k, text in enumerate(texts) if text and not (suffix == ".txt" and text[0] == "#")]
    if suffix == ".jsonl" and "" in texts:
        with pytest.raises(PromptError, match="the prompt is empty"):
            read(str(file))
    elif not kept:
        with pytest.raises(PromptError, match="no prompts in it"):
            read(str(file))
    else:
        actual = read(str(file))
        wanted = [(line, text.strip() if suffix == ".txt" else text) for line, text in kept]
        assert [(row.line, row.text) for row in actual.rows] == wanted
        assert actual.comments == (suffix == ".txt") * texts.count("# left out")
        assert str(actual).startswith(f"{len(kept)} prompts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_module, "MAX_LINE_BYTES", block)  # ends fall on borders of blocks
        seen = [*lines_of(io.BytesIO(raw))]
        short = [line.encode() for line in lines]
        wanted = (begin + end.join(short)).split(end)
        assert [line[:block] for line in seen] == [line[:block] for line in wanted][: len(seen)]


def picture(file: Path, size: tuple[int, int] = (6, 4), turn: int = 1) -> bytes:
    """A picture without transparency, of which the right half is red; stored turned."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, size[0] // 2 :, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(pixels).save(file, quality=100, exif=exif.tobytes())
    return file.read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_script_hands_over_pictures_in_any_form(tmp_path: Path) -> None:
    raw = picture(tmp_path / "a.jpg", turn=6)
    forms: list[Any] = [raw, {"bytes": raw, "path": None}, Image.open(io.BytesIO(raw)), np.zeros((6, 4, 3), np.uint8)]
    forms += [{"bytes": None, "path": str(tmp_path / "a.jpg")}, np.zeros((6, 4), bool)]
    with lending({"python:rows": [{"prompt": "p", "image": form} for form in forms]}):
        result = read("python:rows")
    assert [Image.open(row.columns["image"]).size for row in result.rows] == [(4, 6)] * len(forms)
    with (
        lending({"python:rows": [{"prompt": "p", "image": np.zeros((6, 4, 3))}]}),
        pytest.raises(PromptError, match=r"python:rows:1: image: .*float64 \[6, 4, 3\]"),
    ):
        read("python:rows")


def test_a_table_that_the_library_did_not_write_has_its_pictures(tmp_path: Path) -> None:
    """`{bytes, path}` as plain columns, and bytes, as pandas and other trainers write them."""
    pa = pytest.importorskip("pyarrow")
    raw = picture(tmp_path / "a.jpg")
    pictures = {"image": [{"bytes": raw, "path": "a.jpg"}], "source_image": [raw]}
    columns = {"prompt": ["p"], **pictures, "mask_path": ["/etc"]}
    import pyarrow.parquet as pq

    (tmp_path / "set").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "set" / "train.parquet")
    (row,) = read(f"{tmp_path / 'set'}:train").rows
    assert {*row.columns} == {"image", "source_image"}
    assert all(Image.open(file).size == (6, 4) for file in row.columns.values())


@pytest.mark.parametrize(
    "value, says",
    [
        ("IN/a.jpg", None),
        ({"path": "a.jpg", "bytes": None}, None),
        ("ABS/absent.jpg", "there is no file"),
        ("https://example.org/a.jpg", "an address, which is not fetched"),
        ("data:image/png;base64,AAAA", "an address"),
        ({"bytes": "x"}, "must be a path as text, found an object"),
    ],
)
def test_pictures_in_lines_are_relative_or_absolute_or_named(value: Any, says: str | None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        picture(folder / "a.jpg")
    if isinstance(value, str):
        value = value.replace("IN", str(tmp_path)).replace("ABS", str(tmp_path))  # beside the folder of the file
    file = tmp_path / "data" / "p.jsonl"
    file.write_text(json.dumps({"prompt": "p", "image": value}))
    if says is None:
        assert Path(read(str(file)).rows[0].columns["image"]).is_file()
    else:
        with pytest.raises(PromptError, match=says):
            read(str(file))


def test_scored_pictures_may_lie_anywhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    picture(tmp_path / "a.jpg")
    file = tmp_path / "data" / "p.jsonl"
    file.write_text("\n".join(json.dumps({"image": str(tmp_path / name)}) for name in ("a.jpg", "secret")))
    first, second = rows_of([file], "p")
    assert isinstance(first, Row) and first.path == tmp_path / "a.jpg"
    assert "outside the folder" in str(second)


def test_buckets_sets_and_targets_see_pictures_upright(tmp_path: Path) -> None:
    picture(tmp_path / "tall.jpg", size=(60, 30), turn=6)  # 30 x 60 when upright
    row = Prompt("p", {"image": str(tmp_path / "tall.jpg"), "target_image": str(tmp_path / "tall.jpg")}, 3)
    (result,) = sized([row], [(32, 64), (64, 32)], "image", "p.jsonl")
    assert result.size == {"height": 64, "width": 32}
    (shown,) = open_set("p.jsonl", [row], ["target_image"])(row)
    assert shown.size == (30, 60)
    levels = as_tensor(shown, 60, 30)[0].mean(1)
    assert levels[:28].max() < 0.1 and levels[32:].min() > 0.9  # what is stored on the right is seen below
    check_set("p.jsonl", [row], ["target_image"], beside="image", size=(60, 30))
    with pytest.raises(PromptError, match="p.jsonl:3: unlike shapes"):
        check_set("p.jsonl", [row], ["target_image"], beside="image", size=(30, 60))
    (tmp_path / "tall.jpg").write_bytes(b"no picture")
    with pytest.raises(PromptError, match="p.jsonl:3: image: picture .*tall.jpg"):
        sized([row], [(32, 64)], "image", "p.jsonl")


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.txt").write_text("# a\na\n# b\n\nb\n")
    with caplog.at_level(logging.INFO):
        assert len(load(str(tmp_path / "p.txt"))) == 2
    assert "2 prompts (2 lines that begin with # are left out)" in caplog.text
    assert "column negative_prompt is not read" in unread(["word", "negative_prompt"])[0]
    with caplog.at_level(logging.WARNING):
        sized([Prompt("p", {"negative_prompt": "blurry", "seed": 3})], [(8, 8)], None, "org/name:train")
    assert "org/name:train: the column negative_prompt is not read" in caplog.text and "column seed" in caplog.text
