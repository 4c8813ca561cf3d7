"""The contract between a reward and whoever calls it.

A reward is a function, or an object with `__call__`. **Its parameter names are its declaration**:

    images       float32 tensor [N, 3, H, W], RGB in [0, 1]; video [N, F, 3, H, W]. Do not change it in place.
    pil_images   list of N Pillow RGB pictures (video: list of N lists of F), rounded to 8 bits
    prompts      list of N strings
    group        list of N integers; equal numbers mark the samples of one group (same prompt), which is complete
    pairs        list of P pairs (i, j): every ordered pair of two samples of one group, which is complete
    reference_images, source_images   list of N Pillow RGB pictures, read from the files named by the columns
                 `reference_image` and `source_image` of the prompt file
    any other parameter without a default: the column of that name of the prompt file, a list of N values

A parameter with another name *and* a default gets the column of that name where there is one, else it is an option, set
by `args:` in the configuration; those of the rewards of this package are options only. `images` annotated as Pillow
pictures (`list[Image.Image]`) are `pil_images`. Where these are annotated so, a video of several frames is refused.
An `async def` is waited for.
A reward returns one number per sample (list, tensor or array), or `(scores, {part name: N numbers})`. A part name
consists of words of letters, digits and `. _ -`, separated by single spaces, since each part becomes the metric
`reward/<name>/<part>_mean`. `None` or NaN means "no score for this sample": it is left out of the statistics and never
becomes a zero.

A reward is *pointwise* (neither `group` nor `pairs`: the score of a sample depends on that sample alone),
*groupwise* (`group`), or *pairwise* (`pairs`: it returns one number per pair, how well i does compared with j, and the
score of a sample is the mean over its pairs (i, j)).

What a signature cannot say is said by attributes and methods, all of them optional:

    differentiable = True   with gradients enabled, the scores keep the graph to `images` (see `score_with_gradients`)
    to(device)              moves the model; called if the configuration says `offload: true`
    close()                 stops what the reward has started (processes, connections)

Importing this module imports no torch, so that configurations can be checked quickly.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from genrl_rewards.failures import Failure, catch
from genrl_rewards.pictures import check_images, to_pil
from genrl_rewards.pictures import open_picture as open_picture
from genrl_rewards.pictures import to_uint8 as to_uint8

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Reward: TypeAlias = Callable[..., Any]
Scored: TypeAlias = tuple[list[float], dict[str, list[float]]]
"""What a reward may return: N scores, and named parts with N numbers each."""

IMAGE_COLUMNS = {"reference_images": "reference_image", "source_images": "source_image"}
LARGEST = 3.4028234663852886e38
"""Of a score, which is a float32 number: more, in size, is none."""
FROM_SAMPLER = ("images", "pil_images", "prompts", "group", "pairs", *IMAGE_COLUMNS)
_PICTURES = re.compile(r"(list|List|Sequence)\[(\w+\.)*Image\]")
_PART_NAME = re.compile(r"[\w.-]+( [\w.-]+)*")


@runtime_checkable
class Differentiable(Protocol):
    """A reward that says whether its scores keep the graph to the images."""

    differentiable: bool


@runtime_checkable
class Movable(Protocol):
    """A reward with a model that can be moved to another device."""

    def to(self, device: str) -> object: ...


@runtime_checkable
class Closable(Protocol):
    """A reward that has something to stop; `close` may be called twice."""

    def close(self) -> object: ...


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that reads only some values of its columns: `check_row` gets the columns of a row by name, but no
    pictures, and raises ValueError."""

    check_row: Callable[..., None]


@runtime_checkable
class HasLogits(Protocol):
    """A reward to be trained alongside the model (see `genrl_rewards.scorers.preference.adversary`)."""

    logits: Callable[..., Any]


