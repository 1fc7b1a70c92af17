# Everything runs in .venv, which makes itself: only python3 (3.11 or newer) and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
LIGHTNING_TESTS := $(addprefix tests/lightning/test_,strategy.py strategy_misuse.py low_communication.py equivalence.py)
# The fake device takes all of tests/averaging and tests/optim; these are the ones where it is most likely to matter.
DEVICE_TESTS := tests/devices tests/lightning/test_strategy_misuse.py \
	$(addprefix tests/averaging/test_,averager.py compressed_rounds.py default_device.py rounds.py state_sharing.py) \
	$(addprefix tests/optim/test_,comparison.py grad_averager.py grad_scaler.py low_rank.py optimizer_state.py) \
	$(addprefix tests/optim/test_,state_averager.py training_averager.py optimizer.py::test_peers_stay_identical)
# Tests wait more than they compute: four processes keep two cores busy.
PYTEST_OPTIONS := --numprocesses 4 --dist loadgroup
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)
OLDEST_BIN := $(subst $(VENV),$(VENV)/oldest,$(BIN))
# Where much is tested already, what differs shows up soon: few examples, nothing that takes long.
QUICK := -m "not slow" --hypothesis-profile=quick
OLDEST_TESTS := tests/test_*.py tests/testing tests/p2p tests/dht tests/compression tests/averaging tests/optim tests/archive

# What Windows and macOS do differently is in these rooms; what takes long there is left out.
PRETENDING_TESTS_windows := tests/ports tests/p2p tests/dht tests/averaging tests/optim/test_optimizer.py::test_peers_stay_identical
# macOS differs in sockets and files alone: of the rooms above them, what uses real ones.
PRETENDING_TESTS_macos := tests/ports tests/p2p tests/dht/test_dht.py tests/dht/test_node.py tests/averaging/test_averager.py \
	tests/averaging/test_state_sharing.py tests/optim/test_optimizer.py::test_peers_stay_identical
# These are the same everywhere: they decode bytes, or have no network but a simulated one.
SAME_EVERYWHERE := tests/p2p/test_wire.py tests/p2p/test_multiaddr.py \
	$(addprefix tests/dht/test_,schema.py lookup.py traverse.py routing.py validation.py crypto.py search.py) \
	$(addprefix tests/averaging/test_,slices.py bad_values.py compressed_rounds.py partition.py load_balancing.py aggregation.py)
SYSTEMS ?= windows macos
PRETENDING := $(PYTEST) $(QUICK) $(addprefix --ignore=,$(SAME_EVERYWHERE))

.PHONY: demo test test-for test-lightning test-oldest test-devices test-pretend check style types fuzz bench format install oldest clean
.DEFAULT_GOAL := check

# Train a small language model with four peers on this machine; the report goes to demo-report/.
demo: install
	$(BIN)/shoal demo

# All tests. Choose some with: make test TESTS=tests/dht
test: install
	$(PYTEST) $(TESTS)

# The tests of one file of the source, or of a folder: make test-for FILE=src/shoal/p2p/tcp.py
test-for: install
	tests=$$($(BIN)/python tools/tests_for.py $(FILE)) && $(PYTEST) $(QUICK) $$tests

# The Lightning strategy once more: from the other package, with the oldest versions that pyproject.toml allows. `make
# test` has the newest of both packages; at one version they differ in their name only.
test-lightning: install $(VENV)/lightning-oldest.stamp
	PYTHONPATH=$(VENV)/lightning-oldest LIGHTNING_PACKAGE=pytorch_lightning $(PYTEST) $(LIGHTNING_TESTS)

# Without what takes long, with the oldest versions that pyproject.toml allows, in an environment of their own. It needs
# Python 3.11, which is the newest for which all of these were built.
test-oldest: $(VENV)/oldest-package.stamp
	$(OLDEST_BIN)/python -m pytest $(PYTEST_OPTIONS) $(QUICK) $(or $(TESTS),$(OLDEST_TESTS))

# On a fake accelerator whose work is late: what an owner of a graphics card would notice first. Needs a C++ compiler.
test-devices: install
	$(BIN)/python -m tests.fake_device
	SHOAL_TEST_DEVICE=fake $(PYTEST) $(QUICK) $(or $(TESTS),$(DEVICE_TESTS))

# Tests as on Windows and on macOS, as far as shoal can see; on Linux. tests/pretend tells what that means.
test-pretend: install
	for system in $(SYSTEMS); do $(MAKE) pretend-$$system || exit 1; done

pretend-%: install
	$(PRETENDING) --pretend=$* $(PRETENDING_TESTS_$*)

# Style, types and the layering of the rooms. `make -j2 check` uses two cores.
check: style types types-win32 types-darwin

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

# What is for one system is not reached on another, and what one complains of is fine there. Each has a cache of its own.
types-%: install
	$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$* --no-warn-unreachable --no-warn-unused-ignores

# A million hostile inputs, other ones each time; `make test` tries a few thousand that are always the same.
fuzz: install
	$(BIN)/python -m tests.fuzz

# Times, on a machine that is otherwise idle. benchmarks/README.md tells more, also how to compare with hivemind.
bench: install
	$(BIN)/python benchmarks/allreduce.py --library shoal --peers 2 --megabytes 200
	$(BIN)/python benchmarks/allreduce.py --library gloo --peers 2 --megabytes 200
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/rpc.py
	$(BIN)/python benchmarks/compression.py --library shoal

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/package.stamp

$(VENV)/requirements.stamp: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoal is developed on Python 3.11 or newer; this is %s. Say which one to use: make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# --no-deps and --no-build-isolation: nothing but the pinned versions above is ever downloaded.
$(VENV)/package.stamp: $(VENV)/requirements.stamp pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Beside the environment, not in it: there are the newest versions.
$(VENV)/lightning-oldest.stamp: $(VENV)/requirements.stamp requirements-lightning-oldest.txt
	rm -rf $(VENV)/lightning-oldest
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $(VENV)/lightning-oldest -r requirements-lightning-oldest.txt
	@touch $@

# Only what is downloaded, so that it can be made beside all else.
oldest: $(VENV)/oldest.stamp

$(VENV)/oldest.stamp: requirements-oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "The oldest versions need Python 3.11; this is %s. Say which one to use: make PYTHON=python3.11 test-oldest" % sys.version.split()[0])'
	rm -rf $(VENV)/oldest
	$(PYTHON) -m venv $(VENV)/oldest
	$(OLDEST_BIN)/python -m pip install --disable-pip-version-check -r requirements-oldest.txt
	@touch $@

$(VENV)/oldest-package.stamp: $(VENV)/oldest.stamp pyproject.toml
	$(OLDEST_BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(OLDEST_BIN)/python -m pip check
	@touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report
