"""The sections of a run that trains a vision-language model. The text under each field is its description."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from genrl.config.section import Count, Flag, NonNegative, Number, Positive, Section, Share, Text, Ways, Whole
from genrl.config.sections import EvaluationBase, Optimizer, Quantized
from genrl.vlm.config.names import FORMATS, OUTPUTS, TASKS

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # DeepSeek's attention, which Kimi has
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", *LATENT)
LOGITS = 2**25
"""Logits that exist at a time in an update: 128 MiB."""


class VLMLoRA(Section):
    """Low-rank adapters on the language model; only they are trained."""

    rank: Count = 16
    """Rank of the adapters (VL-DAC: 16)."""
    alpha: Positive = 32.0
    """Scale; the update is multiplied by alpha / rank (VL-DAC: 32)."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Last parts of the names of the layers to adapt; null = the attention projections."""


class VLM(Section):
    """Which vision-language model is trained, and what of it."""

    path: Text
    """Folder or hub id of a transformers image-text-to-text model with its processor; for other outputs as
    docs/sequence_policies.md says."""
    output: Annotated[Text, Field(examples=sorted(OUTPUTS.built_in))] = "text"
    """What it answers: text about pictures; image, by tokens (Janus); masked_text, as a masked diffusion model; voxels
    or audio, by the codes of a causal language model with a codec; music, by MusicGen; music_reward: no answer but a
    score of pieces, by MusicGen; or a policy of your own, path/file.py:Name (genrl/vlm/policies/contract.py says what
    it is)."""
    codec: Text | None = None
    """output voxels: ShapeLLM-Omni's codec, the folder or hub id with its VQVAE, 3DVQVAE.bin or .safetensors
    (yejunliang23/3DVQVAE), or that file; null = codec.safetensors beside the weights. An answer has two bodies of 1,024
    codes, and two thoughts that fill generation.max_new_tokens."""
    lora: VLMLoRA | None = None
    """Low-rank adapters; null = all weights are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights and passes; log-probabilities and LoRA weights are always float32."""
    quantize: Quantized | None = None
    """Hold the linear layers in fewer bits, the output layer aside: int8 or fp8 (torchao), nf4 (bitsandbytes); adapters
    stay float32 (QLoRA: nf4 with lora, docs/vlm_models.md); null = as in dtype. int4 is refused."""
    prefix_attention: Literal["sdpa", "flex"] | None = None
    """Back-end by which answers attend to one copy of their prompt's keys in training (docs/kernels.md), text only;
    null = a copy per answer, in the model's own attention."""

    kernels: Literal["liger"] | None = None
    """Fused kernels for norms, rotations and MLPs: Liger's (pip install liger-kernel), on a GPU; null = transformers'
    own."""
    gradient_checkpointing: Flag = False
    """Compute the activations of the blocks again in the backward pass instead of keeping them: less memory, a third
    more training time, and prompts are computed once for each answer."""

    packing: Flag = False
    """Put the prompts and answers of a pass one after the other in one row, without padding, each attending to itself
    alone: the log-probabilities of training (docs/sft.md says which models can). Prompts are computed once for each
    answer."""

    @property
    def makes(self) -> str | None:
        """What it is known to answer that is no text about a picture; None = that, or what an outside policy does."""
        return self.output if self.output in OUTPUTS.built_in and self.output != "text" else None


class Curriculum(Section):
    """Easy questions first."""

    column: Text = "level"
    """Column with a number that grows with difficulty; generated tasks have `level`."""
    start: Share = 0.25
    """Share of the questions, the easiest ones, that the first iteration takes its own from."""
    over: Count = 100
    """Iterations over which the share grows to all."""


class Task(Section):
    """The questions: a generated task, or data."""

    name: Annotated[Text, Field(examples=sorted(TASKS.built_in))] | None = None
    """A task that needs no download (docs/vlm_tasks.md), or one of your own, path/file.py:Name (genrl/vlm/tasks.py says
    what it is); null = `train`."""
    rows: Count = 4096
    """Training questions of a generated task."""
    train: Text | None = None
    """Data: a .jsonl file, or data set id:split; null = `name`."""
    eval: Text | None = None
    """Held-out data, same formats; needed while evaluation.every is above 0. Generated tasks have their own."""
    format: Annotated[Text, Field(examples=sorted(FORMATS.built_in))] | None = None
    """What makes questions of the rows of a published data set (docs/vlm_data.md), or a function of your own,
    path/file.py:name, from a row to its columns; null = rows are questions as they are."""
    prompt: Text = "prompt"
    """Column with the question: text, in which <image> and <video> are places, or a list of chat messages."""
    image: Text | None = "image"
    """Column with the picture: a file beside the .jsonl file, or a data set's picture, or a list of pictures; null in a
    row = a question without one. null here = all are, or their messages have the pictures."""
    video: Text | None = None
    """Column with the clip: a video file beside the .jsonl file, a list of frames, or a list of clips; null = none."""
    fps: Positive = 2.0
    """Frames of a second of a video file that the model sees; of a list of frames, how many it has (Qwen2.5-VL: 2)."""
    frames: Count = 16
    """Most frames of a clip; of more, so many are taken evenly."""
    min_pixels: Count | None = None
    """Smaller pictures are made larger, to width x height >= this; null = as the model's processor does it."""
    max_pixels: Count | None = None
    """Larger pictures are made smaller, to width x height <= this; null = as the model's processor does it. A token of
    Qwen2.5-VL is 28 x 28 pixels."""
    system: Text | None = None
    """System message before every question; null = none."""
    curriculum: Curriculum | None = None
    """Easy questions first (Jigsaw-R1); null = all from the start."""
    passes: Ways | None = None
    """Ask every training question so many times before training, and leave out those that the model never or always
    answers correctly (MedVLThinker: 16); null = leave out none."""


