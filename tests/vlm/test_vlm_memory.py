"""What a run of billions of weights holds, from a config.json alone, against arithmetic by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.memory import Sizes, memory, sizes, ways

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs" / "vlm" / "qwen2_5_vl_7b_fsdp.yaml"
WEIGHTS = 8_292_166_656  # what the hub says of Qwen/Qwen2.5-VL-7B-Instruct: 8.29 B
TEXT = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published configuration of Qwen2.5-VL-7B, and no weights."""
    made = tmp_path_factory.mktemp("seven")
    text = {**TEXT, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
    transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False).save_pretrained(
        made
    )
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        (made / name).write_text("{}")
    return made


@pytest.fixture(scope="module")
def size(folder: Path) -> Sizes:
    return sizes(str(folder), shipped())


def shipped(*changes: str) -> VLMConfig:
    found = load(SHIPPED, list(changes))
    assert isinstance(found, VLMConfig)
    return found


def test_sizes_are_those_of_the_published_model(size: Sizes) -> None:
    layer = 2 * 3584 * (3584 + 512) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert (size.numbers, size.layer, size.outside) == (WEIGHTS, layer, WEIGHTS - 28 * layer)
    assert size.adapted == 28 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    assert (size.layers, size.width, size.inner, size.keys) == (28, 3584, 18944, 512)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("Qwen2.5-VL-7B-Instruct", 8.29), ("Qwen2.5-VL-3B-Instruct", 3.75), ("Qwen3-VL-4B-Instruct", 4.44)],
)
def test_published_models_are_known_before_the_download(
    model: str, billions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes as the hub has them."""
    monkeypatch.setenv("COLUMNS", "200")
    command = ["check", str(SHIPPED), f"vlm.path=Qwen/{model}", "--memory", "80GB"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    weights = re.search(r"([\d,]+) weights", said.output)
    assert weights and int(weights[1].replace(",", "")) / 1e9 == pytest.approx(billions, rel=0.005)
    assert f"not checked: weights and licence of Qwen/{model}" in said.output
    assert "memory" not in said.output.partition("not checked")[2]


def test_all_weights_take_sixteen_bytes_each_in_one_process(size: Sizes) -> None:
    parts = dict(memory(shipped("distributed.fsdp=false", "trainer.regularisers=[]"), size))
    kept = sum(parts[name] for name in parts if "weights" in name or "optimiser" in name or name == "gradients")
    assert kept == 16 * WEIGHTS and "reference" not in parts and "copy to undo an iteration" not in parts


def test_the_shipped_run_fits_on_eight_cards_of_80_gb(size: Sizes) -> None:
    parts = dict(memory(shipped(), size, 8))
    assert parts["float32 shares of the weights"] == parts["gradients"] == 4 * WEIGHTS // 8
    assert parts["optimiser state (adamw)"] == WEIGHTS and parts["reference"] == 2 * WEIGHTS // 8
    assert sum(parts.values()) < 0.92 * 80e9 < sum(dict(memory(shipped(), size, 2)).values())
    # two answers of 1,024 tokens to questions as long, 28 inputs of layers kept and one layer computed again
    layer = 10.1 * 3584 + 4 * 18944 + 2 * 512
    assert parts["activations of one micro-batch (rough)"] == round(2 * 2048 * (28 * 3584 + layer) * 2)


@pytest.mark.parametrize(("kind", "weights"), [("int8", 1.0), ("nf4", 4.127 / 8)])
def test_fewer_bits(kind: str, weights: float, size: Sizes) -> None:
    changes = ("distributed.fsdp=false", "vlm.lora={rank: 16}", f"vlm.quantize={kind}")
    parts = dict(memory(shipped(*changes), size))
    rest = 2 * (WEIGHTS - size.linear) + (2 * size.rows if kind == "int8" else 0)
    assert parts["frozen weights"] == round(weights * size.linear) + rest
    assert parts["adapters"] == parts["gradients"] == 4 * 16 * size.adapted and "reference" not in parts
    assert ("unpacked weights, for the backward pass" in parts) == (kind == "int8")


def test_each_way_takes_less_than_the_one_before_it_that_it_saves_on(size: Sizes) -> None:
    totals = {name: sum(part for _, part in memory(config, size, count)) for name, config, count in ways(shipped())}
    whole, shards = totals["all weights"], [totals[f"all weights, {n} processes with fsdp"] for n in (2, 4, 8)]
    assert (
        whole > shards[0] > shards[1] > shards[2] > totals["LoRA"] > totals["LoRA, int8"] > totals["LoRA, nf4 (QLoRA)"]
    )


def test_check_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")

    def check(*changes: Any) -> Any:
        return CliRunner().invoke(app, ["check", str(SHIPPED), *changes])

    printed = check("vlm.path=Qwen/Qwen2.5-VL-7B-Instruct", "--memory", "80GB")
    assert printed.exit_code == 0 and f"{WEIGHTS:,} weights; of one of 8 processes" in printed.output
    assert "LoRA, nf4 (QLoRA)" in printed.output
    absent = check("vlm.path=org/unknown", "--memory", "80GB")
    assert absent.exit_code == 2 and "hf download" in absent.output
    assert check().exit_code == 0
