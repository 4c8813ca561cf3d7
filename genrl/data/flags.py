"""True or false, as programs and files from outside tell it: 0.3, NaN and a text are neither. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def flag(told: Any, what: str, refused: type[ValueError] = ValueError) -> bool:
    """One of the two, whatever number or array of one it stands in. Raises `refused`, naming it, for all else."""
    array = np.asarray(told)
    if array.size != 1:
        raise refused(f"{what} is {told!r:.60}, and it is true or false")
    return bool(flags(array, what, refused).item())


def flags(told: NDArray[Any], what: str, refused: type[ValueError] = ValueError) -> NDArray[np.bool_]:
    """An array of them, as bool. Raises `refused`, naming the first that is neither."""
    odd = [] if told.dtype == np.bool_ else [one for one in told.reshape(-1).tolist() if one not in (0, 1)]
    if odd:
        raise refused(f"{what} is {odd[0]!r}, and it is true or false")
    return told.astype(np.bool_)
