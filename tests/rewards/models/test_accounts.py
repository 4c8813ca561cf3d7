"""Loads of transformers' models and tokenizers accounted for: what is missing is refused, what is unused is named."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl_rewards.models.accounts import accounted
from genrl_rewards.models.checkpoints import pretrained, tokenizer_of, transformers
from genrl_rewards.models.qwen_video import chosen

ASSETS = Path(__file__).parents[3] / "assets"


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


def opened(folder: Path, kind: Any = None) -> Any:
    return pretrained(kind or transformers.AutoModelForCausalLM, str(folder), types=(), reward="lm")


def changed(folder: Path, how: str) -> None:
    weights = load_file(file := folder / "model.safetensors")
    key = next(name for name in sorted(weights) if "h.0.attn.c_attn.weight" in name)
    if how == "missing":
        del weights[key]
    elif how == "shape":
        weights[key] = torch.ones(2, 2)
    elif how == "a layer more":
        weights[key.replace("h.0.", "h.7.")] = weights[key].clone()
    elif how == "extra":
        weights["score.weight"] = torch.ones(1)
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("missing", "GPT2LMHeadModel", r"lm: '.*gpt': it lacks 1 weights of \w+ \(transformer.h.0.attn.c_attn\."),
        ("shape", "GPT2LMHeadModel", "MISMATCH"),
        ("a layer more", "GPT2LMHeadModel", "1 weights of layers that the config.json of GPT2LMHeadModel does not"),
        ("", "GPT2ForSequenceClassification", r"it lacks 1 weights of \w+ \(score.weight\)"),  # no random head
    ],
)
def test_weights_that_do_not_fit(gpt: Path, how: str, kind: str, says: str) -> None:
    changed(gpt, how)
    with pytest.raises(ValueError, match=says):
        opened(gpt, getattr(transformers, kind))


def test_what_is_whole_loads_and_what_is_unused_is_named(gpt: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(gpt)
    assert caplog.text == ""
    changed(gpt, "extra")
    opened(gpt)
    assert "1 weights of its files are of no use to GPT2LMHeadModel: score.weight" in caplog.text


@pytest.mark.parametrize("kind", ["CLIPTokenizer", "T5Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "BertTokenizer"])
def test_a_tokenizer_without_vocabulary(tmp_path: Path, kind: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match=r"lm: the tokenizer of .*(no vocabulary|tokenizer|vocab)"):
        tokenizer_of(str(tmp_path), "lm")


@pytest.mark.parametrize("name", ["tiny-sd/tokenizer", "tiny-janus", "tiny-dllm", "tiny-t2i/tokenizer_3"])
def test_small_vocabularies_are_vocabularies(name: str) -> None:
    assert tokenizer_of(str(ASSETS / name), "lm").get_vocab()


def test_a_warning_that_means_loss_is_an_error() -> None:
    for name, line in (
        ("transformers.modeling_utils", "Some weights of X were not initialized from the checkpoint and are newly"),
        ("diffusers.loaders", "We are going to filter out the keys associated to 'dora_scale` from the state dict"),
        ("diffusers.loaders", "Provided path contains more than one weights file in the .safetensors format."),
        ("peft.tuners", "Loading adapter weights from state_dict led to unexpected keys found in the model: a.b"),
        ("diffusers.pipelines", "Keyword arguments {'connector': 1} are not expected by X and will be ignored."),
    ):
        with pytest.raises(ValueError, match="model.path: 'a': "), accounted("model.path: 'a'"):
            logging.getLogger(name).warning(line)
        with pytest.raises(ValueError, match="model.path: 'a': 'x'"), accounted("model.path: 'a'"):
            raise KeyError("x")  # what a library raises is told with the key


def test_other_warnings_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with accounted("model.path: 'a'"):
        for logger in [logging.getLogger("diffusers.x")] * 2:
            logger.warning("The config attributes {'a': 1}\n were passed, but are not expected")
        warnings.warn("of a user", UserWarning, stacklevel=1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "model.path: 'a': The config attributes {'a': 1} were passed, but are not expected",
        "model.path: 'a': of a user",
    ]


# -- Which frames of a video Qwen's models read
def test_frames_are_chosen_by_time() -> None:
    assert len(chosen(81, 16.0, 2.0, "r")) == 10 and chosen(81, 16.0, 2.0, "r")[::9] == [0, 80]
    assert chosen(16, 16.0, 2.0, "r") == [0, 5, 10, 15]  # one second: four all the same
    assert len(chosen(121, 16.0, 2.0, "r")) == 16 and len(chosen(121, 16.0, 2.0, "r", down=True)) == 14
    assert chosen(3, 16.0, 2.0, "r") == [0, 2]  # an even number of them
    with pytest.raises(ValueError, match="r reads videos of two frames or more; this is a picture"):
        chosen(1, 16.0, 2.0, "r")
