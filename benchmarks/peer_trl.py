"""A step of GRPO on questions with pictures, against TRL's trainer: pip install 'genrl-diffusion[trl]'.

    python -m benchmarks.peer_trl [--rounds 5]

TRL's `GRPOTrainer` and genrl's own loop train the embedded model in full, in float32: 16 questions, 8 answers each of
12 tokens at most, at temperature 1, DAPO's loss, one update; TRL leaves out the pass for old log-probabilities then, as
genrl does. Both take turns, step by step, in one process; the first round is a warm-up. Seconds are the processor's.
Prints the ratio and writes peer_trl.json.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import transformers
import trl

from benchmarks.common import Turns, alone, beside, clock, turns_taken
from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.answers import train as answers
from genrl.vlm.policies.processor import load_processor
from genrl.vlm.rollout.data import Questions
from genrl.vlm.train import KIND
from genrl_rewards.scorers.texts import verifiable

FILE = "configs/vlm/quickstart.yaml"
CHANGES = ("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]", "optimizer.schedule=constant")


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    return verifiable.exact([chat[0]["content"] for chat in completions], answer)


def tag_format(completions: list[Any], **_: Any) -> list[float | None]:
    return verifiable.tag_format([chat[0]["content"] for chat in completions])


class _Waits(transformers.TrainerCallback):
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wait()


def of_trl(config: VLMConfig, steps: int, place: Path) -> Callable[[Callable[[], None]], None]:
    """TRL's training, told what to call after every step."""
    questions, generation = Questions(config, "train"), config.generation
    rows = []
    for number in range(generation.prompts_per_iteration * steps):
        row = questions[number]
        picture, text = row.prompt.parts
        rows.append({"prompt": [{"role": "user", "content": text}], "image": picture, "answer": row.columns["answer"]})
    arguments = trl.GRPOConfig(
        output_dir=str(place),
        per_device_train_batch_size=generation.prompts_per_iteration * generation.group_size,
        num_generations=generation.group_size,
        max_completion_length=generation.max_new_tokens,
        max_steps=steps,
        loss_type="dapo",
        epsilon_high=0.28,
        beta=0.0,
        reward_weights=[1.0, 0.2],
        temperature=1.0,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    made = trl.GRPOTrainer(
        model=transformers.AutoModelForImageTextToText.from_pretrained(config.vlm.path, dtype=torch.float32),
        processing_class=load_processor(config.vlm.path, "llava"),
        reward_funcs=[exact, tag_format],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
    )

    def loop(wait: Callable[[], None]) -> None:
        made.add_callback(_Waits(wait))
        made.train()

    return loop


def of_genrl(config: VLMConfig, stack: ExitStack) -> Callable[[Callable[[], None]], None]:
    """genrl's training, told what to call after every step."""
    process = alone(config, stack)
    run: Any = KIND.open(config, process, KIND.prepare(config, process.accelerator), stack)
    finish = run.finish

    def loop(wait: Callable[[], None]) -> None:
        run.finish = lambda row: (finish(row), wait())
        answers.train(run, config.trainer)  # type: ignore[arg-type]

    return loop


def measure(rounds: int, changes: list[str]) -> dict[str, Any]:
    """Of the rounds after the first: medians of the seconds of either, and of the ratio of neighbours; its range."""
    config = load(FILE, [*CHANGES, *changes, f"iterations={rounds + 2}"])
    assert isinstance(config, VLMConfig)
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        loops = {"theirs": Turns(of_trl(config, rounds + 2, place)), "ours": Turns(of_genrl(config, stack))}
        spent = []
        for turns in loops.values():
            stack.callback(turns.close)
        for _ in range(rounds + 1):
            row = {}
            for name, turns in loops.items():
                begun = clock()
                turns.next()
                row[name] = (clock() - begun)._asdict()
            spent.append(row)
    return {"answers": config.generation.prompts_per_iteration * config.generation.group_size, **turns_taken(spent)}


def main() -> None:
    beside(__doc__, "peer_trl", "answers", f"TRL {trl.__version__}", measure)


if __name__ == "__main__":
    main()
