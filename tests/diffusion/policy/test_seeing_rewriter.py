"""A vision-language model as PromptRL's rewriter sees the picture that is edited, and learns beside the flow model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.config import load
from genrl.diffusion.config.sections import Rewriter as Settings
from genrl.diffusion.policy.rewriter import Rewriter, load_rewriter
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES as PIPELINES
from tests.diffusion.policy.test_rewriter import anything, moved
from tests.diffusion.policy.test_starting import editing
from tests.vlm import tiny_checkpoints

from peft import PeftModel  # isort: skip  # after what makes transformers importable beside any torchvision
from transformers import AutoModelForImageTextToText  # isort: skip


ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random vision-language model of a family on disk. Not to be changed."""
    root = tmp_path_factory.mktemp("seeing")
    return lambda family: root / family if (root / family).exists() else tiny_checkpoints.save(family, root / family)


def opened_settings(path: Path) -> Settings:
    plain = {"path": str(path), "instruction": "Say {prompt}", "max_new_tokens": 12}
    return Settings.model_validate(plain)


def opened(path: Path) -> Rewriter:
    return moved(Rewriter(opened_settings(path)))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (24, 16, 3), dtype=np.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_answers_are_those_of_the_model_and_of_the_picture(saved: Callable[[str], Path], family: str) -> None:
    """Teacher forcing equals sampling and, unadapted, `genrl.vlm`'s replay; another picture gives other numbers."""
    rewriter = opened(saved(family))
    written = rewriter.write("a jade disc", 4, ("key", 1), anything, [picture(0)])
    other = rewriter.write("two plum boxes there", 3, ("key", 2), anything)  # what the model remembers of a call
    again = rewriter.log_probs(written)
    assert again.dtype == torch.float32 and again.shape == written.tokens.shape
    for one in (written, other):
        result = rewriter.log_probs(one)
        assert torch.allclose(result[one.mask], one.log_probs[one.mask], atol=1e-5)
    assert not torch.isin(written.tokens, rewriter.forbidden).any()
    seen = {**written.asked, **{k: v for k, v in rewriter.asked("a jade disc", [picture(1)]).items() if "pixel" in k}}
    unlike = rewriter.log_probs(type(written)(seen, written.tokens, written.log_probs, written.mask, [], []))
    assert (unlike - again)[written.mask].abs().max() > 1e-3
    policy = Policy(str(saved(family)))
    policy.forbidden = rewriter.forbidden
    asked = [policy.encode(Prompt((picture(0), "Say a jade disc")))]
    same = policy.log_probs(asked, written.tokens, written.mask, group=torch.zeros(4, dtype=torch.int64)).log_prob
    with torch.no_grad(), rewriter.model.disable_adapter():
        assert torch.allclose(rewriter.log_probs(written)[written.mask], same[written.mask], atol=1e-5)


