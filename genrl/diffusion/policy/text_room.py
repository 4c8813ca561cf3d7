"""How long a text may be that a pipeline is to draw."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from genrl.data.prompts import Prompt

ANY = 1_000_000
"""Tokenizers without a limit say that theirs is larger than this."""


class TextRoom:
    """Whether a text fits into the longest of a pipeline's text encoders; the others cut it, as ever.

    The limit is the tokenizer's `model_max_length`, for those that take it (all but CLIP's) also `max_sequence_length`
    of the call.
    """

    def __init__(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        parameter = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
        called = arguments.get("max_sequence_length", parameter.default if parameter else None)
        self.name, self.tokenizer, self.limit = "", None, 0
        for name, part in sorted(pipe.components.items()):
            if not name.startswith("tokenizer") or part is None:
                continue
            limit = int(getattr(part, "model_max_length", ANY))
            if isinstance(called, int) and "CLIP" not in type(part).__name__:
                limit = min(limit, called)
            if limit > self.limit:
                self.name, self.tokenizer, self.limit = name, part, limit

    def length(self, text: str) -> int:
        """Its tokens, those of the beginning and the end included."""
        return len(self.tokenizer(text, verbose=False).input_ids) if self.tokenizer is not None else 0

    def __call__(self, text: str) -> bool:
        return self.tokenizer is None or self.limit >= ANY or self.length(text) <= self.limit

    def check(self, prompts: Iterable[Prompt], source: str | None, model: str) -> None:
        """Raise ValueError, with its line in `source`, for a prompt that the text encoders of `model` would cut."""
        for row in prompts:
            if not self(row.text):
                raise ValueError(
                    f"{source}:{row.line}: {self.length(row.text)} tokens, but {self.name} of {model} takes "
                    f"{self.limit}: what comes after would not be drawn; shorten the prompt, or raise "
                    "sampling.pipeline_args.max_sequence_length where the model has one"
                )
