"""The sections of a run that trains a policy in simulation.

The text under each field is its description. Sources named there: pi_RL (arXiv 2510.25889), DPPO (2409.00588),
ReinFlow (2505.22094), SimpleVLA-RL (2509.09674).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.plugins import names
from genrl.config.section import Count, Flag, NonNegative, Positive, Section, Share, Text, Ways, Whole
from genrl.config.sections import EvaluationBase, Optimizer
from genrl.vla.config.names import POLICIES, PREDICTS, PUBLISHED, SAMPLERS


class NewPolicy(Section):
    """A small policy with fresh weights, for supervised training."""

    type: Text = "tiny_flow_vla"
    """tiny_flow_vla, a flow policy of half a million parameters; diffusion_mlp, DPPO's diffusion MLP; act, LeRobot's
    ACT; an installed policy; or path/file.py:Name."""
    horizon: Count = 4
    """Actions in a chunk."""
    image_size: Whole = 32
    """Side of the picture that it sees, in pixels; 0 = none."""
    points: Whole = 0
    """Points of the cloud that it sees (DP3, RL-100: 512 or 1024); 0 = none. Where it sees neither picture nor points
    it gets the state of the environment instead."""
    train_steps: Ways = 20
    """Noise levels of a diffusion policy (DPPO: 20 from states, 100 from pictures)."""
    args: dict[str, Any] = {}
    """Settings of a policy of your own, by name; of act, by LeRobot's names: {dim_model: 128, dropout: 0}."""

    @property
    def looks(self) -> bool:
        """Whether it sees anything."""
        return self.image_size > 0 or self.points > 0

    def problems(self, sampled: str) -> Iterator[Finding]:
        """A type that cannot be made, or that predicts something else than the sampler needs, `sampled`."""
        trainable = [name for name in names(POLICIES) if name not in PUBLISHED]
        predicts = PREDICTS.get(self.type, sampled)
        if self.type in PUBLISHED:
            yield ("policy.new.type",), f"{self.type} is a published policy: write its folder as policy.path"
        elif self.type not in trainable and ".py" not in self.type:
            close = get_close_matches(self.type, trainable, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}? " if close else ""
            text = f"found {self.type!r}; {hint}they are: {', '.join(trainable)}; or name a file: path/file.py:Name"
            yield ("policy.new.type",), text
        elif predicts != sampled:
            text = f"{self.type} predicts {predicts}; write sampler.kind: {SAMPLERS[predicts]}"
            yield ("policy.new.type", "sampler.kind"), text


class PolicyLoRA(Section):
    """Low-rank adapters; only they, the critic and a noise head are trained."""

    rank: Count = 32
    """Rank of the adapters (openpi: 32 on the action expert, 16 on the language model)."""
    alpha: Positive = 32.0
    """Scale; the update is multiplied by alpha / rank (openpi: as the rank)."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Last parts of the names of the layers to adapt; null = the attention projections."""


class OFT(Section):
    """OpenVLA-OFT: what the published folders do not say."""

    unnorm_key: Text | None = None
    """Data set whose statistics map actions to the robot's units (libero_10_no_noops), which the folder names; null =
    its only one."""
    chunk: Count = 8
    """Actions of a chunk (LIBERO: 8)."""
    cameras: Annotated[tuple[Text, ...], Field(min_length=1)] = ("observation.image",)
    """Pictures that it reads, in this order, by the environment's names (LIBERO: observation.images.image, and
    observation.images.image2 at the hand)."""
    centre_crop: Flag = True
    """Show it the central 0.9 of a picture, as it was trained with augmented ones."""


