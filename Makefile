PYTHON ?= python3
BIN = .venv/bin

.PHONY: train test check bench bench-islands bench-machine bench-islands-quick bench-machine-quick bench-low-rank bench-sharded-pipeline bench-vocabulary matrix mutants chaos gpu docs evidence stale clean

train: .venv/.stamp
	$(BIN)/atoll train configs/quickstart.toml

test: check
	$(BIN)/python -m pytest -q

check: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.stamp
	$(BIN)/python benchmarks/run.py

# Root, ip and tc: two network namespaces with a slow link between.
bench-islands: .venv/.bench
	$(BIN)/python benchmarks/run.py two_islands two_islands_a100 two_islands_text

bench-machine: .venv/.bench
	$(BIN)/python benchmarks/run.py one_machine one_machine_a100 one_machine_text

# The members of the fronts alone, less than six minutes each.
bench-islands-quick: .venv/.bench
	$(BIN)/python benchmarks/run.py two_islands --front

bench-machine-quick: .venv/.bench
	$(BIN)/python benchmarks/run.py one_machine --front

bench-low-rank: .venv/.stamp
	$(BIN)/python benchmarks/run.py low_rank

# Root, ip and tc: a link between the data-parallel ranks.
bench-sharded-pipeline: .venv/.stamp
	$(BIN)/python benchmarks/run.py sharded_pipeline

# A large head on the last pipeline rank, or split over all.
bench-vocabulary: .venv/.stamp
	$(BIN)/python benchmarks/run.py vocabulary

# Every schedule, layout, recompute and so on with every other: more than an hour.
matrix: .venv/.stamp
	$(BIN)/python benchmarks/run.py matrix

# Damages copies of the source and runs the tests that should notice: about an hour, and goes on where it was.
mutants: .venv/.mutants
	$(BIN)/python benchmarks/run.py mutants --jobs 2

# Kills and stops ranks and launchers at random moments: more than an hour.
chaos: .venv/.stamp
	$(BIN)/python benchmarks/run.py chaos

gpu: .venv/.stamp
	$(BIN)/python -m pytest tests/gpu -q

docs: .venv/.stamp
	$(BIN)/python scripts/docs.py

# The README's figures, docs/evidence.md and the benchmarks' pages, from the raw files; measures nothing.
evidence: .venv/.stamp
	$(BIN)/python benchmarks/run.py --pages

# Which results are older than the code that they measured.
stale: .venv/.stamp
	$(BIN)/python benchmarks/run.py --stale

clean:
	rm -rf .venv build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Runs once, and again when what it installs has changed.
.venv/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# The peers that benchmarks are measured against.
.venv/.bench: .venv/.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $@

# What damages the source.
.venv/.mutants: .venv/.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,mutants]"
	touch $@
