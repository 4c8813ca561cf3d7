"""What a reward may declare and return, and what happens when it does something else."""

import asyncio
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl.runtime.folder.metrics import catalogue, document
from genrl_rewards.calls import Calls
from genrl_rewards.contract import Failure

IMAGES = torch.rand(3, 3, 4, 6, generator=torch.Generator().manual_seed(0))
PROMPTS = ["one", "two", "three"]
TWO: dict[str, Any] = {"images": torch.rand(2, 3, 4, 4), "prompts": ["a", "b"]}


def brightness(images: torch.Tensor) -> torch.Tensor:
    return images.mean((1, 2, 3))


class Everything:
    def __init__(self, bonus: float = 0.0):
        self.bonus = bonus

    def __call__(
        self, images: Any, pil_images: Any, prompts: Any, group: Any, style: Any, weight: Any, limit: float = 1.0
    ) -> list[float]:
        self.seen = {"pil_images": pil_images, "prompts": prompts, "group": group, "style": style, "weight": weight}
        return [self.bonus + w for w in weight]


def score(reward: genrl_rewards.Reward, **changes: Any) -> genrl_rewards.Scores:
    return genrl_rewards.score(reward, **{"images": IMAGES, "prompts": PROMPTS} | changes)


@pytest.mark.parametrize("reward", [Everything, Everything(), Everything().__call__])
def test_parameter_names_are_the_declaration(reward: Any) -> None:
    needed = genrl_rewards.needs(reward)
    assert needed == genrl_rewards.Needs(("images", "pil_images", "prompts", "group", "style", "weight"))
    assert needed.images and needed.prompts and needed.columns == ("style", "weight")
    for unsaid in (lambda *images: [], lambda images, **rest: [], len):
        with pytest.raises(ValueError, match="does not say what it needs"):
            genrl_rewards.needs(unsaid)


def test_a_class_gets_what_it_declares() -> None:
    reward = Everything(bonus=0.5)
    columns = {"style": ["a", "b", "c"], "weight": [1, 2, 3], "unused": [0, 0, 0]}
    assert score(reward, columns=columns, group=[0, 0, 1]).values == [1.5, 2.5, 3.5]
    assert reward.seen["prompts"] == PROMPTS and reward.seen["group"] == [0, 0, 1]
    assert reward.seen["style"] == ["a", "b", "c"]
    assert [image.size for image in reward.seen["pil_images"]] == [(6, 4)] * 3


def test_none_nan_and_infinity_are_no_score() -> None:
    for returned in (
        [1, None, 0.5],
        (1.0, math.nan, 0.5),
        torch.tensor([1.0, math.nan, 0.5], requires_grad=True),
        torch.tensor([1.0, math.inf, 0.5], dtype=torch.bfloat16),
        np.array([1.0, -np.inf, 0.5], dtype=np.float16),
        [np.float32(1), None, torch.tensor(0.5)],
    ):
        scores = score(lambda prompts, returned=returned: returned)
        assert [scores.values[0], scores.values[2]] == [1.0, 0.5] and math.isnan(scores.values[1])
        assert scores.unscored == 1 and scores.failed == 0


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, 2.0], "reward 'mine' returned 2 numbers for 3 samples"),
        (torch.zeros(4), "reward 'mine' returned 4 numbers for 3 samples"),
        (torch.zeros(3, 1), r"reward 'mine' returned shape \[3, 1\]"),
        (np.float64(1), "reward 'mine' returned float64"),
        (1.0, "reward 'mine' returned float;"),
        (None, "reward 'mine' returned NoneType"),
        (["a", "b", "c"], "reward 'mine' returned something that is not a number"),
        ([10**400, 1, 2], "reward 'mine' returned something that is not a number"),
        pytest.param(["0.5", 1, 2], "not a number .the text '0.5'", id="texts are no numbers"),
        (([1, 2, 3], {"count": [1]}), "part 'count' of reward 'mine' returned 1 numbers"),
    ],
)
def test_a_result_that_breaks_the_contract_names_the_reward(returned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        score(lambda prompts: returned, name="mine")


@pytest.mark.parametrize("part", ["a/b", "", " padded", "two  spaces", "accuracy (%)", "line\nbreak", 3])
def test_parts_have_names_that_become_metrics(part: Any) -> None:
    scores = score(lambda prompts: ([1, 2, 3], {"count": torch.tensor([1, 0, 1]), "top-1.5 質": [None, 1, 1]}))
    assert scores.values == [1, 2, 3] and scores.parts["count"] == [1, 0, 1]
    assert math.isnan(scores.parts["top-1.5 質"][0])
    assert document("reward/mine/top-1.5 質_mean") is catalogue()["reward/<name>_mean"]
    with pytest.raises(ValueError, match="reward 'mine' returned a part called") as error:
        score(lambda images: ([1, 2, 3], {part: [0.5, 0.5, 0.5]}), name="mine")
    assert repr(part) in str(error.value) and "reward/mine/<part>_mean" in str(error.value)


def test_a_missing_column_names_reward_column_and_nearest_and_groups_and_rows_are_checked() -> None:
    def mine(prompts: list[str], colour: list[str]) -> list[float]:
        raise AssertionError("never called")

    with pytest.raises(ValueError) as error:
        score(mine, columns={"colours": ["red"] * 3, "count": [1] * 3})
    assert str(error.value) == (
        "reward 'mine' asks for the column 'colour', but the prompt file has the columns colours, count. "
        "Did you mean 'colours'?"
    )
    with pytest.raises(ValueError, match="has no columns besides the prompt"):
        genrl_rewards.check_columns(mine, [])
    with pytest.raises(ValueError, match="Did you mean 'images'"):
        genrl_rewards.check_columns(lambda image: [], [])
    with pytest.raises(ValueError, match="compares the samples of a group"):
        score(lambda group: group)
    with pytest.raises(ValueError, match="unequal numbers of rows: .*'prompts': 2"):
        score(brightness, prompts=["one", "two"])
    with pytest.raises(ValueError, match="unequal numbers of rows: .*'style': 1"):
        score(lambda style: style, columns={"style": [1.0]})


@pytest.mark.parametrize("shape", [(3, 4, 4, 3), (3, 4, 4), (3, 1, 4, 4), (3, 3, 4, 4)])
def test_images_of_another_layout_or_in_bytes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="images must be float"):
        score(brightness, images=torch.zeros(shape, dtype=torch.uint8 if shape[:2] == (3, 3) else torch.float32))


