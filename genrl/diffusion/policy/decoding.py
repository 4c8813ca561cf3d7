"""The autoencoder (VAE): in parts, and backwards, from pictures to the states that decode to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion.policy.interfaces import Autoencoder, Decoder
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch


def spare_vae(pipe: Any, *, sliced: bool = False, tiled: bool = False) -> None:
    """Have the VAE decode one picture after the other (sliced), which differs by rounding, or work in tiles (tiled).

    Raises ValueError, naming the key, where the pipeline has no VAE, or none that can.
    """
    vae = pipe.components.get("vae")
    for key, enabled in (("slice_vae", sliced), ("tile_vae", tiled)):
        if enabled and not (isinstance(vae, nn.Module) and isinstance(vae, Decoder)):
            raise ValueError(f"model.{key}: {type(pipe).__name__} has no VAE (component vae); write false")
    if tiled:
        _enable(vae, "enable_tiling", "tile_vae", "tiles")
    if sliced:
        _enable(vae, "enable_slicing", "slice_vae", "slices")


def _enable(vae: Any, method: str, key: str, parts: str) -> None:
    """Have the VAE work in parts. Raises ValueError, naming the key, where it cannot."""
    try:
        getattr(vae, method)()
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(f"model.{key}: {type(vae).__name__} does not decode in {parts}; write false") from error


MOST = 0.1  # mean absolute difference of pictures in [0, 1] from themselves, encoded and decoded; good ones: 0.03


class _Captured(Exception):
    """Leaves the pipeline where its autoencoder would decode."""


class Encoder:
    """Pictures as final states of a policy: those that decode to them.

    What the pipeline does before it decodes is looked at, and decoding tried, for the first pictures of each number,
    size and settings: it takes five calls of the pipeline, in which an editing one encodes its sources again.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._before: dict[tuple[torch.Size, str], _BeforeDecoding] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, images: Tensor) -> Tensor:
        """Final states, float32 [B, ...], of images [B, 3, H, W] in [0, 1], of the batch's size.

        Raises ValueError, with the reason, where the pipeline has no autoencoder, where what it does before decoding is
        not a permutation with factors and offsets, or where decoding does not give back the first pictures.
        """
        policy, vae, key = self.policy, self.policy.pipe.components.get("vae"), (images.shape, repr(batch.sampling))
        name = type(policy.pipe).__name__
        if not isinstance(vae, Autoencoder):
            raise ValueError(
                f"{name} has no autoencoder that encodes (component vae): it cannot learn from given pictures"
            )
        before = self._before.get(key) or _BeforeDecoding(policy, batch)
        pixels = (2.0 * images - 1.0).to(policy.device, vae.dtype)
        with torch.autocast(policy.device.type, enabled=False):
            coded = vae.encode(pixels[:, :, None] if before.at_zero.dim() == 5 else pixels)
        # The mode, not a draw: the same picture is then the same sample in every epoch.
        latents = coded.latent_dist.mode() if hasattr(coded, "latent_dist") else coded[0]
        if latents.shape != before.at_zero.shape:
            raise ValueError(
                f"the autoencoder of {name} encodes pictures of {images.shape[-2]} x {images.shape[-1]} to "
                f"{list(latents.shape)}, but {name} decodes {list(before.at_zero.shape)}: it cannot learn from given "
                "pictures"
            )
        latents = latents.float().to(before.at_zero.device)
        states = before.undone(latents)
        if key not in self._before:
            _check(policy, batch, states, latents, images)
            self._before[key] = before
        return states


class _BeforeDecoding:
    """What a pipeline does before it decodes, y = P (a x) + b, with a permutation P (packing), factors a, offsets b."""

    def __init__(self, policy: Policy, batch: Batch) -> None:
        """Raises ValueError where it is something else that has no gradient."""
        self.policy = policy
        # b is its output at 0. Its transpose, which autograd applies, takes y - b to a^2 x; and P a = y(1) - y(0), so
        # that the transpose of that is a^2. The quotient is x, whatever the pipeline's code, and is verified later.
        with torch.enable_grad():
            self.zero = torch.zeros(policy.state_shape(batch), device=policy.device, requires_grad=True)
            self.at_zero = decoder_input(policy, batch, self.zero)
            at_one = decoder_input(policy, batch, torch.ones_like(self.zero))
        self.squares = self._transposed(at_one.detach() - self.at_zero.detach())

    def undone(self, latents: Tensor) -> Tensor:
        """The final states that reach the autoencoder as `latents`, float32 [B, ...]."""
        return self._transposed(latents - self.at_zero.detach()) / self.squares

    def _transposed(self, values: Tensor) -> Tensor:
        try:
            return torch.autograd.grad(self.at_zero, self.zero, values.to(self.at_zero), retain_graph=True)[0]
        except RuntimeError as error:
            raise _not_affine(self.policy, str(error)) from error


def _check(policy: Policy, batch: Batch, states: Tensor, latents: Tensor, images: Tensor) -> None:
    """Raise ValueError where these states do not reach the autoencoder as `latents`, or do not decode to `images`."""
    decoded = decoder_input(policy, batch, states).detach()
    difference, size = (decoded - latents).abs().max(), latents.abs().max().clamp(min=1.0)
    # A rounding of bfloat16 is up to 4e-3 of a number, and there are a few on the way.
    tolerance = 1e-4 if decoded.dtype == torch.float32 else 2e-2
    if not bool(difference <= tolerance * size):
        raise _not_affine(policy, f"it is missed by {float(difference):.2g}")
    error = float((policy.decode(batch, states).cpu() - images.cpu()).abs().mean())
    # Written so that NaN is refused, too.
    if not error <= MOST:
        name = type(policy.pipe).__name__
        raise ValueError(
            f"pictures that {name} encodes and decodes come back changed, by {error:.2f} of the range on average "
            f"(at most {MOST}): its autoencoder is no inverse of its decoding, and it cannot learn from given pictures"
        )


def decoder_input(policy: Policy, batch: Batch, states: Tensor) -> Tensor:
    """What the autoencoder is given to decode of these final states; differentiable."""
    with _captured(policy.pipe.components["vae"]) as inputs:
        try:
            policy.decode(batch, states, grad=True)
        except _Captured:
            return inputs[0]
    raise ValueError(f"{type(policy.pipe).__name__} does not decode by its component vae: no picture can be encoded")


@contextmanager
def _captured(vae: Any) -> Iterator[list[Tensor]]:
    inputs: list[Tensor] = []

    def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs.append(latents)
        raise _Captured

    original = vae.__dict__.get("decode")
    vae.decode = decode
    try:
        yield inputs
    finally:
        if original is None:
            del vae.decode
        else:
            vae.decode = original


def _not_affine(policy: Policy, why: str) -> ValueError:
    return ValueError(
        f"what {type(policy.pipe).__name__} does to its states before its autoencoder decodes them cannot be undone "
        f"({why}): it cannot learn from given pictures"
    )
