"""The typed configuration: every key of a YAML file, its type, range, default and one-line meaning.

The text under each field is its description: it goes into the JSON schema (`genrl config schema`) and into
`genrl check --explain`. Sources named there: Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), MixGRPO
(2507.21802), DiffusionNFT (2509.16117), Coefficients-Preserving Sampling (2509.05952).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from genrl.config.combinations import refuse_impossible
from genrl.config.section import (
    Count,
    Flag,
    Fraction,
    Margin,
    NonNegative,
    Number,
    Positive,
    Section,
    Share,
    Text,
    Ways,
    Whole,
)
from genrl.config.sections import EMA, Checkpoint, Distributed, LoRA, Monitor, Optimizer, Precision, Tracker

AdvantageScale = Literal["group", "global", "none"]
Kernel = Literal["flow_sde", "dance_sde", "wan_sde", "flow_cps", "flow_ddim", "ddim"]
ReferenceKL = Literal["gaussian", "gaussian_dt", "mean_square", "velocity", "x_prediction", "k2"]
Attention = Literal["auto", "math", "efficient", "cudnn", "flash", "flash2", "flash3", "xformers"]

# The names of attention projections in diffusers, over all model families: what an adapter is put on by default.
ATTENTION_LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "to_added_qkv", "to_qkv_mlp_proj"),
)


class Model(Section):
    """Which diffusers pipeline to train, and in which precision."""

    path: Text
    """Folder of a saved diffusers pipeline (has model_index.json), or a hub id such as org/name."""
    revision: Text | None = None
    """Branch, tag or commit of the hub id; null = the main branch. Pin a commit to reproduce a run."""
    variant: Text | None = None
    """Variant of the weight files, for example fp16; null = the plain ones."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights are always float32."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Precision of the forward passes; null = the weights' own."""
    lora: LoRA | None = LoRA()
    """Low-rank adapters; null = train every weight of the denoiser."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: much less memory, about a third more time."""
    offload_text_encoders: Flag = False
    """Move the text encoders off the device once the prompts are encoded."""
    offload_vae: Flag = False
    """Keep the VAE off the device but while it encodes or decodes."""
    slice_vae: Flag = False
    """Decode pictures one by one: less memory where they are large; the same up to rounding."""


class Kernels(Section):
    """Fused kernels, attention back-ends and compilation (docs/kernels.md, docs/speed.md). All are off: none has been
    timed on a GPU yet."""

    fused: tuple[Literal["qk_norm_rope", "adaln", "step"], ...] = ()
    """What runs in one pass: norm and rotation of queries and keys; gate, residual, norm and modulation (both in SD3.5,
    FLUX, Qwen-Image and Wan); a stochastic step and its log-probability (flow models)."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """What computes them: auto = Triton on a GPU, else the torch functions that define them; a name = that or an
    error."""
    attention: Attention | None = None
    """Back-end of the joint attention: auto = torch chooses; a name = that or an error; null = diffusers' own."""
    evaluation_attention: Attention | Literal["sage"] | None = None
    """Another one for evaluation, where no ratio depends on it; null = as in training."""
    compile: Flag | Literal["cuda_graphs"] = False
    """Compile the denoiser by torch, in sampling, training and evaluation: true, or cuda_graphs = with its launches
    recorded too (a GPU; algorithms flow_grpo and diffusion_nft; not tried on one yet)."""


class Prompts(Section):
    """Which prompts to train and evaluate on."""

    train: Text
    """Prompt file (.txt: one per line; .jsonl: a prompt column and any others), or data set id:split."""
    eval: Text | None = None
    """Held-out prompts, same formats; needed while evaluation.every is above 0."""
    column: Text = "prompt"
    """Name of the prompt's column in a .jsonl file or a data set."""


class Gate(Section):
    """A reward counts only where another one is good enough; elsewhere it is replaced before it is normalised."""

    reward: Text
    """The other one, as it is named in the log: its name, or what stands after the colon of a file."""
    at_least: Number
    """Threshold, in the other one's own units."""
    otherwise: Number = 0.0
    """What a sample below the threshold scores instead, in this reward's own units."""


class Outage(Section):
    """A reward in another process or on a server: how long is waited for it, and what happens then."""

    timeout_s: Positive = 60.0
    """Seconds for one attempt, from connecting to the end of the reply."""
    deadline_s: Positive = 180.0
    """Seconds for one call with all its attempts."""
    policy: Literal["stop", "drop", "pause"] = "stop"
    """At the deadline: stop the run, leave out these samples, or wait pause_s longer and then stop."""
    pause_s: Positive = 300.0
    """Seconds that `pause` waits for a server to come back."""


