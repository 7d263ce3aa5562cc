"""kvbench measures what the layout of the KV cache costs a large language model's server.

Two backends, a contiguous preallocated cache and a paged one, run under one engine and one load. To know the whole,
read in this order:

1. `engine/types.py`       Request, Chunk, Batch, Move: what flows through everything
   `engine/sequence.py`    Sequence, the one of them that changes
2. `engine/interfaces.py`  the seams: Allocator (and Paging), Cache, Executor, Clock, Load
3. `engine/scheduler.py`   which tokens are computed next (no phases: computed catches up with known)
   `engine/decoding.py`    those that decode, and the calendar of what each needs next
   `engine/static.py`      the other way to batch: as a whole, the traditional one
4. `engine/engine.py`      Engine and `serve`, the loop around it
5. `contiguous/slots.py`, `paged/blocks.py`   the two memory policies, host bookkeeping only;
                           `paged/prefix.py` and `holders.py`: what sequences share; `swap.py`: what makes room
6. `contiguous/cache.py`, `paged/cache.py`    where a token's row lies in the arena both share
7. `engine/model.py`, `engine/runner.py`      transformers' own model over our attention, on a device, made fast in
                           `engine/decoder.py` and `linear.py`; its tokens are chosen in `engine/sampling.py`
8. `workloads/`            what is asked, and when; `workloads/client.py` puts it to a server instead
9. `metrics/`              what was compared (points), observed (records), kept (store) and concluded (summary, stats)
10. `cli/stack.py`         the one place that puts the parts together, over a device there is (`cli/owned.py`) or one
                           that is computed (`cli/virtual.py`); `cli/sweep.py` the main job
11. `planner/`             what cannot be measured here: cards (catalog), what fits into them (memory), how long their
                           steps take (cost, steps), engines on that (simulator), recorded steps once more (replay)
12. `reports/`             tables, charts and the page, all from the stored run

Everything imports as `kvbench.<folder>`, from an installed package and from a bare checkout alike.
"""

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():  # a checkout: the folders stand beside this package, not inside it
    __path__.append(str(_root))
