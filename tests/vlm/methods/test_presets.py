"""The table of methods: complete, plain data, and free of contradictions."""

from __future__ import annotations

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from genrl.vlm.recipe.advantages import CriticAdvantage, GroupAdvantage, WhitenedReturns
from genrl.vlm.recipe.preset import ExtraForward, Preset, extra_forwards
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.regularisers import EntropyBand
from genrl.vlm.recipe.surrogates import Clip, Regression, SequenceClip
from genrl.vlm.recipe.weights import OffPolicyMask, TopEntropy

TABLE = """
grpo dr_grpo dapo gspo cispo sapo rloo reinforce_pp reinforce_pp_baseline ngrpo dcpo etr balanced forking_tokens vppo
tw_grpo q_hawkeye g2rpo grpo_care stable_reinforce spine para_grpo conan vrag_rl time_master med_vl_thinker patho_r1
lmm_r1 k_frames jigsaw reg_grpo real dmpo vl_dac poad bgpo syn_grpo just_grpo
""".split()
"""The rows of the specification's table and its two further systems."""


def test_every_row_of_the_table_is_there() -> None:
    assert set(TABLE) <= PRESETS.keys()
    assert set(PRESETS) - set(TABLE) == {
        *("bnpo", "gspo_token", "luspo", "vespo", "gdpo", "off_policy_mask"),  # further losses of TRL
        *("gmpo", "clip_cov", "kl_cov", "gpg", "opo", "remax"),  # of verl
        "ttrl",
        *("dpo", "hi_grpo"),  # of image tokens and of shapes
        *("token_ppo", "ui_s1", "trloo"),  # POAD's control; from an expert's walks; of paid turns
    }


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_plain_data_that_yaml_can_hold(name: str) -> None:
    preset = PRESETS[name]
    assert preset.source
    written = yaml.safe_dump(TypeAdapter(Preset).dump_python(preset, mode="json"))
    assert TypeAdapter(Preset).validate_python(yaml.safe_load(written)) == preset


def test_choices_of_equal_constants_are_told_apart_by_their_names() -> None:
    data = {"advantage": {"name": "leave_one_out"}, "surrogate": {"name": "sequence_token_clip", "low": 0.2}}
    preset = TypeAdapter(Preset).validate_python(data)
    assert preset.advantage.name == "leave_one_out" and preset.surrogate.name == "sequence_token_clip"


def test_extra_forwards_are_those_that_the_choices_read() -> None:
    reference = ExtraForward("ref", model="ref")
    wanted: dict[str, tuple[ExtraForward, ...]] = {
        "dapo": (),
        "grpo": (reference,),
        "rloo": (reference,),
        "vppo": (ExtraForward("masked_image", image="masked"),),  # two choices, one forward
        "q_hawkeye": (reference, ExtraForward("degraded", image="degraded", model="policy", when="update")),
        "grpo_care": (ExtraForward("ema", model="ema"),),
    }
    assert {name: extra_forwards(PRESETS[name]) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a surrogate or a group_loss"),
        ({"surrogate": Clip(), "group_loss": Regression()}, "a surrogate or a group_loss"),
        ({"group_loss": Regression(), "weights": (TopEntropy(),)}, "do not apply"),
        ({"group_loss": Regression(), "aggregation": "balanced"}, "does not apply"),
        ({"advantage": WhitenedReturns(), "surrogate": SequenceClip()}, "sequence_token_clip"),
        (
            {"advantage": CriticAdvantage(level="token"), "surrogate": Clip(), "aggregation": "balanced"},
            "differs by token",
        ),
        (
            {"advantage": WhitenedReturns(), "surrogate": Clip(), "weights": (OffPolicyMask(threshold=0.1),)},
            "off-policy mask",
        ),
        ({"surrogate": Clip(), "aggregation": "const", "length": 0}, "at least 1"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preset(**({"advantage": GroupAdvantage()} | fields))


def test_what_is_inferred_says_so() -> None:
    for name, preset in PRESETS.items():
        band = any(isinstance(choice, EntropyBand) for choice in preset.regularisers)
        if "abstract" in preset.source and name != "syn_grpo" or band:
            assert "inferred" in preset.notes, name


def test_choices_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PRESETS["grpo"].surrogate.low = 0.3  # type: ignore[misc, union-attr]