class Reward(Section):
    """One reward of the weighted sum."""

    name: Text
    """Built-in or installed name (see `genrl rewards`), or path/file.py:function_or_class."""
    weight: Number = 1.0
    """Factor in the sum that is trained on; 0 = only logged; negative = a penalty."""
    args: dict[str, Any] = {}
    """Keyword arguments of the reward's class, where it has them also device and dtype."""
    schedule: tuple[tuple[Whole, Number], ...] = ()
    """Points [iteration, factor on the weight], linear between them and constant outside; empty = 1."""
    normalize: Literal["none", "group", "running"] = "none"
    """Centre and divide by the spread: of the sample's group, or of all scores of the run so far."""
    gate: Gate | None = None
    """Count this reward only where another one is good enough; null = always."""
    offload: Flag = False
    """Move its model off the device while nothing is scored."""
    batch_size: Count | None = None
    """Most samples per call; null = those of a micro-batch."""
    cache: Whole = 0
    """Remember the scores of so many samples, by their content; 0 = none."""
    remote: Text | None = None
    """URL of a `genrl serve` of this reward, which is then not loaded here; null = none. Its token, if it asks for
    one, is taken from the environment variable GENRL_REWARD_TOKEN."""
    isolate: Flag | Text = False
    """Run it in a process of its own, started and ended with the run; a folder = in that virtual environment."""
    outage: Outage = Outage()
    """What happens when the server or the process does not answer."""


