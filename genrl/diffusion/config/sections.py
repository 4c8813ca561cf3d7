"""The sections of a run that trains a diffusion pipeline: every key, its type, range, default and one-line meaning.

The text under each field is its description: it goes into the JSON schema (`genrl config schema`) and into
`genrl check --explain`. Sources named there: Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), MixGRPO
(2507.21802), DiffusionNFT (2509.16117), Coefficients-Preserving Sampling (2509.05952).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.folders import PROCESSORS, no_transformers_model, read_json
from genrl.config.run_config import FileFinding
from genrl.config.section import Count, Flag, NonNegative, Number, Positive, Section, Text, Whole
from genrl.config.sections import Distributed, EvaluationBase, LoRA, Outage, Precision, Quantized

Attention = Literal["auto", "math", "efficient", "cudnn", "flash"]

# The names of attention projections in diffusers, over all model families: what an adapter is put on by default.
ENCODER_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""What a LoRA adapts in text encoders, as diffusers reads it."""
ATTENTION_LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "to_added_qkv", "to_qkv_mlp_proj"),
    *("to_query", "to_key", "to_value", "img_qkv_proj", "txt_kv_proj"),
)


class Offload(Section):
    """What leaves the device while it is idle (docs/memory.md)."""

    text_encoders: Literal["encode_then_free", "between"] | None = None
    """encode_then_free = all prompts are encoded before the denoiser is on the device, and the encoders dropped;
    between = they are on the CPU except while they encode; null = always on the device."""
    denoiser: Literal["blocks"] | None = None
    """blocks = its frozen weights wait on the CPU, and a block is on the device while it computes; null = they stay."""


class Model(Section):
    """Which diffusers pipeline to train, and in which precision."""

    path: Text
    """Folder of a saved diffusers pipeline (has model_index.json), a hub id such as org/name, or one .safetensors or
    .gguf file (with config)."""
    config: Text | None = None
    """For such a file: folder or hub id of the pipeline that it was made from, for its class, the settings of its
    networks, and what the file lacks."""
    pipeline: Text | None = None
    """Class that loads it, path/file.py:Name, where it is one of your own; null = the one that model_index.json
    names."""
    revision: Text | None = None
    """Branch, tag or commit of the hub id; null = the main branch. Pin a commit to reproduce a run."""
    variant: Text | None = None
    """Variant of the weight files, for example fp16; null = the plain ones."""
    use_safetensors: Flag = True
    """Refuse pickled weight files, which may run code; false = take them where there are no others."""
    without: tuple[Text, ...] = ()
    """Components that are left out, for example [text_encoder_3, tokenizer_3]: SD3 without its T5."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights are always float32 (docs/adapters.md)."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Precision of the forward passes; null = the weights' own."""
    scheduler: dict[Text, Any] = {}
    """Settings of its scheduler in place of the checkpoint's, for example {timestep_spacing: trailing}."""
    lora: LoRA | None = LoRA()
    """Low-rank adapters; null = train every weight of the denoiser."""
    quantize: Quantized | dict[Text, Quantized] | None = None
    """Hold the linear layers of denoiser and text encoders in fewer bits: int8 or fp8 (torchao), nf4 (bitsandbytes, a
    GPU), one for all or {component: kind}; adapters stay float32; null = as in dtype. int4 is refused."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: much less memory, about a third more time."""
    offload: Offload = Offload()
    """What leaves the device while it is idle."""
    encodings: Text | None = None
    """Folder in which encodings of prompts are kept for other processes and later runs, up to 20 GB: what was used
    longest ago goes first; null = only in memory."""
    slice_vae: Flag = False
    """Decode pictures one at a time: less memory for large ones; equal up to rounding."""
    tile_vae: Flag = False
    """Encode and decode large pictures in overlapping tiles: least memory, slightly different pixels where tiles meet.
    A VAE that can decode only in tiles (Allegro) needs it."""


class Kernels(Section):
    """Fused parts, attention back-ends and compilation (docs/kernels.md, docs/speed.md). All are off: docs/gpu.md
    says what has been timed on a GPU."""

    fused: Flag = False
    """Compile what lies between the matrix products of the blocks of SD3.5, FLUX, Qwen-Image and Wan: norm and rotation
    of queries and keys; gate, residual, norm and modulation."""
    attention: Attention | None = None
    """Back-end of the joint attention: auto = torch chooses; a name = that or an error; null = diffusers' own."""
    compile: Flag | Literal["cuda_graphs"] = False
    """Compile the denoiser with torch, in sampling, training and evaluation: true, or cuda_graphs = with its launches
    recorded too (a GPU; algorithms flow_grpo and diffusion_nft; not tried on one yet)."""


