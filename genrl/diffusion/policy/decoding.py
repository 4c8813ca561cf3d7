"""The autoencoder (VAE) between its uses: off the device, and one picture at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from genrl.diffusion.policy.encoding import keep_execution_device
from genrl.diffusion.policy.interfaces import Autoencoder, Decoder


def spare_vae(pipe: Any, *, offload: bool = False, sliced: bool = False, tiled: bool = False) -> None:
    """offload: the VAE waits on the CPU and is on the pipeline's device only while it encodes or decodes, without a
    backward pass through it. sliced: it decodes one picture after the other, which differs by rounding.
    tiled: it encodes and decodes in tiles.

    Raises ValueError, naming the key, where the pipeline has no VAE, or none that can.
    """
    vae, home = pipe.components.get("vae"), pipe._execution_device
    keys = (("offload.vae", offload, "null"), ("slice_vae", sliced, "false"), ("tile_vae", tiled, "false"))
    for key, asked, instead in keys:
        if asked and not (isinstance(vae, nn.Module) and isinstance(vae, Decoder)):
            raise ValueError(f"model.{key}: {type(pipe).__name__} has no VAE (component vae); write {instead}")
    if tiled:
        _enable(vae, "enable_tiling", "tile_vae", "tiles")
    if sliced:
        _enable(vae, "enable_slicing", "slice_vae", "slices")
    if offload:
        keep_execution_device(pipe, home)
        vae.to("cpu")
        vae.decode = _fetched(vae, vae.decode, home)
        if isinstance(vae, Autoencoder):
            vae.encode = _fetched(vae, vae.encode, home)


def _enable(vae: Any, method: str, key: str, parts: str) -> None:
    """Have the VAE work in parts. Raises ValueError, naming the key, where it cannot."""
    try:
        getattr(vae, method)()
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(f"model.{key}: {type(vae).__name__} does not decode in {parts}; write false") from error


def _fetched(vae: Any, original: Callable[..., Any], home: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        vae.to(home)
        try:
            return original(*args, **kwargs)
        finally:
            vae.to("cpu")

    return call
