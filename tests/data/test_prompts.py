"""Prompt files: every dirty row is reported with its line, none gets through, none crashes the reader."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from genrl.data.prompts import Prompt, PromptError, load, read
from genrl.data.rows import MAX_CHARACTERS, MAX_LINE_BYTES
from genrl_rewards.given import lending

BAD_TXT: list[tuple[bytes, str]] = [
    (b"caf\xe9", "0xe9 at column 4 is not UTF-8"),
    (b"a \x00 circle", "0x0000 at position 3"),
    (b"\x1b[31mred\x1b[0m", "0x001b"),
    (b"a \xc2\x9b circle", "0x009b"),
    (b"a" * (MAX_CHARACTERS + 1), "10,001 characters"),
    (b"a" * (MAX_LINE_BYTES + 1), "a line of more than"),
]
BAD_JSONL: list[tuple[bytes, str]] = [
    (b'{"prompt": "a red', "not JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "not JSON: Extra data"),
    (b'["a red circle"]', "found a list"),
    (b"3", "found a number"),
    (b"{}", "no column 'prompt'"),
    (b'{"text": "a"}', "no column 'prompt', found 'text' (prompts.column names"),
    (b'{"promt": "a"}', "did you mean 'promt'?"),
    (b'{"prompt": "a", "prompt": "b"}', "written twice"),
    (b'{"prompt": null}', "must be text, found null"),
    (b'{"prompt": " \\n\\t "}', "the prompt is empty"),
    (b'{"prompt": "\\ud800"}', "0xd800"),
    (b'{"prompt": "%s"}' % (b"a" * (MAX_CHARACTERS + 1)), "10,001 characters"),
    (b'{"prompt": "a", "x": NaN}', "NaN is not a number"),
    (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"prompt":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON: nested too deeply"),
    (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
    (b'{"prompt": "a", "image": "x/../../secret.png"}', "leaves the folder"),
    (b'{"prompt": "a", "mask_path": "/etc/passwd"}', "leaves the folder"),
    (b'{"prompt": "a", "image": "..\\\\secret.png"}', "is not a path"),
    (b'{"prompt": "a", "image": "in.png\\u0000.jpg"}', "is not a path"),
    (b'{"prompt": "a", "start_image": ["in.png"]}', "must be a path as text"),
    (b'{"prompt": "a", "score": 1e999}', "1e999 is not a number"),
    (b'{"prompt": "\\u200b \\ufeff"}', "the prompt is empty"),
    (b'{"prompt": "a", "image": "absent.png"}', "there is no file"),
    (b'{"prompt": "a", "image": "out.png"}', "is a link that leaves the folder"),
    (b'{"prompt": "a", "image": "up/secret.png"}', "is a link that leaves the folder"),
    (b'{"prompt": "a", "image": "loop.png"}', "image"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with one picture, links that leave it, and a secret beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "in.png").write_bytes(b"picture")
    (inside / "also.png").symlink_to(inside / "in.png")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop.png").symlink_to(inside / "loop.png")
    return inside


@pytest.mark.parametrize(
    "suffix, raw, says", [("txt", *row) for row in BAD_TXT] + [("jsonl", *row) for row in BAD_JSONL]
)
def test_a_dirty_line_is_skipped_and_named(suffix: str, raw: bytes, says: str, folder: Path) -> None:
    good = [b"a red circle" if suffix == "txt" else b'{"prompt": "a red circle", "word": "RED"}'] * 150
    path = folder / f"p.{suffix}"
    path.write_bytes(b"\n".join([*good[:7], raw, *good[7:]]) + b"\n")
    result = read(str(path))
    assert len(result.rows) == len(good) and [row.where for row in result.skipped] == [f"{path}:8"]
    assert says in result.skipped[0].problem
    assert str(result.skipped[0]).isprintable() and len(str(result.skipped[0])) < 600


def test_above_one_percent_of_dirty_rows_nothing_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "p.jsonl"
    path.write_bytes(b"\n".join([b'{"prompt": "a"}', *(raw for raw, _ in BAD_JSONL)]))
    with pytest.raises(PromptError) as caught:
        read(str(path))
    text = str(caught.value)
    assert f"{len(BAD_JSONL)} of {len(BAD_JSONL) + 1} rows are dirty (the limit is 1%)" in text
    assert f"{path}:2: not JSON" in text and f"{path}:21: " in text and f"{path}:22: " not in text
    assert f"and {len(BAD_JSONL) - 20} more" in text
    path = folder / "p.txt"
    path.write_bytes(b"\n".join([*[b"fine"] * 99, b"\x1b"]))
    with caplog.at_level(logging.WARNING):
        assert len(load(str(path))) == 99
    assert f"{path}:100" in caplog.text and "\x1b" not in caplog.text
    path.write_bytes(b"\n".join([*[b"fine"] * 98, b"\x00"]))
    with pytest.raises(PromptError, match="1 of 99 rows"):
        read(str(path))


def test_json_file_with_columns_and_paths(folder: Path) -> None:
    path = folder / "p.jsonl"
    rows = [
        {"prompt": "a", "n": 1, "image": "in.png", "tags": ["x"]},
        {"prompt": "b\nc", "n": None, "image": "also.png"},
        {"prompt": "😀", "image": None},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    actual = read(str(path))
    picture = str((folder / "in.png").resolve())
    wanted = [{"n": 1, "image": picture, "tags": ["x"]}, {"n": None, "image": picture}, {"image": None}]
    assert [row.columns for row in actual.rows] == wanted
    assert [row.text for row in actual.rows] == ["a", "b\nc", "😀"] and [row.line for row in actual.rows] == [1, 3, 5]
    assert actual.column_names == ["image"]
    path.write_text('{"Prompt": "a", "prompt": 3}')
    assert load(str(path), "Prompt") == [Prompt("a", {"prompt": 3}, 1)]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("absent.txt", "no such file"),
        ("p.tx", "did you mean .*p.txt"),
        ("sub", "is a folder; name a .txt or .jsonl file, or a data set's split as"),
        ("p.csv", "prompts are .txt"),
        ("empty.txt", "no prompts in it"),
        ("comments.txt", "no prompts in it"),
        ("words", "a data set is written id:split"),
    ],
)
def test_sources_that_cannot_be_used(source: str, says: str, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "p.txt").write_text("fine")
    (folder / "p.csv").write_text("prompt\nfine")
    (folder / "empty.txt").write_text("")
    (folder / "comments.txt").write_text("# nothing\n\n")
    with pytest.raises(PromptError, match=says):
        read(str(folder / source))


def test_data_set_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    data = folder / "set"
    data.mkdir()
    rows = [{"prompt": f"p{k}", "word": "x", "image_path": "/etc/passwd"} for k in range(120)] + [{"prompt": "\0"}]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = read(f"{data}:train")
    assert result.rows[0] == Prompt("p0", {"word": "x"}, 1) and len(result.rows) == 120
    assert result.skipped[0].where == f"{data}:train:121"
    assert len(read(f"{data}:train[:50%]").rows) == 60
    says = "no column 'Prompt', found 'prompt', 'word', 'image_path'; did you mean 'prompt'"
    with pytest.raises(PromptError, match=says):
        read(f"{data}:train", "Prompt")
    with pytest.raises(PromptError, match="cannot be loaded"):
        read(f"{data}:test")


def test_tables_say_what_is_wrong_with_them(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    for name in ("l", "shards"):
        (folder / name).mkdir()
    named = datasets.Features({"prompt": datasets.Value("string"), "answer": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": [1]}, features=named).to_parquet(folder / "l" / "a.parquet")
    (folder / "l" / "b.csv").write_text("prompt,answer\nb,0\n")
    assert read(f"{folder / 'l'}:train").rows[0].columns == {"answer": 1}
    assert "only the parquet files are read; not read: b.csv" in caplog.text
    assert "the column 'answer' gives labels (cat, dog...) as their numbers" in caplog.text
    with lending({"python:p": datasets.Dataset.from_dict({"prompt": [b"a"]})}):
        with pytest.raises(PromptError, match="must be text, found bytes"):
            read("python:p")
    for name, x in (("0", 1), ("1", "text")):
        datasets.Dataset.from_dict({"prompt": ["a"], "x": [x]}).to_parquet(folder / "shards" / f"train-{name}.parquet")
    with pytest.raises(PromptError, match="cannot be loaded: .*'text' as a scalar"):
        read(f"{folder / 'shards'}:train")
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(folder / "saved")
    with pytest.raises(PromptError, match="saved using `save_to_disk`.*for example `Dataset.to_parquet`"):
        read(f"{folder / 'saved'}:train")


def test_a_data_set_has_configurations_and_keeps_its_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> object:
        asked.append((name, config, split))
        columns = {"prompt": ["a", "b", "c"], "source": [red, blue, red], "mask_path": ["/etc/passwd"] * 3}
        return datasets.Dataset.from_dict(columns).cast_column("source", datasets.Image())

    red, blue = (Image.new("RGB", (4, 4), name) for name in ("red", "blue"))
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = read("org/name:edits:train[:90%]").rows
    read("org/name:train[:90%]+test[10:20]")
    assert asked == [("org/name", "edits", "train[:90%]"), ("org/name", None, "train[:90%]+test[10:20]")]
    assert [list(row.columns) for row in rows] == [["source"]] * 3
    files = [Path(row.columns["source"]) for row in rows]
    assert files[0] == files[2] and len(list((folder / "cache" / "genrl-pictures").iterdir())) == 2
    assert [Image.open(file).getpixel((0, 0)) for file in files[:2]] == [(255, 0, 0), (0, 0, 255)]
    with pytest.raises(PromptError, match="written id:split or id:config:split"):
        read("org/name:a:b:train")


def test_pictures_of_a_folder_stay_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    data = folder / "pictures" / "train"
    data.mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (4, 4), "red").save(data / f"{name}.png")
    lines = [{"file_name": f"{name}.png", "prompt": name} for name in ("a", "b")]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read(f"{data.parent}:train").rows
    result = {row.text: Path(row.columns["image"]) for row in rows}
    assert result == {name: (data / f"{name}.png").resolve() for name in ("a", "b")}


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=200), suffix=st.sampled_from([".txt", ".jsonl"]))
def test_no_bytes_crash_the_reader(raw: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bytes") / f"p{suffix}"
    path.write_bytes(raw)
    try:
        rows = read(str(path)).rows
    except PromptError as error:
        assert str(path) in str(error)
    else:
        assert all(row.text.strip() for row in rows)
