"""Any diffusers pipeline as a policy: scheduler, encoding, decoding, loading, weights."""

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before diffusers and transformers look for a torchvision that may be broken beside a CPU-only torch
