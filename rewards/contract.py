"""The contract between a reward and whoever calls it.

A reward is a function, or an object with `__call__`. **Its parameter names are its declaration**:

    images       float32 tensor [N, 3, H, W], RGB in [0, 1]; video [N, F, 3, H, W]. Read only.
    pil_images   list of N PIL RGB images (video: list of N lists of F), rounded to 8 bit
    prompts      list of N strings
    group        list of N ints; equal numbers mark the samples of one group (same prompt), which is then complete
    pairs        list of P (i, j): every ordered pair of two samples of one group, which is then complete
    reference_images, source_images   list of N PIL RGB images, read from the files that the columns
                 `reference_image` and `source_image` of the prompt file name
    any other parameter without a default: the column of that name of the prompt file, a list of N values

A parameter with another name *and* a default is an option, set by `args:` in the configuration.
It returns one number per sample (list, tensor or array), or `(scores, {part name: N numbers})`; part names are words of
letters, digits and `. _ -`, with single spaces between them, since each becomes the metric `reward/<name>/<part>_mean`.
`None` or NaN says "no score for this sample"; it is left out of the statistics and never becomes a zero.

So a reward is *pointwise* (neither `group` nor `pairs`: the score of a sample depends on that sample alone),
*groupwise* (`group`), or *pairwise* (`pairs`: it returns one number per pair, how well i does beside j, and the
score of a sample is the mean over its pairs (i, j)).

What a signature cannot say are attributes and methods, all of them optional:

    differentiable = True   with gradients enabled, the scores keep the graph to `images` (see `score_with_gradients`)
    to(device)              moves the model; called where the configuration says `offload: true`
    close()                 ends what the reward has started (processes, connections)

Nothing here imports torch until something is scored, so that a configuration can be checked in no time.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from PIL.Image import Image

Reward: TypeAlias = Callable[..., Any]

IMAGE_COLUMNS = {"reference_images": "reference_image", "source_images": "source_image"}
FROM_SAMPLER = ("images", "pil_images", "prompts", "group", "pairs", *IMAGE_COLUMNS)
FAILED_LIMIT = 0.2
_PART_NAME = re.compile(r"[\w.-]+( [\w.-]+)*")
MAX_PIXELS = 2**26  # of one picture file: 8192 x 8192


class Needs(NamedTuple):
    """What a reward declares that it takes."""

    images: bool
    pil_images: bool
    prompts: bool
    group: bool
    columns: tuple[str, ...]
    """Columns of the prompt file, those of the pictures below included."""
    pairs: bool = False
    pictures: tuple[str, ...] = ()
    """`reference_images`, `source_images`."""
    gradients: bool = False
    """Whether scores can keep the graph to the images."""

    @property
    def kind(self) -> Literal["pointwise", "pairwise", "groupwise"]:
        """What a score depends on: the sample alone, its pairs, or its whole group."""
        return "pairwise" if self.pairs else "groupwise" if self.group else "pointwise"

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that the reward takes, as its signature names it."""
        flags = (self.images, self.pil_images, self.prompts, self.group, self.pairs)
        taken = [name for name, flag in zip(FROM_SAMPLER, flags, strict=False) if flag]
        pictured = [IMAGE_COLUMNS[name] for name in self.pictures]
        return (*taken, *self.pictures, *(name for name in self.columns if name not in pictured))


class Failure(NamedTuple):
    """A call of a reward that raised: how many samples have no score because of it, and why."""

    samples: int
    error: str
    traceback: str
    fatal: bool = False
    """The reward itself asked to stop the run (it raised RewardFailed)."""


@dataclass(frozen=True)
class Scores:
    """N scores in the reward's own units; NaN = no score. `parts` are named sub-scores, N numbers each."""

    values: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    @property
    def failed(self) -> int:
        """How many samples have no score because the reward raised."""
        return sum(failure.samples for failure in self.failures)

    @property
    def unscored(self) -> int:
        """How many samples have no score, for whatever reason."""
        return sum(math.isnan(value) for value in self.values)


