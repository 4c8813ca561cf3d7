"""A small random Orient-Anything in the published format: DINOv2's folder, and one file of weights beside it."""

from pathlib import Path

import torch

from genrl_rewards.models.checkpoints import transformers

WIDTH, PATCH = 16, 14
OLD_NAMES = {  # as transformers 4 wrote them, when the published file was made
    "attention.o_proj": "attention.output.dense",
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
}


def save(folder: Path, bins: int = 180) -> tuple[Path, Path]:
    """The file of weights and the folder of the backbone."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, image_size=2 * PATCH, patch_size=PATCH
    )
    model = transformers.Dinov2Model(config)
    backbone = folder / "dino"
    config.save_pretrained(backbone)
    size = {"shortest_edge": 2 * PATCH}
    crop = {"height": 2 * PATCH, "width": 2 * PATCH}
    transformers.BitImageProcessor(size=size, crop_size=crop).save_pretrained(backbone)
    outputs = 360 + 180 + bins + 2
    weights = {}
    for name, value in model.state_dict().items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        weights[f"dinov2.{name}"] = value + 0.2 * torch.randn(value.shape)
    for net, width in (("net1", WIDTH), ("net2", outputs)):
        linear, norm = torch.nn.Linear(width, outputs), torch.nn.BatchNorm1d(outputs)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        for place, module in enumerate((linear, norm)):
            weights |= {f"down_sampler.{net}.{place}.{name}": v for name, v in module.state_dict().items()}
    file = folder / "croplargeEX2" / "dino_weight.pt"
    file.parent.mkdir()
    torch.save(weights, file)
    return file, backbone