class Sampling(Section):
    """How pictures (or videos) are drawn for training."""

    num_inference_steps: Count = 10
    """Denoising steps of a rollout (Flow-GRPO on SD3.5: 10)."""
    guidance_scale: NonNegative | None = None
    """Guidance handed to the pipeline; null = the pipeline's default; 1 = off in most pipelines."""
    height: Count | None = None
    """Height in pixels; null = the pipeline's default."""
    width: Count | None = None
    """Width in pixels; null = the pipeline's default."""
    num_frames: Count | None = None
    """Frames of a video pipeline; null = its default, or a picture."""
    prompts_per_iteration: Count = 8
    """Different prompts in one iteration, over all processes (Flow-GRPO: 48)."""
    group_size: Count = 8
    """Samples per prompt, compared with each other; at least 2 (Flow-GRPO: 24)."""
    batch_size: Count = 8
    """Samples per call of the denoiser, in rollout and in training alike."""
    fit_batch: Flag = False
    """Take batch_size as the most: before training find how many fit into memory, by halving, in all processes; and do
    an iteration again with half where memory runs out later."""
    same_initial_noise: Flag = False
    """Start all samples of a group from one noise (DanceGRPO: true)."""
    pipeline_args: dict[str, Any] = {}
    """Further keyword arguments of the pipeline's call, for example max_sequence_length."""
    inputs: dict[str, Text] = {}
    """Pictures that the pipeline is given with each prompt: argument of its call -> column that names the file, for
    example {image: source_image} to train an editing model."""
    score_in_background: Flag = False
    """Score a micro-batch in a second thread while the next one is drawn; the results are the same."""

    @property
    def images_per_iteration(self) -> int:
        """Samples drawn in one iteration, over all processes."""
        return self.prompts_per_iteration * self.group_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one iteration, over all processes."""
        return -(-self.images_per_iteration // self.batch_size)


class Window(Section):
    """The stretch of steps that is stochastic and trained; all others are deterministic."""

    size: Count = 2
    """Number of consecutive stochastic steps (Flow-GRPO-Fast: 2 or 3, MixGRPO: 4)."""
    low: Whole = 0
    """First step where the window may begin."""
    high: Count | None = None
    """The window ends before this step; null = before the last step, which is never stochastic."""
    schedule: Literal["random", "progressive", "decaying", "geometric", "backward"] = "random"
    """Its place in an iteration: uniform; down the schedule (MixGRPO), faster and faster; early starts likelier
    (TreeGRPO); or the last steps, more and more of them (B2-DiffuRL)."""
    every: Count = 25
    """Iterations that it stays in one place (progressive; decaying: at first)."""
    stride: Whole = 1
    """Steps that it moves by (progressive, decaying); 0 = never (MixGRPO's frozen window)."""
    decay_from: Whole = 13
    """Start from which on it stays exp(-0.1) times shorter per step (decaying; MixGRPO: 13 of 25)."""
    ratio: Share = 0.5
    """Likelihood of a start against the one before it (geometric; TreeGRPO: 0.5); 1 = uniform."""
    shortest: Count | None = None
    """Size at the beginning (backward); it grows to `size` over the run (B2-DiffuRL: 14 to 20 of 20 steps)."""


class Prune(Section):
    """Edges that are not trained (BranchGRPO, arXiv 2509.06040)."""

    depths: tuple[Count, ...] = ()
    """Leave out the edges into these depths (step + 1); consecutive ones."""
    slide_every: Count | None = None
    """Move `depths` up the tree by one every so many iterations, as far as the last split; null = never."""
    width: Literal["best_sibling", "extremes"] | None = None
    """Below the last split keep the better leaf of each parent, or the best and worst leaves; null = all."""
    keep: Share = 0.5
    """Share of the leaves that `extremes` keeps, half best and half worst."""
    until: Share = 1.0
    """Share of the iterations in which pruning is on, from the first."""


class Contrast(Section):
    """Train only the best and the worst leaf of each split, by scores over a prompt's history (B2-DiffuRL)."""

    high: Number = 0.5
    """The best is trained if its score is at least this."""
    low: Number = -0.5
    """The worst is trained if its score is below this."""
    history: Whole = 8
    """Earlier iterations of a prompt that its scores are measured against, besides the running one."""


class Tree(Section):
    """The samples of a group are leaves of trees: what they share is run once."""

    ways: Ways
    """Children of every state at a step that branches (TreeGRPO 3, BranchGRPO and Dynamic-TreeRPO 2)."""
    at: Literal["window", "window_start"] | tuple[Whole, ...] = "window_start"
    """Steps that branch: all of the window, its first one, or these. group_size is a multiple of the leaves."""
    spread: Positive | None = None
    """Noises of siblings have correlation 1 / (1 + spread^2) (BranchGRPO: 4); null = independent."""
    noise_growth: NonNegative = 0.0
    """The noise level grows from the first to the last branching step by this share (Dynamic-TreeRPO: 0.5)."""
    credit: Literal["mean", "path_softmax", "level_softmax"] = "mean"
    """Value of a shared edge: the mean of its leaves, or weighted by their likelihood along the path or level by
    level (TreeGRPO)."""
    sharpness: NonNegative = 1.0
    """Factor on the log-probabilities in the softmax weights; 0 = mean."""
    normalise: Literal["group", "depth"] = "group"
    """Advantages are those of the leaves, or of all values at one depth (BranchGRPO; four or more)."""
    weight: Literal["leaf_multiplicity", "per_edge"] = "leaf_multiplicity"
    """An edge counts as often as it has leaves (as if rollouts were separate), or once (BranchGRPO, TreeGRPO)."""
    prune: Prune | None = None
    """Edges that are not trained; null = all are."""
    contrast: Contrast | None = None
    """Train only the extremes of each split; null = all."""


class LayerTuning(Section):
    """LayerTuning-RL of Dynamic-TreeRPO: clip bounds that follow the advantage, and a pull towards the best sample."""

    weight: NonNegative = 0.1
    """Weight of the squared distance to the target velocity."""
    target: Literal["best_path", "best_image"] = "best_path"
    """Velocity on the best leaf's path at the same step, or the one that leads to the best leaf's image."""
    sensitivity: NonNegative = 0.5
    """How much wider the clip range is for large advantages."""


class PromptHistory(Section):
    """What an advantage is measured against where it is not the group (DDPO's statistics per prompt)."""

    size: Count = 16
    """Last rewards of a prompt that are remembered, this iteration's included (DDPO: 16)."""
    min_count: Count = 8
    """With fewer, a prompt is measured against the whole iteration (DDPO: 8)."""


class FlowGRPO(Section):
    """Policy gradient on the denoising steps (arXiv 2505.05470), with the kernels of its successors."""

    algorithm: Literal["flow_grpo"] = "flow_grpo"
    """Which trainer."""
    kernel: Kernel = "flow_sde"
    """Transition density of a stochastic step; ddim is for epsilon- and v-prediction models."""
    noise_level: NonNegative | None = 0.7
    """Noise of the kernel (flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, (flow_)ddim eta 1); wan_sde: null."""
    window: Window | None = None
    """Train only a stretch of steps, placed once per iteration; null = all steps but the last."""
    noise_outside_window: Flag = False
    """Draw the steps outside the window too, without training them (B2-DiffuRL); false = they are deterministic."""
    tree: Tree | None = None
    """Share the beginnings of a group's samples (docs/trees.md); null = independent samples."""
    tail_ratio: Share | None = None
    """Take the steps after the window by DPM-Solver++ in this share of them (MixGRPO-Flash: 0.4); null = all."""
    layer_tuning: LayerTuning | None = None
    """Supervised pull towards the best sample of a tree, and dynamic clip bounds; null = none."""
    advantage_scale: Literal["group", "global", "none", "prompt_history"] = "group"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing; or measure them
    against the prompt's last rewards, in groups of any size (DDPO)."""
    history: PromptHistory = PromptHistory()
    """Of advantage_scale: prompt_history."""
    aggregate: Literal["sum", "gdpo", "log_tame", "log_tame_released"] = "sum"
    """Several rewards to one advantage: of their weighted sum; of each by itself, then summed and whitened (GDPO); of
    the sum in which those that vary most are log(1 + r) (PaCo-GRPO's paper), or that sum itself (its code)."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (all peers: 5)."""
    objective: Literal["importance", "score_function"] = "importance"
    """Clipped importance ratios, or -A log p (DDPO's score function), for one update per iteration."""
    guard: Flag = False
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled alike at all steps, losses divided by the step."""
    clip_range: Positive | tuple[Positive, Positive] = 1e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Flow-GRPO 1e-4, guard 2e-6 to
    4e-6)."""
    kl_weight: NonNegative = 0.0
    """Weight of the divergence from the starting model (Flow-GRPO: 0 to 0.04)."""
    kl: ReferenceKL = "gaussian"
    """Which divergence: gaussian (exact), gaussian_dt (Flow-GRPO's, of SDE kernels), mean_square, velocity,
    x_prediction (of the predicted data), k2 (half the squared log-ratio)."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-probability over the latent's numbers: mean (all peers; clip_range assumes it) or sum."""
    guidance_in_training: Flag = True
    """Use classifier-free guidance in training as in sampling. An input of the model (FLUX.1-dev) always stays."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (Flow-GRPO: 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (Flow-GRPO: 1)."""
    keep_graph: Flag = False
    """Keep the activations of the trained steps from sampling and go backward from there, instead of running these
    steps again: the same gradient, for one update per iteration and where they fit into memory together."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high): the ratio is kept between 1 - low and 1 + high."""
        return self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range, self.clip_range)