class RewardFailed(RuntimeError):
    """The run cannot go on: too many samples could not be scored, or a reward that raises this says so itself."""


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The sentence "Did you mean 'x'?" after a space, or nothing; upper and lower case count as equal."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def name_of(reward: Reward) -> str:
    """A reward's name in messages where the configuration gives none: its function's or class's."""
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
                f"reward {name_of(reward)!r} takes {str(parameter)!r}, which does not tell what it needs. "
                f"Name each parameter: {', '.join(FROM_SAMPLER)}, or a column of the prompt file."
            )
    names = [p.name for p in parameters if p.default is p.empty or p.name in FROM_SAMPLER]
    pictures = tuple(name for name in names if name in IMAGE_COLUMNS)
    columns = (*(n for n in names if n not in FROM_SAMPLER), *(IMAGE_COLUMNS[name] for name in pictures))
    return Needs(
        images="images" in names,
        pil_images="pil_images" in names,
        prompts="prompts" in names,
        group="group" in names,
        columns=tuple(dict.fromkeys(columns)),
        pairs="pairs" in names,
        pictures=pictures,
        gradients=_is_differentiable(reward),
    )


def _is_differentiable(reward: Reward) -> bool:
    inner = reward.func if isinstance(reward, functools.partial) else reward
    return bool(getattr(inner, "differentiable", False))


def is_trainable(reward: Reward) -> bool:
    """Whether a reward is to be trained beside the model: it has `logits` (see
    `rewards.scorers.preference.adversary`)."""
    return hasattr(reward, "logits")


def check_columns(reward: Reward, columns: Iterable[str], *, name: str = "") -> None:
    """Raise ValueError where a reward asks for a metadata column that the prompts do not have."""
    known = list(columns)
    for column in needs(reward).columns:
        if column not in known:
            have = f"has the columns {', '.join(known)}" if known else "has no columns beside the prompt"
            raise ValueError(
                f"reward {name or name_of(reward)!r} asks for the column {column!r}, but the prompt file "
                f"{have}.{nearest(column, [*known, *FROM_SAMPLER])}"
            )


def score(
    reward: Reward,
    *,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    group: Sequence[int] | None = None,
    name: str = "",
) -> Scores:
    """Score N samples without gradients and outside autocast.

    `images` float [N, 3, H, W] (video [N, F, 3, H, W]) in [0, 1]. `name` is used in messages.

    A reward that *raises* does not end the run: its N samples have no score (NaN) and the failure is recorded
    with its traceback; `check_failures` says when that is too much. A reward that breaks the contract does:
    ValueError for a missing column, images of another layout, a result of the wrong length or type. So does memory that
    runs out (torch.OutOfMemoryError), since the next call would have no more.
    """
    import torch

    name = name or name_of(reward)
    columns = columns or {}
    check_columns(reward, columns, name=name)
    arguments = _arguments(needs(reward), images, prompts, columns, group, name)
    try:
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            result = reward(**arguments)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code; kept, counted and reported, not hidden
        fatal = isinstance(error, RewardFailed)
        what = str(error) if fatal else f"{type(error).__name__}: {error}"
        failure = Failure(len(prompts), what, traceback.format_exc(), fatal)
        return Scores([math.nan] * len(prompts), failures=(failure,))
    pairs = arguments.get("pairs")
    if pairs is None:
        return read(result, len(prompts), name)
    of_pairs = read(result, len(pairs), name, each="pair")
    parts = {part: mean_over_pairs(row, pairs, len(prompts)) for part, row in of_pairs.parts.items()}
    return Scores(mean_over_pairs(of_pairs.values, pairs, len(prompts)), parts)


def score_with_gradients(
    reward: Reward,
    *,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    name: str = "",
) -> torch.Tensor:
    """Score N samples so that the scores, float32 [N], keep the graph to `images`; nothing is caught.

    Raises ValueError for a reward that is not declared `differentiable` and pointwise, does not take `images`, or
    returns something else than a tensor [N] with a graph.
    """
    import torch

    name = name or name_of(reward)
    needed = needs(reward)
    if not needed.gradients or not needed.images or needed.kind != "pointwise":
        raise ValueError(
            f"reward {name!r} has no gradients: it must be pointwise, take `images`, and say so by the attribute "
            "`differentiable = True`"
        )
    columns = columns or {}
    check_columns(reward, columns, name=name)
    arguments = _arguments(needed, images, prompts, columns, None, name)
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        result = reward(**arguments)
    result = result[0] if isinstance(result, tuple) else result
    if not isinstance(result, torch.Tensor) or result.shape != (len(prompts),) or not result.requires_grad:
        raise ValueError(
            f"reward {name!r} is declared differentiable; it must then return a tensor of {len(prompts)} scores "
            "that keeps the graph to `images` (no PIL, no numpy, no detach)"
        )
    return result.to(torch.float32)


