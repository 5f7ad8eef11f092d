# `make demo` and `make test` work on a fresh clone: targets that need .venv set it up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOSTS := .venv-hosts
HOSTS_READY := $(HOSTS)/.ready
# Four workers for two cores: the suite also waits for disks, servers and killed processes, and each
# worker needs 10 s of CPU to start. A worker runs neighboring tests, which share costly setup, and
# takes over other tests at the end.
WORKERS := -n 4 --dist worksteal
PYTEST_ARGS ?= $(WORKERS) -m "not slow"

# Without cached bytecode, each of a hundred processes compiles the whole package, and each test
# worker all tests: 7 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo imports test test-fast test-all test-pythons test-without-uring test-gpu test-hosts check bench bench-codecs docs clean format lint types layers picture wheel

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (once; torch takes a minute) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,bench,docs]'
	@touch $@

demo: $(READY) ## train, kill in mid-save, resume bit-identically, restore a part
	@$(BIN)/python examples/demo.py

test: $(READY) ## run the test suite without slow tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# Caches bytecode of all tests, with rewritten asserts, or each worker compiles it again.
imports: $(READY) ## import all tests
	@output=$$($(BIN)/python -m pytest --collect-only -qqq) || { echo "$$output"; exit 1; }

# Leaves the longest searches for counterexamples to `make test`.
FAST := tests/core tests/providers tests/codecs tests/test_guarantees.py \
	--ignore tests/core/catalog/test_protocol.py --ignore tests/core/catalog/test_rank_protocol.py \
	--ignore tests/core/format/test_fuzz_manifest.py \
	--ignore tests/core/replicas/test_simulation.py --ignore tests/core/rounds/test_simulation.py

test-fast: $(READY) ## run the tests that start no process and never sleep, in a minute
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not process" --fast $(FAST)

# Other mutants each day; `make test-all SEED=7` repeats a run.
SEED ?= $(shell date +%Y%j)

test-all: $(READY) ## run all tests, and some mutants of the code that decides what to keep
	@$(BIN)/python -m pytest $(WORKERS)
	@$(BIN)/python tools/mutate.py --seconds 120 --seed $(SEED)

test-pythons: $(READY) ## test wheel and sdist on Python 3.12 and 3.13, if installed
	@$(BIN)/python tools/other_pythons.py

# The same scenarios with io_uring forbidden, as under Docker's default seccomp profile; killed jobs
# of several ranks use files without it anyway. On a machine without io_uring, all tests run without
# it.
WITHOUT_URING := integration/lifecycle/test_engines integration/atomic/test_kill \
	integration/lifecycle/test_lifecycle backends/test_engines backends/test_files

test-without-uring: $(READY) ## run the scenarios of io_uring where the kernel forbids it
	@$(BIN)/python -c "from penstock.backends.uring.ring import Ring; Ring(2).close()" 2>/dev/null || exit 0; \
	PENSTOCK_DISABLE_URING=EPERM $(BIN)/python -m pytest -n 2 -q -m "not multirank and not slow" \
	    $(WITHOUT_URING:%=tests/%.py) && \
	PENSTOCK_DISABLE_URING=ENOSYS $(BIN)/python -m pytest -q -m "not slow" \
	    tests/integration/lifecycle/test_engines.py

test-gpu: $(READY) ## run the tests that need a CUDA device, which other targets hide
	@$(BIN)/python -m pytest -n 4 -m gpu

# The trainers that Penstock works with, in an environment on top of .venv: some change the behavior
# of others as soon as they are installed. torchtitan's own dependencies exclude each other, so it
# is installed without them.
$(HOSTS_READY): $(READY)
	@test -x $(HOSTS)/bin/python || $(BIN)/python -m venv --without-pip $(HOSTS)
	@echo "Setting up $(HOSTS) (once; the trainers take two minutes) ..."
	@$(HOSTS)/bin/python -c "import sysconfig; \
	    base, own = (f'{sysconfig.get_path(\"purelib\")}'.replace('$(HOSTS)', v) for v in ('$(VENV)', '$(HOSTS)')); \
	    open(own + '/base.pth', 'w').write(f'import site; site.addsitedir({base!r})\n')"
	@DS_BUILD_OPS=0 $(HOSTS)/bin/python -m pip install -qq --disable-pip-version-check \
	    -c constraints.txt --no-build-isolation -e '.[hosts]'
	@$(HOSTS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	    --no-deps torchtitan spmd-types
	@touch $@

# A worker runs whole files, so that only one starts a server that has imported the file's trainer.
test-hosts: $(HOSTS_READY) ## test the adapters against real trainers (installs them once)
	@$(HOSTS)/bin/python -m pytest -n 2 --dist loadfile tests/integrations/hosts \
	    tests/integrations/events tests/integrations/files/test_from_pretrained.py \
	    tests/core/cli/test_report.py

check: lint types layers picture docs wheel ## run all checks except the tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# From src/: at the root, the folder codecs/ would hide the standard module from mypy.
types: $(READY)
	cd src && ../$(BIN)/mypy --config-file ../pyproject.toml -p penstock
	$(BIN)/pyright

layers: $(READY)
	$(BIN)/lint-imports

picture: $(READY)
	$(BIN)/python tools/architecture.py --check

wheel: $(READY)
	$(BIN)/python tools/check_wheel.py

# Not --quiet: it also hides warnings from --strict. The variable silences an advertisement for the
# theme's successor, not problems of these pages.
docs: $(READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# `make bench BENCH_ARGS="--scale 2 --minutes 40"` measures larger states.
bench: $(READY) ## measure docs/benchmarks.md again, with other libraries (24 minutes, 10 GB)
	@$(BIN)/python benchmarks/everything.py $(BENCH_ARGS)

# zipnn is built from source: without a compiler the comparison reports that it leaves zipnn out.
bench-codecs: $(READY) ## compare floatsplit with zipnn, blosc2 and zstd (trains a small model once)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[bench-codecs]' || true
	@test -e build/snapshots/step201.pt || $(BIN)/python benchmarks/make_state.py build/snapshots
	@$(BIN)/python benchmarks/codecs.py --snapshots build/snapshots

format: $(READY) ## format the sources and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build products (not .venv)
	rm -rf build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
