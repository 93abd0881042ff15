# `make demo` shows the whole thing, `make test` proves it, `make check` is what every commit passes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CODE   := ctr_ps protos ps_server ps_worker ctr_model deploy

# numba's cache notices a change only in the file that holds a kernel, not in those whose functions it inlines:
# so one cache folder for each state of the sources, and one for kernels that check their indices.
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba/$(shell cat $$(find $(CODE) -name '*.py' | sort) /dev/null | sha256sum | cut -c1-16)$(addprefix -checked-,$(NUMBA_BOUNDSCHECK))

# Tests start over a thousand processes. Without bytecode each of them, and each run, compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

SEEDS ?= 1000

.PHONY: setup demo test simulate check format lint types imports messages generated bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

simulate: setup
	$(BIN)/python -m tests.simulation --first $(or $(FIRST),0) --seeds $(SEEDS)

check: lint types imports generated test

format: setup
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Stubs and servicers are not generated: protos/wire/calls.py has a row for each RPC.
PROTOC := $(BIN)/python -m grpc_tools.protoc -I. ctr_ps/protos/v1/*.proto

messages: setup
	$(PROTOC) --python_out=. --pyi_out=.

generated: setup
	rm -rf .cache/generated && mkdir -p .cache/generated
	$(PROTOC) --python_out=.cache/generated --pyi_out=.cache/generated
	diff -r -x '*.proto' -x '__*' .cache/generated/ctr_ps/protos/v1 protos/v1

bench: setup
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache log output/demo data/demo