class VLLMEngine(Section):
    """vLLM as the sampler: beside the model in each process, or on a server for all."""

    url: Text | None = None
    """A server's address, http://host:8000 (docs/vlm_engines.md says how to start it); null = in each process, on its
    GPU."""
    weights: Text | None = None
    """Folder in which a server gets new weights as a file, the same path for both; null = in the run folder."""
    args: dict[str, Any] = {}
    """In this process: further arguments of vllm.LLM, for example {max_model_len: 4096, enforce_eager: true}. Of the
    GPU's memory it has the share gpu_memory_utilization, 0.4 where that is not written; after sampling it leaves it to
    training, unless enable_sleep_mode is false (which a CPU needs)."""


class Generation(Section):
    """How answers are sampled for training."""

    vllm: VLLMEngine | None = None
    """What samples: vLLM (the extra vllm; {} as it stands), whose rounding the weight engine_mismatch then corrects
    unless trainer.weights says otherwise; null = the model that is trained."""
    prompts_per_iteration: Count = 8
    """Different questions in one iteration, over all processes."""
    group_size: Count = 8
    """Answers to each, compared with each other (8 is usual)."""
    max_new_tokens: Count = 64
    """Longest answer. vlm.output music: steps of the decoder, of K books steps + 1 - K frames (musicgen-small: 503 are
    10 s)."""
    temperature: Positive = 1.0
    """Of sampling and of the log-probabilities that are trained."""
    batch_size: Count | None = None
    """Answers sampled side by side, whole groups; null = all of a process."""
    staleness: Whole = 0
    """Sample answers with the weights of so many iterations before: 0 = the newest; 1 or more = a vLLM server
    (vllm.url) samples while the model is trained. Methods over groups of answers, or of episodes, with clipped ratios
    (docs/ray.md)."""
    guidance_scale: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] | None = None
    """vlm.output image and music: scale of classifier-free guidance, in sampling and in the log-probabilities that are
    trained; 1 = none, null = the model's own."""
    elbo_samples: Count = 16
    """BGPO: estimates of the bound that stands for an answer's log-probability (BGPO: 16)."""
    denoising_steps: Count | None = None
    """BGPO: steps in which an answer's places are filled; null = one place at a step."""

    @property
    def answers_ahead(self) -> bool:
        """Whether a server answers, which may do so for coming iterations."""
        return self.vllm is not None and self.vllm.url is not None


class VLMReward(Section):
    """One reward of the weighted sum."""

    name: Text
    """A function of `genrl_rewards.scorers.texts.verifiable` (exact, numeric, choice, iou, tag_format ...), `math`, or
    path/file.py:function, also as TRL takes it; others as `genrl rewards` lists them where they need no picture of a
    sampler."""
    weight: Number = 1.0
    """Factor in the sum that is trained on; 0 = only logged."""
    args: dict[str, Any] = {}
    """Options of the function: its parameters with a default."""
    views: Literal["max", "sum", "mean"] = "mean"
    """vlm.output voxels: from the scores of the six rendered views to one (Hi-GRPO: HPSv2.1 max, UnifiedReward sum)."""
    conversational: Flag = False
    """Pass it prompts and completions as lists of messages, as TRL does for conversational data."""
    max_failed: Share = 0.2
    """Share of the answers of an iteration or evaluation for which it may raise, as the rules do for an expected answer
    that they cannot read. They have no score and teach nothing; above this share the run stops. 1 = never."""


class VLMOptimizer(Optimizer):
    """The optimiser and its schedule."""

    lr: Positive = 1e-6
    """Learning rate (models of billions: 1e-6; LoRA: 1e-5; embedded: 5e-4)."""
    weight_decay: float = Field(default=0.0, strict=True, ge=0, allow_inf_nan=False)
    """Decoupled weight decay."""