def test_what_sees_is_not_trained_and_the_adapter_is_peft_s(saved: Callable[[str], Path], tmp_path: Path) -> None:
    rewriter = opened(saved("qwen2_5_vl"))
    trained = [name for name, p in rewriter.model.named_parameters() if p.requires_grad]
    assert trained and all("language_model" in name and "lora_" in name for name in trained)
    rewriter.save_pretrained(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(saved("qwen2_5_vl"))
    plain = PeftModel.from_pretrained(base, tmp_path).eval()
    asked = rewriter.asked("a jade disc", [picture(0)])
    assert torch.equal(plain(**asked).logits, rewriter.model(**asked).logits)
    again = load_rewriter(tmp_path)
    texts = [one.rewrite("a jade disc", (0,), anything, [picture(0)]) for one in (again, rewriter)]
    assert texts[0] == texts[1]


def trainer(path: Path) -> dict[str, Any]:
    rewriter = {"path": str(path), "instruction": "Edit: {prompt}", "max_new_tokens": 8, "lr": 1e-2}
    return {"algorithm": "prompt_rl", "retained": 1, "clip_range": 1e-2, "rewriter": rewriter}


def test_an_editing_model_and_a_rewriter_that_sees_what_is_edited(
    folder: Path, kontext: Path, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both get the picture of the prompt's own row, the pipeline beside the rewritten instruction; both learn."""
    shown: dict[str, list[bytes]] = {}
    write, collect = Rewriter.write, DiffusionRun.collect

    def made_up(self: Rewriter, prompt: str, count: int, key: Any, fits: Any, pictures: Any = ()) -> Any:
        actual = write(self, prompt, count, key, fits, pictures)
        shown[prompt] = [one.tobytes() for one in pictures]
        for k in range(0, count, 2):  # a model of random weights never writes the tags
            actual.texts[k], actual.well_formed[k] = f"{prompt}, better {k}", True
        return actual

    given: list[tuple[str, bytes]] = []

    def watched(self: DiffusionRun, draw: Any, **shape: Any) -> Any:
        actual = collect(self, draw, **shape)
        for one in actual.mine.values():
            given.extend(zip(one.batch.prompts, [image.tobytes() for image in one.batch.inputs["image"]], strict=True))
        return actual

    monkeypatch.setattr(Rewriter, "write", made_up)
    monkeypatch.setattr(DiffusionRun, "collect", watched)
    sampling = {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4}
    run = train(editing(folder, kontext, sampling=sampling, trainer=trainer(saved("qwen2_5_vl")), iterations=2))
    for text, bits in given:
        original = text.partition(", better")[0]
        wanted = Image.open(folder / f"{original.removeprefix('make it red ')}.png").convert("RGB").tobytes()
        assert bits == wanted and shown[original] == [wanted]
    assert any(", better" in text for text, _ in given)
    before, first, second = runs.rows(run)
    assert first["ratio/max_abs_dev"] == second["ratio/max_abs_dev"] == 0.0 and first["grad_norm"] > 0
    assert first["rewriter/kl"] == 0.0 < second["rewriter/kl"] and first["rewriter/grad_norm"] > 0
    assert max(row["rewriter/ratio/max_abs_dev"] for row in (first, second)) < 1e-4
    assert "eval/total_mean" in before and "eval_rewritten/total_mean" in before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux1_dev_prompt_rl", "flux1_kontext_prompt_rl"])
def test_the_recipes_of_published_models_in_tiny_form(name: str, folder: Path, kontext: Path, saved: Any) -> None:
    """One iteration with the recipe's own groups, steps, window, dtypes and losses; models, sizes and answers tiny."""
    edits = name == "flux1_kontext_prompt_rl"
    config = editing(folder, kontext)
    if not edits:
        PIPELINES["flux"]().pipe.save_pretrained(folder / "flux")
    further = ", max_area: 256, _auto_resize: false" if edits else ""
    changes = [
        *(f"model.path={kontext if edits else folder / 'flux'}", f"trainer.rewriter.path={saved('qwen2_5_vl')}"),
        f"prompts={{train: {config.prompts.train}, eval: {config.prompts.eval}}}",
        *(f"rewards=[{{name: '{config.rewards[0].name}'}}]", "trainer.rewriter.max_new_tokens=8"),
        *("sampling.height=16", "sampling.width=16", "sampling.prompts_per_iteration=1"),
        *(f"sampling.pipeline_args={{max_sequence_length: 512{further}}}", "evaluation={every: 1, num_prompts: 1}"),
        *("trackers=[]", "iterations=1", f"output={folder / 'recipe'}"),
    ]
    rows = runs.rows(train(load(ROOT / f"configs/diffusion/{name}.yaml", changes)))
    assert rows[1]["ratio/max_abs_dev"] == 0.0 and rows[1]["grad_norm"] > 0 and rows[1]["rewriter/grad_norm"] > 0
    assert rows[1]["rewriter/ratio/mean_abs_dev"] < 0.05 and rows[1]["rewriter/tokens"] <= 8
    steps, trained = (8, 4) if edits else (20, 10)
    assert rows[1]["model_calls/sample"] == 8 * steps and rows[1]["model_calls/train"] == 2 * 8 * trained  # and KL


def test_what_sees_passes_the_check_with_its_processor(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def problems(path: Path) -> str:
        return "\n".join(text for _, text in opened_settings(path).file_problems([]))

    assert problems(saved("qwen2_5_vl")) == problems(saved("llava")) == ""
    settings = json.loads((saved("qwen2_5_vl") / "config.json").read_text())
    settings["text_config"]["max_position_embeddings"] = 8
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text((saved("qwen2_5_vl") / "tokenizer_config.json").read_text())
    result = problems(tmp_path)
    assert "sees, but has no image processor (processor_config.json or preprocessor_config.json); save the" in result
    assert "12 new tokens leave no place for the prompt in 8 positions" in result
