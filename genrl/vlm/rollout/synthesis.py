"""Syn-GRPO's loop: the model describes pictures, a diffusion pipeline draws them, and they replace questions.

An iteration writes a group of descriptions of a question's picture, and hands them to the data server. In the next one
the pictures stand in for those of as many questions, with the same answers. A description is worth how
diverse the answers to its picture are, and is trained on then, by the weights of then. The paper gives no equations:
delay, diversity and the check of descriptions are ours.
"""

from __future__ import annotations

import base64
import io
import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.runtime.loop.loop import Loop
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import Synthesis as Settings
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.augment import with_text
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.tasks import Row
from genrl_rewards.scorers.texts.completions import load_text, score_completions
from genrl_rewards.scorers.texts.verifiable import answer_in, diversity

PATIENCE_S = 600.0
"""Longest wait for one picture."""


class DataServer:
    """A process that draws. Pictures are functions of their description and seed, whatever else is asked for.

    Submitted pictures are drawn in their order; what is neither taken nor forgotten stays.
    `close` ends the process.
    """

    def __init__(self, pipeline: str, num_inference_steps: int, guidance_scale: float) -> None:
        command = [sys.executable, "-m", "genrl.diffusion.sample", pipeline]
        command += ["--num-inference-steps", str(num_inference_steps), "--guidance-scale", str(guidance_scale)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.arrived: queue.Queue[str] = queue.Queue()
        self.asked: dict[str, str] = {}
        self.pictures: dict[str, Image.Image] = {}
        # Read all the time: a pipe that nobody empties is full after some pictures, and the process that draws would
        # wait.
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.arrived.put(line)
        self.arrived.put("")  # it has ended

    def submit(self, description: str, sample: str, seed: int) -> None:
        """Ask for a picture; `sample` is its name. Returns at once. Raises RuntimeError where the process has ended."""
        self.asked[sample] = description
        request = {"id": sample, "description": description, "seed": derive_seed(seed, sample) % 2**63}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(self._ended()) from error

    def poll(self) -> list[str]:
        """Names of the pictures that are there and were not taken."""
        while not self.arrived.empty():
            self._read(self.arrived.get())
        return list(self.pictures)

    def take(self, sample: str) -> Image.Image:
        """The picture of this name, waited for. Raises RuntimeError where it cannot be drawn or does not come, and
        KeyError where it was never submitted."""
        description = self.asked[sample]
        while sample not in self.pictures:
            try:
                self._read(self.arrived.get(timeout=PATIENCE_S))
            except queue.Empty as error:
                raise RuntimeError(
                    f"synthesis: no picture of {description!r} came within {PATIENCE_S:.0f} s; look at the load of the "
                    "machine, or take fewer denoising steps (synthesis.num_inference_steps)"
                ) from error
        del self.asked[sample]
        return self.pictures.pop(sample)

    def forget(self, sample: str) -> None:
        """Keep no picture of this name, drawn or not."""
        self.asked.pop(sample, None)
        self.pictures.pop(sample, None)

    def _read(self, line: str) -> None:
        if not line:
            raise RuntimeError(self._ended())
        answer = json.loads(line)
        if "error" in answer:
            description = self.asked.get(answer["id"], answer["id"])
            raise RuntimeError(f"synthesis: {description!r} cannot be drawn: {answer['error']}")
        if answer["id"] not in self.asked:
            return
        self.pictures[answer["id"]] = Image.open(io.BytesIO(base64.b64decode(answer["png"]))).convert("RGB")

    def _ended(self) -> str:
        code = self.process.wait(timeout=10)
        return f"synthesis: the process that draws has ended with code {code}; what it said is above"

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(timeout=10)


PARKED = "synthesis"
"""In the loop's memory: groups of descriptions that wait for their pictures, oldest first."""


class Synthesis:
    """Descriptions that wait, in `loop.memory`, and the process that draws their pictures."""

    def __init__(self, config: VLMConfig, questions: Questions, policy: Policy, loop: Loop) -> None:
        assert config.synthesis is not None
        self.settings: Settings = config.synthesis
        self.config, self.questions, self.policy, self.loop = config, questions, policy, loop
        self.check = load_text(self.settings.check)
        self.server = DataServer(
            self.settings.pipeline, self.settings.num_inference_steps, self.settings.guidance_scale
        )
        self.known = False

    @property
    def parked(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.loop.memory.setdefault(PARKED, [])
        return groups

    def due(self) -> list[dict[str, Any]]:
        """Parked groups whose pictures are to be asked about in this iteration."""
        if not self.known:  # resumed, or done again: the server has yet to hear of those that wait
            for group in self.parked:
                self._submit(group)
            self.known = True
        return [group for group in self.parked if group["iteration"] < self.loop.iteration]

    def replaced(self, rows: Sequence[Row]) -> list[Row]:
        """The questions of the iteration, the first of them with pictures that were drawn."""
        synthetic = [
            self._row(group, k)
            for group in self.due()
            for k, description in enumerate(group["descriptions"])
            if description is not None
        ][: len(rows)]
        return [*synthetic, *rows[len(synthetic) :]]

    def _row(self, one: dict[str, Any], k: int) -> Row:
        source, name = self.questions[one["number"]], self._name(one, k)
        picture = self.picture_of(name)
        parts = tuple(part if isinstance(part, str) else picture for part in source.prompt.parts)
        return Row(name, replace(source.prompt, parts=parts, where=name), source.columns)

    def picture_of(self, name: str) -> Image.Image:
        """The picture of this name, from the server."""
        return self.server.take(name)

    def _name(self, one: dict[str, Any], k: int) -> str:
        return f"synthesis/{one['iteration']}/{one['number']}/{k}"

    def _submit(self, one: dict[str, Any]) -> None:
        for k, description in enumerate(one["descriptions"]):
            if description is not None:
                self.server.submit(description, self._name(one, k), self.config.seed)

    def described(self, number: int) -> Row:
        """The question about a description of a question's picture."""
        row = with_text(self.questions[number], self.settings.ask)
        return replace(row, name=f"describe/{row.name}")

    def park(self, numbers: Sequence[int], answers: Answers) -> None:
        """Hand the descriptions of these questions' pictures that pass the check to the server, and keep all."""
        size = answers.size
        for place, (number, row) in enumerate(zip(numbers, answers.rows, strict=True)):
            index = range(place * size, (place + 1) * size)
            texts = [answers.texts[k] for k in index]
            columns = {name: [value] * size for name, value in row.columns.items()}
            passed = score_completions(self.check, prompts=[""] * size, completions=texts, columns=columns)
            if passed.failures:
                raise ValueError(f"synthesis.check failed: {passed.failures[0].error}")
            descriptions = [answer_in(t) if value >= 1 else None for t, value in zip(texts, passed.values, strict=True)]
            lengths = answers.mask.sum(1).tolist()
            group = {
                "iteration": self.loop.iteration,
                "number": number,
                "descriptions": [text or None for text in descriptions],
                "tokens": [answers.tokens[k, : lengths[k]].tolist() for k in index],
                "log_probs": [answers.sampler_log_prob[k, : lengths[k]].tolist() for k in index],
                "texts": texts,
                "cut": [bool(answers.cut[k]) for k in index],
            }
            self.parked.append(group)
            self._submit(group)

    def paid(self, answers: Answers) -> tuple[list[Answers], dict[str, float]]:
        """The groups of descriptions whose pictures `answers` are about, with what they are worth, and figures of them.
        They wait no longer."""
        due, size, answer_groups, worths, num_pictures = self.due(), answers.size, [], [], 0
        spread = dict(zip([row.name for row in answers.rows], self._diversity(answers), strict=True))
        for group in due:
            names = [self._name(group, k) for k in range(size)]
            worth = [
                spread.get(name, math.nan) if description is not None else 0.0
                for name, description in zip(names, group["descriptions"], strict=True)
            ]
            num_pictures += sum(description is not None for description in group["descriptions"])
            # a picture that nobody asks about would stay with the server for ever
            for name in set(names) - set(spread):  # more pictures than questions in the iteration
                self.server.forget(name)
            worths += [value for value in worth if not math.isnan(value)]
            answer_groups.append(self._answers(group, worth))
            self.parked.remove(group)
        if not worths:
            return answer_groups, {}
        return answer_groups, {
            "synthesis/drawn": num_pictures / (size * len(due)),
            "synthesis/diversity_mean": sum(worths) / len(worths),
        }

    def _diversity(self, answers: Answers) -> list[float]:
        """Normalised entropy of each group's answers; 0 where none can be read."""
        values = diversity(answers.texts, answers.group.tolist())
        groups = [values[k : k + answers.size] for k in range(0, len(values), answers.size)]
        return [next((value for value in group if value is not None), 0.0) for group in groups]

    def _answers(self, one: dict[str, Any], worth: Sequence[float]) -> Answers:
        """A parked group. Its worth stands in the place of the first reward that counts, the others have no score."""
        row = self.described(one["number"])
        longest = max(map(len, one["tokens"]))

        def padded(rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
            return torch.tensor([values + [0] * (longest - len(values)) for values in rows], dtype=dtype)

        first = next(k for k, reward in enumerate(self.config.rewards) if reward.weight)
        label, weight = self.config.reward_labels[first], self.config.rewards[first].weight
        scores = {name: torch.full((len(worth),), math.nan, dtype=torch.float64) for name in self.config.reward_labels}
        # Over the weight, by which the total multiplies it again: the description is to be worth what it is.
        scores[label] = torch.tensor(worth, dtype=torch.float64) * (1.0 / weight)
        return Answers(
            [row],
            [self.policy.encode(row.prompt)],
            padded(one["tokens"], torch.int64),
            padded([[1] * len(tokens) for tokens in one["tokens"]], torch.bool),
            padded(one["log_probs"], torch.float32),
            list(one["texts"]),
            torch.tensor(one["cut"]),
            scores,
        )

    def close(self) -> None:
        """End the process that draws."""
        self.server.close()
