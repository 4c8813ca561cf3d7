"""Accounts of what is loaded: every parameter is filled or the load is refused, every key of a file is used or named.

Libraries fill missing weights with random numbers, leave out what does not fit, make a tokenizer without words, and
warn; a model made so still trains and scores. `accounted` stands around every load of diffusers, transformers and peft:
it reads their reports, collects what they warn of, raises ValueError for what means loss, and says the rest in one line
each.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before transformers is imported for the first time

import transformers  # noqa: E402
from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # noqa: E402

logger = logging.getLogger(__name__)

LIBRARIES = ("diffusers", "transformers", "peft", "open_clip")
LOSS = (
    r"newly initialized|[Ss]ome weights .* not initialized|MISSING",
    r"are not expected by .* will be ignored",
    r"unexpected keys found in the model|missing keys in the model",
    r"filter out the keys|not compatible in Diffusers",
    r"more than one weights file",
    r"[Nn]o LoRA (keys|layers) (were )?found|[Ss]kipping.*(layer|key|weight)s?\b.*(not|unsupported)",
    r"size mismatch|ignore_mismatched_sizes|MISMATCH",
    r"(keys|weights|parameters) .*(dropped|discarded|ignored|skipped)",
)
"""Warnings that mean that something of a file is not in the model: regular expressions."""
NOT_USED = "not used when (loading|initializing)"
REPORTED = rf"LOAD REPORT|newly initialized|{NOT_USED}"
"""Warnings that repeat what is read from the reports themselves."""
NAMED = 3


@contextmanager
def accounted(what: str, *, quiet: str = r"(?!)") -> Iterator[None]:
    """Within it, models and tokenizers that `from_pretrained` loads are accounted for.

    what: how a message begins, a key and its value. quiet: warnings that mean nothing here, a regular expression.
    Raises ValueError for weights that are missing, of another shape, or of layers that the configuration does not have;
    for tokenizers without a vocabulary; and for warnings that mean loss (`LOSS`). Other keys that are not used, and
    other warnings, are logged, one line each.
    """
    wrong: list[str] = []
    unused: list[str] = []
    messages: list[str] = []
    try:
        with ExitStack() as stack:
            for base in (transformers.PreTrainedModel, _networks()):
                if base is not None:
                    stack.enter_context(_reported(base, lambda m, r: _judge(m, r, wrong, unused)))
            stack.enter_context(_read_tokenizers(wrong))
            stack.enter_context(collected(messages))
            yield
    except Exception as error:  # noqa: BLE001  whatever a library says of a file; it goes on with the key and the reason
        shapes = [line for line in messages if "MISMATCH" in line]
        text = "; ".join([str(error).strip() or type(error).__name__, *wrong, *shapes])
        raise ValueError(f"{what}: {' '.join(text.split())}") from error
    messages = [line for line in dict.fromkeys(messages) if not re.search(quiet, line)]
    if wrong:  # a library's own words for what its report says already
        messages = [line for line in messages if not re.search(REPORTED, line)]
    wrong += [line for line in messages if any(re.search(pattern, line) for pattern in LOSS)]
    if wrong:
        raise ValueError(f"{what}: {'; '.join(dict.fromkeys(wrong))}")
    repeated = REPORTED if unused else REPORTED.replace(NOT_USED, "(?!)")  # a single file has no report, but this line
    for line in (*unused, *(line for line in messages if not re.search(repeated, line))):
        logger.warning("%s: %s", what, line)


def _networks() -> Any:
    """The base of diffusers' networks where it is installed; rewards work without it."""
    try:
        from diffusers import ModelMixin
    except ImportError:
        return None
    return ModelMixin