class Needs(NamedTuple):
    """What a reward declares that it takes, and whether its scores can keep the graph to the images."""

    names: tuple[str, ...]
    """As its signature names them: those of `FROM_SAMPLER`, in that order, then columns of the prompt file."""
    gradients: bool = False

    @property
    def images(self) -> bool:
        """Whether it takes the images as a tensor."""
        return "images" in self.names

    @property
    def prompts(self) -> bool:
        """Whether it takes the prompts."""
        return "prompts" in self.names

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the prompt file that it needs, including those that name picture files."""
        return columns_of(self.names)

    @property
    def kind(self) -> Literal["pointwise", "pairwise", "groupwise"]:
        """What a score depends on: the sample alone, its pairs, or its whole group."""
        return "pairwise" if "pairs" in self.names else "groupwise" if "group" in self.names else "pointwise"


@dataclass(frozen=True)
class Scores:
    """N scores in the reward's own units; NaN = no score. `parts` are named sub-scores, N numbers each."""

    values: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of_failure(cls, failure: Failure) -> Scores:
        """No score for any of the samples of a call that raised."""
        return cls([math.nan] * failure.samples, failures=(failure,))

    @property
    def failed(self) -> int:
        """How many samples have no score because the reward raised."""
        return sum(failure.samples for failure in self.failures)

    @property
    def unscored(self) -> int:
        """How many samples have no score, for whatever reason."""
        return sum(math.isnan(value) for value in self.values)


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The sentence "Did you mean 'x'?" after a space, or nothing; case is ignored."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def check_choice(what: str, given: str, known: Iterable[str]) -> None:
    """Raise ValueError, with the nearest choice and all of them, if `given` is none. `what`: "jpeg: unknown scale"."""
    known = list(known)
    if given not in known:
        raise ValueError(f"{what} {given!r}.{nearest(given, known)} Known: {', '.join(known)}")


def name_of(reward: Reward) -> str:
    """The name of a reward's function or class, for messages where the configuration gives none."""
    if isinstance(reward, functools.partial):
        return name_of(reward.func)
    if inspect.isfunction(reward) or inspect.isclass(reward):
        return reward.__name__
    return type(reward).__name__


def needs(reward: Reward) -> Needs:
    """Read a reward's declaration from its signature. Takes a function, an instance, or the class itself.

    Raises ValueError for `*args`, `**kwargs` and positional-only parameters, which declare nothing.
    """
    if inspect.isclass(reward):
        parameters = list(inspect.signature(reward.__call__).parameters.values())[1:]
    else:
        parameters = list(inspect.signature(reward).parameters.values())
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"reward {name_of(reward)!r} takes {str(parameter)!r}, which does not say what it needs. "
                f"Name each parameter: {', '.join(FROM_SAMPLER)}, or a column of the prompt file."
            )
    taken = [p.name for p in parameters if p.default is p.empty or p.name in FROM_SAMPLER]
    if (annotation := _annotated(reward, "images")) and re.search(r"\b(ndarray|NDArray)\b", annotation):
        raise ValueError(
            f"reward {name_of(reward)!r} annotates `images` as {annotation}, but they are a float tensor "
            "[N, 3, H, W] in [0, 1]; annotate torch.Tensor and call .numpy(), or take `pil_images`"
        )
    columns = [name for name in taken if name not in FROM_SAMPLER]
    inner = reward.func if isinstance(reward, functools.partial) else reward
    differentiable = isinstance(inner, Differentiable) and bool(inner.differentiable)
    return Needs((*(name for name in FROM_SAMPLER if name in taken), *columns), differentiable)


def _annotated(reward: Reward, name: str) -> str:
    """The annotation of a parameter as text; "" without one."""
    call = reward.__call__ if inspect.isclass(reward) else reward
    parameter = inspect.signature(call).parameters.get(name)
    if parameter is not None and parameter.annotation is not parameter.empty:
        annotation = parameter.annotation
    else:  # a signature that was declared has none
        annotation = getattr(type(reward).__call__, "__annotations__", {}).get(name, "")
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def optional_columns(reward: Reward, known: Iterable[str]) -> list[str]:
    """Parameters with a default that have the name of one of the `known` columns and are set by nobody: they get it, as
    in TRL. Those of the rewards of this package are options."""
    return [name for name in options_of(reward) if name in known]


