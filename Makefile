# Everything a newcomer needs; each target does its own set-up. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m-instruct
FUZZ_TIME ?= 60
FUZZ_SERVER_TIME ?= 600
CHAOS_TIME ?= 300
CHAOS_SEED ?= 0
SOAK_TIME ?= 3600

PIP := $(BIN)/python -m pip --disable-pip-version-check
# One process more than cores, as many tests wait for daemons; long files come first (tests/conftest.py).
# Without the last option a test whose process died would be tried again for ever.
TEST_PROCESSES ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 5 ? cores + 1 : 6)))
WITHOUT := not packages and not ray and not extended
PYTEST_PARALLEL := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=2
# what runs models, daemons, servers, simulated days: `make check` leaves it to `make test`
SLOW_FOLDERS := e2e gpu scripts simulation $(addprefix frontend/,cli http load multimodal simulator) \
	$(addprefix kernels/,compiled cpu triton) \
	$(addprefix engine_core/,adapters distributed model_files model_runner models startup)
export HF_HUB_OFFLINE ?= 1
# where it is set, each of some 300 daemons and each test process would compile all modules again
unexport PYTHONDONTWRITEBYTECODE
# without a compiler tests of the native kernels fail; with 0 they are skipped
export REQUIRE_NATIVE_KERNELS ?= 1

.DEFAULT_GOAL := help
.PHONY: help gpu install install-dev model demo audit test test-all test-emulated test-arm check static lint types imports requirements unit docs docs-serve simulate-faults fuzz fuzz-server chaos soak bench wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@echo "== virtual environment and dependencies in $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python " + sys.version.split()[0] + " is too old; name one from 3.11 on: make PYTHON=python3.12 ...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python scripts/install.py torch --progress-bar off
	$(PIP) install --progress-bar off -e '.[cpu]'
	@echo "== native CPU kernels, into the user's cache (without a compiler torch runs instead)"
	@$(BIN)/python scripts/install.py kernels
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== what the tests need"
	$(PIP) install --progress-bar off -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --progress-bar off -e '.[docs]'
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(PIP) install --progress-bar off -e '.[fuzz]'
	@touch $@

install: $(VENV)/.installed  ## the engine and its client
install-dev: $(VENV)/.installed-dev  ## and what tests need

model: install  ## fetch the demo's model
	@$(BIN)/engine-core pull $(MODEL)

demo: install  ## a daemon, three questions at once from another process, statistics
	@$(BIN)/python scripts/demo.py --model $(MODEL)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

imports: install-dev
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/requirements_list.py --check
	$(BIN)/python tests/spine.py
	$(BIN)/python tests/features.py

requirements: install-dev  ## every required behaviour, and the tests that prove it
	@$(BIN)/python tests/requirements_list.py

unit: install-dev
	$(PYTEST_PARALLEL) -m 'not slow' --hypothesis-profile=check $(addprefix --ignore=tests/,$(SLOW_FOLDERS))

# side by side: each has one process
static: install-dev
	@$(MAKE) --no-print-directory -j3 -Otarget lint types imports

check: static unit  ## quick: lint, types, import arrows, unit tests

test: static  ## everything, with real models
	@$(BIN)/engine-core pull $(MODEL)
	$(PYTEST_PARALLEL) --durations=10 -m '$(WITHOUT)'

test-all: test  ## and more random draws, and what takes minutes or needs Debian packages or Ray
	$(PYTEST_PARALLEL) --hypothesis-profile=thorough -m 'not slow and $(WITHOUT)' \
		$(shell grep -rlE 'hypothesis|tests.profiles' tests --include='test_*.py')
	$(PIP) install --progress-bar off -q -e '.[browser,cluster,deployment,docs]'
	$(BIN)/python -m pytest -q -m 'packages or ray or extended' tests
	$(BIN)/python -m tests.fuzz.server.run --time 60

test-emulated: install-dev  ## AVX-512 and AMX kernels on a machine that has AVX2 alone; needs Debian's libsimde-dev
	CXX=$(CURDIR)/tests/kernels/cpu/emulated_avx512/compiler ENGINE_CORE_NATIVE_CACHE=$(CURDIR)/build/emulated \
		$(PYTEST_PARALLEL) tests/kernels/cpu

# left out: two files that start processes, two that import Triton by way of transformers
test-arm: install-dev  ## AArch64 kernels under QEMU, an hour; as root, with Debian's debootstrap, qemu-user, g++-aarch64-linux-gnu
	tests/kernels/cpu/emulated_arm/prepare $(CURDIR)/build/arm $(BIN)/python
	ARM_FOLDER=$(CURDIR)/build/arm CXX=aarch64-linux-gnu-g++ ENGINE_CORE_NATIVE_CACHE=$(CURDIR)/build/arm/native \
		PYTHONPATH=$(CURDIR) tests/kernels/cpu/emulated_arm/python -m pytest -q tests/kernels/cpu \
		$(addprefix --ignore=tests/kernels/cpu/test_,native_library.py weight_memory.py native_experts.py recurrence.py)

docs: $(VENV)/.installed-docs  ## the documentation as a site, in build/docs/site
	$(BIN)/python scripts/docs_site.py

docs-serve: $(VENV)/.installed-docs  ## and served at http://localhost:8000
	$(BIN)/python scripts/docs_site.py serve

simulate-faults: install-dev  ## 100,000 simulated schedules of faults; goes on where it stopped
	$(BIN)/python -m tests.simulation.campaign

fuzz: $(VENV)/.installed-fuzz  ## coverage-guided fuzzing of every reader; FUZZ_TIME=60 seconds each
	$(BIN)/python -m tests.fuzz.run --time $(FUZZ_TIME)

fuzz-server: install-dev  ## attacks on a served engine beside another's stream; FUZZ_SERVER_TIME=600 seconds
	@$(BIN)/engine-core pull $(MODEL)
	$(BIN)/python -m tests.fuzz.server.run --time $(FUZZ_SERVER_TIME) --model $(MODEL)

chaos: install-dev  ## 30 clients and a daemon, killed and paused; CHAOS_TIME=300 seconds, CHAOS_SEED=0
	@mkdir -p build
	$(BIN)/python -m tests.chaos.run --time $(CHAOS_TIME) --seed $(CHAOS_SEED) --json build/chaos.json

gpu: install-dev  ## on a GPU: checks of the tree and eight steps in three minutes; build/gpu.json
	@mkdir -p build
	$(BIN)/python scripts/gpu_run.py --quick --json build/gpu.json

soak: install-dev  ## does anything grow in an hour? SOAK_TIME=3600 seconds; build/soak.json and .svg
	@mkdir -p build
	$(BIN)/python -m tests.chaos.soak --time $(SOAK_TIME) --json build/soak.json --picture build/soak.svg

wheel: install  ## dist/: a wheel with the native kernels inside, and one for any processor
	@$(PIP) install --progress-bar off -q -e '.[wheel]'
	$(BIN)/python scripts/wheel.py

# exit code 3: there is no network, or no pip-audit; the script has said so
audit: install  ## known vulnerabilities (needs a network); licences of the dependencies
	@$(PIP) install -q -e '.[audit]' || true
	@$(BIN)/python scripts/audit.py || test $$? -eq 3

bench: install  ## measure this machine; prints JSON last
	$(BIN)/python scripts/bench.py startup --model $(MODEL)
	$(BIN)/python scripts/compare_engines.py --engine "engine=" --model $(MODEL) --workloads W1,W2

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
