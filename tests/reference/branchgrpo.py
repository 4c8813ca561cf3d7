"""BranchGRPO (arXiv 2509.06040) as its code has it: split points, calls of copied states, width pruning by edges."""

from __future__ import annotations

from genrl.mdp.plan import SamplingPlan


def copied_calls(plan: SamplingPlan) -> int:
    """Model calls of sampling where a node is copied before its split and each copy is evaluated."""
    nodes = plan.nodes
    return sum(nodes[step + 1] if ways > 1 else nodes[step] for step, ways in enumerate(plan.branching))


def repeated_windows(size: int, stride: int, steps: int) -> tuple[int, ...]:
    """Steps i with i mod stride < size: windows that begin at every multiple of `stride` (BranchGRPO-Mix's code)."""
    return tuple(step for step in range(steps) if step % stride < size)
