"""Where a series settles: the last of its changes of level that chance does not explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FALSE_ALARM = 0.01
"""How often a series without a change may seem to have one."""
PERMUTATIONS = 999
FEWEST = 8
"""Of fewer values no order is unlikely enough to be told from chance."""


def settled_from(values: Sequence[float]) -> int:
    """The index from which on `values` show no change of level any more; 0 where they never do.

    The change of one level into another is where the two means explain most (least squares; Hinkley 1970, Bai 1994).
    It counts where at most `FALSE_ALARM` of all orders of the same values have one as clear (a permutation test; Antoch
    and Hušková 2001): with values in an order of pure chance that holds exactly, whatever their distribution. The rest
    behind a change is searched again, so a slow rise is several changes. Orders are drawn from a fixed seed.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    series = np.asarray(values, np.float64)
    start = 0
    while len(rest := series[start:]) >= FEWEST:
        clearness = _clearness(rest[None, :])[0]
        orders = rng.permuted(np.tile(rest, (PERMUTATIONS, 1)), axis=1)
        as_clear = (_clearness(orders).max(axis=1) >= clearness.max() * (1 - 1e-9)).sum()
        if (1 + as_clear) / (1 + PERMUTATIONS) > FALSE_ALARM:
            break
        start += 1 + int(clearness.argmax())
    return start


def _clearness(series: Floats) -> Floats:
    """For each row and each k from 1: the sum of squares that the means of the first k and of the other values explain
    beyond the mean of all."""
    import numpy as np

    n = series.shape[1]
    k = np.arange(1, n)
    sums = np.cumsum(series - series.mean(axis=1, keepdims=True), axis=1)[:, :-1]
    explained: Floats = sums**2 * n / (k * (n - k))
    return explained
