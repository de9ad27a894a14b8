# make demo   answer a question with the built-in model
# make test   run the suite          make check  lint, types, layers
# make native compile the CPU kernels again
# Each makes what it needs; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
# torch first and by its pinned version: otherwise pip may take another build of it for a dependency.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format native clean

demo: .venv/.run
	$(BIN)/llamarium chat "What is the capital of France, and what is it famous for?"

test: .venv/.dev
	$(BIN)/python -m pytest

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

native:
	@test -x $(BIN)/python || $(MAKE) .venv/.dev
	$(BIN)/python hatch_build.py

clean:
	rm -rf .venv dist build

.venv/.run: pyproject.toml constraints.txt hatch_build.py $(wildcard native/*)
	$(PYTHON) -m venv .venv
	@echo "Installing (a few minutes the first time) ..."
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e .
	@touch $@

.venv/.dev: .venv/.run
	$(INSTALL) -e '.[dev]'
	@touch $@
