"""The small policies: the encoder, the statistics that they normalise by, their heads, their folders; TinyFlowVLA, of
half a million parameters, and DPPO's diffusion MLP for short chunks (arXiv 2409.00588).

A policy of your own is the shortest as a subclass of `EmbeddedPolicy`: see `genrl.vla.policies.policy`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from genrl.mdp.noise import seeded
from genrl.vla.policies.encoder import (
    MODES,
    ObservationEncoder,
    ResidualMLP,
    check_statistics,
    sinusoidal,
    value_head,
)
from genrl.vla.policies.folder import critic_of
from genrl.vla.policies.lerobot import Adapt, existing, write
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, POINTS, STATE, Batch, Inputs, NoiseHead, Statistics
from genrl.vla.policies.robot import normalise, unnormalise

if TYPE_CHECKING:
    from genrl.vla.config.sections import NewPolicy


_PROCESSORS = {"policy_preprocessor": "normalizer_processor", "policy_postprocessor": "unnormalizer_processor"}


@dataclass(frozen=True)
class EmbeddedConfig:
    """What makes a policy: what it reads, numbers of an action, actions of a chunk, values of the critic (0: none).

    Subclasses add the settings of their kind, with defaults; they are saved in config.json.
    """

    inputs: Inputs
    action_dim: int
    horizon: int
    critic: int = 0


_COMMON = ("inputs", "action_dim", "horizon")


class EmbeddedPolicy(nn.Module):
    """A network on the features [B, F] of an `ObservationEncoder`. stats: of `STATE`, `ACTION` and, where they are
    read, `ENVIRONMENT` and `POINTS`; the weights are initialised from torch's global generator.

    A context has "features", what the encoder saw: with a frozen one keep those of a rollout and begin at `context`.
    """

    Config: ClassVar[type[EmbeddedConfig]] = EmbeddedConfig
    name: str = ""
    """By which it is found: the `type` in its config.json."""
    value_head: nn.Module
    """On the features, [B, F] -> [B, values]; only with a critic."""

    def __init__(self, config: Any, stats: Statistics) -> None:
        super().__init__()
        check_statistics(config.inputs, config.action_dim, stats)
        self.config, self.stats = config, stats
        self.horizon, self.action_dim, self.critic = config.horizon, config.action_dim, config.critic
        self.inputs, self.image_size, self.points = config.inputs.keys, config.inputs.image, config.inputs.points
        self.encoder = ObservationEncoder(config.inputs, stats)

    @classmethod
    def new(cls, inputs: Inputs, action_dim: int, stats: Statistics, settings: NewPolicy) -> Self:
        """A policy with fresh weights. settings: of the section `policy.new`."""
        arguments = {field.name for field in fields(cls.Config)} - {*_COMMON, "critic"}
        if unknown := settings.args.keys() - arguments:
            raise ValueError(f"policy.new.args: {settings.type} has no {sorted(unknown)}; it has {sorted(arguments)}")
        defaults = {"train_steps": settings.train_steps} if "train_steps" in arguments else {}
        policy = cls(cls.Config(inputs, action_dim, settings.horizon, **(defaults | settings.args)), stats)
        policy.name = settings.type
        return policy

    def with_heads(self, *, critic: int, noise_head: NoiseHead, seed: int) -> Self:
        """The policy with a critic of so many values (0: none) and a noise head where it is asked for; heads that it
        lacked are new, by the seed, and so are a noise head in another place and a critic of other values.

        Raises ValueError for a noise head where its kind has none.
        """
        heads = {"critic": critic, "noise_head": noise_head}
        if "noise_head" not in {field.name for field in fields(self.config)}:
            if noise_head != "none":
                raise ValueError("sampler.kind: this policy has no noise head; choose a sampler that learns no noise")
            del heads["noise_head"]
        config = replace(self.config, **heads)
        if config == self.config:
            return self
        with seeded(seed, "heads"):
            new = type(self)(config, self.stats)
        fresh, old = new.state_dict(), self.state_dict()
        for setting, head in (("noise_head", "noise_head."), ("critic", "value_head.")):
            if setting in heads and getattr(self.config, setting) != heads[setting]:
                old = {name: value for name, value in old.items() if not name.startswith(head)}
        # Made anew with the heads and filled from the old one: heads whose shape changed keep their fresh weights.
        new.load_state_dict(fresh | {name: value for name, value in old.items() if name in fresh})
        new.name = self.name
        return new.to(next(self.parameters()).device)

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.encoder.tokenise(instructions)

    def encode(self, observation: Batch) -> Batch:
        return self.context(self.encoder(observation))

    def context(self, features: Tensor) -> Batch:
        """The context of features [B, F] that the encoder has computed."""
        return {"features": features}

    def value(self, context: Batch) -> Tensor:
        """Raises ValueError where the policy was made without a critic."""
        # Detached: the critic's loss is not to move what the policy sees by.
        values: Tensor = critic_of(self)(context["features"].detach())
        return values

    def normalised(self, actions: Tensor) -> Tensor:
        return normalise(actions, self.stats[ACTION], MODES["ACTION"])

    def actions(self, chunk: Tensor) -> Tensor:
        return unnormalise(chunk, self.stats[ACTION], MODES["ACTION"])

    def save(self, folder: Path) -> None:
        """Write the files of `genrl.vla.policies.folder`; each appears under its name when it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        shapes = _features(self.config.inputs)
        features = shapes | {ACTION: {"type": "ACTION", "shape": [self.action_dim]}}
        config = {
            "type": self.name,
            "input_features": shapes,
            "output_features": {ACTION: features[ACTION]},
            "normalization_mapping": MODES,
            "chunk_size": self.horizon,
            "vocabulary": list(self.config.inputs.vocabulary),
        }
        settings = {f.name: getattr(self.config, f.name) for f in fields(self.config) if f.name not in _COMMON}
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        stats = {f"{name}.{key}": value.cpu() for name, stat in self.stats.items() for key, value in stat.items()}
        write(folder / "model.safetensors", weights)
        for processor, step in _PROCESSORS.items():
            state = f"{processor}_step_0_{step}.safetensors"
            how = {"eps": 1e-8, "features": features, "norm_map": MODES}
            write(folder / state, stats)
            steps = [{"registry_name": step, "config": how, "state_file": state}]
            write(folder / f"{processor}.json", {"name": processor, "steps": steps})
        # Last: a folder with this file is complete.
        write(folder / "config.json", config | settings)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str, adapt: Adapt | None) -> Self:
        """What `save` wrote, in evaluation mode. Raises as `genrl.vla.policies.folder.load_policy`."""
        if adapt is not None:
            raise ValueError(f"{folder} holds an embedded policy, which is made with its heads: it takes no Adapt")
        config = json.loads(existing(folder, "config.json").read_text())
        if config["normalization_mapping"] != MODES:
            raise ValueError(
                f"{folder}/config.json: normalization_mapping must be {MODES}, found {config['normalization_mapping']}"
            )
        sizes = {name: int(feature["shape"][0]) for name, feature in config["input_features"].items()}
        image = config["input_features"].get(IMAGE, {"shape": [0]})["shape"][-1]
        widths = {"environment": sizes.get(ENVIRONMENT, 0), "image": int(image), "points": sizes.get(POINTS, 0)}
        inputs = Inputs(sizes[STATE], tuple(config["vocabulary"]), **widths)
        action, horizon = int(config["output_features"][ACTION]["shape"][0]), int(config["chunk_size"])
        settings = {f.name: config[f.name] for f in fields(cls.Config) if f.name not in _COMMON and f.name in config}
        settings["critic"] = int(settings["critic"])  # true or false in the first folders
        policy = cls(cls.Config(inputs, action, horizon, **settings), _statistics(folder))
        policy.name = config["type"]
        weights = load_file(existing(folder, "model.safetensors"))
        try:
            policy.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{folder}/model.safetensors does not fit {folder}/config.json: {error}") from error
        return policy.to(device).eval()