def options_of(reward: Reward) -> list[str]:
    """Parameters with a default that are set by nobody; none of this package's own rewards."""
    fixed: set[str] = set()
    itself: Any = reward
    while (within := getattr(itself, "func", None) or getattr(itself, "reward", None)) and callable(within):
        fixed |= set(getattr(itself, "keywords", ()))
        itself = within
    home = getattr(itself, "__module__", "") or ""
    # Their options have names that a prompt file may have for something else (`target`, `scale`). One that stands for a
    # reward elsewhere declares what that one leaves open.
    if home.partition(".")[0] == __package__ and not hasattr(itself, "__signature__"):
        return []
    parameters = inspect.signature(reward).parameters.values()
    names = [p.name for p in parameters if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY]
    return [name for name in names if name not in fixed and name not in FROM_SAMPLER]


def call(reward: Reward, arguments: Mapping[str, Any]) -> Any:
    """What a reward returns, waited for if it is an `async def`."""
    result = reward(**arguments)
    if not inspect.isawaitable(result):
        return result
    import asyncio  # a tenth of what `genrl check` does

    async def waited() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(waited())
    with ThreadPoolExecutor(1) as apart:  # a notebook has a loop of its own in this thread
        return apart.submit(asyncio.run, waited()).result()


def columns_of(names: Iterable[str]) -> tuple[str, ...]:
    """The columns of the prompt file that these parameters ask for, each once."""
    names = list(names)
    plain = (name for name in names if name not in FROM_SAMPLER)
    return tuple(dict.fromkeys([*plain, *(IMAGE_COLUMNS[name] for name in names if name in IMAGE_COLUMNS)]))


def declare(names: Iterable[str], options: Iterable[str] = ()) -> inspect.Signature:
    """A signature that declares these names, for the `__signature__` of a reward that knows them at run time only.
    options: names of parameters that have a default."""
    kind = inspect.Parameter.KEYWORD_ONLY
    needed = [inspect.Parameter(name, kind) for name in names]
    return inspect.Signature([*needed, *(inspect.Parameter(name, kind, default=None) for name in options)])


def is_trainable(reward: Reward) -> bool:
    """Whether a reward is to be trained alongside the model: whether it has `logits`."""
    return isinstance(reward, HasLogits)


def check_columns(reward: Reward, columns: Iterable[str], *, name: str = "") -> None:
    """Raise ValueError if a reward asks for a column that the prompt file does not have."""
    available = list(columns)
    for column in needs(reward).columns:
        if column not in available:
            have = f"has the columns {', '.join(available)}" if available else "has no columns besides the prompt"
            raise ValueError(
                f"reward {name or name_of(reward)!r} asks for the column {column!r}, but the prompt file "
                f"{have}.{nearest(column, [*available, *FROM_SAMPLER])}"
            )
    for option in options_of(reward):
        if option not in available and (close := get_close_matches(option.lower(), map(str.lower, available), 1, 0.8)):
            text = f"has its default, since no column is called so; the nearest is {close[0]!r}"
            _warn_once(f"reward {name or name_of(reward)!r}: the parameter {option!r} {text}")


@functools.cache  # every call of a reward looks at its columns
def _warn_once(text: str) -> None:
    logger.warning(text)


def check_row(reward: Reward, columns: Mapping[str, Any], *, row: str) -> None:
    """Raise ValueError, naming the `row`, if a reward says that it cannot read its columns there."""
    if isinstance(reward, ChecksRows):
        try:
            reward.check_row(**{name: columns[name] for name in needs(reward).names if name not in FROM_SAMPLER})
        except ValueError as error:
            raise ValueError(f"{row}: {error}") from error


