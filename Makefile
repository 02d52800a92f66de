# In: a Python of at least 3.11 and a C++ compiler. Out: .venv with serrate in it, and what each target runs there.
# Each install step leaves a stamp in .venv, so a second run installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One quiet flag still prints warnings about the machine's own pip configuration; errors are printed either way.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-gpu sanitize mutate bench lint clean check-python check-compiler

help:
	@echo "make demo       install into $(VENV) and run the demonstration"
	@echo "make test       format check, lint, types, then the whole test suite"
	@echo "make test-full  the same, with slow tests and more examples per property"
	@echo "make test-gpu   the tests that need a GPU, with the Python that is active (PYTHON=python3); nothing is installed"
	@echo "make sanitize   the tests that build generated C++ with sanitizers"
	@echo "make mutate     break the compiler one line at a time and see that a test fails"
	@echo "make bench      the benchmarks"
	@echo "make lint       format check, lint and types only"
	@echo "make clean      remove build outputs and caches; $(VENV) stays"

demo: check-compiler $(VENV)/.stamp-package
	@$(BIN)/serrate demo

lint: $(VENV)/.stamp-test
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy

test: check-compiler lint
	@echo "== pytest"
	@$(BIN)/python -m pytest
	@$(TEST_GPU)

test-full: export SERRATE_TEST_FULL := 1
test-full: check-compiler lint
	@echo "== pytest, full"
	@$(BIN)/python -m pytest
	@$(TEST_GPU)

# Triton interprets or compiles for a whole process, so what runs on a GPU has a run of its own.
TEST_GPU = if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(MAKE) --no-print-directory test-gpu PYTHON=$(BIN)/python; \
	else echo "== no CUDA device: the tests of make test-gpu were not run"; fi

test-gpu:
	@echo "== pytest, on the GPU"
	@TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $$(nproc) --continue-on-collection-errors

sanitize: check-compiler $(VENV)/.stamp-test
	@SERRATE_TEST_FULL=1 $(BIN)/python -m pytest tests -m sanitize

mutate: check-compiler $(VENV)/.stamp-test
	@$(BIN)/python -m tests.mutation.run

bench: check-compiler $(VENV)/.stamp-bench
	@$(BIN)/serrate bench cpu memory calls construction

clean:
	@rm -rf build dist serrate.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find serrate tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "removed build outputs and caches; $(VENV) stays (rm -rf $(VENV) to start over)"

# --- the environment ---

$(VENV)/.stamp-venv: | check-python
	@echo "-- making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) -m venv failed; on Debian and Ubuntu the package python3-venv provides it" >&2; exit 1; }
	@touch $@

# torch comes first and alone: a package that depends on torch would otherwise let pip choose another build of it.
# The version is read from constraints.txt so that it is written down once.
$(VENV)/.stamp-torch: constraints.txt $(VENV)/.stamp-venv
	@echo "-- installing $$(grep '^torch==' constraints.txt) (the longest step)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# The build tools are installed here and build isolation is off, so that pip does not fetch them again for every build.
$(VENV)/.stamp-package: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	@echo "-- installing serrate"
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-package
	@echo "-- installing the test tools"
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-package
	@echo "-- installing the benchmark tools"
	@$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "serrate needs Python 3.11 or newer, got $$($(PYTHON) --version 2>&1); name another: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }

# make has a CXX of its own (g++) even where none is set; the shell's is the one the user chose and serrate will use.
# CXX may be several words, such as "ccache g++"; the first is what must exist.
check-compiler:
	@if [ -n "$${CXX:-}" ]; then \
	  set -- $$CXX; command -v "$$1" >/dev/null || { echo "CXX is '$$CXX', but $$1 was not found; unset CXX or correct it" >&2; exit 1; }; \
	else \
	  command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	    echo "no C++ compiler was found; install g++ or clang++, or set CXX to one" >&2; exit 1; }; \
	fi