class Policy(Section):
    """Which policy is trained, and what of it."""

    path: Text | None = None
    """Folder or hub id (lerobot/pi0_libero_finetuned) of a policy as LeRobot saves it (config.json, model.safetensors),
    or of an OpenVLA-OFT; or the folder of a run; null = `new`."""
    new: NewPolicy | None = None
    """A small policy with fresh weights; null = `path`."""
    rename: dict[Text, Text] = {}
    """Published policies: the environment's name -> the policy's (LeRobot's rename_map); where it names a camera,
    others stay empty, and one that the environment shows under the policy's own name is refused."""
    statistics: Literal["checkpoint", "data"] = "checkpoint"
    """By what a published policy normalises: what its folder holds, or what demonstrations.dataset has (a base model
    holds nothing; a checkpoint learns again what a number means)."""
    padded_state: Flag | None = None
    """pi0.5: write the state into the prompt with the zeros that pad it, as LeRobot 0.4 did; false = the robot's own
    numbers alone, as openpi and later releases write them; null = as a folder of ours says, else false."""
    oft: OFT | None = None
    """OpenVLA-OFT: what its folder does not say; null = as a folder of ours says, else the defaults."""
    freeze: Literal["nothing", "encoder"] = "encoder"
    """What of a loaded policy is not trained: nothing, or what sees and reads (a VLM, the embedded encoder)."""
    lora: PolicyLoRA | None = None
    """pi0, pi0.5, SmolVLA, GR00T, OpenVLA: low-rank adapters in the layers that would be trained; null = their weights
    are trained."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """pi0, pi0.5, SmolVLA, GR00T, OpenVLA: numbers of the weights that are not trained, and of what these compute; null
    = float32, and as in the file what the folder itself freezes. What is trained is float32."""
    gradient_checkpointing: Flag = False
    """pi0, pi0.5, SmolVLA, GR00T, OpenVLA: compute the activations of the layers again in the backward pass instead of
    keeping them: less memory, a third more training time."""

    @property
    def frozen(self) -> bool:
        """Whether the encoder is not trained; that of a new policy always is."""
        return self.path is not None and self.freeze == "encoder"


class Environment(Section):
    """Where the policy acts."""

    name: Text
    """minitable, metaworld, point_maze, fetch, reacher, a gymnasium id, or path/file.py:function that makes an
    environment."""
    tasks: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Which tasks, by name; null = the environment's own choice."""
    num_envs: Count = 64
    """Environments that run side by side, over all processes."""
    group_size: Count = 1
    """Neighbouring environments that begin every episode from the same state (GRPO: 8)."""
    chunk: Count | None = None
    """Actions of a chunk that are executed before the policy is asked again; null = all of them."""
    max_steps: Count | None = None
    """Actions after which an episode is cut off; null = the environment's own limit."""
    workers: Whole | Literal["ray", "ray_simulators"] = 0
    """Processes that the simulators run in; 0 = this one; ray = Ray actors, which act with copies of the policy;
    ray_simulators = Ray actors, and the policy stays here."""
    staleness: Whole = 0
    """Act with the weights of so many iterations before: 0 = the newest; 1 or more = with workers: ray, actors act
    while the policy is trained. PPO, GRPO (docs/ray.md)."""
    timeout_s: Positive = 60.0
    """Seconds after which a worker that does not answer is restarted and its episodes are dropped; twice as many where
    an episode begins, for which a simulator may have to be made."""
    reward: Literal["success", "environment"] = "success"
    """1 at success, or what the environment pays."""
    goals: Whole = 0
    """Fixed starts of each task, a function of evaluation.seed; 0 = a new one for every episode (not MiniTable)."""
    instruction: Text | None = None
    """gymnasium: the sentence that the policy is told, where the environment has no task_description of its own."""
    success_key: Text | None = "is_success"
    """gymnasium: the entry of info that says success; null = there is none, its own rewards are all that it pays."""
    cost_key: Text | None = None
    """gymnasium: the entry of info that is the cost of an action, for methods that limit it; null = none."""
    proprioception: Whole = 0
    """gymnasium: how many of the first numbers of an observation are the robot's own state."""
    args: dict[str, Any] = {}
    """gymnasium: keyword arguments of gymnasium.make, or of the function."""


