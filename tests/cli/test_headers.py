"""How large a model on the hub is, from JSON files and headers of weights, by a client without a network."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from genrl.cli import diffusion
from genrl.config import load
from genrl.config.folders import from_hub, hub_errors, read_header
from genrl.diffusion.config.estimate import read_components
from genrl.diffusion.config.schema import Config
from tests.cli.commands import MODEL, run


class Hub:
    """A repository of files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def model_info(self, source: str, *, revision: str | None, timeout: float) -> Any:
        files = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        return Of(siblings=[Of(rfilename=name) for name in files])

    def hf_hub_download(self, source: str, name: str, *, revision: str | None, local_dir: Path) -> str:
        self.asked.append(name)
        (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(self.folder / name, local_dir / name)

    def parse_safetensors_file_metadata(self, source: str, name: str, *, revision: str | None) -> Any:
        entries = read_header(self.folder / name)
        return Of(tensors={key: Of(shape=list(s), dtype=d, data_offsets=(0, 0)) for key, s, d in entries})


def test_a_pipeline_is_the_one_of_its_folder_and_a_header_alone_is_a_file_that_is_cut(tmp_path: Path) -> None:
    hub = Hub(MODEL)
    found = read_components(from_hub("org/model", None, tmp_path, hub))
    assert found == read_components(MODEL) and sum(part.num_parameters for part in found) > 10**6
    assert "model_index.json" in hub.asked and not [name for name in hub.asked if not name.endswith(".json")]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 200_000
    file = next(tmp_path.rglob("*.safetensors"))
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert json.loads(file.read_bytes()[8:]) and file.stat().st_size == 8 + length


def test_check_asks_it_once_and_estimates(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    hub = Hub(MODEL)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    diffusion._of_hub.cache_clear()
    text = run("check", "small.yaml", "model.path=org/model", "--memory", "24GB")
    diffusion._of_hub.cache_clear()
    assert "SD3Transformer2DModel" in text and "it fits as it is" in text and hub.asked.count("model_index.json") == 1
    assert "not checked: weights and licence of org/model" in text and "memory" not in text.partition("not checked")[2]
    config = load("small.yaml", ["model.path=org/model"])
    assert isinstance(config, Config) and diffusion.components_of(config) == ()  # who lists recipes does not ask


def test_a_hub_that_is_not_reached_is_said(tmp_path: Path) -> None:
    """By the error of any HTTP library that huggingface_hub is made with."""
    of_library = next(kind for kind in HfHubHTTPError.__bases__ if kind is not OSError)

    def fail(*_: Any, **__: Any) -> None:
        raise of_library("no such host\nmore")

    with pytest.raises(OSError, match="does not say how large it is: no such host$"):
        from_hub("org/model", None, tmp_path, Of(model_info=fail))
    assert issubclass(HfHubHTTPError, hub_errors()) and OSError in hub_errors()
