"""Types of the arrays that the folders of `adapt` hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
IntsLike: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
