"""DiWA, DPPO in a world model (arXiv 2508.03645): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Section
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.methods.settings import on_the_table

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


RIGHT = "share of the paid frames in which the table fulfils the instruction"
RECALL = "share of the frames that fulfil an instruction which are paid"
HELD_OUT = "over frames of play that nobody trained on, for all instructions"
DREAMED = ", dreamed once more with its own actions, without looking"
PAID = "Far below 1: dreams pay for the wrong things, and training in them teaches these."
MISSED = "Near 0 where `classifier/accuracy` is high: the classifier knows ends of demonstrations alone."


class World(Section):
    """A recurrent world model, trained once on play."""

    tables: Count = 1500
    """Episodes of play, 64 actions each."""
    steps: Count = 2500
    """Updates."""
    window: Count = 16
    """Actions of a training sequence."""


class Classifier(Section):
    """Says of a latent whether the instruction is fulfilled; trained on demonstrations."""

    steps: Count = 1500
    """Updates (DiWA: 100 epochs)."""


class DiWA(PPO):
    """DiWA: DPPO inside a frozen world model; the real environment is for evaluation only."""

    title: ClassVar[str] = "DiWA"
    one_process: ClassVar[bool] = True
    imitates = "never"
    acts_through: ClassVar[str] = "its world model, in whose latents it sees"
    takes = frozenset()
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "world/reconstruction": MetricDoc(
            "half the squared error of an observation decoded from its latent, summed over normalised numbers",
            "Below 0.01: latents hold what was seen.",
        ),
        "world/kl": MetricDoc(
            "KL(posterior || prior) of a step, summed over z", "What the model could not foresee.", "nats"
        ),
        "classifier/loss": MetricDoc(
            "cross-entropy plus the weighted contrastive loss; mean over updates", "Falls early."
        ),
        "classifier/accuracy": MetricDoc(
            "share of its training examples that the reward classifier gets right; mean over updates",
            "Below about 0.95: dreams pay for the wrong things.",
            "share 0..1",
        ),
        "calibration/seen_precision": MetricDoc(f"{RIGHT}, {HELD_OUT}", PAID, "share 0..1"),
        "calibration/seen_recall": MetricDoc(f"{RECALL}, {HELD_OUT}", MISSED, "share 0..1"),
        "calibration/dreamed_precision": MetricDoc(f"{RIGHT}, {HELD_OUT}{DREAMED}", PAID, "share 0..1"),
        "calibration/dreamed_recall": MetricDoc(f"{RECALL}, {HELD_OUT}{DREAMED}", MISSED, "share 0..1"),
    }

    algorithm: Literal["diwa"] = "diwa"  # type: ignore[assignment]
    """Which trainer."""
    world: World = World()
    """The model of the world."""
    classifier: Classifier = Classifier()
    """The reward in it."""
    imitation_steps: Count = 1500
    """Steps of imitation, on demonstrations as the world model sees them."""

    def _start(self, config: VLAConfig) -> Iterator[Finding]:
        yield from on_the_table(config, self.algorithm, diffusion=True)
        if config.demonstrations is None or config.demonstrations.expert is None:
            yield ("demonstrations.expert",), "diwa imitates the expert in latents; write a number of episodes"
        if config.sampler.kind != "diffusion":
            yield ("sampler.kind",), "diwa is DPPO in a world model; write diffusion"
