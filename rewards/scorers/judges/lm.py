"""Ask a language model about texts: a local transformers model, or any OpenAI-compatible server, as
`rewards.scorers.judges.vlm`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.models.checkpoints import model_type, pretrained, torch_dtype
from rewards.scorers.judges.chat import ChatServer, Server
from rewards.scorers.judges.vlm import BATCH, VLM, Answer, Question, open_vlm, spelling, yes_or_no

import transformers  # isort: skip  # after rewards.scorers.judges.vlm, which makes it importable beside any torchvision

logger = logging.getLogger(__name__)


def open_lm(model: str, server: Mapping[str, Any] | None, dtype: str, device: str, reward: str) -> VLM:
    """A model of that name on a server (keys of `Server`), or else the local model of that hub id or folder, with or
    without eyes. Questions are pieces of text."""
    if server is not None:
        return ChatServer(model, Server.of(server, reward))
    if model_type(model, reward) in transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return open_vlm(model, None, dtype, device, reward)
    return LocalLM(model, dtype, device, reward)


class LocalLM:
    """A transformers causal language model with a chat template. Greedy answers.

    ValueError for a checkpoint that is no such model, lacks weights, or has no chat template.
    """

    def __init__(self, model: str, dtype: str = "bfloat16", device: str = "cpu", reward: str = "lm"):
        kind = model_type(model, reward)
        if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{reward}: {model!r} is a {kind!r} model, which answers no questions")
        self.model = pretrained(
            transformers.AutoModelForCausalLM, model, types=(), reward=reward, dtype=torch_dtype(dtype, reward)
        ).to(device)
        self.device = device
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{reward}: {model!r} has no chat template to ask questions by")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        spelled = {i: spelling(token) for token, i in self.tokenizer.get_vocab().items()}
        self._words = {i: word for i, word in sorted(spelled.items()) if word.strip().lower() in ("yes", "no")}
        logger.info("LM %s (%s, %s)", model, kind, dtype)

    def to(self, device: str) -> None:
        """Move the model."""
        self.model.to(device)
        self.device = device

    @torch.no_grad()
    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is beside "no" as the first word of each answer."""
        found = []
        for inputs in self._batches(questions):
            logits = self.model(**inputs, logits_to_keep=1).logits[:, -1]
            log_probabilities = logits.float().log_softmax(-1)[:, list(self._words)].tolist()
            found += [yes_or_no(zip(self._words.values(), row, strict=True)) for row in log_probabilities]
        return found

    @torch.no_grad()
    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Greedy answers."""
        found: list[str] = []
        for inputs in self._batches(questions):
            written = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            found += self.tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return found

    def _batches(self, questions: Sequence[Question]) -> list[dict[str, torch.Tensor]]:
        found = []
        for start in range(0, len(questions), BATCH):
            chats = [[{"role": "user", "content": "\n".join(map(str, q))}] for q in questions[start : start + BATCH]]
            texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
            tokens = self.tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
            found.append({name: value.to(self.device) for name, value in tokens.items()})
        return found