@contextmanager
def _reported(base: Any, judge: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Have `from_pretrained` of a library's base class hand over its report, whoever calls it."""
    plain = base.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # The library's own callers may ask for the report, too (a model within a model).
        wants_info = kwargs.pop("output_loading_info", False)
        model, report = plain(cls, *args, output_loading_info=True, **kwargs)
        judge(model, report)
        return (model, report) if wants_info else model

    with patch.object(base, "from_pretrained", classmethod(from_pretrained)):
        yield


def _judge(model: Any, report: dict[str, Any], wrong: list[str], unused: list[str]) -> None:
    kind = type(model).__name__
    missing = sorted(map(str, report.get("missing_keys", ())))
    if missing:
        wrong.append(f"it lacks {len(missing)} weights of {kind} ({first(missing)}), which nothing else can fill")
    shaped = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get("mismatched_keys", ()))
    if shaped:
        wrong.append(f"{len(shaped)} weights of {kind} have another shape in its files ({first(shaped)})")
    wrong += [f"{kind}: {str(line).splitlines()[0]}" for line in report.get("error_msgs", ())]
    left = sorted(map(str, report.get("unexpected_keys", ())))
    # Unused keys are common (heads, buffers) and harmless; further layers of a stack mean that the model is cut short.
    layers = further_layers(left, model.state_dict())
    if layers:
        wrong.append(
            f"its files have {len(layers)} weights of layers that the config.json of {kind} does not ({first(layers)})"
        )
    elif left:
        unused.append(f"{len(left)} weights of its files are of no use to {kind}: {first(left)}")


def further_layers(keys: Iterable[str], known: Iterable[str]) -> list[str]:
    """Keys, of `keys`, that would be known by another number: a stack that is longer in the file than in the model."""
    patterns = {re.sub(r"\.\d+\.", ".#.", name) for name in known if re.search(r"\.\d+\.", name)}
    return [key for key in keys if re.search(r"\.\d+\.", key) and re.sub(r"\.\d+\.", ".#.", key) in patterns]


@contextmanager
def _read_tokenizers(wrong: list[str]) -> Iterator[None]:
    plain = PreTrainedTokenizerBase.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = plain(cls, *args, **kwargs)
        # A file of a few tokens is what somebody wrote; without a file a library makes a tokenizer of nothing.
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path", "")
        folder = Path(str(source)) / str(kwargs.get("subfolder") or "")
        has_files = any((folder / str(name)).is_file() for name in {*cls.vocab_files_names.values(), "tokenizer.json"})
        if not has_files and isinstance(tokenizer, PreTrainedTokenizerBase) and (problem := no_vocabulary(tokenizer)):
            wrong.append(problem)
        return tokenizer

    with patch.object(PreTrainedTokenizerBase, "from_pretrained", classmethod(from_pretrained)):
        yield


def no_vocabulary(tokenizer: Any) -> str | None:
    """Why a tokenizer reads every text alike: it has no more than its special tokens."""
    vocabulary = tokenizer.get_vocab()
    if isinstance(vocabulary, dict) and len(vocabulary.keys() - set(tokenizer.all_special_tokens)) > 1:
        plain = vocabulary.keys() - set(tokenizer.all_special_tokens) - tokenizer.get_added_vocab().keys()
        if len(plain) > 1 or _tells_apart(tokenizer):
            return None
    elif _tells_apart(tokenizer):
        return None
    return (
        f"its tokenizer ({type(tokenizer).__name__}) has no vocabulary and reads every prompt alike: the files are "
        "missing (tokenizer.json, or vocab.json and merges.txt, or spiece.model)"
    )


def _tells_apart(tokenizer: Any) -> bool:
    """Whether two texts become other tokens: of tokenizers that read bytes or have their words added."""
    first_ids, other = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a red cat", "two blue dogs")
    )
    return list(first_ids) != list(other) and not {*first_ids, *other} <= set(tokenizer.all_special_ids)


@contextmanager
def collected(lines: list[str]) -> Iterator[None]:
    """Put what libraries warn of meanwhile into `lines` instead of the log; each in one line."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(" ".join(record.getMessage().split())[:400])

    handler = Collector(logging.WARNING)
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(log, log.level, log.propagate, log.handlers[:]) for log in loggers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for log in loggers:
            log.handlers, log.propagate = [handler], False
            log.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for log, level, propagate, handlers in before:
                log.handlers, log.propagate = handlers, propagate
                log.setLevel(level)
    lines += [" ".join(str(log.message).split())[:400] for log in caught if issubclass(log.category, UserWarning)]


def first(keys: list[str]) -> str:
    """The first of many keys, in one line."""
    return ", ".join(keys[:NAMED]) + (", ..." if len(keys) > NAMED else "")
