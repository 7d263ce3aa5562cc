"""What cannot be measured here: cards one does not own, on the same engine and a virtual clock.

`catalog.py` knows the cards, `memory.py` what fits into them, `cost.py` how long a step takes, `simulator.py` runs the
engine on that. `forecast.py` is that in milliseconds. What no datasheet says is fitted: to published measurements
(`published.py`, `predict.py`, `effects.py`, `fit.py`; `shipped.py` has the outcome, `score.py` says how far off it
is), or to runs of one's own (`calibrate.py`). May import workloads, engine and metrics.
"""
