"""A Ray cluster of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import ray_nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes.connected(cpus=1):
        import ray

        yield ray
