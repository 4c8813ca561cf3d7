"""A number that is not finite stops all ranks before the step, and its micro-batch can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from genrl.runtime.loop.guards import NonFiniteError, any_rank, non_finite, read_dump, require_finite, statistics
from tests.run_folders import start_ranks, wait

BAD = [float("nan"), float("inf"), -float("inf")]


def check(tmp_path: Path, value: float, where: str = "log-prob") -> None:
    latents = torch.arange(12.0).reshape(3, 4)
    require_finite(
        {"log_prob": torch.tensor([0.5, value]), "loss": torch.tensor(1.0)},
        where=where,
        step=12,
        dumps=tmp_path / "dumps",
        batch={"latents": latents, "first": latents[0], "view": latents.T},
        info={"prompts": ["<b>", "two"], "seeds": [1, 2]},
    )


def test_without_a_micro_batch_there_is_no_dump(tmp_path: Path) -> None:
    check(tmp_path, 1e30)  # finite numbers pass
    bad = {"gradient": torch.tensor(float("inf"))}
    said = "Each micro-batch of this rank was finite: see the dumps of the"
    with pytest.raises(NonFiniteError, match=said) as caught:
        require_finite(bad, where="gradient", step=1, dumps=tmp_path / "dumps", batch={}, info={})
    assert caught.value.dump is None and not (tmp_path / "dumps").exists()


def test_a_dump_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("")
    with pytest.raises(NonFiniteError, match="could not be dumped") as caught:
        check(tmp_path, float("nan"))
    assert caught.value.dump is None


@pytest.mark.parametrize("value", BAD)
def test_the_error_says_what_where_and_the_dump_holds_it(tmp_path: Path, value: float) -> None:
    """A second dump of the same place replaces the first."""
    for _ in range(2):
        with pytest.raises(NonFiniteError) as caught:
            check(tmp_path, value, where="loss, update 2/3")
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-000012-loss-update-2-3-rank-0"]
    text = str(caught.value)
    assert "before the update of step 12 on rank 0: loss, update 2/3 is not finite" in text
    assert f"log_prob: {int(value != value)} NaN and {int(value == value)} infinite of 2" in text
    assert f"`genrl replay {caught.value.dump}`" in text and "optimizer.lr" in text
    assert "reward" not in text  # an infinite score is no score: it cannot be the cause
    assert caught.value.dump is not None
    dump = read_dump(caught.value.dump)
    assert (dump.step, dump.where, dump.info) == (12, "loss, update 2/3", {"prompts": ["<b>", "two"], "seeds": [1, 2]})
    assert torch.equal(dump.checked["log_prob"], torch.tensor([0.5, value])) or value != value
    assert torch.equal(dump.batch["view"], torch.arange(12.0).reshape(3, 4).T)
    record = json.loads((caught.value.dump / "dump.json").read_text())
    assert record["statistics"]["batch/latents"]["max"] == 11.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_which_tensors_are_not_finite(dtype: torch.dtype) -> None:
    tensors = {str(value): torch.tensor([[1.0, value]], dtype=dtype) for value in [*BAD, 65504.0]}
    assert non_finite(tensors | {"empty": torch.zeros(0), "steps": torch.tensor([1, 2])}) == ["nan", "inf", "-inf"]
    assert non_finite({}) == []


def test_statistics_leave_out_what_is_not_finite() -> None:
    assert statistics(torch.tensor([1.0, 3.0, float("nan"), float("inf")])) == {
        "shape": [4], "dtype": "float32", "nan": 1, "inf": 1, "min": 1.0, "max": 3.0, "mean": 2.0,
    }  # fmt: skip
    assert statistics(torch.tensor(float("nan")))["mean"] is None


def one_of_two(folder: str) -> None:
    """Child: rank 1 finds a NaN."""
    accelerator = Accelerator(cpu=True)
    rank, place = accelerator.process_index, Path(folder)
    assert any_rank(rank == 1, accelerator) and not any_rank(False, accelerator)
    given = {"where": "loss", "step": 3, "dumps": place / "dumps", "accelerator": accelerator}
    given |= {"batch": {"x": torch.tensor([float(rank)])}, "info": {"rank": rank}}
    require_finite({"loss": torch.tensor(1.0)}, **given)
    try:
        require_finite({"loss": torch.tensor(float("nan") if rank == 1 else 1.0)}, **given)
    except NonFiniteError as error:
        (place / f"error-{rank}.txt").write_text(str(error))
    accelerator.wait_for_everyone()
    accelerator.end_training()


@pytest.mark.slow
def test_all_ranks_stop_when_one_has_a_nan(tmp_path: Path) -> None:
    """One process needs no collective."""
    assert any_rank(True, None) is True and any_rank(False, None) is False
    codes = wait(start_ranks(2, one_of_two, str(tmp_path), log=tmp_path / "log.txt"))
    assert codes == [0, 0], "\n".join(path.read_text() for path in tmp_path.glob("log*"))
    assert "on rank 1: loss is not finite" in (tmp_path / "error-1.txt").read_text()
    assert "another rank found a number that is not finite" in (tmp_path / "error-0.txt").read_text()
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-000003-loss-rank-1"]
    assert read_dump(tmp_path / "dumps" / "step-000003-loss-rank-1").info == {"rank": 1}