class Prompts(Section):
    """Which prompts to train and evaluate on."""

    train: Text
    """Prompt file (.txt: one per line; .jsonl: a prompt column and any others), or data set id:split
    or id:config:split."""
    eval: Text | None = None
    """Held-out prompts, same formats; needed while evaluation.every is above 0."""
    column: Text = "prompt"
    """Name of the prompt's column in a .jsonl file or a data set."""


class Gate(Section):
    """A reward counts only where another one is good enough; elsewhere it is replaced before it is normalised."""

    reward: Text
    """The other reward, as the log names it: its name, or the part after the colon of a file."""
    at_least: Number
    """Threshold, in the other one's own units."""
    otherwise: Number = 0.0
    """What a sample below the threshold scores instead, in this reward's own units."""


class Reward(Section):
    """One reward of the weighted sum."""

    name: Text
    """Built-in or installed name (see `genrl rewards`), or path/file.py:function_or_class."""
    weight: Number = 1.0
    """Factor in the sum that is trained on; 0 = only logged; negative = a penalty."""
    args: dict[str, Any] = {}
    """Keyword arguments of the reward's class, also device and dtype if it has them."""
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
    remote: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """URL of a `genrl serve` of this reward, which is then not loaded here, or a list of several; null = none. Their
    token, if they ask for one, is taken from the environment variable GENRL_REWARD_TOKEN."""
    isolate: Flag | Text = False
    """Run it in its own process, started and ended with the run; a folder = in that virtual environment."""
    outage: Outage = Outage()
    """What happens when the server or the process does not answer."""


