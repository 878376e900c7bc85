# Two commands set everything up on a fresh machine: `make lds` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU, the tested versions (newer torch brings CUDA along); with one, whatever is newest. CONSTRAINTS= lifts it.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),,constraints.txt)

.PHONY: lds datamodel test test-slurm lint types gate figures wheel ci clean

lds: $(VENV)/.installed
	$(BIN)/python -m bench.lds --alpha 0.1 --task digits

# Retraining as attribution: prior x number of retrains on the embedded task, and the picture of what it buys.
datamodel: $(VENV)/.installed
	$(BIN)/python -m bench.lds --experiment results/digits/datamodel.toml --cluster local
	$(BIN)/python -m bench.publish figures --results runs --only retraining

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist loadfile

# A real Slurm on this machine (root, Debian's packages), and the other tests of the job layer that take minutes.
test-slurm: $(VENV)/.installed
	-$(BIN)/python tests/slurm/cluster.py install
	RUN_SLURM_TESTS=1 $(BIN)/python -m pytest -rs -n 2 --dist loadfile tests/slurm tests/retrain/jobs/test_jobs_slow.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The project's own gate: has a method become worse, or dearer, than its recorded baseline?
gate: $(VENV)/.installed
	$(BIN)/python -m bench.regress --cost warn

figures: $(VENV)/.installed
	$(BIN)/python -m bench.publish figures --results results
	$(BIN)/python -m bench.publish report --results results

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The stamp is touched last: an interrupted install is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist
