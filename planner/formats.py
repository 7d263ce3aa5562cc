"""Number formats of weights: how many bits they stream and at which of a card's rates they are multiplied.

A format that a card has no rate for is multiplied at its 16-bit rate, as engines do (weights unpacked on the way). Only
the matrices of the layers are in the format; embedding, head, norms and routers stay in 16 bits, as in the published
quantised models. Scales count: 128 values share 16 bits in the 4-bit formats, 32 share 8 bits in MXFP4, 16 share 8 bits
in NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.parameters import EXPERTS
from kvbench.engine.quantisation import LINEAR, Quantisation
from kvbench.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.planner.catalog import Card


@dataclass(frozen=True, slots=True)
class Format:
    """`bits` of a streamed weight. `compute` is the rate of the card it is multiplied at: `bfloat16`, `float16`, `fp8`
    (8-bit integers alike) or `fp4`. `kind` groups formats whose kernels are alike. `experts_only`: the rest stays
    16-bit."""

    name: str
    bits: float
    compute: str
    kind: str
    experts_only: bool = False

    @property
    def quantisation(self) -> Quantisation | None:
        """How the weights are stored; None: as they are, in 16 bits."""
        if self.kind == "plain":
            return None
        return Quantisation(self.kind, self.bits, frozenset({EXPERTS}) if self.experts_only else LINEAR)


FORMATS = (
    Format("BF16", 16, "bfloat16", "plain"),
    Format("FP16", 16, "float16", "plain"),
    Format("FP8", 8, "fp8", "fp8"),
    Format("W8A8", 8, "fp8", "int8"),
    Format("W8A16", 8.125, "bfloat16", "w8a16"),
    Format("W4A16", 4.125, "bfloat16", "w4a16"),
    Format("AWQ/INT4", 4.25, "bfloat16", "w4a16"),
    Format("MXFP4", 4.25, "bfloat16", "mxfp4", experts_only=True),
    Format("FP4", 4.5, "fp4", "fp4"),
)
INTEGER_8_BIT = 2.0  # tensor cores since Turing multiply 8-bit integers at twice their 16-bit rate
FP4_OVER_FP8 = 2.0  # Blackwell's datasheets


def find_format(name: str) -> Format:
    """The format of that name in any case. KvbenchError names the known ones."""
    for one in FORMATS:
        if one.name.lower() == name.strip().lower():
            return one
    known = ", ".join(one.name for one in FORMATS)
    raise KvbenchError(f"unknown number format {name!r}; known are {known}")


def native(card: Card, number: Format) -> bool:
    """Whether the card multiplies in the format itself, so that values are 8 or 4 bits on both sides."""
    rates = card.flops_per_s
    if number.kind == "int8":
        return True
    return number.compute in ("fp8", "fp4") and "fp8" in rates and (number.compute != "fp4" or _has_fp4(card))


def flops_per_s(card: Card, number: Format) -> float:
    """Peak FLOP/s of the card for matrices in that format."""
    rates = card.flops_per_s
    plain = rates.get(number.compute) or rates.get("bfloat16") or rates.get("float16")
    if not plain:
        raise KvbenchError(f"{card.name} has no 16-bit rate in the catalogue; give bf16_tflops in --gpu-file")
    if not native(card, number):
        return plain if number.compute not in ("fp8", "fp4") else _sixteen_bit(card)
    if number.compute == "fp4":
        return FP4_OVER_FP8 * rates["fp8"]
    if number.kind == "int8":
        return rates.get("fp8", INTEGER_8_BIT * _sixteen_bit(card))
    return plain


def _sixteen_bit(card: Card) -> float:
    rates = card.flops_per_s
    return rates.get("bfloat16") or rates["float16"]


def _has_fp4(card: Card) -> bool:
    return card.id in {"b200", "rtx-pro-6000", "rtx-5090"}