def raising(error: BaseException) -> Any:
    def mine(images: torch.Tensor) -> list[float]:
        raise error

    return mine


@pytest.mark.parametrize("raised", [KeyError("style"), SystemExit(1)])
def test_a_reward_that_raises_gives_no_scores_and_keeps_the_traceback(raised: BaseException) -> None:
    scores = score(raising(raised))
    assert all(map(math.isnan, scores.values)) and scores.failed == 3 and scores.unscored == 3
    assert type(raised).__name__ in scores.failures[0].error
    assert "in mine" in scores.failures[0].traceback


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_memory_that_runs_out_and_an_interrupt_are_no_failed_rewards(raised: BaseException) -> None:
    with pytest.raises(type(raised)):
        score(raising(raised))


def test_too_many_failures_stop_the_run_with_the_first_traceback() -> None:
    first = Failure(4, "KeyError: 'style'", "Traceback: line 3, in mine")
    genrl_rewards.check_failures("mine", 4, 20, first)
    genrl_rewards.check_failures("mine", 0, 0, None)
    with pytest.raises(genrl_rewards.RewardFailed, match="'mine' raised for 5 of 20 .*25%, at most 20%") as error:
        genrl_rewards.check_failures("mine", 5, 20, first)
    assert first.traceback in str(error.value)
    with pytest.raises(genrl_rewards.RewardFailed, match="log of another process"):
        genrl_rewards.check_failures("mine", 1, 20, None, limit=0.0)
    (failure,) = score(raising(genrl_rewards.RewardFailed("the server is gone"))).failures
    assert failure.fatal
    kept = genrl_rewards.first_failure([Failure(1, "other", ""), failure])
    assert kept is failure and genrl_rewards.first_failure([]) is None
    with pytest.raises(genrl_rewards.RewardFailed, match="'mine': the server is gone"):
        genrl_rewards.check_failures("mine", 1, 1000, kept)


