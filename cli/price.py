"""What a device costs an hour, and who says so."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for an hour of one card. Of a catalogue's range it is the middle, and `low` and `high` are its ends as
    of a `date`."""

    usd_per_hour: float
    source: str
    low: float | None = None
    high: float | None = None
    date: str | None = None

    def facts(self) -> dict[str, object]:
        return asdict(self)


def price_of(told: float | None) -> Price | None:
    """`--price`; None where nothing was told."""
    return None if told is None else Price(told, "--price")
