# Sets up a fresh Debian machine with Python 3.11 or later. Each step runs only if its result is missing.
VENV := .venv
BIN := $(VENV)/bin
# Extras to install. Add one here when tests begin to use it.
EXTRAS := postgres,mysql,rabbitmq,server,spark,opentelemetry,prometheus,sentry,reload,structlog,dev
# package=program: the package is installed if the program cannot be found.
JAVA := openjdk-17-jre-headless=java
SERVERS := postgresql=postgres postgresql-client=psql mariadb-client=mariadb sqlite3=sqlite3 mariadb-server=mariadbd pgbouncer=pgbouncer openssl=openssl $(JAVA) rabbitmq-server=rabbitmq-server chromium=chromium libpostgresql-jdbc-java

# Some containers set this. Every process that tests start would then compile the whole library again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help site demo check test slow versions lint audit sbom bench bench-spark faults clean servers
# Test processes. Most tests wait for servers or timers, so three processes per core pay.
PROCESSES := 6
# The tests of a file stay together, and files with long recorded durations start first (tests/schedule.py).
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --no-loadscope-reorder --tb short

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

# The demo needs Spark, and offers the dashboard at its end. It uses the full environment if that is there.
demo: $(if $(wildcard $(VENV)/installed),$(VENV)/installed,$(VENV)/installed-for-demo) ## see Millpond at work in two minutes
	@scripts/debian-packages $(JAVA)
	@$(BIN)/python -m millpond demo

# Of the tests of the project those that start no process: documents and examples run with `make test`.
QUICK := $(addprefix tests/,unit conformance rooms worker cli $(addprefix project/test_,guarantees.py public_names.py reference.py tree.py))
# Servers and Java are switched off, which finds tests that need them and lack the mark.
check: PROCESSES := 5
check: lint ## check a change in a minute: lint, and the quick tests that need no server and no Java
	@MILLPOND_NO_SERVERS=1 JAVA_HOME=/nonexistent $(PYTEST) -m 'not server and not java and not slow' $(or $(TESTS),$(QUICK))

test: $(VENV)/installed servers ## test every behaviour on real servers (TESTS="tests/unit -k proxy" for some)
	@$(PYTEST) -m 'not slow' $(TESTS)

slow: $(VENV)/installed servers ## run the tests that `make test` leaves out: repetitions, kill matrices, long Spark runs
	@$(PYTEST) -m slow $(TESTS)

versions: ## run `make check` on every Python from 3.11 to 3.14 that is found
	@scripts/check-versions

lint: $(VENV)/installed ## check style, types, import rules and language
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@for part in src tests 'bench deploy examples scripts servers' 'docs *.md'; do $(BIN)/python scripts/prose.py --limit 1 $$part || exit; done

audit: $(VENV)/installed ## compare dependencies with known vulnerabilities
	@$(BIN)/python scripts/audit.py

sbom: $(VENV)/installed ## list the shipped dependencies in dist/sbom.json (CycloneDX)
	@mkdir -p dist
	@$(BIN)/python scripts/sbom.py > dist/sbom.json

bench: $(VENV)/installed servers ## measure
	@$(BIN)/python -m bench
	@$(BIN)/python -m bench.rabbitmq

bench-spark: $(VENV)/installed servers ## measure Spark against its own JDBC
	@$(BIN)/python -m bench.spark

site: $(VENV)/installed ## build the documentation site into site/
	@$(BIN)/python -m mkdocs build --strict --quiet

faults: $(VENV)/installed servers ## run the tests that take minutes: kill servers, cut networks
	@$(BIN)/python -m pytest --long -m long

clean: ## remove everything that was built here
	rm -rf $(VENV) .venv-3.* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

servers:
	@scripts/debian-packages $(SERVERS)

$(VENV)/installed: pyproject.toml constraints.txt Makefile
	@scripts/make-venv $(VENV)
	@echo "installing the Python packages of constraints.txt into $(VENV)"
	@$(BIN)/python -m pip install -qq --no-require-hashes --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/installed-for-demo: pyproject.toml constraints.txt Makefile
	@scripts/make-venv $(VENV)
	@echo "installing the Python packages for Spark and the server into $(VENV), with the versions of constraints.txt"
	@$(BIN)/python -m pip install -qq --no-require-hashes --constraint constraints.txt --editable '.[spark,server]'
	@touch $@
