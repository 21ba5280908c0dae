# make train      a first run: train configs/quickstart.yaml with torchrec, pgas and fused, on one process per GPU or
#                 two on the CPU, and print a table of the results and their TensorBoard folder; on a CPU that is not
#                 x86-64, where pgas and fused do not run, with torchrec and nccl
# make test       run the tests, without the slow ones
# make test-slow  run the slow tests: four ranks, and variants of what `make test` covers
# make test-versions  run the distributed and kernel tests, on CPUs, with all older versions of the libraries, and with
#                 each other Python that is on PATH; install the wheel into an empty environment, and train there; needs
#                 30 GB for the environments .venv-*
# make wheel      build dist/dlrm_overlap-VERSION-py3-none-any.whl, the only file that the Dockerfile needs; no .venv
# make soak       kill and resume a run 200 times, and train for five minutes; takes half an hour
# make test-gpu   run the tests that need GPUs
# make lint       ruff, import-linter, pyright
#
# Targets that need .venv create it. PYTHON=python3.12 selects the interpreter (3.11 to 3.13). The libraries are the
# newest that are supported: the CUDA builds if there is a GPU, else the CPU builds, for which pip also searches PyTorch's
# index of CPU wheels, unless pip is configured for another index (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, its configuration)
# or it does not answer. A .venv with the other builds is made anew, as pip would keep torch; machines with and without
# GPUs that share a checkout take VENV=.. on one of them, or STACK=cuda on both.

VENV ?= .venv
BIN := $(VENV)/bin
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(IS_SUPPORTED)' 2>/dev/null && echo $$p && break; done)
NEED_PYTHON = @test -n "$(PYTHON)" && $(PYTHON) -c '$(IS_SUPPORTED)' || \
	{ echo "make: no Python 3.11 to 3.13 found; install one, or name it: make PYTHON=..." >&2; exit 2; }
STACK ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
TORCHREC_cpu = $(BIN)/python -m pip install -q --no-deps torchrec==1.9.2
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PROBE := import urllib.request as u; u.urlopen("$(CPU_WHEELS)/torch/", timeout=5)
INDEX_cpu = $$($(BIN)/python -m pip config list | grep -E "(index-url|no-index|find-links)=" > /dev/null || \
	! $(BIN)/python -c '$(PROBE)' 2>/dev/null || echo --extra-index-url $(CPU_WHEELS))
READY := $(VENV)/.ready-$(STACK)
OTHER_BUILDS := $(filter-out $(READY),$(wildcard $(VENV)/.ready-*))
OURS := $(if $(filter cuda-% cpu-x86_64,$(STACK)-$(shell uname -m)),pgas fused,nccl)
# Two processes, one test file at a time each, as the tests of a file share ranks and runs; those that start ranks first.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: train wheel test test-slow test-versions soak test-gpu lint format clean

train: $(READY)
	$(BIN)/dlrm-overlap compare --config configs/quickstart.yaml --backends torchrec $(OURS) --nproc auto

wheel:
	$(NEED_PYTHON)
	rm -rf build dist
	$(PYTHON) -m pip wheel -q --no-deps -w dist .

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

test-slow: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not gpu"

test-versions: $(READY)
	$(BIN)/python -m tests.versions $(INDEX_cpu)

soak: $(READY)
	SOAK_ROUNDS=200 SOAK_SECONDS=300 $(BIN)/python -m pytest tests/soak

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache

$(READY): pyproject.toml Makefile
	$(NEED_PYTHON)
	$(PYTHON) -m venv $(if $(OTHER_BUILDS),--clear) $(VENV)
	$(BIN)/python -m pip install -q --no-warn-conflicts $(INDEX_$(STACK)) -e ".[$(STACK),dev]"
	$(TORCHREC_$(STACK))
	touch $@
