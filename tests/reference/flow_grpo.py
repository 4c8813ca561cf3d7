"""Flow-GRPO's transition and its density, as the paper writes them (arXiv 2505.05470)."""

import math

from torch import Tensor


def flow_sde(x: Tensor, v: Tensor, sigma: float, sigma_next: float, sigma_max: float, a: float) -> tuple[Tensor, float]:
    """Mean and transition std of Flow-GRPO's SDE, as the paper writes them."""
    s = a * math.sqrt(sigma / (1 - min(sigma, sigma_max)))
    dt = sigma_next - sigma
    mean = x * (1 + s**2 * dt / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * math.sqrt(-dt)


def log_density(y: Tensor, mean: Tensor, std: float) -> Tensor:
    return (-((y - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)
