"""Weights of edges and leaves by their log-probabilities, node by node: TreeGRPO (arXiv 2512.08153).

parent int64 [N] in level order, -1 for roots; edge_log_prob [N], entries of roots not read. All is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sibling_weights(parent: Tensor, edge_log_prob: Tensor) -> Tensor:
    """softmax(l) of each edge among the children of its parent, [N]; 1 for roots."""
    weights = torch.ones(len(parent), dtype=torch.float64)
    for mother in parent[parent >= 0].unique().tolist():
        children = parent == mother
        weights[children] = edge_log_prob[children].double().softmax(0)
    return weights


def leaf_weights(parent: Tensor, edge_log_prob: Tensor) -> Tensor:
    """Product of `sibling_weights` on the path from the root to each leaf, [L], in level order."""
    product = sibling_weights(parent, edge_log_prob)
    for node, mother in enumerate(parent.tolist()):
        if mother >= 0:
            product[node] *= product[mother]
    return product[~torch.isin(torch.arange(len(parent)), parent)]


def effective_sample_size(weights: Tensor) -> Tensor:
    """`(sum w)^2 / sum w^2` over the last dimension: how many equally weighted leaves they are worth."""
    return weights.sum(-1) ** 2 / weights.square().sum(-1)


def log_partition(parent: Tensor, edge_log_prob: Tensor) -> Tensor:
    """Z(n) = log of the sum over leaves below n of exp(sum of l_e on the path down), [N]; 0 for a leaf."""
    value = torch.zeros(len(parent), dtype=torch.float64)
    for mother in parent[parent >= 0].unique().flip(0).tolist():
        children = parent == mother
        value[mother] = (edge_log_prob[children].double() + value[children]).logsumexp(0)
    return value
