"""The size of each prompt's samples: from its row, or a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from genrl.data.prompts import Prompt, PromptError
from genrl.data.sizes import short_bucket, sized
from genrl.diffusion.config.sections import Sampling

WIDE, TALL = (16, 24), (24, 16)


def rows(*columns: dict[str, object]) -> list[Prompt]:
    return [Prompt(f"prompt {k}", found, k + 1) for k, found in enumerate(columns)]


def test_rows_say_their_own_size_and_what_they_leave_out_is_the_pipelines() -> None:
    found = sized(
        rows({"height": 16, "width": 24}, {"height": 8, "num_frames": 5, "x": 1}, {}), "rows", None, "a.jsonl"
    )
    assert [row.size for row in found] == [{"height": 16, "width": 24}, {"height": 8, "num_frames": 5}, {}]
    for wrong in (0, -8, 8.5, "16", True):
        with pytest.raises(PromptError, match="a.jsonl:1: height must be a whole number above 0"):
            sized(rows({"height": wrong}), "rows", None, "a.jsonl")
    with pytest.raises(PromptError, match="no row has a column height, width, num_frames"):
        sized(rows({"x": 1}), "rows", None, "a.jsonl")


def test_buckets_are_dealt_in_turn() -> None:
    found = sized(rows({}, {}, {}), [WIDE, (*TALL, 9)], None, "a.txt")
    first, second = {"height": 16, "width": 24}, {"height": 24, "width": 16, "num_frames": 9}
    assert [row.size for row in found] == [first, second, first]
    assert [row.size for row in sized(rows({}), (), None, "a.txt")] == [{}]


def test_a_picture_gets_the_bucket_of_its_shape(tmp_path: Path) -> None:
    sizes = {"wide": (300, 200), "tall": (201, 300), "square": (8, 8)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    given = rows(*({"image": str(tmp_path / f"{name}.png")} for name in sizes))
    found = [tuple(row.size.values()) for row in sized(given, [WIDE, TALL, (20, 20)], "image", "a.jsonl")]
    assert found == [WIDE, TALL, (20, 20)]
    with pytest.raises(PromptError, match="a.jsonl:1: no picture in the column 'image'"):
        sized(rows({}), [WIDE], "image", "a.jsonl")


def test_a_size_with_fewer_rows_than_a_micro_batch_is_named() -> None:
    found = sized(rows(*[{}] * 5), [WIDE, TALL], None, "a.txt")
    assert short_bucket(found, 2) is None
    four = [[64, 64], [32, 64], [64, 32], [32, 32]]
    dealt = sized(rows({}, {}, {}), four, None, "three.txt")
    assert "32 x 32 has 0 of the 3 prompts" in str(short_bucket(dealt, 1, four))
    assert short_bucket(dealt, 1, four, "photo") is None  # pictures choose theirs
    assert "24 x 16 has 2 of the 5 prompts, and a micro-batch is of 3" in str(short_bucket(found, 3))
    assert [Sampling(batch_size=b, group_size=g).prompts_together for b, g in ((8, 4), (4, 4), (2, 4))] == [2, 1, 1]
