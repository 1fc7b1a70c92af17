# Everything runs in .venv, which makes itself: only python3 (3.11 or newer) and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Tests wait more than they compute: six processes keep two cores busy.
PROCESSES ?= 6
# $(call pytest,PYTHON,ARGUMENTS). With AGAIN=yes, tools/again.py runs what fails once more, and keeps durations.
pytest = $1 $(if $(AGAIN),tools/again.py $@,-m pytest -o cache_dir=.pytest_cache/$@) \
	--numprocesses $(or $(PROCESSES_$@),$(PROCESSES)) --dist loadgroup $2
OLDEST_BIN := $(subst $(VENV),$(VENV)/oldest,$(BIN))
RELEASE_BIN := $(subst $(VENV),$(VENV)/release,$(BIN))
DOCS_BIN := $(subst $(VENV),$(VENV)/docs,$(BIN))
# Where Python may not keep what it has compiled, each of the many processes compiles it anew, tests and shoal.
unexport PYTHONDONTWRITEBYTECODE
# What a slow drill shows has a quick test, too. The drills show it longer, more often, or with more peers.
DRILLS := slow_drill
quick = -m "$(if $1,$1 and )not slow and not $(DRILLS)" --hypothesis-profile=quick
QUICK := $(quick)
# $(call once_more,MARKER): the tests with this marker, where all is tested already. What differs shows up soon: of tests
# with many sets of parameters, the first and the last. Only files and folders with the marker are read, not all tests.
once_more = $(call quick,$1 and not once) --variants=2 $(sort $(patsubst %/conftest.py,%,$(shell grep -rlw --include='*.py' 'mark\.$1' tests)))
SYSTEMS ?= windows macos

.PHONY: demo test test-slow test-for test-lightning test-transformers test-oldest test-devices test-pretend
.PHONY: collected check style types fuzz bench dist docs format install oldest clean
.DEFAULT_GOAL := check

# Train a small language model with four peers on this machine; the report goes to demo-report/.
demo: install
	$(BIN)/shoal demo

# All tests but the slow drills. Choose some with: make test TESTS=tests/dht
test: install
	$(call pytest,$(BIN)/python,-m "not $(DRILLS)" $(TESTS))

# The slow drills, before a release.
test-slow: install
	$(call pytest,$(BIN)/python,-m $(DRILLS) $(TESTS))

# The tests of one file of the source, or of a folder: make test-for FILE=src/shoal/net/tcp/transport.py
test-for: install
	tests=$$($(BIN)/python tools/tests_for.py $(FILE)) || exit; $(call pytest,$(BIN)/python,$(QUICK) $$tests)

# The Lightning strategy once more, without what takes long: from the other package, with the oldest versions that
# pyproject.toml allows. `make test` has the newest of both packages; at one version they differ in their name only.
test-lightning: install $(VENV)/lightning-oldest.stamp
	export PYTHONPATH=$(VENV)/lightning-oldest LIGHTNING_PACKAGE=pytorch_lightning; \
		$(call pytest,$(BIN)/python,$(call once_more,lightning))

# The trainer of Hugging Face once more, with the oldest versions that pyproject.toml allows.
test-transformers: install $(VENV)/transformers-oldest.stamp
	export PYTHONPATH=$(VENV)/transformers-oldest; $(call pytest,$(BIN)/python,-m "not $(DRILLS)" tests/transformers)

# Without what takes long, with the oldest versions that pyproject.toml allows, in an environment of their own. It needs
# Python 3.11, which is the newest for which all of these were built.
test-oldest: $(VENV)/oldest-package.stamp
	$(call pytest,$(OLDEST_BIN)/python,$(if $(TESTS),$(QUICK) $(TESTS),$(call once_more,oldest)))

# On a fake accelerator whose work is late: what an owner of a graphics card would notice first. Needs a C++ compiler.
test-devices: install
	$(BIN)/python -m tests.fake_device
	export SHOAL_TEST_DEVICE=fake; $(call pytest,$(BIN)/python,$(if $(TESTS),$(QUICK) $(TESTS),$(call once_more,devices)))

# Tests as on Windows and on macOS, as far as shoal can see; on Linux. tests/pretend tells what that means.
test-pretend: $(addprefix pretend-,$(SYSTEMS))

pretend-%: install
	$(call pytest,$(BIN)/python,$(call once_more,pretend) --pretend=$*)

# Only finds all tests. Whoever runs them later finds them compiled, which takes longer than many a test.
collected: install
	$(BIN)/python -m pytest --collect-only -qq

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

# The packages of a release, in dist/: built, checked, and tried in an empty environment, where two peers train.
dist: $(VENV)/release.stamp
	rm -rf dist build
	$(RELEASE_BIN)/python -m build --no-isolation
	$(RELEASE_BIN)/twine check --strict dist/*
	$(RELEASE_BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) tools/try_package.py dist/*.whl

# The documents as a site, in site/: index.html can be opened as it is, and searched once a server shows it. Whatever is
# wrong with a link or with a name in the reference ends it.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/package.stamp

# --no-compile, here and below: Python compiles what it imports, of these packages a tenth.
$(VENV)/requirements.stamp: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoal is developed on Python 3.11 or newer; this is %s. Say which one to use: make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements-dev.txt
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

$(VENV)/transformers-oldest.stamp: $(VENV)/requirements.stamp requirements-transformers-oldest.txt
	rm -rf $(VENV)/transformers-oldest
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $(VENV)/transformers-oldest -r requirements-transformers-oldest.txt
	@touch $@

# Only what is downloaded, so that it can be made beside all else.
oldest: $(VENV)/oldest.stamp

$(VENV)/oldest.stamp: requirements-oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "The oldest versions need Python 3.11; this is %s. Say which one to use: make PYTHON=python3.11 test-oldest" % sys.version.split()[0])'
	rm -rf $(VENV)/oldest
	$(PYTHON) -m venv $(VENV)/oldest
	$(OLDEST_BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements-oldest.txt
	@touch $@

$(VENV)/oldest-package.stamp: $(VENV)/oldest.stamp pyproject.toml
	$(OLDEST_BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(OLDEST_BIN)/python -m pip check
	@touch $@

$(VENV)/release.stamp: requirements-release.txt
	rm -rf $(VENV)/release
	$(PYTHON) -m venv $(VENV)/release
	$(RELEASE_BIN)/python -m pip install --disable-pip-version-check -r requirements-release.txt
	@touch $@

$(VENV)/docs.stamp: requirements-docs.txt
	rm -rf $(VENV)/docs
	$(PYTHON) -m venv $(VENV)/docs
	$(DOCS_BIN)/python -m pip install --disable-pip-version-check -r requirements-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report
