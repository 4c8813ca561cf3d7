"""A stand-in for the module `vllm`: the parts of its interface that `vllm_engine` uses, on a second copy of the model.

Like the real one it has weights of its own that stay old until they are reloaded by checkpoint names, expands one token
per image itself, and draws each answer of a request from seed + number. What it was asked is in `calls`.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.folder import checkpoint_weights
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Tokens

BaseModelLoader = object


def register_model_loader(name: str) -> Callable[[type], type]:
    return lambda made: made


NAMES = ("vllm", "vllm.model_executor.model_loader")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])


def use(modules: dict[str, Any]) -> None:
    """The same in a process of its own."""
    modules.update(dict.fromkeys(NAMES, modules[__name__]))


@dataclass(frozen=True)
class SamplingParams:
    """The arguments that are used; others are errors, as in vLLM."""

    n: int
    seed: int
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    bad_words: list[str]
    logprobs: int


class LLM:
    """One engine."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.policy, self.settings, self.version = Policy(model), settings, "default"
        self.calls: list[str] = []
        self.llm_engine = self

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        self.calls.append(method)
        if method == "reload_weights":
            self._reload((kwargs or {})["weights_iterator"])

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.policy.model)]

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own, given = checkpoint_weights(self.policy), dict(weights)
        assert own.keys() == given.keys()
        for name, value in own.items():
            value.copy_(given[name])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def reset_mm_cache(self) -> None:
        self.calls.append("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {tags[0]}")

    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        return [self.one(*pair) for pair in zip(prompts, params, strict=True)]

    def one(self, prompt: dict[str, Any], params: SamplingParams) -> Any:
        policy = self.policy
        pictures: list[Image.Image] = prompt.get("multi_modal_data", {}).get("image", [])
        image = policy.tokenizer.convert_tokens_to_ids("<image>")
        assert prompt["prompt_token_ids"].count(image) == len(pictures)  # not expanded
        # as many as the picture's patches are, by the engine's own processor
        sizes = iter([policy.processor(text="<image>", images=[one])["input_ids"][0].count(image) for one in pictures])
        ids = [i for i in prompt["prompt_token_ids"] for _ in range(next(sizes) if i == image else 1)]
        pixels = dict(policy.processor.image_processor(pictures, return_tensors="pt")) if pictures else {}
        encoded = Encoded(Tokens(torch.tensor(ids), {}, pixels), torch.arange(len(ids)), len(ids), "engine")
        sampling = Sampling(params.max_tokens, params.temperature, tuple(params.stop_token_ids))
        assert params.bad_words == ["<image>"] and params.logprobs == 0
        outputs = []
        for k in range(params.n):
            made = generate(policy, [encoded], 1, sampling, [(params.seed + k,)])
            tokens, chances = made.tokens[0][made.mask[0]].tolist(), made.log_prob[0][made.mask[0]].tolist()
            each = [{t: SimpleNamespace(logprob=chance)} for t, chance in zip(tokens, chances, strict=True)]
            spans = [SimpleNamespace(version=self.version)]
            outputs.append(SimpleNamespace(index=k, token_ids=tokens, logprobs=each, weight_versions=spans))
        return SimpleNamespace(prompt_token_ids=ids, outputs=outputs[::-1])  # the order is the index's, not the list's
