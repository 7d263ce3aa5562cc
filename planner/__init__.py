"""What cannot be measured here: cards one does not own, on the same engine and a virtual clock.

`catalog.py` knows the cards, `memory.py` what fits into them, `cost.py` how long a step takes, `simulator.py` runs the
engine on that. May import workloads, engine and metrics.
"""
