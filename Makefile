# Make the environment, and run the checks and benchmarks of Flash.

# `make env PYTHON=/path/to/python3.12` chooses the Python. Without PYTHON, an existing environment keeps its Python.
PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
BIN := .venv/bin
BENCH_ARGS ?=
GPU_CHECK ?=

# Number of tests that run at the same time: one more than there are cores, because many tests wait for a process; at most
# four. The tests of a file run in their order: see tests/conftest.py.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
TYPED := 'flash/*.py' 'algorithms/*.py' 'envs/*.py'
ALONE := $(BIN)/python -m pytest -v --exitfirst --last-failed --last-failed-no-failures none

# With this variable, each process of the tests would compile all modules that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env check unit test all-tests lint lint-changed style bench gpu-check docs site clean

# Make .venv. Returns at once if it is up to date.
env:
	@$(PYTHON) scripts/install.py

# Run the fast unit tests, which use the virtual clock and fakes, and the linters. The tests with the mark `slow` are one
# in thirty, and take more than half of the time. The types of the whole code take 80 seconds of a core, so only
# `make test` checks them all. Here pyright reads the files that differ from the last commit.
check: env
	@$(MAKE) --no-print-directory --jobs=2 unit lint-changed

unit: env
	$(PYTEST) -m "not integration and not slow"

# Run all tests, also those with real engines, process groups and, where a container engine answers, containers. Tests
# that fail are run a second time, without other tests beside them. A test that passes then has a race that must be
# repaired, but the change under test is not what broke it.
test: env
	@$(MAKE) --no-print-directory --jobs=2 all-tests lint

all-tests: env
	$(PYTEST) || { [ $$? = 1 ] && $(ALONE); }

lint: style
	$(BIN)/pyright --pythonpath $(BIN)/python

lint-changed: style
	@changed="$$(git diff --name-only --diff-filter=d HEAD -- $(TYPED); git ls-files --others --exclude-standard -- $(TYPED))"; \
	if [ -n "$$changed" ]; then $(BIN)/pyright --pythonpath $(BIN)/python $$changed; fi

style: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Run every benchmark. Their rows go to benchmarks/results/. `make bench BENCH_ARGS=--quick` runs the short forms.
bench: env
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Check what needs one NVIDIA GPU, in a quarter of an hour. `make gpu-check GPU_CHECK="mfu engine"` runs these parts
# only. GPU_CHECK="--model FOLDER" also trains the model in this folder.
gpu-check: env
	$(BIN)/python -m benchmarks.gpu $(GPU_CHECK)

# Write the generated pages: docs/configuration.md from the docstrings of flash/config/tree.py, docs/commands.md from the
# parsers in flash/cli, the tables of docs/metrics.md from flash/observe/columns/, and docs/grafana.json from the charts.
docs: env
	$(BIN)/python scripts/reference_docs.py

# Build the documents as a site in build/site. Any server can show it, such as `python3 -m http.server -d build/site`. A
# link without a target is an error.
site: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Delete all files that can be made again. Runs, which are in outputs/, stay.
clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
