# Everything a fresh Debian machine with Python 3.11+ needs; each step runs only when it is missing.
VENV := .venv
BIN := $(VENV)/bin
# What is installed beside the core. Add an extra here when tests begin to use it.
EXTRAS := postgres,mysql,rabbitmq,spark,dev
# package=program: installed when the program cannot be found.
JAVA := openjdk-17-jre-headless=java
SERVERS := postgresql=postgres mariadb-server=mariadbd pgbouncer=pgbouncer openssl=openssl $(JAVA) rabbitmq-server=rabbitmq-server chromium=chromium libpostgresql-jdbc-java

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench bench-spark faults clean servers

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

# Who has everything needs nothing more; a newcomer needs Spark only.
demo: $(if $(wildcard $(VENV)/installed),$(VENV)/installed,$(VENV)/installed-for-demo) ## see all of it in two minutes
	@scripts/debian-packages $(JAVA)
	@$(BIN)/python -m millpond demo

test: $(VENV)/installed servers ## run the tests against real servers (TESTS="tests/unit -k proxy" for some)
	@$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder --tb short $(TESTS)

lint: $(VENV)/installed ## check style, types and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/installed servers ## measure
	@$(BIN)/python -m bench
	@$(BIN)/python -m bench.rabbitmq

bench-spark: $(VENV)/installed servers ## measure Spark against its own JDBC
	@$(BIN)/python -m bench.spark

faults: $(VENV)/installed servers ## kill servers and cut networks for minutes
	@$(BIN)/python -m pytest --long -m long

clean: ## remove everything that was built here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

servers:
	@scripts/debian-packages $(SERVERS)

$(VENV)/installed: pyproject.toml constraints.txt Makefile
	@scripts/make-venv $(VENV)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/installed-for-demo: pyproject.toml constraints.txt Makefile
	@scripts/make-venv $(VENV)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[spark]'
	@touch $@
