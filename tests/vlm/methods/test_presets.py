"""The table of methods: complete, plain data, and free of contradictions."""

from __future__ import annotations

import pytest
import yaml
from pydantic import TypeAdapter

from genrl.vlm.recipe.advantages import GroupAdvantage, WhitenedReturns
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.surrogates import Clip, Regression, SequenceClip
from genrl.vlm.recipe.weights import OffPolicyMask, TopEntropy


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a surrogate or a group_loss"),
        ({"surrogate": Clip(), "group_loss": Regression()}, "a surrogate or a group_loss"),
        ({"group_loss": Regression(), "weights": (TopEntropy(),)}, "do not apply"),
        ({"advantage": WhitenedReturns(), "surrogate": SequenceClip()}, "sequence_token_clip"),
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
