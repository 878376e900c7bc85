# Two commands set everything up on a fresh machine: `make lds` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: lds test test-slurm lint types ci clean

lds: $(VENV)/.installed
	$(BIN)/python -m bench.lds --alpha 0.1 --task digits

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# A real Slurm on this machine (root, Debian's packages), and the other tests of the job layer that take minutes.
test-slurm: $(VENV)/.installed
	-$(BIN)/python tests/slurm/cluster.py install
	RUN_SLURM_TESTS=1 $(BIN)/python -m pytest -rs tests/slurm tests/test_jobs_slow.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The stamp is touched last: an interrupted install is done again.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