class VLMEvaluation(EvaluationBase):
    """The most probable answers to held-out questions."""

    every: Whole = 10
    """Evaluate every so many iterations, and at the start and the end; 0 = never."""
    questions: Count = 256
    """Held-out questions, always the same."""
    right_at: Number = 1.0
    """An answer counts as right if the first reward is at least this."""
    blind: Flag = True
    """At the start and the end, ask with black pictures too: answers that are right then do not come from the
    picture."""


class Augmentation(Section):
    """Questions changed by how hard they are for the model, and answered again (Reg-GRPO's augmentation). d is the mean
    reward of the last iterations less the question's own. Behind a hard question (d > 0) stands the first min(1, d) of
    the words of the model's own best reasoning, found with the right answer in the question; an easy one (d < 0) gets
    noise on its pictures."""

    window: ClassVar[int] = 10
    """Iterations whose mean reward is compared with."""
    noise: ClassVar[float] = 64.0
    """Easy question: Gaussian noise on its pictures of noise * |d| levels of 255."""

    truth: Text = "{question} (The answer is {answer}.)"
    """How a hard question is asked with its answer, from the column `answer`."""


class Rescue(Section):
    """Help with questions that no answer of the group is right to (the first reward below evaluation.right_at): a right
    one takes the place of the first, before advantages are made. It is found with a hint, or given."""

    shaping: ClassVar[float] = 0.1
    """ICPO, LUFFY: what the probability of a token is compared with."""

    hints: tuple[Text, ...] = ()
    """Columns with hints, the least first: with each of them one answer is tried, until one is right (Scaf-GRPO)."""
    demonstration: Text | None = None
    """In place of hints: the column with a right answer, written as the model would write it (LUFFY)."""
    prompt: Text = "{question}\n{hint}"
    """How a question is asked with a hint."""
    warmup: Whole = 50
    """Iterations without help: what the model learns by itself needs none (Scaf-GRPO: 50)."""
    plain: Flag = False
    """Train an answer that a hint found as one to the question alone, like a demonstration: by A p / (p + 0.1), without
    ratio or clip (ICPO). false: as one to the question with the hint, which the model did sample."""


class Synthesis(Section):
    """Pictures made during the run from descriptions that the model writes (Syn-GRPO): group_size of one question in
    every iteration."""

    pipeline: Text
    """Folder or hub id of the diffusers pipeline that renders them, in its own process."""
    ask: Text
    """What the model is asked about a question's picture; the description is its answer in <answer> tags."""
    check: Text
    """A text reward that is 1 if a description keeps the answer (column `answer`); other descriptions are not rendered
    and get reward 0."""
    num_inference_steps: Count = 20
    """Denoising steps."""
    guidance_scale: NonNegative = 4.0
    """Of the pipeline."""


class Environment(Section):
    """Where the model acts, instead of a task: episodes of several turns."""

    name: Text = "grid"
    """grid, trajectories, crop, search, watch, cards-numberline, cards-ezpoints, cards-points24 and cards-blackjack
    need no download; miniwob has web pages in Chromium; else the id of a gymnasium environment with discrete actions
    and a picture (MiniGrid-FourRooms-v0, FrozenLake-v1), or path/file.py:function that returns one or a
    `contract.Environment`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    actions: Annotated[tuple[Text, ...], Field(min_length=2)] | None = None
    """Words for the actions 0, 1 ... of a gymnasium environment; null = its own where it says them."""
    instruction: str = ""
    """What is to be done, for environments that do not say so themselves."""
    answer: Literal["json", "plain"] = "json"
    """How an action is written: {"thoughts": "...", "action": "left"}, or the word alone. Tools have their own tags."""
    invalid: Literal["noop", "random"] = "noop"
    """What an answer that names no action does: nothing, in a step that counts; or a random action (VL-DAC)."""
    invalid_reward: Number = -0.05
    """Added to the reward of such a step."""
    images: Annotated[int, Field(strict=True, ge=1, le=4)] = 1
    """Pictures in a prompt: the last so many (VL-DAC: 1 to 4). Tools show them all."""
    picture: Count | None = None
    """Side to which pictures are reduced, in pixels; null = as they are rendered."""
    max_steps: Count | None = None
    """Steps after which an episode is cut; null = the environment's own limit."""
    parallel: Count = 16
    """With a critic: episodes side by side, over all processes."""
    steps: Count = 16
    """With a critic: steps in each of them in an iteration (VL-DAC: 128 to 256 steps together). Unfinished episodes
    continue in the next iteration."""
    timeout_s: Positive | None = None
    """Run each environment in its own process, which is killed and restarted where a step takes longer than so many
    seconds; null = all in this process."""
