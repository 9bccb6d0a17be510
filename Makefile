# Two commands on a fresh machine: `make demo` and `make test`. Python 3.11 or newer and pip are all
# they assume; each creates .venv and installs into it what it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per engine, and two engines at a time in the tests: on few cores more threads cost more
# than they bring. Test files in their order: those with engines, the longest, come first.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast lint clean

demo: $(VENV)/.installed
	$(BIN)/libraspec demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest tests/unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing SGLang and what it pulls in (11 GB, 3 to 8 minutes)"
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