class Rewriter(Section):
    """A language model that rewrites prompts, trained beside the flow model (PromptRL)."""

    path: Text
    """Folder of a saved transformers causal language model, or a hub id such as org/name."""
    revision: Text | None = None
    """Branch, tag or commit of the hub id; null = the main branch."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights and log-probabilities are always float32."""
    lora: LoRA = LoRA(rank=16, alpha=32.0)
    """Low-rank adapters; only they are trained. targets: null = all linear layers but the last."""
    instruction: Text = (
        "Rewrite this prompt for an image generator, so that the image shows exactly what it asks for. "
        "Write the new prompt between <answer> and </answer>.\n\n{prompt}"
    )
    """What it is told; {prompt} stands for the prompt. It is the user's message where the tokenizer has a chat
    template."""
    answer_tags: tuple[Text, Text] = ("<answer>", "</answer>")
    """What the new prompt is written between; an answer without them has format reward 0 and is not drawn."""
    max_new_tokens: Count = 128
    """Longest answer; one that does not end by then has format reward 0."""
    temperature: Positive = 1.0
    """Of its sampling, in training and in evaluation."""
    lr: Positive = 1e-4
    """Learning rate of its own AdamW, constant (PromptRL, all weights: 3e-7)."""
    kl_weight: NonNegative = 0.01
    """Weight of the divergence (k3) from the model before training (PromptRL: 0.01)."""
    format_weight: NonNegative = 1.0
    """Weight of the format reward, 0 or 1 per answer, beside the rewards of the pictures (PromptRL: 1)."""


class PromptRL(FlowGRPO):
    """Flow-GRPO with a language model that rewrites the prompts, both trained (arXiv 2602.01382)."""

    algorithm: Literal["prompt_rl"] = "prompt_rl"  # type: ignore[assignment]
    """Which trainer."""
    rewriter: Rewriter
    """The language model."""
    retained: Whole = 2
    """Samples of each group that are drawn from the prompt as it is (PromptRL: 2 of 8)."""
    reward_column: Text | None = None
    """Column of the prompts that names the one reward which judges their samples (PromptRL's reward tags); null = the
    weighted sum."""
    kl_weight: NonNegative = 1e-2
    """Weight of the divergence of the flow model from its start (PromptRL: 0.01)."""


