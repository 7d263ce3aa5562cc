"""One seed gives one random stream per purpose, so that a draw added for one purpose moves no other.

Used purposes: `lengths.input`, `lengths.output`, `arrivals`, `tokens`, `tokens.prefix`, `tokens.block.…` (one for each
block of a trace that is shared), `groups` (whose prefix a prompt has), `order` (of a data set's rows), `sampling` (one
seed a request).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from numpy.random import Generator


def stream(seed: int, purpose: str) -> Generator:
    """The generator of `purpose` under `seed`: always the same numbers, independent of every other pair's.

    Independence is numpy's: `SeedSequence` hashes the seed and the purpose, which serves as its spawn key.
    """
    from numpy.random import PCG64, Generator, SeedSequence

    if seed < 0:
        raise KvbenchError(f"--seed must be a whole number of at least 0, not {seed}")
    assert purpose, "a stream needs a purpose"
    return Generator(PCG64(SeedSequence(seed, spawn_key=tuple(purpose.encode()))))
