"""The next token of each row of logits: greedy, or drawn as `Sampling` asks. Nothing here has a state.

A draw depends on the request's seed and on the token's position alone. So it is the same in any batch, on any device
and after any preemption; and the repetition penalty reads the sequence itself, which a preemption does not change
(vllm PR#5349).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.sequence import Sequence
from kvbench.engine.types import Sampling

ROWS_AT_ONCE = 32
"""A draw takes some 40 bytes of device memory for each row and word of the vocabulary; this bounds it."""


@torch.inference_mode()
def next_tokens(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """The next token of each sequence [n] from logits [n, V]; -1 where the logits hold NaN or +inf, or nothing
    but -inf. Rows that are plainly greedy cost one maximum, whatever the others ask."""
    best, tokens = logits.max(dim=-1)
    asking = [row for row, sequence in enumerate(sequences) if not sequence.sampling.plain]
    for first in range(0, len(asking), ROWS_AT_ONCE):
        rows = asking[first : first + ROWS_AT_ONCE]
        tokens[rows] = _asked(logits[rows].float(), [sequences[row] for row in rows])
    return tokens.masked_fill(~best.isfinite(), -1)


def _asked(scores: Tensor, sequences: list[Sequence]) -> Tensor:
    """Tokens [n] by penalty, then temperature, then top-p, the order of vLLM and transformers; scores [n, V] float32,
    changed in place."""
    samplings = [sequence.sampling for sequence in sequences]
    _penalise(scores, [(row, one) for row, one in enumerate(sequences) if one.sampling.repetition_penalty != 1])
    tokens = scores.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    if drawn:
        chosen = [samplings[row] for row in drawn]
        positions = [sequences[row].known for row in drawn]
        weights = _cut(_probabilities(scores[drawn], chosen), chosen)
        tokens[drawn] = (weights / _exponential(chosen, positions, scores)).argmax(dim=-1)
    return tokens


def _penalise(scores: Tensor, rows: list[tuple[int, Sequence]]) -> None:
    """Every token of prompt and answer becomes less likely: its logit is divided by the penalty where it is above 0 and
    multiplied by it elsewhere (CTRL, arXiv 1909.05858), once however often the token came."""
    at: list[int] = []
    seen: list[int] = []
    penalties: list[float] = []
    for row, sequence in rows:
        at.extend([row] * sequence.known)
        seen.extend(sequence.tokens)
        penalties.extend([sequence.sampling.repetition_penalty] * sequence.known)
    if not at:
        return
    device = scores.device
    where = torch.tensor(at, device=device), torch.tensor(seen, device=device)
    penalty = torch.tensor(penalties, device=device)
    found = scores[where]
    scores[where] = torch.where(found > 0, found / penalty, found * penalty)


def _probabilities(scores: Tensor, samplings: list[Sampling]) -> Tensor:
    """Softmax of scores [n, V] over temperature. The best is moved to 0 first: no temperature is too small."""
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=scores.device)
    temperatures = temperatures.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return ((scores - scores.amax(dim=-1, keepdim=True)) / temperatures).softmax(dim=-1)


def _cut(weights: Tensor, samplings: list[Sampling]) -> Tensor:
    """Weights [n, V] with 0 for all but the fewest, most likely tokens that reach top-p together (nucleus sampling,
    arXiv 1904.09751). The best always stays; of equals the lower token goes first."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if rows:
        ordered, tokens = weights[rows].sort(dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered
        top_p = torch.tensor([[samplings[row].top_p] for row in rows], dtype=torch.float64, device=weights.device)
        ordered[before >= top_p] = 0
        weights[rows] = torch.zeros_like(ordered).scatter(-1, tokens, ordered)
    return weights


def _exponential(samplings: list[Sampling], positions: list[int], scores: Tensor) -> Tensor:
    """Draws e [n, V] from Exp(1); argmax(p / e) is then a draw from p, and one that small errors in p hardly move.

    Counter-based (SplitMix64, Steele, Lea and Flood 2014): row i is the stream of seed and position, the token its
    counter. A generator a row would mean a loop over rows on the host.
    """
    device = scores.device
    seeds = torch.tensor([sampling.seed for sampling in samplings], dtype=torch.int64, device=device)
    streams = _mixed(_mixed(seeds) + torch.tensor(positions, device=device)).unsqueeze(1)
    counters = torch.arange(1, scores.shape[-1] + 1, device=device) * -0x61C8864680B583EB  # 2**64 over the golden ratio
    uniform = ((_mixed(streams + counters) >> 1) & (2**63 - 1)).float().add_(0.5).mul_(2.0**-63)
    return uniform.neg_().log1p_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser: int64 in and out, taken as 64 bits without a sign."""
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return bits ^ ((bits >> 31) & (2**33 - 1))