class Sampling(Section):
    """How pictures (or videos) are generated for training."""

    num_inference_steps: Count = 10
    """Denoising steps of a rollout (Flow-GRPO on SD3.5: 10); at a strength below 1 those that are left."""
    guidance_scale: NonNegative | None = None
    """Guidance handed to the pipeline; null = the pipeline's default; 1 = off in most pipelines."""
    height: Count | None = None
    """Height in pixels; null = the pipeline's default."""
    width: Count | None = None
    """Width in pixels; null = the pipeline's default."""
    num_frames: Count | None = None
    """Frames of a video pipeline; null = its default, or a picture."""
    buckets: Literal["rows"] | tuple[tuple[Count, Count] | tuple[Count, Count, Count], ...] = ()
    """Several sizes, one per micro-batch: a list of [height, width] or [height, width, frames], assigned to prompts in
    turn (with inputs: by the shape of their first picture); rows = by the columns height, width and num_frames; empty =
    one size. In evaluation too."""
    prompts_per_iteration: Count = 8
    """Different prompts in one iteration, over all processes (Flow-GRPO: 48)."""
    group_size: Count = 8
    """Samples per prompt, compared with each other; at least 2 (Flow-GRPO: 24)."""
    batch_size: Count = 8
    """Most samples per call of the denoiser, in rollout and in training alike: fewer where several processes would else
    wait for each other."""
    fit_batch: Flag = False
    """Take batch_size as the maximum: before training find how many samples fit into memory, by halving, in all
    processes; and repeat an iteration with half of it if memory runs out later."""
    same_initial_noise: Flag = False
    """Start all samples of a group from the same noise (DanceGRPO: true)."""
    pipeline_args: dict[str, Any] = {}
    """Further keyword arguments of the pipeline's call, for example max_sequence_length."""
    inputs: dict[str, Text] = {}
    """Pictures that the pipeline is given with each prompt: argument of its call -> column that names the file, for
    example {image: source_image} to train an editing model."""
    staleness: Whole = 0
    """Sample each iteration with the weights of so many iterations before: 0 = the newest; 1 or more = rollout workers
    (`engine`) sample while the model is trained. Flow-GRPO, PaCo-GRPO, GRPO-Guard, DDPO, DiffusionNFT (docs/ray.md)."""
    score_in_background: Flag = False
    """Score a micro-batch in a second thread while the next one is sampled; the results are the same."""

    def scheduled(self, steps: int) -> int:
        """Steps of the schedule that the pipeline is asked for, where it is to run `steps` of it: at a strength below 1
        it leaves out the first ones."""
        strength = self.pipeline_args.get("strength", 1.0)
        return round(steps / float(strength))

    @property
    def prompts_together(self) -> int:
        """Prompts of one micro-batch of whole groups; 1 where a group has several micro-batches."""
        return max(1, self.batch_size // self.group_size)

    @property
    def picture_column(self) -> str | None:
        """The column of the first picture that the pipeline is given, whose shape decides a row's bucket."""
        return next(iter(self.inputs.values()), None)

    @property
    def images_per_iteration(self) -> int:
        """Samples drawn in one iteration, over all processes."""
        return self.prompts_per_iteration * self.group_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one iteration, over all processes."""
        return -(-self.images_per_iteration // self.batch_size)


class Evaluation(EvaluationBase):
    """Held-out prompts, fixed noise, deterministic sampling."""

    num_prompts: Count = 64
    """Prompts taken from the beginning of prompts.eval; fewer if it has fewer."""
    group_size: Count = 1
    """Pictures of each prompt; rewards that compare the pictures of a group need 2 or more to say anything."""
    num_inference_steps: Count | None = None
    """Denoising steps; null = sampling.num_inference_steps (Flow-GRPO on SD3.5: 40)."""
    guidance_scale: NonNegative | None = None
    """Guidance; null = sampling.guidance_scale."""
    height: Count | None = None
    """Pixels; null = sampling.height (PaCo-GRPO trains at a lower resolution than it is evaluated at)."""
    width: Count | None = None
    """Pixels; null = sampling.width."""
    batch_size: Count | None = None
    """Samples per call of the denoiser; null = sampling.batch_size."""
    seed: Whole = 1234
    """Seed of the fixed noise."""


class Processes(Distributed):
    """Several processes."""

    context: Count = 1
    """Processes that compute each sample together: its tokens are divided over them (Ulysses)."""


class Engine(Section):
    """Where samples are generated, if not in the processes that train (docs/ray.md)."""

    rollout_workers: Count
    """Ray actors that generate samples, each with a copy of the pipeline, over all processes; together with those that
    score, at most one per CPU of the cluster."""
    reward_workers: Whole = 0
    """Actors that score, each with all rewards that are on no server; 0 = the processes that train score."""


class Rewriter(Section):
    """A language model that rewrites prompts, trained beside the flow model (PromptRL)."""

    path: Text
    """Folder of a saved transformers model, a causal language model or one that sees, or a hub id such as org/name. One
    that sees is shown the pictures of sampling.inputs before its instruction."""
    dtype: Precision = "float32"
    """Precision in which the frozen weights are held; LoRA weights and log-probabilities are always float32."""
    instruction: Text = (
        "Rewrite this prompt for an image generator, so that the image shows exactly what it asks for. "
        "Write the new prompt between <answer> and </answer>.\n\n{prompt}"
    )
    """The instruction to the language model; {prompt} stands for the prompt. It is the user's message if the tokenizer
    has a chat template."""
    max_new_tokens: Count = 128
    """Longest answer; one that does not end by then has format reward 0."""
    lr: Positive = 1e-4
    """Learning rate of its own AdamW, constant (PromptRL, all weights: 3e-7)."""
    kl_weight: NonNegative = 0.01
    """Weight of the divergence (k3) from the model before training (PromptRL: 0.01)."""

    def problems(self) -> Iterator[Finding]:
        """What cannot work."""
        if self.dtype == "float16":
            text = "its losses are not scaled, and small gradients vanish in float16; use bfloat16 or float32"
            yield ("trainer.rewriter.dtype",), text
        if (times := self.instruction.count("{prompt}")) != 1:
            text = f"holds {{prompt}} {times} times; write it once, where the prompt is to stand"
            yield ("trainer.rewriter.instruction",), text

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """Whether its folder holds a language model, with room for answers."""
        key, path = ("trainer", "rewriter", "path"), Path(self.path).expanduser()
        if wrong := no_transformers_model(".".join(key), self.path, notes):
            yield key, wrong
        if wrong or not path.is_dir():
            return
        settings, tokenizer = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
        kinds, vision = settings.get("architectures") or [], settings.get("vision_config")
        if kinds and not vision and not any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
            text = f"{path} is a {', '.join(map(str, kinds))}; a rewriter is a causal language model (...ForCausalLM)"
            yield key, f"{text} or one that sees, with a vision_config"
        if vision and not any((path / name).is_file() for name in PROCESSORS):
            text = f"{path} sees, but has no image processor ({' or '.join(PROCESSORS)})"
            yield key, f"{text}; save the processor of the original model there"
        if not tokenizer:
            yield key, f"{path} has no tokenizer_config.json; save the tokenizer beside the model"
        elif tokenizer.get("eos_token") is None:
            yield key, f"the tokenizer of {path} has no eos_token, so no answer would ever end; set it and save it"
        settings |= settings.get("text_config") or {}
        room = settings.get("max_position_embeddings") or settings.get("n_positions")
        if isinstance(room, int) and self.max_new_tokens >= room:
            text = f"{self.max_new_tokens} new tokens leave no place for the prompt in {room} positions of {path}"
            yield ("trainer", "rewriter", "max_new_tokens"), f"{text}; use {room // 2} or less"