def score(
    reward: Reward,
    *,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    group: Sequence[int] | None = None,
    name: str = "",
) -> Scores:
    """Score N samples, without gradients and outside autocast.

    `images` is float [N, 3, H, W] (video [N, F, 3, H, W]) in [0, 1]; `name` is used in messages. A picture that is not
    finite has no score, whatever the reward makes of it.

    A reward that *raises* does not end the run: its N samples have no score (NaN) and the failure is recorded with its
    traceback; `check_failures` says when there are too many. A reward that breaks the contract does end it: ValueError
    for a missing column, images of another layout, a result of the wrong length or type. So does running out of memory
    (torch.OutOfMemoryError), since the next call would have no more.
    """
    import torch

    name = name or name_of(reward)
    arguments = _arguments(reward, images, prompts, columns or {}, group, name)
    # The caller may be inside the denoiser's autocast, which would score in another precision than a server does.
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        result = catch(lambda: call(reward, arguments), len(prompts))
    if isinstance(result, Failure):
        # The commonest slip: rewards of other libraries are given Pillow pictures by this name.
        if "'Tensor' object has no attribute" in result.error:
            hint = "\n`images` are a float tensor; a parameter named `pil_images` gets Pillow pictures"
            result = result._replace(error=result.error + hint, traceback=result.traceback + hint)
        return Scores.of_failure(result)
    pairs = arguments.get("pairs")
    count, each = (len(prompts), "sample") if pairs is None else (len(pairs), "pair")
    scores = read(result, count, name, each=each)
    low, high = images.flatten(1).aminmax(dim=1)  # NaN if one is; `isfinite` would take another copy
    finite = (low.isfinite() & high.isfinite()).tolist()

    def of_samples(row: list[float]) -> list[float]:
        row = row if pairs is None else mean_over_pairs(row, pairs, len(prompts))
        return [value if good else math.nan for value, good in zip(row, finite, strict=True)]

    return Scores(of_samples(scores.values), {part: of_samples(row) for part, row in scores.parts.items()})


def score_with_gradients(
    reward: Reward,
    *,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    name: str = "",
) -> torch.Tensor:
    """Score N samples so that the scores, float32 [N], keep the graph to `images`; no exception is caught.

    Raises ValueError for a reward that is not declared `differentiable`, is not pointwise, does not take `images`, or
    returns anything but a tensor [N] with a graph.
    """
    import torch

    name = name or name_of(reward)
    needed = needs(reward)
    if not needed.gradients or not needed.images or needed.kind != "pointwise":
        raise ValueError(
            f"reward {name!r} has no gradients: it must be pointwise, take `images`, and have the attribute "
            "`differentiable = True`"
        )
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        result = call(reward, _arguments(reward, images, prompts, columns or {}, None, name))
    result = result[0] if isinstance(result, tuple) else result
    if not isinstance(result, torch.Tensor) or result.shape != (len(prompts),) or not result.requires_grad:
        raise ValueError(
            f"reward {name!r} is declared differentiable; it must then return a tensor of {len(prompts)} scores "
            "that keeps the graph to `images` (no Pillow, no numpy, no detach)"
        )
    return result.to(torch.float32)


def pairs_of(group: Sequence[int]) -> list[tuple[int, int]]:
    """Every ordered pair (i, j), i != j, of samples of the same group, in ascending order."""
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        members.setdefault(number, []).append(row)
    return [(i, j) for i, number in enumerate(group) for j in members[number] if i != j]


def mean(values: Iterable[float]) -> float:
    """The mean of those values that are not NaN; NaN if all are."""
    valid = [value for value in values if not math.isnan(value)]
    return math.fsum(valid) / len(valid) if valid else math.nan


def mean_over_pairs(values: Sequence[float], pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
    """The score of each of `count` samples i: the `mean` of the values of its pairs (i, j)."""
    rows: list[list[float]] = [[] for _ in range(count)]
    for (i, _), value in zip(pairs, values, strict=True):
        rows[i].append(value)
    return [mean(row) for row in rows]


def move(reward: Reward, device: str) -> None:
    """Move the model of a reward that has a method `to(device)`; do nothing for others."""
    if isinstance(reward, Movable):
        reward.to(device)


def close(reward: Reward) -> None:
    """Stop what a reward has started, if it has a method `close()`. May be called twice."""
    if isinstance(reward, Closable):
        reward.close()


def _arguments(
    reward: Reward,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    group: Sequence[int] | None,
    name: str,
) -> dict[str, Any]:
    """What the reward is called with. Raises ValueError for missing columns, unequal lengths and a missing group."""
    import torch

    check_columns(reward, columns, name=name)
    check_images(images)
    needed = needs(reward)
    optional = optional_columns(reward, columns)
    lengths = {"images": len(images), "prompts": len(prompts)}
    lengths |= {column: len(columns[column]) for column in (*needed.columns, *optional)}
    if needed.kind != "pointwise":
        if group is None:
            raise ValueError(f"reward {name!r} compares the samples of a group, but is called without groups")
        lengths["group"] = len(group)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"reward {name!r} is called with unequal numbers of rows: {lengths}")
    makers: dict[str, Callable[[], Any]] = {
        # A copy, since a reward may edit what it gets. One memory layout: the last bits of a sum depend on it.
        "images": lambda: images.to(torch.float32, memory_format=torch.contiguous_format, copy=True),
        "pil_images": lambda: _pillow(reward, images, name),
        "prompts": lambda: list(prompts),
        "group": lambda: list(group or ()),
        "pairs": lambda: pairs_of(group or ()),
    }
    arguments: dict[str, Any] = {}
    if takes_pillow(reward):
        makers["images"] = makers["pil_images"]
    for taken in (*needed.names, *optional):
        if taken in IMAGE_COLUMNS:
            arguments[taken] = [open_picture(file) for file in columns[IMAGE_COLUMNS[taken]]]
        else:
            arguments[taken] = makers[taken]() if taken in makers else of_its_own(columns[taken])
    return arguments


