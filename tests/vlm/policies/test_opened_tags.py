"""Tags that a chat template opens for the answer."""

import pytest

from genrl.vlm.policies.processor import without_opened


@pytest.mark.parametrize(
    ("asked", "text", "left"),
    [
        ("<|assistant|>\n<think>\n", "<think>\nso</think> 3", "so</think> 3"),
        ("<|assistant|>\n<think>\n", "so</think> 3", "so</think> 3"),
        ("<|assistant|>\n", "<think>so</think> 3", "<think>so</think> 3"),
        ("<|assistant|>\n<reasoning>", " <reasoning>so", "so"),
    ],
)
def test_an_answer_does_not_repeat_the_tag(asked: str, text: str, left: str) -> None:
    assert without_opened(asked, text) == left
