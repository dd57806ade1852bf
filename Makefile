# The whole developer interface. `make demo` and `make setup` need Linux, Python 3.11+, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Tests run single-threaded workers: two cores are shared by up to ten of them.
export OMP_NUM_THREADS := 1

.PHONY: demo setup test test-slow test-all check bench docs clean

demo: setup
	@$(BIN)/python examples/demo/demo.py $(if $(SEED),--seed $(SEED))

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test "$$(uname -s)" = Linux || { echo "Myriad runs on Linux only (it needs memfd, pidfd and parent-death signals); this is $$(uname -s)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Myriad needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V); set PYTHON=/path/to/python3.11."; exit 1; }
	@echo "making $(VENV): downloads PyTorch 2.13 (200 MB for CPU, more where pip finds the ordinary build), pyarrow (55 MB), transformers (14 MB) and about 70 small packages"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -q -m "not slow and not hours" --durations=10

test-slow: setup
	$(BIN)/python -m pytest -q -m "slow and not hours" --durations=15

test-all: setup
	$(BIN)/python -m pytest -q --durations=25

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tidy.py tests/test_docs.py

# One benchmark: make bench NAME=recovery
bench: setup
	@$(BIN)/python -m benchmarks.$(NAME)

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
