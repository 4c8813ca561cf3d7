"""Fused kernels, each beside the plain torch function that defines it. Nothing here knows a model.

| module | defines | kernel |
| --- | --- | --- |
| `prefix_attention` | rows that continue shared prefixes, kept once | Triton, FlexAttention, masked SDPA |
| `qk_norm_rope` | RMS norm of queries or keys, then rotary positions | Triton |
| `adaln` | gate, residual, LayerNorm, modulation | Triton |
| `sde_step` | a Gaussian denoising step and its log-probability | Triton |
| `joint_attention` | attention by a chosen library | SDPA, FlashAttention-2/3, xformers, SageAttention |

`backend.choose` decides and says what runs. The definitions compute in float32 (float64 for float64) and round once.
"""