class Demonstrations(Section):
    """What supervised training imitates, and offline methods learn from: exactly one source."""

    expert: Count | None = None
    """Episodes of the environment's scripted expert, of each task (MiniTable: of all together); null = `dataset`."""
    dataset: Text | None = None
    """Folder or hub id of a LeRobotDataset v3, a folder of Minari, or a file of DSRL (.hdf5); null = `expert`."""
    camera: Text = "observation.image"
    """Column of the data set that is the picture of a policy with one camera."""


class Sampler(Section):
    """What the samplers share: the facts that methods ask."""

    predicts: ClassVar[Literal["velocity", "noise", "tokens", "actions"]] = "velocity"
    """What the policy has to predict."""
    noise_head: ClassVar[Literal["none", "expert", "context"]] = "none"
    """Where the policy has a head that sets the noise: on its action expert, beside it, or nowhere. With one, the whole
    chain is one decision; without, every sampled step is."""

    @property
    def first_steps(self) -> int:
        """Denoising steps that are not trained, and done by the policy as it was before (DPPO)."""
        return 0

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings for a policy. whole_chain: every denoising step is trained, none sampled."""
        raise NotImplementedError

    def problems(self) -> Iterator[Finding]:
        """Settings that contradict each other."""
        return iter(())


class FlowSDE(Sampler):
    """Flow-SDE of pi_RL: some denoising steps are sampled, each is a decision with a ratio of its own."""

    kind: Literal["flow_sde"] = "flow_sde"
    """Which sampler."""
    steps: Ways = 4
    """Denoising steps K (pi0: 4; pi0.5: 3 to 5)."""
    noise_level: Positive = 1.0
    """Noise a of the sampled step (pi_RL: 0.5; a small policy needs 1)."""
    selection: Literal["all", "random_per_env", "random_per_batch", "last"] = "random_per_env"
    """Which steps are sampled, the others being the ODE's: all, one at random per chunk, one for all chunks (pi_RL as
    released), or the last one."""

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings."""
        from genrl.vla.rollout.sampling import FlowSteps

        return FlowSteps(self.kind, self.steps, self.noise_level, self.selection)


class FlowCPS(FlowSDE):
    """Flow-CPS: as Flow-SDE, with a kernel that keeps the noise level; its last step is never sampled."""

    kind: Literal["flow_cps"] = "flow_cps"  # type: ignore[assignment]
    """Which sampler."""
    noise_level: Share = 0.7
    """Noise of the sampled step, all of which is replaced at 1 (RL-100: 0.7)."""


class FlowNoise(Sampler):
    """Flow-Noise of pi_RL: a head of the policy sets the noise of every step, and the chain is one decision."""

    noise_head: ClassVar[Literal["none", "expert", "context"]] = "expert"

    kind: Literal["flow_noise"] = "flow_noise"
    """Which sampler."""
    steps: Count = 4
    """Denoising steps K."""
    std: tuple[Positive, Positive] = (0.2, 0.6)
    """Least and greatest standard deviation (pi_RL: [0.08, 0.16]; a small policy needs [0.2, 0.6])."""

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings; the mean of the chain's terms is pi_RL's as released, its equation sums."""
        from genrl.vla.rollout.sampling import LearnedNoise

        return LearnedNoise(self.steps, *self.std)

    def problems(self) -> Iterator[Finding]:
        """Bounds in the wrong order."""
        if self.std[0] > self.std[1]:
            yield ("sampler.std",), "the standard deviation lies between them; the first must be the smaller"


class ReinFlow(FlowNoise):
    """ReinFlow: as Flow-Noise, with a noise network of its own; means and actions are clipped to 1, noise to 3 std."""

    noise_head: ClassVar[Literal["none", "expert", "context"]] = "context"

    kind: Literal["reinflow"] = "reinflow"  # type: ignore[assignment]
    """Which sampler."""
    steps: Count = 4
    """Denoising steps K (ReinFlow: 4 from states, 1 from pictures)."""
    std: tuple[Positive, Positive] = (0.08, 0.24)
    """Least and greatest standard deviation (ReinFlow: 0.05 to 0.10, and 0.10 to 0.24)."""

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings, with ReinFlow's clips."""
        from genrl.vla.rollout.sampling import LearnedNoise

        clips: dict[str, Any] = {"mean_clip": 1.0, "noise_clip": 3.0, "last_clip": 1.0}
        return LearnedNoise(self.steps, *self.std, reduction="sum", **clips)


