"""To the hub and from it, against a stand-in of its HTTP interface on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from genrl.cli.app import app
from genrl.config import dump, load
from genrl.diffusion.config.schema import Config
from genrl.runtime.folder import hub as ours
from genrl.runtime.folder.run import Run, json_line
from genrl.runtime.show.pictures import save_samples
from tests.hub_server import Hub, reached


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with reached(monkeypatch, tmp_path / "cache") as running:
        yield running


@pytest.fixture
def exported(tmp_path: Path, root: Path) -> tuple[Path, Path]:
    """A finished run's folder, and what `export` wrote of it."""
    import torch
    from safetensors.torch import save_file

    from genrl.diffusion.files.export import write_card

    config = load(root / "configs/quickstart.yaml")
    assert isinstance(config, Config)
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    (run / "config.yaml").write_text(dump(config))
    rows: list[dict[str, float | None]] = [
        {"step": 0, "eval/total_mean": 0.5, "eval/shapes_mean": 0.5},
        {"step": 2, "eval/total_mean": 0.75, "eval/shapes_mean": 0.75},
    ]
    Run(run).metrics.write_text("".join(map(json_line, rows)))
    for step in (0, 2):
        save_samples(run / "samples", step, [torch.full((3, 16, 16), 0.4)], ["a red star"], {"shapes": [0.5]})
    write_card(out, config, rows, ["a red star"])
    save_file({"transformer.x.lora_A.weight": torch.ones(2)}, out / "pytorch_lora_weights.safetensors")
    return run, out


def test_a_push_holds_weights_card_configuration_and_pictures(server: Hub, exported: tuple[Path, Path]) -> None:
    run, out = exported
    assert ours.push(run, out, "lab/stars", private=True) == f"{server.address}/lab/stars"
    files = server.repos["lab/stars"]
    assert server.private == {"lab/stars": True}
    assert set(files) == {"README.md", "config.yaml", "pytorch_lora_weights.safetensors", "samples.png"}
    assert files == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert files["config.yaml"] == (run / "config.yaml").read_bytes()
    assert files["samples.png"].startswith(b"\x89PNG")
    _, front, text = files["README.md"].decode().split("---\n", 2)
    tags = ["lora", "reinforcement-learning", "genrl", "diffusion_nft"]
    # The base model is a folder: the hub would take it for a repository.
    assert yaml.safe_load(front) == {"library_name": "diffusers", "tags": tags}
    assert "| `eval/shapes_mean` | 0.5 | 0.75 |" in text and "(samples.png)" in text
    assert "genrl train hub:lab/stars/config.yaml" in text and 'pipe.load_lora_weights("lab/stars")' in text


def test_the_card_names_the_base_model_of_the_hub_and_its_licence(server: Hub, exported: tuple[Path, Path]) -> None:
    run, out = exported
    server.repos["maker/base"] = {"README.md": b"---\nlicense: apache-2.0\n---\n# Base\n"}
    for file in (run / "config.yaml", out / "README.md"):
        file.write_text(file.read_text().replace("assets/tiny-shapes", "maker/base"))
    ours.push(run, out, "lab/stars")
    front = yaml.safe_load(server.repos["lab/stars"]["README.md"].decode().split("---\n", 2)[1])
    assert (front["base_model"], front["license"]) == ("maker/base", "apache-2.0")
    assert ours.licence_of("maker/other") is None and ours.licence_of("./nowhere") is None


def test_a_push_that_fails_keeps_the_export_and_says_how_to_go_on(server: Hub, exported: tuple[Path, Path]) -> None:
    run, out = exported
    server.refuse = 403
    with pytest.raises(RuntimeError, match=rf"(?s)is written, .*hf upload lab/stars {out} \. --private") as caught:
        ours.push(run, out, "lab/stars", private=True)
    assert "403" in str(caught.value)
    assert {path.name for path in out.iterdir()} >= {"README.md", "config.yaml", "pytorch_lora_weights.safetensors"}
    server.refuse = None
    ours.push(run, out, "lab/stars", private=True)
    assert server.repos["lab/stars"]["README.md"].count(b"## Samples") == 1


def test_a_configuration_is_fetched_with_files_beside_it_but_no_code(server: Hub, root: Path, tmp_path: Path) -> None:
    text = (root / "configs/quickstart.yaml").read_text().replace("assets/prompts/things_train.txt", "prompts.txt")
    files = {"sub/mine.yaml": text.encode() + b"output: /etc\n", "sub/prompts.txt": b"a red star\n"}
    server.repos["lab/stars"] = files
    file, overrides = ours.fetch("hub:lab/stars/sub/mine.yaml")
    assert file.read_bytes() == files["sub/mine.yaml"]
    config = load(file, overrides)
    assert isinstance(config, Config) and config.output == "runs/stars"
    assert Path(str(config.prompts.train)).read_text() == "a red star\n"
    assert config.prompts.eval == "assets/prompts/things_eval.txt"
    server.repos["lab/code"] = {"config.yaml": b"rewards: [{name: bad.py}]\n", "bad.py": b"raise SystemExit\n"}
    file, overrides = ours.fetch("hub:lab/code/config.yaml")
    assert overrides == ["output=runs/code"] and not file.with_name("bad.py").exists()


def test_names_that_are_none_what_the_hub_does_not_have_and_nobody_logged_in_are_refused(
    server: Hub, monkeypatch: Any
) -> None:
    server.repos["lab/stars"] = {"config.yaml": b"{}"}
    for names, says in (
        ("hub:stars/config.yaml hub:lab/stars hub:lab/stars/../../x.yaml hub:", "is written hub:org/name"),
        ("hub:lab/none/config.yaml hub:lab/stars/other.yaml", "the hub does not give it: .*404"),
    ):
        for name in names.split():
            with pytest.raises(ValueError, match=says):
                ours.fetch(name)
    for repo in ("stars", "a/b/c", "lab/st ars", "../stars"):
        with pytest.raises(ValueError, match="is no name of a repository"):
            ours.check_repo(repo)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="hf auth login"):
        ours.check_repo("lab/stars")


def test_check_takes_a_configuration_of_the_hub(server: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(root)
    server.repos["lab/stars"] = {"config.yaml": (root / "configs/quickstart.yaml").read_bytes()}
    done = CliRunner().invoke(app, ["check", "hub:lab/stars/config.yaml", "iterations=7"])
    assert done.exit_code == 0 and "valid" in done.output, done.output
    both = CliRunner().invoke(app, ["check", "hub:lab/stars/config.yaml", "hub:lab/none/config.yaml"])
    assert both.exit_code == 2 and "1 valid, 1 wrong" in both.output, both.output
