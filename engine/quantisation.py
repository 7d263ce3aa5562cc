"""How quantised weights are stored: bits a value, scales and zero points included, and which parts have them.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.engine.parameters import ATTENTION, DENSE, EXPERTS, PARTS, SHARED

LINEAR = frozenset({ATTENTION, DENSE, SHARED, EXPERTS})
"""What a scheme quantises where nothing else is said: embedding, head, router and norms stay as they are."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of some parts are stored: `bits` a value, its share of scales and zero points included."""

    name: str
    bits: float
    parts: frozenset[str]

    def __post_init__(self) -> None:
        assert 0 < self.bits <= 32 and self.parts <= set(PARTS), self


_SCHEMES = {
    "mxfp4": Quantisation("mxfp4", 4 + 8 / 32, frozenset({EXPERTS})),
    "fp8": Quantisation("fp8", 8 + 32 / 128**2, LINEAR),
}


def scheme(name: str) -> Quantisation:
    """A built-in shape's own scheme: `mxfp4` (a scale of 8 bits for 32 values), `fp8` (one of 32 bits for a block of
    128 x 128)."""
    return _SCHEMES[name]