class Diffusion(Sampler):
    """DPPO: a DDPM or DDIM chain whose last steps are trained, each a decision; a frozen copy does the first ones."""

    predicts: ClassVar[Literal["velocity", "noise", "tokens", "actions"]] = "noise"

    kind: Literal["diffusion"] = "diffusion"
    """Which sampler."""
    steps: Count = 20
    """Denoising steps; all of the policy's (DDPM), or fewer (DDIM)."""
    ft_denoising_steps: Count = 10
    """How many of the last ones are trained (DPPO: 10 of 20, or all 5 of DDIM)."""
    floor: Positive = 0.1
    """Least standard deviation of a step, to sample and to score (DPPO: 0.1)."""

    @property
    def first_steps(self) -> int:
        """See `Sampler`."""
        return self.steps - self.ft_denoising_steps

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings. Raises ValueError for a policy of fewer noise levels."""
        from genrl.vla.rollout.sampling import Diffusion

        levels, steps = policy.train_steps, self.steps
        if steps > levels:
            raise ValueError(f"sampler.steps: the policy knows {levels} noise levels, {steps} are more")
        return Diffusion(levels, steps, steps if whole_chain else self.ft_denoising_steps, self.floor)

    def problems(self) -> Iterator[Finding]:
        """More trained steps than there are."""
        if self.ft_denoising_steps > self.steps:
            text = f"{self.ft_denoising_steps} of {self.steps} steps cannot be trained"
            yield ("sampler.ft_denoising_steps", "sampler.steps"), text


class Tokens(Sampler):
    """Action tokens of OpenVLA-OFT: every number of a chunk is drawn, all at once; evaluation takes the likeliest."""

    predicts: ClassVar[Literal["velocity", "noise", "tokens", "actions"]] = "tokens"
    steps: ClassVar[int] = 1

    kind: Literal["tokens"] = "tokens"
    """Which sampler."""
    temperature: Positive = 1.0
    """Of the logits, in drawing and in scoring (SimpleVLA-RL, RLinf: 1.6)."""

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler of these settings."""
        from genrl.vla.rollout.sampling import Tokens

        return Tokens(self.temperature)


class Regression(Sampler):
    """Actions that the policy computes (ACT, the continuous head of OpenVLA-OFT): nothing is drawn, so there is no
    reinforcement."""

    predicts: ClassVar[Literal["velocity", "noise", "tokens", "actions"]] = "actions"
    steps: ClassVar[int] = 1

    kind: Literal["regression"] = "regression"
    """Which sampler."""

    def made(self, policy: Any, *, whole_chain: bool) -> Any:
        """The sampler, which has no settings."""
        from genrl.vla.rollout.sampling import Regression

        return Regression()


class PolicyOptimizer(Optimizer):
    """The optimiser and its schedule; the critic has a rate of its own."""

    lr: Positive = 1e-4
    """Learning rate of the policy (small policies: 1e-4; pi_RL on pi0: 5e-6)."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critic (pi_RL: 1e-4; DPPO: 1e-3)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""


class Evaluation(EvaluationBase):
    """Seeded episodes without exploration: the ODE, or DDIM, from fixed initial noise."""

    every: Whole = 5
    """Evaluate every so many iterations, and at the start and the end; 0 = never."""
    episodes: Count = 256
    """Episodes, always the same."""
    num_envs: Count | None = None
    """Environments side by side; null = environment.num_envs, or `episodes` if that is fewer. Those of training serve,
    where they are enough; others would stay beside them."""
    seed: Whole = 1234
    """Seed of the episodes and of the initial noise."""
    videos: Whole = 4
    """Episodes that are filmed, successes and failures; 0 = none."""
