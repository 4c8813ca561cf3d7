"""What pipelines and adapters are read from, and written to."""

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before diffusers and transformers look for a torchvision that may be broken beside a CPU-only torch
