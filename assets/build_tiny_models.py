"""Make the embedded models and prompt files from nothing but drawn scenes. See assets/README.md.

    torchrun --nproc-per-node 2 assets/build_tiny_models.py --stage vae        # the autoencoder, then
    torchrun --nproc-per-node 2 assets/build_tiny_models.py --stage t2i        # shapes, mostly, then
    torchrun --nproc-per-node 2 assets/build_tiny_models.py --stage t2i-words  # words: assets/tiny-t2i
    torchrun --nproc-per-node 2 assets/build_tiny_models.py --stage sd         # assets/tiny-sd
    python assets/build_tiny_models.py --stage prompts                         # assets/prompts, assets/world.png

The two processes of one thread each draw their own half of the scenes and average their gradients. Every stage is
a function of the seed and of the number of processes, and goes on from its last checkpoint in `--work`.
Needs torch 2.9 or newer (`torch.optim.Muon`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from genrl_rewards.models.torchvision_compat import ensure

ensure()

from diffusers import (  # noqa: E402
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import Attention  # noqa: E402
from PIL import Image  # noqa: E402
from tokenizers import AddedToken, Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from genrl.playground import shapes as world  # noqa: E402

ASSETS = Path(__file__).resolve().parent
SEED = 0
SCENES = 30_000
TOKENS = 16  # length of a tokenised caption
CAPTION_DROPOUT = 0.1
STEPS = {"vae": 1500, "t2i": 3000, "t2i-words": 1250, "sd": 1200}
BATCH = {"vae": 8, "t2i": 64, "t2i-words": 64, "sd": 64}  # over all processes
CONSTANT = {"vae": 0.6, "t2i": 0.6, "t2i-words": 0.8, "sd": 0.6}  # part of the steps before the rate falls
WORD_SHARE = {"vae": 0.15, "t2i": 0.15, "t2i-words": 0.5, "sd": 0.15}  # of the scenes


# --- processes -------------------------------------------------------------------------------------------------


def start_processes() -> tuple[int, int]:
    """Join the other processes of torchrun; (rank, world size)."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def average_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
    if world_size == 1:
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for parameter, part in zip(parameters, flat.div_(world_size).split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


# --- the parts -------------------------------------------------------------------------------------------------


def make_tokenizer(folder: Path, words: Iterable[str] = world.GRAMMAR) -> CLIPTokenizer:
    """A CLIP tokenizer of single bytes and these whole words, saved to `folder` and read back."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]  # GPT-2's byte alphabet
    entries = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {entry: i for i, entry in enumerate(entries)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=TOKENS)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=True) for word in words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(folder)


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 24, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=world.SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_text_encoder(tokenizer: CLIPTokenizer, kind: type[nn.Module]) -> nn.Module:
    """Two layers of width 64. Larger embeddings than CLIP's, unit-gain matrices: it starts from nothing here."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = kind(config)
    for name, parameter in model.named_parameters():
        if "token_embedding" in name:
            nn.init.normal_(parameter, std=0.3)
        elif "position_embedding" in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def make_transformer() -> SD3Transformer2DModel:
    """Adaptive norms and the output start at zero, so that every block starts as the identity."""
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        num_attention_heads=3,
        attention_head_dim=32,
        joint_attention_dim=128,
        caption_projection_dim=96,
        pooled_projection_dim=128,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    for name, module in model.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear")) or name == "proj_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def make_unet() -> UNet2DConditionModel:
    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 80),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,  # the number of heads, by diffusers' old name
        norm_num_groups=8,
    )
    nn.init.zeros_(model.conv_out.weight)
    nn.init.zeros_(model.conv_out.bias)
    return model


def make_blank_encoder() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """A third text encoder that says nothing: exact zeros, as the stock pipeline uses where there is none.

    The pipeline loads without `text_encoder_3=None` only if it has one. Any text is two tokens to its tokenizer, so
    `max_sequence_length=2` is the shortest call without a warning about truncation.
    """
    config = T5Config(vocab_size=3, d_model=128, d_kv=8, d_ff=8, num_layers=1, num_heads=1, tie_word_embeddings=False)
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=256
    )
    return encoder, tokenizer