def takes_pillow(reward: Reward) -> bool:
    """Whether its `images` are Pillow pictures, as their annotation says."""
    # As text: annotations of a file with `from __future__ import annotations` are no objects, and may not resolve.
    annotation = _annotated(reward, "images")
    return re.search(r"\bImage\b", annotation) is not None and "Tensor" not in annotation


def _pillow(reward: Reward, images: torch.Tensor, name: str) -> list[Any]:
    """Pictures, or lists of a video's frames; where it says that it takes pictures, they must be that."""
    annotation = _annotated(reward, "pil_images") or _annotated(reward, "images")
    if images.ndim == 4 or not _PICTURES.fullmatch(annotation):
        return to_pil(images)
    if images.shape[1] > 1:
        raise ValueError(
            f"reward {name!r} takes pictures ({annotation}), and these are videos of {images.shape[1]} frames: give it "
            "some of their frames by the reward `per_frame`, or annotate what takes frames as list[list[Image]]"
        )
    return to_pil(images[:, 0])


def of_its_own(values: Sequence[Any]) -> list[Any]:
    """A column for a reward, which may edit what it gets: lists and mappings in it are copies."""
    return [copy.deepcopy(value) if isinstance(value, list | dict) else value for value in values]


def read(result: Any, count: int, name: str, *, each: str = "sample") -> Scores:
    """What a reward returned, as `Scores` of `count` numbers. Raises ValueError if it breaks the contract."""
    parts: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, parts = result
    for part in parts:
        if not isinstance(part, str) or not _PART_NAME.fullmatch(part):
            raise ValueError(
                f"reward {name!r} returned a part called {part!r}: a part is logged as the metric "
                f"reward/{name}/<part>_mean, so its name may hold letters, digits, '.', '_', '-' and single spaces"
            )
    values = _numbers(result, count, f"reward {name!r}", each)
    numbers = {part: _numbers(row, count, f"part {part!r} of reward {name!r}", each) for part, row in parts.items()}
    return Scores(values, numbers)


def _numbers(result: Any, count: int, what: str, each: str) -> list[float]:
    import numpy as np
    import torch

    expected = f"it must return a list, tensor or array of {count} numbers, one per {each}"
    if isinstance(result, torch.Tensor | np.ndarray):
        if result.ndim != 1:
            raise ValueError(f"{what} returned shape {list(result.shape)}; {expected}")
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise ValueError(f"{what} returned {type(result).__name__}; {expected}")
    if len(result) != count:
        raise ValueError(f"{what} returned {len(result)} numbers for {count} {each}s; {expected}")
    if texts := [value for value in result if isinstance(value, str | bytes)]:  # float would read some of them
        raise ValueError(f"{what} returned something that is not a number (the text {texts[0]!r:.40}); {expected}")
    try:
        values = [math.nan if value is None else float(value) for value in result]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} returned something that is not a number ({error}); {expected}") from error
    # Totals become float32: an infinity there makes the advantages of its whole group NaN.
    return [value if abs(value) <= LARGEST else math.nan for value in values]