def pairs_of(group: Sequence[int]) -> list[tuple[int, int]]:
    """Every ordered pair (i, j), i != j, of samples of the same group, in ascending order."""
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        members.setdefault(number, []).append(row)
    return [(i, j) for i, number in enumerate(group) for j in members[number] if i != j]


def mean_over_pairs(values: Sequence[float], pairs: Sequence[tuple[int, int]], count: int) -> list[float]:
    """The score of sample i: the mean of the values of its pairs (i, j) that have one; NaN where none has."""
    rows: list[list[float]] = [[] for _ in range(count)]
    for (i, _), value in zip(pairs, values, strict=True):
        if not math.isnan(value):
            rows[i].append(value)
    return [math.fsum(row) / len(row) if row else math.nan for row in rows]


def move(reward: Reward, device: str) -> None:
    """Move the model of a reward that can be moved: one with a method `to(device)`. Others stay."""
    to = getattr(reward, "to", None)
    if to is not None:
        to(device)


def close(reward: Reward) -> None:
    """End what a reward has started, where it has a method `close()`. May be called twice."""
    end = getattr(reward, "close", None)
    if end is not None:
        end()


def _arguments(
    needed: Needs,
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    group: Sequence[int] | None,
    name: str,
) -> dict[str, Any]:
    import torch

    check_images(images)
    lengths = {"images": len(images), "prompts": len(prompts)} | {c: len(columns[c]) for c in needed.columns}
    if needed.kind != "pointwise":
        if group is None:
            raise ValueError(f"reward {name!r} compares the samples of a group, but is called without groups")
        lengths["group"] = len(group)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"reward {name!r} is called with unequal numbers of rows: {lengths}")
    taken = needed.names
    arguments: dict[str, Any] = {column: list(columns[column]) for column in needed.columns if column in taken}
    for pictures in needed.pictures:
        arguments[pictures] = [open_picture(file) for file in columns[IMAGE_COLUMNS[pictures]]]
    if needed.images:
        # In one layout, whoever calls: the last bits of a sum depend on the order of memory.
        arguments["images"] = images.to(torch.float32).contiguous()
    if needed.pil_images:
        arguments["pil_images"] = to_pil(images)
    if needed.prompts:
        arguments["prompts"] = list(prompts)
    if needed.group:
        arguments["group"] = list(group or ())
    if needed.pairs:
        arguments["pairs"] = pairs_of(group or ())
    return arguments