class BlankTokenAttention:
    """Joint attention in which the last text token, all zeros, stands for `n` equal ones.

    The stock pipeline appends the `max_sequence_length` (256) tokens of the third text encoder, here all zeros, to
    the text. They have no positions, so they stay equal to each other, and n of them weigh as one whose attention
    logit is raised by log n. So the model learns to cope with any number of them at the price of one.
    """

    def __init__(self) -> None:
        self.log_count: Tensor | None = None  # [B]

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: None = None
    ) -> tuple[Tensor, Tensor]:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        image, text = hidden_states, encoder_hidden_states
        query = torch.cat([attn.norm_q(heads(attn.to_q(image))), attn.norm_added_q(heads(attn.add_q_proj(text)))], 2)
        key = torch.cat([attn.norm_k(heads(attn.to_k(image))), attn.norm_added_k(heads(attn.add_k_proj(text)))], 2)
        value = torch.cat([heads(attn.to_v(image)), heads(attn.add_v_proj(text))], 2)
        assert self.log_count is not None
        bias = F.pad(self.log_count[:, None], (key.shape[2] - 1, 0))[:, None, None].to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
        image, text = out[:, : image.shape[1]], out[:, image.shape[1] :]
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


# --- data ------------------------------------------------------------------------------------------------------


def draw_scenes(stage: str, rank: int, world_size: int, number: int = SCENES) -> tuple[Tensor, list[str]]:
    """This process's share of the scenes: pictures uint8 [N, 3, 64, 64] and captions."""
    rng, share = np.random.default_rng([SEED, rank, world_size]), WORD_SHARE[stage]
    scenes = [world.sample_scene(rng, split="all", word_share=share) for _ in range(number // world_size)]
    pictures = torch.from_numpy(np.stack([world.draw(scene) for scene in scenes])).permute(0, 3, 1, 2)
    return pictures.contiguous(), [world.caption(scene) for scene in scenes]


def to_model(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def tokenise(tokenizer: CLIPTokenizer, captions: Iterable[str]) -> Tensor:
    ids: Tensor = tokenizer(
        list(captions), padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


@torch.no_grad()
def encode_scenes(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Normalised latents [N, 4, 16, 16]."""
    modes = torch.cat([vae.encode(to_model(chunk)).latent_dist.mode() for chunk in pictures.split(64)])
    return (modes - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


# --- training --------------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, constant: float) -> float:
    """Warm-up over 100 steps, constant for that part of the run, then linear down to 2 %."""
    fall = (step - constant * steps) / ((1 - constant) * steps)
    return min(1.0, (step + 1) / 100) * (1 - 0.98 * max(0.0, fall))


def train(
    name: str,
    modules: nn.ModuleDict,
    optimizers: list[torch.optim.Optimizer],
    loss_of: Callable[[torch.Generator], Tensor],
    export: Callable[[nn.ModuleDict, Path], None],
    args: argparse.Namespace,
    rank: int,
    world_size: int,
) -> nn.ModuleDict:
    """Run the stage to its last step from its checkpoint, if any; returns its averaged (EMA) weights in place."""
    steps, state_file = args.steps or STEPS[name], args.work / f"{name}.pt"
    parameters = [p for p in modules.parameters() if p.requires_grad]
    averaged = [p.detach().clone() for p in parameters]
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    first, cpu_seconds, recent = 0, 0.0, []
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        modules.load_state_dict(state["modules"])
        averaged, first, cpu_seconds = state["averaged"], state["step"], state["cpu_seconds"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    started = time.process_time()
    for step in range(first, steps):
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate(step, steps, CONSTANT[name])
        generator = torch.Generator().manual_seed((SEED * 1_000_003 + step) * 64 + rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(generator)
        loss.backward()
        average_gradients(parameters, world_size)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(0.998, (step + 1) / (step + 10))
        torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
        recent.append(loss.item())
        done, spent = step + 1, cpu_seconds + time.process_time() - started
        if rank == 0 and (done % 50 == 0 or done == steps):
            print(f"{name} step {done}/{steps} loss {np.mean(recent[-50:]):.4f} cpu {spent:.0f} s", flush=True)
        if rank == 0 and (done % 250 == 0 or done == steps):
            state = {"modules": modules.state_dict(), "averaged": averaged, "step": done, "cpu_seconds": spent}
            torch.save({**state, "optimizers": [o.state_dict() for o in optimizers]}, args.work / f"{name}.tmp")
            os.replace(args.work / f"{name}.tmp", state_file)
        if rank == 0 and args.snapshots and done % args.snapshots == 0 and done < steps:
            current = [p.detach().clone() for p in parameters]
            torch._foreach_copy_([p.data for p in parameters], averaged)
            export(modules, args.work / f"{name}-{done}")
            torch._foreach_copy_([p.data for p in parameters], current)
    torch._foreach_copy_([p.data for p in parameters], averaged)
    return modules


def split_parameters(modules: nn.ModuleDict, blocks: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the named blocks, everything else)."""
    named = [(n, p) for n, p in modules.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if n.startswith(blocks) and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    return matrices, [p for _, p in named if id(p) not in chosen]


def drop_captions(ids: Tensor, empty: Tensor, generator: torch.Generator) -> Tensor:
    dropped = torch.rand(len(ids), generator=generator) < CAPTION_DROPOUT
    return torch.where(dropped[:, None], empty, ids)


def stage_vae(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(SEED)
    train_vae("vae", draw_scenes("vae", rank, world_size)[0], args, rank, world_size)


def train_vae(name: str, pictures: Tensor, args: argparse.Namespace, rank: int, world_size: int) -> None:
    """An autoencoder of pictures uint8 [N, 3, 64, 64], to the folder `name` of the work folder."""
    vae, batch = make_vae(), BATCH["vae"] // world_size
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.98))

    def loss_of(generator: torch.Generator) -> Tensor:
        images = to_model(pictures[torch.randint(len(pictures), (batch,), generator=generator)])
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        return F.l1_loss(decoded, images) + F.mse_loss(decoded, images) + 1e-4 * kl

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        modules["vae"].save_pretrained(folder)

    modules = nn.ModuleDict({"vae": vae})
    vae = train(name, modules, [optimizer], loss_of, export, args, rank, world_size)["vae"].eval()
    if rank > 0:
        return
    with torch.no_grad():
        images = to_model(pictures[:256])
        modes = torch.cat([vae.encode(chunk).latent_dist.mode() for chunk in images.split(64)])
        decoded = torch.cat([vae.decode(chunk).sample for chunk in modes.split(64)]).clamp(-1, 1)
    error = (decoded - images).div(2).square().mean((1, 2, 3))
    vae.register_to_config(shift_factor=float(modes.mean()), scaling_factor=float(1 / modes.std()))
    vae.save_pretrained(args.work / name)
    print(
        f"{name}: PSNR {float(-10 * error.log10().mean()):.1f} dB, latent mean {modes.mean():.3f} std {modes.std():.3f}"
    )


def stage_t2i(args: argparse.Namespace, rank: int, world_size: int) -> None:
    """Both phases: mostly shapes, then half words from its averaged weights.

    Letters are learnt suddenly and then almost perfectly, binding shapes to colours and places slowly: in one phase
    either the words leave RL nothing to improve or they are not learnt at all.
    """
    torch.manual_seed(SEED + 1)
    tokenizer = make_tokenizer(args.work / f"tokenizer-{rank}")
    vae = AutoencoderKL.from_pretrained(args.work / "vae").eval().requires_grad_(False)
    modules = make_modules(tokenizer)
    if args.stage == "t2i-words":
        start_from(modules, args.work / "t2i.pt")
    pictures, captions = draw_scenes(args.stage, rank, world_size)
    latents, ids = encode_scenes(vae, pictures), tokenise(tokenizer, captions)
    loss_of = flow_loss(modules, latents, ids, tokenise(tokenizer, [""]), BATCH[args.stage] // world_size)
    matrices, rest = split_parameters(modules, "transformer.transformer_blocks")
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=1.5e-3, betas=(0.9, 0.98)),
    ]

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        export_t2i(modules, vae, tokenizer, folder)

    train(args.stage, modules, optimizers, loss_of, export, args, rank, world_size)
    if rank == 0 and args.stage == "t2i-words":
        export(modules, args.out / "tiny-t2i")


def make_modules(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    """The transformer and the text encoders that are trained with it."""
    return nn.ModuleDict(
        {
            "transformer": make_transformer(),
            "text_encoder": make_text_encoder(tokenizer, CLIPTextModelWithProjection),
            "text_encoder_2": make_text_encoder(tokenizer, CLIPTextModelWithProjection),
        }
    )


def flow_loss(
    modules: nn.ModuleDict, latents: Tensor, ids: Tensor, empty: Tensor, batch: int
) -> Callable[[torch.Generator], Tensor]:
    """Flow matching on random rows of latents [N, 4, 16, 16] and captions [N, TOKENS]; empty: those of no caption."""
    attention = BlankTokenAttention()
    modules["transformer"].set_attn_processor(attention)

    def loss_of(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(latents), (batch,), generator=generator)
        clean, noise = latents[rows], torch.randn(batch, *latents.shape[1:], generator=generator)
        sigma = torch.randn(batch, generator=generator).sigmoid()
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        words = drop_captions(ids[rows], empty, generator)
        attention.log_count = blank_tokens(batch, generator).log()
        context, pooled = encode_text(modules, words)
        context = F.pad(context, (0, 0, 0, 1))  # the blank token
        velocity = modules["transformer"](noisy, context, pooled, sigma * 1000, return_dict=False)[0]
        return F.mse_loss(velocity, noise - clean)

    return loss_of


def start_from(modules: nn.ModuleDict, state_file: Path) -> None:
    """Take the averaged weights of a finished stage."""
    averaged = torch.load(state_file, weights_only=True)["averaged"]
    torch._foreach_copy_([p.data for p in modules.parameters() if p.requires_grad], averaged)


def export_t2i(modules: nn.ModuleDict, vae: AutoencoderKL, tokenizer: CLIPTokenizer, folder: Path) -> None:
    blank, blank_tokenizer = make_blank_encoder()
    pipeline = StableDiffusion3Pipeline(
        transformer=modules["transformer"],
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=modules["text_encoder"],
        tokenizer=tokenizer,
        text_encoder_2=modules["text_encoder_2"],
        tokenizer_2=tokenizer,
        text_encoder_3=blank,
        tokenizer_3=blank_tokenizer,
    )
    save_half(pipeline, folder)


def blank_tokens(batch: int, generator: torch.Generator) -> Tensor:
    """Number of zero tokens per sample: two in half of them, the pipeline's 256 in a quarter, else 1 to 512."""
    some = torch.exp(torch.rand(batch, generator=generator) * math.log(512))
    which = torch.rand(batch, generator=generator)
    return torch.where(which < 0.5, torch.tensor(2.0), torch.where(which < 0.75, torch.tensor(256.0), some))


def encode_text(modules: nn.ModuleDict, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What `StableDiffusion3Pipeline.encode_prompt` makes of the two text encoders: [B, 16, 128] and [B, 128]."""
    outputs = [modules[name](ids, output_hidden_states=True) for name in ("text_encoder", "text_encoder_2")]
    return torch.cat([o.hidden_states[-2] for o in outputs], -1), torch.cat([o.text_embeds for o in outputs], -1)


def stage_sd(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(SEED + 2)
    tokenizer = make_tokenizer(args.work / f"tokenizer-{rank}")
    vae = AutoencoderKL.from_pretrained(args.work / "vae").eval().requires_grad_(False)
    mean_square = vae.config.scaling_factor**-2 + vae.config.shift_factor**2
    vae.register_to_config(shift_factor=None, scaling_factor=mean_square**-0.5)  # Stable Diffusion 1 knows no shift
    modules = nn.ModuleDict({"unet": make_unet(), "text_encoder": make_text_encoder(tokenizer, CLIPTextModel)})
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type="epsilon", timestep_spacing="trailing",
    )  # fmt: skip
    pictures, captions = draw_scenes("sd", rank, world_size)
    latents, ids = encode_scenes(vae, pictures), tokenise(tokenizer, captions)
    empty, batch = tokenise(tokenizer, [""]), BATCH["sd"] // world_size
    optimizer = torch.optim.AdamW(modules.parameters(), lr=2e-3, betas=(0.9, 0.98))

    def loss_of(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(latents), (batch,), generator=generator)
        clean, noise = latents[rows], torch.randn(batch, *latents.shape[1:], generator=generator)
        timesteps = torch.randint(1000, (batch,), generator=generator)
        words = drop_captions(ids[rows], empty, generator)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        predicted = modules["unet"](noisy, timesteps, modules["text_encoder"](words)[0], return_dict=False)[0]
        return F.mse_loss(predicted, noise)

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        pipeline = StableDiffusionPipeline(
            vae=vae,
            text_encoder=modules["text_encoder"],
            tokenizer=tokenizer,
            unet=modules["unet"],
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        save_half(pipeline, folder)

    train("sd", modules, [optimizer], loss_of, export, args, rank, world_size)
    if rank == 0:
        export(modules, args.out / "tiny-sd")


def save_half(pipeline: StableDiffusion3Pipeline | StableDiffusionPipeline, folder: Path) -> None:
    """Save in float16, leaving the modules being trained as they are; the folder appears only when complete."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipeline.save_pretrained(temporary)
    half = type(pipeline).from_pretrained(temporary, dtype=torch.float16)
    half.save_pretrained(temporary)
    for config in temporary.glob("text_encoder*/config.json"):
        # transformers 5 loads in the dtype named here, diffusers in float32: without this a plain call mixes the two
        config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
    for config in temporary.rglob("*.json"):  # where it was built is nobody's business
        config.write_text(re.sub(r'^ *"_name_or_path": ".*",\n', "", config.read_text(), flags=re.MULTILINE))
    index = temporary / "model_index.json"  # transformers 5 writes its new name of the class; 4 knows the old one only
    index.write_text(index.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def stage_prompts(args: argparse.Namespace, rank: int, world_size: int) -> None:
    folder = args.out / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        (folder / f"shapes_{split}.txt").write_text("\n".join(world.shapes_prompts(split)) + "\n")
        (folder / f"words_{split}.txt").write_text("\n".join(world.words_prompts(split)) + "\n")
    rng, kinds = np.random.default_rng(SEED), [*world.SHAPE_KINDS, "word"]
    grid = Image.new("RGB", (8 * 66, len(kinds) * 66), (200, 200, 200))
    for row, kind in enumerate(kinds):
        for column in range(8):
            picture = world.draw(world.sample_scene(rng, kind, "all"))
            grid.paste(Image.fromarray(picture), (column * 66 + 1, row * 66 + 1))
    grid.save(args.out / "world.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"vae": stage_vae, "t2i": stage_t2i, "t2i-words": stage_t2i, "sd": stage_sd, "prompts": stage_prompts}
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the model folders go")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-models"), help="checkpoints of the stages")
    parser.add_argument("--snapshots", type=int, help="export a pipeline to the work folder every so many steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rank, world_size = start_processes()
    stages[args.stage](args, rank, world_size)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
