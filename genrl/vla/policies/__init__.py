"""Vision-language-action policies, embedded and published, and their parts."""

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before transformers looks for a torchvision that may be broken beside a CPU-only torch
