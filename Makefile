# Every target sets itself up: the first run makes .venv and installs the project into it.
#
#   make recall      measure the default model and draw its curves
#   make report      a sweep of the default model and one page about it
#   make test        the test suite
#
# Variables: PYTHON (3.11 or newer), JOBS (test workers), TESTS (what to test), ARGS (Hydra overrides of `recall`),
# RESULTS (the folder that `figures` draws), REPORT (the folder that `report` fills and tells about).

PYTHON ?= python3
JOBS ?= logical
TESTS ?= tests
ARGS ?=
RESULTS ?= results/recall/smollm2-pydoc-2048
REPORT ?= results/report/smollm2-pydoc-2048

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help recall figures report test lint clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z.]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(STAMP) ## make the virtual environment and install the project with its tools

# Pinned where there is no GPU (CI, laptops). With one, torch has to fit the driver, so what is installed or what pip
# finds for it stays.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	if command -v nvidia-smi >/dev/null 2>&1; then pins=; else pins="-c constraints.txt"; fi; \
		$(BIN)/python -m pip install $$pins -e '.[dev]'
	touch $@

recall: $(STAMP) ## measure recall and coverage of the default model, then draw the figures
	$(BIN)/python experiments/recall.py $(ARGS)
	$(MAKE) figures

figures: $(STAMP) ## draw the figures of RESULTS into its folder figures/
	$(BIN)/python analysis/plot_recall.py $(RESULTS)
	$(BIN)/python analysis/plot_coverage.py $(RESULTS)

report: $(STAMP) ## measure a sweep of the default model, draw its figures, write REPORT/report.html
	$(BIN)/python experiments/recall.py experiment=report $(ARGS)
	$(MAKE) figures RESULTS=$(REPORT)
	$(BIN)/python analysis/plot_cost.py $(REPORT)
	$(BIN)/python analysis/report.py $(REPORT) -o $(REPORT)/report.html

# One thread a worker: the workers share the cores, and more threads than cores only slow each other down.
test: $(STAMP) ## run the tests
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 $(TESTS)

lint: $(STAMP) ## ruff, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove caches and build output; results and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
