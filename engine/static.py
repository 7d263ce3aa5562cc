"""Request-level batching, as FasterTransformer and plain frameworks do it: what waits becomes a batch, and the next
batch forms when this one has wholly ended. What ends early keeps its rows until then, full of nothing."""

from __future__ import annotations

from kvbench.engine.interfaces import Retiring
from kvbench.engine.scheduler import Limits, Plan, Scheduler
from kvbench.engine.types import Sequence


class StaticScheduler(Scheduler):
    """`ended` are those of the batch that have ended, well or not, and still hold their rows.

    Memory is reserved for the whole batch when it forms, whatever the token budget; prompts come in chunks under it, as
    ever. Members are admitted when their batch forms.
    """

    def __init__(self, allocator: Retiring, limits: Limits) -> None:
        super().__init__(allocator, limits)
        self.ended: list[Sequence] = []
        self._retire = allocator.retire

    def finish(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.running.remove(sequence)
        self._retire(sequence)
        self.ended.append(sequence)

    def drain(self) -> None:
        self._release()
        super().drain()

    def schedule(self) -> Plan:
        plan = Plan()
        if not self.running:
            self._release()
            while self._admit(plan):
                pass
        self._advance_running(plan)
        return plan

    def _release(self) -> None:
        for sequence in self.ended:
            self.allocator.free(sequence)
        self.ended.clear()
