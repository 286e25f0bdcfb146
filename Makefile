# The environment, the checks and the benchmarks of Flash. `make env PYTHON=/path/to/python3.12` chooses the Python.

# Without it, an environment that is there keeps the Python that it was made with.
PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
BIN := .venv/bin
BENCH_ARGS ?=
GPU_CHECK ?=

# One test more than there are cores, as many wait for a process of their own; at most four. Each file's are in their
# order: see tests/conftest.py.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
ALONE := $(BIN)/python -m pytest -v --exitfirst --last-failed --last-failed-no-failures none

# Else each process of the tests compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env check unit test all-tests lint bench gpu-check docs site clean

# Returns at once when .venv is current.
env:
	@$(PYTHON) scripts/install.py

# Unit tests, on the virtual clock and with fakes, and the linters: under two minutes on two cores.
check: env
	@$(MAKE) --no-print-directory --jobs=2 unit lint

unit: env
	$(PYTEST) -m "not integration"

# Everything: also real engines, process groups and, where an engine for them answers, containers. What fails beside
# others is run again by itself: if it passes then it is a race, told above and to be mended, but no broken change.
test: env
	@$(MAKE) --no-print-directory --jobs=2 all-tests lint

all-tests: env
	$(PYTEST) || { [ $$? = 1 ] && $(ALONE); }

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Every benchmark, whose rows go to benchmarks/results/; `make bench BENCH_ARGS=--quick` for the short form.
bench: env
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# What one NVIDIA GPU can show, in a quarter of an hour: `make gpu-check GPU_CHECK="mfu engine"` for some parts,
# GPU_CHECK="--model FOLDER" to train a model of your own as well.
gpu-check: env
	$(BIN)/python -m benchmarks.gpu $(GPU_CHECK)

# docs/configuration.md, from the docstrings of flash/config/tree.py; docs/commands.md, from the parsers in flash/cli; the
# tables of docs/metrics.md, from flash/observe/columns/; docs/grafana.json, from the charts.
docs: env
	$(BIN)/python scripts/reference_docs.py

# The documents as a site, in build/site: any server shows it, such as `python3 -m http.server -d build/site`. What leads
# nowhere is an error.
site: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Everything that can be made again, but no runs: those are in outputs/.
clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
