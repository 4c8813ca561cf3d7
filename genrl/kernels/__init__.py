"""Kernels, each beside the plain torch function that defines it. Nothing here knows a model.

| module | defines | computed by |
| --- | --- | --- |
| `blocks` | norms, rotations, gates and modulations of a block | torch.compile of the definitions |
| `blocks` | attention by a chosen kernel | SDPA |
| `prefix_attention` | rows that continue shared prefixes, kept once | masked SDPA, FlexAttention |
"""
