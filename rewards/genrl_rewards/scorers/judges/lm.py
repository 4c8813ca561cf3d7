"""Ask a language model about texts: a local transformers model, or any OpenAI-compatible server, as
`genrl_rewards.scorers.judges.vlm` does about pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from genrl_rewards.models.checkpoints import model_type, pretrained, tokenizer_of, torch_dtype, transformers
from genrl_rewards.scorers.judges.vlm import VLM, Endpoint, Inputs, LocalModel, Question, open_vlm, sees

logger = logging.getLogger(__name__)


def open_lm(model: str, server: Endpoint, dtype: str, device: str, reward: str) -> VLM:
    """The model of that name on a server, or else the local model of that hub id or folder, which may be one for
    pictures, too. Questions are pieces of text."""
    if server is not None or sees(model_type(model, reward)):
        return open_vlm(model, server, dtype, device, reward)
    return LocalLM(model, dtype, device, reward)


class LocalLM(LocalModel):
    """A transformers causal language model with a chat template.

    Raises ValueError for a checkpoint of another kind, with missing weights, or without a chat template.
    """

    def __init__(self, model: str, dtype: str = "bfloat16", device: str = "cpu", reward: str = "lm"):
        kind = model_type(model, reward)
        if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{reward}: {model!r} is a {kind!r} model, which answers no questions")
        architecture, precision = transformers.AutoModelForCausalLM, torch_dtype(dtype, reward)
        loaded = pretrained(architecture, model, types=(), reward=reward, dtype=precision).to(device)
        # On the left, so that the last position of every row is the one that the answer begins at.
        tokenizer: Any = tokenizer_of(model, reward, padding_side="left")
        if tokenizer.chat_template is None:
            raise ValueError(f"{reward}: {model!r} has no chat template to ask questions with")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

        def prepare(questions: Sequence[Question]) -> Inputs:
            chats = [[{"role": "user", "content": "\n".join(map(str, question))}] for question in questions]
            texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
            # The chat template has written the beginning of the text already.
            return dict(tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt"))

        super().__init__(loaded, tokenizer, prepare)
        logger.info("LM %s (%s, %s)", model, kind, dtype)
