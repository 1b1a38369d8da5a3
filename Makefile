PYTHON ?= python3
BIN = .venv/bin
# A test of a quarter of an hour hangs: its worker writes all stacks and ends, and the others go on.
HANGS = -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
# Each process has ranks of its own, of half a GB each.
PYTEST = $(BIN)/python -m pytest -q $(HANGS) -n auto --dist worksteal

# As many tests as a machine without a GPU, and without root, may skip.
SKIPS = 60

# Without bytecode every process that a test or a run starts compiles Atoll anew, and pytest compiles every assertion.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all quick every peers style check bench bench-islands bench-machine bench-islands-quick bench-machine-quick bench-low-rank bench-sharded-pipeline bench-vocabulary matrix mutants chaos hangs gpu docs site evidence stale versions clean

train: .venv/.run
	$(BIN)/atoll train configs/quickstart.toml

# Every pair of settings, and every feature, in a few minutes: types take one of them, and are left to test-all. Checks
# run beside the tests, some of which only wait.
test: .venv/.stamp
	$(MAKE) --no-print-directory --jobs=2 style quick

test-all: .venv/.stamp
	$(MAKE) --no-print-directory --jobs=2 check every

quick: .venv/.stamp
	$(PYTEST) --quick

# Tests of real time run last, one after another.
every: .venv/.stamp
	$(PYTEST) -rs --durations=60 --durations-min=8 --most-skips $(SKIPS) -m "not alone"
	$(BIN)/python -m pytest -q -rs $(HANGS) -m alone

# What other systems say of themselves: DeepSpeed and torchtitan, beside the environment, since transformers imports
# what it finds there.
peers: build/.peers
	PYTHONPATH=$(CURDIR)/build/peers $(BIN)/python -m pytest -q -rs --whole tests/training/settings/test_defaults.py tests/training/settings/test_settings.py tests/test_bugs_elsewhere.py -k "deepspeed or torchtitan or default"

style: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check: style
	$(BIN)/mypy

bench: .venv/.stamp
	$(BIN)/python benchmarks/run.py

# Root, ip and tc: two network namespaces with a slow link between.
bench-islands: .venv/.bench
	$(BIN)/python benchmarks/run.py two_islands two_islands_a100 two_islands_text

bench-machine: .venv/.bench
	$(BIN)/python benchmarks/run.py one_machine one_machine_a100 one_machine_text

# A mixture of experts on one machine and on two islands: root, ip and tc.
bench-experts: .venv/.bench
	$(BIN)/python benchmarks/run.py experts

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

# Every case of every test; every schedule, layout, recompute and so on with every other: two hours.
matrix: .venv/.stamp
	$(PYTEST) -m wide --whole
	$(BIN)/python benchmarks/run.py matrix mixtures

# Damages copies of the source and runs the tests that should notice: about an hour, and goes on where it was.
mutants: .venv/.mutants
	$(BIN)/python benchmarks/run.py mutants --jobs 2

# Kills and stops ranks and launchers at random moments: more than an hour.
chaos: .venv/.stamp
	$(BIN)/python benchmarks/run.py chaos

# Stops ranks and cuts links at chosen instructions, and reads what is said: a quarter of an hour, and root.
hangs: .venv/.stamp
	$(BIN)/python benchmarks/run.py hangs

# With a Python of its own, on a machine without registries: make gpu PYTHON=python3. Packages that it lacks are in
# build/packages, see benchmarks/gpu/README.md. Otherwise with that of .venv, which is made if it is missing.
gpu: $(if $(filter command,$(firstword $(origin PYTHON))),,.venv/.stamp)
ifeq ($(origin PYTHON),command line)
	PYTHONPATH=build/packages:src:. $(PYTHON) -m pytest tests/gpu -q
else
	$(BIN)/python -m pytest tests/gpu -q
endif

docs: .venv/.stamp
	$(BIN)/python scripts/docs.py

# The pages and a reference of every public name as HTML, in build/site. A dead link is an error.
site: .venv/.stamp
	$(BIN)/python scripts/site/gather.py
	$(BIN)/mkdocs build --strict

# The README's figures, docs/evidence.md and the benchmarks' pages, from the raw files; measures nothing.
evidence: .venv/.stamp
	$(BIN)/python benchmarks/run.py --pages

# Which results are older than the code that they measured.
stale: .venv/.stamp
	$(BIN)/python benchmarks/run.py --stale

# The same tests with every supported version of torch, Python and transformers: an environment for each, half an hour.
versions: .venv/.stamp
	$(BIN)/python scripts/versions.py
	$(BIN)/python scripts/docs.py

clean:
	rm -rf .venv build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# These run once, and again when what they install has changed. What a run needs, without developer tools:
.venv/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Atoll and what it needs into .venv (1 GB, most of it torch); this takes a minute or two."
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e .
	touch $@

.venv/.stamp: .venv/.run
	@echo "Installing what the tests need into .venv."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,site]"
	touch $@

# The peers that benchmarks are measured against.
.venv/.bench: .venv/.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $@

build/.peers: .venv/.stamp
	mkdir -p build
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --no-build-isolation -c constraints.txt --target build/peers deepspeed torchtitan==0.2.2 einops hjson msgpack ninja py-cpuinfo
	touch $@

# What damages the source.
.venv/.mutants: .venv/.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,mutants]"
	touch $@