def test_rewards_run_in_float32_without_gradients_and_autocast() -> None:
    def mine(images: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() and images.dtype == torch.float32
        product = images.flatten(1) @ images.flatten(1).T
        assert product.dtype == torch.float32
        return product[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert score(mine, images=IMAGES.clone().requires_grad_()).failed == 0
    assert score(mine, images=IMAGES.to(torch.bfloat16)).failed == 0  # whatever the decoder made
    frames = genrl_rewards.to_pil(torch.rand(2, 5, 3, 4, 6))  # of videos
    assert [len(video) for video in frames] == [5, 5] and frames[0][0].size == (6, 4)
    levels = torch.tensor([-0.1, 0.5 / 255, 1.5 / 255, 1.003])
    assert genrl_rewards.to_uint8(levels.expand(3, 1, 4)).reshape(-1, 3)[:, 0].tolist() == [0, 0, 2, 255]


def test_a_pairwise_reward_is_asked_of_every_ordered_pair_of_a_group() -> None:
    seen = []

    def better(images: torch.Tensor, pairs: list[tuple[int, int]]) -> Any:
        seen.extend(pairs)
        means = images.mean((1, 2, 3))
        return [float(means[i] > means[j]) for i, j in pairs], {"place": [float(i) for i, _ in pairs]}

    images = torch.tensor([0.2, 0.9, 0.5, 0.1, 0.7]).view(5, 1, 1, 1).expand(5, 3, 4, 4)
    scores = genrl_rewards.score(better, images=images, prompts=["a"] * 5, group=[7, 3, 7, 7, 9])
    assert seen == [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]
    assert scores.values[0] == 0.5 and scores.values[2] == 1.0 and scores.values[3] == 0.0
    assert math.isnan(scores.values[1]) and math.isnan(scores.values[4])  # alone in their groups: nothing to compare
    assert scores.parts["place"][2] == 2.0
    some = score(lambda pairs: [1.0, None, None, None, 0.25, 0.75], group=[0, 0, 0])
    assert some.values[0] == 1.0 and math.isnan(some.values[1]) and some.values[2] == 0.5  # a mean of what there is
    with pytest.raises(ValueError, match="returned 5 numbers for 6 pairs; .*one per pair"):
        genrl_rewards.score(lambda pairs: [1.0] * 5, images=images, prompts=["a"] * 5, group=[0, 0, 0, 1, 2])


def test_a_row_is_checked_by_its_columns_without_pictures() -> None:
    class Style:
        def __call__(self, images: Any, reference_images: Any, style: Any) -> list[float]:
            return [0.0] * len(images)

        def check_row(self, style: str) -> None:
            if style != "flat":
                raise ValueError(f"no style {style!r}")

    genrl_rewards.check_row(Style(), {"style": "flat", "reference_image": "a.png"}, row="line 1")
    with pytest.raises(ValueError, match="^line 2: no style 'round'"):
        genrl_rewards.check_row(Style(), {"style": "round", "reference_image": "a.png"}, row="line 2")


def test_an_annotation_says_which_pictures_are_wanted() -> None:
    def sizes(images: list[Image.Image]) -> list[float]:
        return [float(picture.convert("L").width) for picture in images]

    def by_name(images: list[Image]) -> list[float]:
        return sizes(images)

    def tensors(images: torch.Tensor) -> list[float]:
        return images.mean((1, 2, 3)).tolist()

    def unsaid(images):  # type: ignore[no-untyped-def]
        return [picture.convert("L") for picture in images]

    def arrays(images: list[np.ndarray]) -> list[float]: ...

    rows = TWO | {"images": torch.full((2, 3, 4, 6), 0.5)}
    assert genrl_rewards.score(sizes, **rows).values == genrl_rewards.score(by_name, **rows).values == [6.0, 6.0]
    assert genrl_rewards.score(Calls(sizes, batch_size=1, cache=4), **rows).values == [6.0, 6.0]
    assert genrl_rewards.score(sizes, **rows | {"images": rows["images"][:, None]}).values == [6.0, 6.0]  # of one frame
    assert genrl_rewards.score(tensors, **rows).values == [0.5, 0.5]
    assert "`pil_images` gets Pillow" in genrl_rewards.score(unsaid, **rows).failures[0].error
    with pytest.raises(ValueError, match="annotates `images` as list.*ndarray.*or take `pil_images`"):
        genrl_rewards.score(arrays, **rows)


def test_a_default_is_replaced_by_the_column_of_its_name() -> None:
    def style(images: Any, style: Any = None, scale: float = 1.0) -> list[float]:
        return [scale * len(one) for one in style or [""] * len(images)]

    columns = {"style": ["x", "xyz"], "scale": [7, 7]}
    fixed = functools.partial(style, scale=2.0)
    assert genrl_rewards.score(style, **TWO).values == [0.0, 0.0] and genrl_rewards.needs(style).columns == ()
    genrl_rewards.move(style, "meta")  # which it need not know
    genrl_rewards.close(style)
    assert genrl_rewards.score(fixed, **TWO, columns=columns).values == [2.0, 6.0]
    assert genrl_rewards.score(Calls(fixed, cache=4), **TWO, columns=columns).values == [2.0, 6.0]


def test_a_default_that_was_meant_to_be_a_column_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def near(images: Any, answers: Any = None, scale: float = 1.0, target: Any = None) -> list[float]:
        return [float(answers is None)] * len(images)

    columns = {"Answer": ["x", "y"], "colour": [1, 2]}
    for _ in range(3):
        assert genrl_rewards.score(near, **TWO, columns=columns).values == [1.0, 1.0]
    genrl_rewards.score(functools.partial(near, answers="given"), **TWO, columns=columns)
    assert caplog.text.count("the parameter 'answers' has its default, since no column is called so") == 1
    assert "the nearest is 'answer'" in caplog.text and "scale" not in caplog.text


def test_an_async_reward_is_waited_for_within_a_loop_too() -> None:
    async def slow(images: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(images)

    async def notebook() -> Any:
        return genrl_rewards.score(slow, **TWO)

    assert genrl_rewards.score(slow, **TWO).values == asyncio.run(notebook()).values == [1.0, 1.0]


def test_reference_pictures_are_read_from_their_column(tmp_path: Any) -> None:
    paths = []
    for k, mode in enumerate(("RGB", "L", "RGBA")):
        paths.append(str(tmp_path / f"{k}.png"))
        Image.new(mode, (5, 4), 40 if mode == "L" else None).save(paths[-1])

    def mine(images: Any, reference_images: Any, source_images: Any) -> list[float]:
        assert [picture.mode for picture in reference_images] == ["RGB"] * 3 and source_images[0].size == (5, 4)
        return [float(picture.getpixel((0, 0))[0]) for picture in reference_images]

    assert genrl_rewards.needs(mine).columns == ("reference_image", "source_image")
    assert genrl_rewards.needs(mine).names == ("images", "reference_images", "source_images")
    columns = {"reference_image": paths, "source_image": [Image.open(path) for path in paths]}
    assert score(mine, columns=columns).values == [0.0, 40.0, 255.0]  # what is transparent is on white
    with pytest.raises(ValueError, match="asks for the column 'source_image'.*Did you mean"):
        genrl_rewards.check_columns(mine, ["reference_image", "source_images"])


def test_gradients_reach_the_images_of_a_differentiable_reward() -> None:
    class Bright:
        differentiable = True

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((1, 2, 3))

    assert genrl_rewards.needs(Bright()).gradients and not genrl_rewards.needs(brightness).gradients
    images = IMAGES.clone().requires_grad_()
    with torch.no_grad():
        scores = genrl_rewards.score_with_gradients(Bright(), images=images, prompts=PROMPTS)
    scores.sum().backward()
    assert torch.equal(images.grad, torch.full_like(images, 1 / images[0].numel()))
    assert score(Bright()).values == scores.tolist()


def test_a_reward_without_gradients_says_so() -> None:
    for returned, declared, words in (
        (lambda images: images.mean((1, 2, 3)), False, "has no gradients"),
        (lambda images, group: images.mean((1, 2, 3)), True, "has no gradients"),
        (lambda prompts: [1.0] * 3, True, "has no gradients"),
        (lambda images: images.detach().mean((1, 2, 3)), True, "keeps the graph"),
        (lambda images: images.mean((1, 2)), True, "keeps the graph"),
        (lambda images: images.mean((1, 2, 3)).tolist(), True, "keeps the graph"),
    ):
        returned.differentiable = declared
        with pytest.raises(ValueError, match=words):
            genrl_rewards.score_with_gradients(returned, images=IMAGES.clone().requires_grad_(), prompts=PROMPTS)


def test_what_a_reward_edits_in_place_is_its_own() -> None:
    def by_torch(images: torch.Tensor) -> list[float]:
        return images.mul_(2).sub_(1).flatten(1).mean(1).tolist()

    def by_numpy(images: torch.Tensor, pil_images: list[Any], boxes: list[list[int]]) -> list[float]:
        images.numpy()[:] = boxes[0].pop()
        for picture in pil_images:
            picture.paste((9, 9, 9), (0, 0, 2, 2))
        return [0.0] * len(images)

    before, boxes = IMAGES.clone(), [[1], [2], [3]]
    for reward in (by_torch, by_numpy):
        assert not score(reward, columns={"boxes": boxes}).failures and torch.equal(IMAGES, before)
    assert boxes == [[1], [2], [3]]


def test_a_picture_that_is_not_finite_has_no_score_alone_or_in_pairs() -> None:
    images = torch.rand(3, 3, 4, 4)
    images[1, 0, 0, 0] = math.nan
    alone = genrl_rewards.score(lambda images: [0.0, 0.0, 1.0], images=images, prompts=["a", "b", "c"])
    pairs = genrl_rewards.score(lambda pairs: [1.0] * len(pairs), images=images, prompts=["a"] * 3, group=[0, 0, 0])
    assert [math.isnan(value) for value in alone.values] == [False, True, False]
    assert [math.isnan(value) for value in pairs.values] == [False, True, False]