def _features(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """LeRobot's description: pictures channels first, as it hands them to a policy."""
    features: dict[str, dict[str, Any]] = {STATE: {"type": "STATE", "shape": [inputs.state]}}
    if inputs.environment:
        features[ENVIRONMENT] = {"type": "ENV", "shape": [inputs.environment]}
    if inputs.image:
        features[IMAGE] = {"type": "VISUAL", "shape": [3, inputs.image, inputs.image]}
    if inputs.points:
        features[POINTS] = {"type": "ENV", "shape": [inputs.points, 3]}
    return features


def _statistics(folder: Path) -> Statistics:
    description = json.loads(existing(folder, "policy_preprocessor.json").read_text())
    states = [step["state_file"] for step in description["steps"] if step["registry_name"] == "normalizer_processor"]
    if len(states) != 1 or Path(states[0]).name != states[0]:
        raise ValueError(
            f"{folder}/policy_preprocessor.json must name one file of statistics beside it, found {states}"
        )
    stats: Statistics = {}
    for name, value in load_file(existing(folder, states[0])).items():
        feature, _, statistic = name.rpartition(".")
        stats.setdefault(feature, {})[statistic] = value
    return stats


_PREFIX, _EXPERT, _TIME = 128, 256, 64


@dataclass(frozen=True)
class TinyFlowConfig(EmbeddedConfig):
    """noise_head: "expert", on the expert's hidden state (Flow-Noise); "context", on the context and the time alone,
    apart from the expert (ReinFlow)."""

    noise_head: NoiseHead = "none"


class TinyFlowVLA(EmbeddedPolicy):
    """Picture, instruction and state -> prefix [B, 128]; (chunk, sigma, prefix) -> velocity, zero before training.

    A context has "features", what the encoder saw, which the critic reads detached, and "prefix", which the expert
    reads.
    """

    Config: ClassVar[type[EmbeddedConfig]] = TinyFlowConfig
    name = "tiny_flow_vla"

    def __init__(self, config: TinyFlowConfig, stats: Statistics) -> None:
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
        self.prefix = ResidualMLP(self.encoder.size, _PREFIX, 2, nn.SiLU())
        self.expert = ResidualMLP(numbers + _TIME + _PREFIX, _EXPERT, 2, nn.SiLU())
        self.norm = nn.LayerNorm(_EXPERT)
        self.out = nn.Linear(_EXPERT, numbers)
        # At first the velocity is 0 and a chunk is its noise: nothing large that training would have to unlearn.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if config.critic:
            self.value_head = value_head(self.encoder.size, _PREFIX, 2, nn.SiLU(), config.critic)
        if config.noise_head != "none":
            head_input = _EXPERT if config.noise_head == "expert" else _TIME + _PREFIX
            self.noise_head = nn.Sequential(
                nn.Linear(head_input, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, numbers)
            )

    def context(self, features: Tensor) -> Batch:
        """The context of features [B, F] that the encoder has computed."""
        return {"features": features, "prefix": self.prefix(features)}

    def velocity(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        return self._read(self._think(context, x, sigma), x)

    def velocity_and_noise(self, context: Batch, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError where the policy was made without a noise head."""
        if self.config.noise_head == "none":
            raise ValueError("this policy has no noise head: make it with noise_head 'expert' or 'context'")
        thought = self._think(context, x, sigma)
        if self.config.noise_head == "expert":
            raw = self.noise_head(thought)
        else:
            raw = self.noise_head(torch.cat([sinusoidal(sigma, _TIME, longest=1.0), context["prefix"]], 1))
        return self._read(thought, x), raw.view(x.shape)

    def _think(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        expert_input = torch.cat([x.flatten(1).float(), sinusoidal(sigma, _TIME, longest=1.0), context["prefix"]], 1)
        thought: Tensor = self.norm(self.expert(expert_input))
        return thought

    def _read(self, thought: Tensor, x: Tensor) -> Tensor:
        velocity: Tensor = self.out(thought).view(x.shape)
        return velocity


_LEVEL, _HIDDEN, _CRITIC = 16, 512, 256


@dataclass(frozen=True)
class DiffusionMLPConfig(EmbeddedConfig):
    """train_steps: K of the noise schedule, 20 in DPPO from states, 100 from pictures."""

    train_steps: int = 20


class DiffusionMLP(EmbeddedPolicy):
    """(chunk, timestep, features) -> noise: three layers of 512 with a residual, Mish; the critic, of 256, sees only
    the observation.

    The encoder is that of `TinyFlowVLA`, where DPPO has a vision transformer.
    """

    Config: ClassVar[type[EmbeddedConfig]] = DiffusionMLPConfig
    name = "diffusion_mlp"

    def __init__(self, config: DiffusionMLPConfig, stats: Statistics) -> None:
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
        self.time = nn.Sequential(nn.Linear(_LEVEL, 2 * _LEVEL), nn.Mish(), nn.Linear(2 * _LEVEL, _LEVEL))
        self.body = ResidualMLP(numbers + _LEVEL + self.encoder.size, _HIDDEN, 1, nn.Mish())
        self.out = nn.Linear(_HIDDEN, numbers)
        if config.critic:
            self.value_head = value_head(self.encoder.size, _CRITIC, 1, nn.Mish(), config.critic)

    @property
    def train_steps(self) -> int:
        """Noise levels."""
        steps: int = self.config.train_steps
        return steps

    def noise(self, context: Batch, x: Tensor, timestep: Tensor) -> Tensor:
        time = self.time(sinusoidal(timestep.to(x.device), _LEVEL, longest=float(self.config.train_steps)))
        predicted: Tensor = self.out(self.body(torch.cat([x.flatten(1).float(), time, context["features"]], 1)))
        return predicted.view(x.shape)