def open_picture(file: str | Path | Image) -> Image:
    """The picture in a file, as PIL RGB; a picture that is open already is converted.

    Raises ValueError, naming the file, for one that is missing, broken, of more than 8 bits a channel, or of more than
    `MAX_PIXELS` pixels.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is lower
            picture = file if isinstance(file, Image.Image) else Image.open(file)
            check_header(picture)
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"picture {str(file)!r} cannot be read: {error}") from error


def check_header(picture: Image) -> None:
    """Raise ValueError for a picture of more than 8 bits a channel, or of more than `MAX_PIXELS` pixels."""
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} x {picture.height} pixels; at most {MAX_PIXELS:,} are read")
    if picture.mode[0] in "IF":  # Pillow would cut 16 bits down to white
        raise ValueError(f"its pixels have more than 8 bits (mode {picture.mode}); save it with 8")


def read(result: Any, count: int, name: str, *, each: str = "sample") -> Scores:
    """What a reward returned as `Scores` of `count` numbers. Raises ValueError where it breaks the contract."""
    parts: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, parts = result
    for part in parts:
        if not isinstance(part, str) or not _PART_NAME.fullmatch(part):
            raise ValueError(
                f"reward {name!r} returned a part called {part!r}: a part is logged as the metric "
                f"reward/{name}/<part>_mean, so call it by letters, digits, '.', '_', '-' and single spaces"
            )
    values = _numbers(result, count, f"reward {name!r}", each)
    numbers = {part: _numbers(row, count, f"part {part!r} of reward {name!r}", each) for part, row in parts.items()}
    return Scores(values, numbers)


def _numbers(result: Any, count: int, what: str, each: str) -> list[float]:
    import numpy as np
    import torch

    wanted = f"it must return a list, tensor or array of {count} numbers, one per {each}"
    if isinstance(result, torch.Tensor | np.ndarray):
        if result.ndim != 1:
            raise ValueError(f"{what} returned shape {list(result.shape)}; {wanted}")
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise ValueError(f"{what} returned {type(result).__name__}; {wanted}")
    if len(result) != count:
        raise ValueError(f"{what} returned {len(result)} numbers for {count} {each}s; {wanted}")
    try:
        values = [math.nan if value is None else float(value) for value in result]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} returned something that is not a number ({error}); {wanted}") from error
    return [value if math.isfinite(value) else math.nan for value in values]


def check_failures(name: str, failed: int, total: int, first: Failure | None, *, limit: float = FAILED_LIMIT) -> None:
    """Stop a run whose reward raises too often: RewardFailed with the first traceback.

    Called once per reward and iteration with the counts summed over all processes, so that all stop together.
    `limit` is the largest share of the samples that may fail. Only calls that raised count: a reward that
    *returns* NaN says that it does not apply to the sample (a prompt without quotes has no text to read).
    A reward that raises RewardFailed stops the run at once, whatever the share: `first` is then that failure.
    """
    if first is not None and first.fatal:
        raise RewardFailed(f"reward {name!r}: {first.error}")
    if total == 0 or failed <= limit * total:
        return
    where = first.traceback if first is not None else "The first failure is in the log of another process."
    raise RewardFailed(
        f"reward {name!r} raised for {failed} of {total} samples of this iteration "
        f"({failed / total:.0%}, at most {limit:.0%} may fail). The first failure:\n{where}"
    )


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure to report of several: the first that asked to stop the run, else the first."""
    return next((f for f in failures if f.fatal), failures[0] if failures else None)


def weighted_sum(values: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Sum over rewards of weight times score, per sample; weights are not divided by their sum.

    A reward of weight 0 is left out (it is logged, never trained on). NaN in any other makes the sum NaN:
    a sample that lacks one of its scores has none. Raises ValueError for names or lengths that differ, or
    where all weights are 0.
    """
    if set(values) != set(weights):
        raise ValueError(f"scores are of the rewards {sorted(values)}, weights of {sorted(weights)}")
    trained = [name for name in values if weights[name] != 0]
    if not trained:
        raise ValueError("every reward has weight 0: give at least one reward a weight to train on")
    lengths = {name: len(values[name]) for name in trained}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rewards with unequal numbers of scores: {lengths}")
    return [math.fsum(weights[name] * values[name][row] for name in trained) for row in range(lengths[trained[0]])]


def check_images(images: torch.Tensor) -> None:
    """Raise ValueError unless float [N, 3, H, W] or [N, F, 3, H, W]. Range and layout are never guessed."""
    if not images.is_floating_point() or images.ndim not in (4, 5) or images.shape[-3] != 3:
        raise ValueError(
            f"images must be float [N, 3, H, W] or [N, F, 3, H, W] in [0, 1], not {images.dtype} {list(images.shape)}"
        )


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """float [..., 3, H, W] in [0, 1] to uint8 [..., H, W, 3]: round(255 x), half to even, then clamp."""
    import torch

    levels = (images.detach().to(torch.float32) * 255).round().clamp(0, 255)
    return levels.to(torch.uint8).movedim(-3, -1).cpu().numpy()


def to_pil(images: torch.Tensor) -> list[Image] | list[list[Image]]:
    """float [N, 3, H, W] in [0, 1] to N PIL images; video [N, F, 3, H, W] to N lists of F."""
    from PIL import Image

    if images.ndim == 5:
        return [[Image.fromarray(frame) for frame in frames] for frames in to_uint8(images)]
    return [Image.fromarray(image) for image in to_uint8(images)]
