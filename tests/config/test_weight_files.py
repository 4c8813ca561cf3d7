"""Weight files by their headers: what the loaders refuse, the check refuses too, without loading anything."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from genrl.config.weight_files import STEMS, weights_problem


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def written(entries: dict[str, Any], data: int) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


@pytest.mark.parametrize(
    ("entries", "data", "says"),
    [
        ({"a": entry([2], 0, 8), "b": entry([8], 8, 16, "F8_E4M3")}, 16, None),
        ({"a": entry([], 0, 4)}, 4, None),
        ({"a": entry([4], 0, 8)}, 8, "is damaged: by its header"),
        ({"a": entry([1], 0, 8)}, 8, "is damaged: by its header"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "is damaged: by its header"),
        ({"a": entry([2], 0, 8), "b": entry([2], 16, 24)}, 24, "is damaged: by its header"),
        ({"a": entry([2], 0, 8)}, 11, "is damaged: by its header"),
        ({"a": entry([2], 0, 8)}, 5, "is cut: it has"),
        ({"__metadata__": {"format": "pt"}}, 0, "holds no weights"),
    ],
)
def test_a_header_that_does_not_fit_its_file(
    entries: dict[str, Any], data: int, says: str | None, tmp_path: Path
) -> None:
    file = tmp_path / f"{STEMS[0]}.safetensors"
    file.write_bytes(written(entries, data))
    problem = weights_problem(tmp_path)
    assert (problem is None) == (says is None) and (says or "") in (problem or "")
    if says is None or "damaged" in says:  # as the library itself has it
        try:
            with safe_open(file, framework="pt") as opened:
                assert says is None and opened.keys()
        except Exception as error:  # noqa: BLE001 its own class
            assert says is not None, error


def test_a_link_whose_target_is_gone(tmp_path: Path) -> None:
    """As the hub's cache has it after files were deleted."""
    (tmp_path / f"{STEMS[0]}.safetensors").symlink_to(tmp_path / "blob")
    assert "a link whose target is gone" in (weights_problem(tmp_path) or "")