class StepEvaluation(Section):
    """How Talk2Move's exit step is found: of edits that leave the chain at every step, where rewards differ most."""

    prompts: Count = 4
    """Instructions that are tried."""
    samples: Ways = 4
    """Edits of each instruction at each step, from one noise (Talk2Move: 2 to 4)."""
    every: Count | None = None
    """Find it anew every so many iterations; null = once, before the first."""


class Talk2Move(FlowGRPO):
    """Flow-GRPO for an editing model (arXiv 2601.02356): the steps before an exit step are trained, then a shortcut."""

    algorithm: Literal["talk2move"] = "talk2move"  # type: ignore[assignment]
    """Which trainer."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (Talk2Move: flow_sde at 1); wan_sde: null."""
    exit_step: Count | None = None
    """Steps that are drawn and trained, from the first; null = found by step_evaluation (Talk2Move: 4 of 10)."""
    shortcut: Count = 2
    """Deterministic steps from there to the picture (Talk2Move: 2)."""
    step_evaluation: StepEvaluation = StepEvaluation()
    """How the exit step is found."""
    advantage_scale: Literal["group", "global", "none", "prompt_history"] = "global"
    """As flow_grpo's (Talk2Move: global)."""
    clip_range: Positive | tuple[Positive, Positive] = 2e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Talk2Move: 2e-4)."""


class Adversary(Section):
    """How the trainable reward of an Adv-GRPO run is trained."""

    references: Text
    """Pictures that samples are to be like, for every prompt: a folder (each picture beside a .txt with its prompt), a
    .jsonl file or a data set id:split with the columns prompt and image."""
    schedule: Literal["alternate", "lag", "together"] = "alternate"
    """Which iterations train it, and which the model: in turns (see every); it, while it scores samples above
    references, else the model (the paper's for PickScore); or both on the same samples."""
    every: Ways = 10
    """Of alternate: each so many-th iteration trains the model, all others the reward (Adv-GRPO: 10)."""
    warmup: Whole = 0
    """First iterations that train the reward alone; with together at least 1."""
    steps: Count = 1
    """Optimiser steps of the reward in an iteration that trains it, each on all its samples (Adv-GRPO: 1)."""
    lr: Positive = 1e-4
    """Learning rate of its Adam, constant (Adv-GRPO: 1e-4 for DINO heads, 5e-6 for PickScore's last layer)."""
    betas: tuple[Fraction, Fraction] = (0.5, 0.999)
    """Its Adam's averaging factors (Adv-GRPO: 0.5, 0.999)."""


class AdvGRPO(FlowGRPO):
    """Flow-GRPO with a reward that is trained beside the model (arXiv 2511.20256)."""

    algorithm: Literal["adv_grpo"] = "adv_grpo"  # type: ignore[assignment]
    """Which trainer."""
    adversary: Adversary
    """How the one trainable reward among `rewards` is trained."""

    def trains_model(self, iteration: int) -> bool:
        """Whether this iteration (0-based) trains the model; with the schedule lag, whether it may."""
        adversary = self.adversary
        if iteration < adversary.warmup:
            return False
        return adversary.schedule != "alternate" or (iteration + 1) % adversary.every == 0


class DiffusionNFT(Section):
    """Forward-process training on finished samples, without log-probabilities (arXiv 2509.16117)."""

    algorithm: Literal["diffusion_nft"] = "diffusion_nft"
    """Which trainer."""
    beta: Positive = 1.0
    """Distance of the implicit positive and negative policies from the old one (paper: 1, or 0.1 for OCR)."""
    kl_weight: NonNegative = 1e-4
    """Weight of the squared velocity difference from the starting model (paper: 1e-4)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (paper: 5)."""
    timesteps_per_sample: Count | None = None
    """Noise levels trained per sample, drawn from the sampling grid; null = all of them but the last."""
    old_policy_decay: Literal["none", "ramp", "delayed_ramp"] = "ramp"
    """How slowly the sampling policy follows: at once, min(0.001 n, 0.5), or 0 until step 75, then up."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (paper: 1, OCR 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (paper: 1)."""


class SPO(Section):
    """Preferences between candidates for one next state (arXiv 2406.04314), judged by the configured rewards."""

    algorithm: Literal["spo"] = "spo"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    candidates: Ways = 4
    """Next states drawn at each compared step, of which one goes on (SPO: 4 on SD 1.5, 2 on SDXL)."""
    first: Whole = 4
    """First step at which candidates are compared (SPO: 4 of 20)."""
    threshold: Fraction = 0.3
    """A comparison counts if tanh(half the difference of best and worst total reward) is above this (SPO: 0.3)."""
    beta: Positive = 10.0
    """Sharpness of the preference loss (SPO: 10)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (SPO: 0.1)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""


class AWM(Section):
    """Advantage weighted matching: a policy gradient on the forward process (arXiv 2509.25050)."""

    algorithm: Literal["awm"] = "awm"
    """Which trainer."""
    weighting: Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"] = "ghuber"
    """How the matching error becomes a log-likelihood: times 1, sigma, sigma^2, or a root of it times sigma."""
    levels: Literal["grid", "logit_normal", "uniform"] = "grid"
    """Noise levels: of the sampling grid, without the first and the last tenth; SD3's; or uniform in 0.2 .. 1."""
    timesteps_per_sample: Count = 6
    """Noise levels trained per sample, stratified, the same for all of an iteration (AWM: 6)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Advantages are cut at this and divided by it (AWM: 5)."""
    clip_range: Positive = 1.0
    """Ratio kept in 1 - c .. 1 + c (AWM: 1, which with one update per iteration never clips)."""
    kl_weight: NonNegative = 1e-3
    """Weight of the squared velocity difference from the starting model (AWM: 1e-3, OCR 3e-3, PickScore 1e-4)."""
    ema_kl_weight: NonNegative = 1.0
    """Weight of that from a slow copy of the policy, which keeps min(0.001 n, 0.3) of itself (AWM: 1)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (AWM: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (AWM: 1)."""


class DGPO(Section):
    """Direct group preference optimisation: one preference of a whole group (arXiv 2510.08425)."""

    algorithm: Literal["dgpo"] = "dgpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the group's preference (DGPO: 100, PickScore 10, with reference: ema 2000)."""
    reference: Literal["model", "ema"] = "model"
    """What the group's preference is measured against: the model before training, or the slow average."""
    kl_weight: NonNegative = 0.02
    """Weight of the squared velocity difference from the starting model (DGPO: 0.02, PickScore 1e-3)."""
    reference_guidance: NonNegative | None = None
    """Guidance of the starting model there (DGPO without guidance: 4.5; not FLUX.1-dev); null = that of training."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (DGPO: false, even if it samples with 4.5); an input of the model stays."""
    first_steps: Count = 7
    """Noise levels are those of the first steps of the sampling grid, so many (DGPO: 7 of 10, GenEval 5)."""
    timesteps_per_sample: Count = 4
    """Noise levels trained per sample, without repetition, the same for all of an iteration (DGPO: 4)."""
    clip_range: Margin = 1e-2
    """No gradient where the ratio to the slow average is beyond 1 +- c (DGPO: 1e-2, PickScore 5e-2, unguided 1e-3)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread (DGPO on GenEval), the iteration's (DGPO), or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (DGPO: 5)."""
    switch_after: Whole = 200
    """After so many optimiser steps the slow average draws the samples (DGPO: 200, GenEval 500)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (DGPO: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (DGPO: 1)."""


class CRD(Section):
    """Centred reward distillation: differences of implicit rewards within a prompt (arXiv 2603.14128)."""

    algorithm: Literal["crd"] = "crd"
    """Which trainer."""
    beta: Positive = 1.0
    """Scale of the implicit reward (CRD: 1)."""
    loss: Literal["mse", "bce"] = "mse"
    """Squared difference of the centred rewards, or a cross-entropy."""
    temperature: Positive | None = None
    """Centre at softmax means of the group's best and worst samples, at this temperature; null = at its mean."""
    kl_weight: NonNegative = 0.1
    """Weight of the squared velocity difference from the starting model, for the best samples (CRD: 0.1)."""
    reference_guidance: NonNegative | None = None
    """Guidance of the starting model there (CRD on SD3.5: 4.5; not FLUX.1-dev); null = that of sampling."""
    timesteps_per_sample: Count | None = None
    """Noise levels of the sampling grid trained per sample, the same for all; null = all of them but one."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (CRD: 5)."""
    updates_per_iteration: Count = 2
    """Optimiser steps per inner epoch (CRD: 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (CRD: 1)."""


class DPO(Section):
    """Online Diffusion-DPO: the best sample of each group against its worst (arXiv 2311.12908)."""

    algorithm: Literal["dpo"] = "dpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the preference (Flow-GRPO's online DPO: 100; Diffusion-DPO offline: 5000)."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps (Flow-GRPO's: 40); null = never."""
    timesteps_per_pair: Count = 1
    """Noise levels trained per pair, each drawn anew (1)."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (peers: false); where it is an input of the model (FLUX.1-dev) it stays."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""


class OfflineDPO(Section):
    """Diffusion-DPO from a preference data set in prompts.train, with the columns image_win and image_lose."""

    algorithm: Literal["dpo_offline"] = "dpo_offline"
    """Which trainer."""
    beta: Positive = 5000.0
    """Sharpness of the preference (Diffusion-DPO: 5000 for SDXL, 2000 for SD 1.5)."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps; null = never (Diffusion-DPO)."""
    timesteps_per_pair: Count = 1
    """Noise levels trained per pair, each drawn anew (Diffusion-DPO: 1)."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (Diffusion-DPO: false); where it is an input of the model it stays."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""


class D3PO(Section):
    """Preferences between images, on the steps of their sampling (arXiv 2311.13231)."""

    algorithm: Literal["d3po"] = "d3po"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    beta: Positive = 0.1
    """Sharpness of the preference (D3PO: 0.1)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (D3PO: 0.1)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""


class PRDP(Section):
    """Regression of reward differences on log-ratios, over pairs of samples of one prompt (arXiv 2402.08714)."""

    algorithm: Literal["prdp"] = "prdp"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    beta: Positive = 3e-5
    """Weight of the divergence from the starting model: log-ratios go to reward / beta (PRDP: 3e-5 or 3e-6)."""
    clip_range: Positive = 1e-4
    """Log-ratios of a step count within this of those that sampled (PRDP: 1e-6 with 10 inner epochs, 1e-4 with 1)."""
    step_reduction: Literal["mean", "sum"] = "mean"
    """Log-ratios over the steps: mean (the paper's listing, to which its beta belongs) or sum (its equations)."""
    pairs: Literal["all", "positive"] = "all"
    """Pairs of a prompt: all (the paper's equations), or those with different rewards (its listing)."""
    inner_epochs: Count = 1
    """Optimiser steps of one iteration, each over all its pairs (PRDP: 10 on few prompts, 1 on many)."""

    @property
    def updates_per_iteration(self) -> int:
        """Optimiser steps per inner epoch."""
        return 1


class Draft(Section):
    """Direct reward back-propagation: DRaFT, AlignProp and ReFL, for rewards with gradients (arXiv 2309.17400)."""

    algorithm: Literal["draft"] = "draft"
    """Which trainer."""
    truncation: Literal["draft", "alignprop", "refl"] = "draft"
    """Steps that gradients run through: the last K; the last k, k drawn from 1 to K (AlignProp); or one of the last K,
    whose prediction of the finished picture is rewarded (ReFL)."""
    steps: Count | None = None
    """K; null = 1 (DRaFT-1), all (AlignProp), or a quarter (ReFL: 10 of 40)."""
    margin: Number | None = None
    """Samples above this total reward are left alone, the loss is max(0, margin - r) (ReFL: 2); null = none are."""

    @property
    def updates_per_iteration(self) -> int:
        """Optimiser steps per inner epoch."""
        return 1

    @property
    def inner_epochs(self) -> int:
        """Passes over the samples of one iteration: its gradient is that of the model that drew them."""
        return 1

    def last_steps(self, num_steps: int) -> int:
        """K, of a sampler of so many steps."""
        if self.steps is not None:
            return self.steps
        return {"draft": 1, "alignprop": num_steps, "refl": max(1, num_steps // 4)}[self.truncation]


class DiffInstruct(Section):
    """Diff-Instruct*: a one-step generator from a multi-step teacher, by scores and rewards (arXiv 2410.20898)."""

    algorithm: Literal["diff_instruct"] = "diff_instruct"
    """Which trainer."""
    divergence: Literal["score", "kl"] = "score"
    """From the teacher: score-based, pseudo-Huber (Diff-Instruct*), or Kullback-Leibler (Diff-Instruct, DI++)."""
    guidance: Literal["none", "inner", "outer"] = "inner"
    """Guidance of the teacher: in its score, or as a reward beside it (the paper finds inner better)."""
    guidance_scale: NonNegative = 4.5
    """Its strength g: s_0 + g (s_c - s_0), or the weight of that reward (paper: 4.5 to 7.5)."""
    assistant_steps: Count = 1
    """Optimiser steps of the assistant network per step of the generator."""
    assistant_lr: Positive | None = None
    """Learning rate of the assistant network; null = optimizer.lr."""

    @property
    def updates_per_iteration(self) -> int:
        """Optimiser steps of the generator per inner epoch."""
        return 1

    @property
    def inner_epochs(self) -> int:
        """Passes over the samples of one iteration."""
        return 1


class Evaluation(Section):
    """Held-out prompts, fixed noise, deterministic sampling."""

    every: Whole = 20
    """Evaluate every so many iterations, and at the start and the end; 0 = never."""
    num_prompts: Count = 64
    """Prompts taken from the beginning of prompts.eval; fewer if it has fewer."""
    group_size: Count = 1
    """Pictures of each prompt; rewards that compare the pictures of a group need 2 or more to say anything."""
    num_inference_steps: Count | None = None
    """Denoising steps; null = sampling.num_inference_steps (Flow-GRPO on SD3.5: 40)."""
    guidance_scale: NonNegative | None = None
    """Guidance; null = sampling.guidance_scale."""
    height: Count | None = None
    """Pixels; null = sampling.height (PaCo-GRPO trains at a lower resolution than it is judged at)."""
    width: Count | None = None
    """Pixels; null = sampling.width."""
    batch_size: Count | None = None
    """Samples per call of the denoiser; null = sampling.batch_size."""
    seed: Whole = 1234
    """Seed of the fixed noise."""
    grid_prompts: Whole = 16
    """Prompts shown in the picture grids; 0 = no grids."""
    monitor: Monitor | None = None
    """End training when a held-out scorer falls; null = never."""


class Config(Section):
    """One training run."""

    model: Model
    """Which pipeline is trained, and how its weights are held."""
    prompts: Prompts
    """What is drawn."""
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    """What is rewarded: a list of {name, weight, args}; the weighted sum is trained on."""
    sampling: Sampling = Sampling()
    """How samples are drawn."""
    trainer: Annotated[
        FlowGRPO
        | AdvGRPO
        | Talk2Move
        | PromptRL
        | DiffusionNFT
        | SPO
        | AWM
        | DGPO
        | CRD
        | DPO
        | OfflineDPO
        | D3PO
        | PRDP
        | Draft
        | DiffInstruct,
        Field(discriminator="algorithm"),
    ]
    """Which algorithm, and its settings."""
    optimizer: Optimizer = Optimizer()
    """AdamW and its schedule."""
    ema: EMA | None = EMA()
    """Moving average of the weights; null = none."""
    evaluation: Evaluation = Evaluation()
    """When and how held-out prompts are scored."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    distributed: Distributed = Distributed()
    """Several processes."""
    kernels: Kernels = Kernels()
    """Fused kernels, attention back-ends, compilation."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides the run folder's metrics.jsonl: names of accelerate's trackers."""
    iterations: Count = 300
    """Rounds of sampling and training (DanceGRPO and MixGRPO: 300)."""
    seed: Whole = 0
    """Seed of everything random: prompts, noise, windows, initial adapters."""
    output: Text = "runs/genrl"
    """Run folder; default runs/<name of the YAML file>, with its folders below `configs`."""

    @property
    def reward_labels(self) -> tuple[str, ...]:
        """A short, unique name for each reward, in their order: `shapes`, `Brightness`, `ocr-2`."""
        labels: list[str] = []
        for reward in self.rewards:
            base = reward.name.rsplit(":", 1)[-1]
            same = sum(label == base or label.startswith(f"{base}-") for label in labels)
            labels.append(f"{base}-{same + 1}" if same else base)
        return tuple(labels)

    @property
    def uses_reference(self) -> bool:
        """Whether training evaluates the model before training."""
        if self.trainer.algorithm in ("spo", "d3po", "prdp", "diff_instruct"):
            return True
        if self.trainer.algorithm == "draft":
            return False
        if self.trainer.algorithm in ("dpo", "dpo_offline"):
            return self.trainer.reference_every is None
        if self.trainer.algorithm == "dgpo" and self.trainer.reference == "model":
            return True
        return self.trainer.kl_weight > 0

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.model_iterations * self.trainer.updates_per_iteration * self.trainer.inner_epochs

    @property
    def model_iterations(self) -> int:
        """Iterations that train the model; at most these, where a run decides it by its scores."""
        if isinstance(self.trainer, AdvGRPO):
            return sum(map(self.trainer.trains_model, range(self.iterations)))
        return self.iterations

    @model_validator(mode="after")
    def _possible(self) -> Config:
        refuse_impossible(self)
        return self
