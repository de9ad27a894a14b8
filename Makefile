# make demo   answer a question with the built-in model
# make dev    install what working on it needs
# make quick  run the quick tests, in under a minute     make test   run the suite
# make check  lint, types, layers
# make test-clients run real programs against the server: CLIENTS="--install aider dspy" installs and chooses
# make native compile the CPU kernels, if they have changed
# make site   write the page as a folder for any static host: site/
# make page   build the page of `llamarium inspect`, if it has changed
# make mutants put faults into the sources, one at a time, and expect tests to fail (half an hour)
# make docs   build the documents as a site, in build/docs
# make peers  measure this library and its peers on the same files, on a quiet machine
# make wheels build the wheels that are published, into dist/
# Each makes what it needs; PYTHON=python3.12 chooses the interpreter, WORKERS=1 how many tests run side by side.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 2)')
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
DEPENDENCIES := "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')"
SAY = @echo "[make $(or $(MAKECMDGOALS),demo)]"

.PHONY: demo dev quick test test-clients check format mutants native page site docs peers wheels clean

demo: .venv/.run
	$(SAY) "Asking the built-in model; the first time it is fetched (98 MB) ..."
	$(BIN)/llamarium chat "What is the capital of France, and what is it famous for?"
	$(SAY) "To try next:"
	@echo "  Talk to it; /help lists what you can type:"
	@echo "    $(BIN)/llamarium chat"
	@echo "  See in the browser how it computes:"
	@echo "    $(BIN)/pip install -e '.[serve]' && $(BIN)/llamarium inspect"
	@echo "  Train a small model of your own, in minutes:"
	@echo "    $(BIN)/pip install -e '.[train]' && $(BIN)/llamarium pretrain"

dev: .venv/.dev

# The core: tokenizers, sampling, grammars, the engine, and C against NumPy. It needs neither PyTorch nor `make dev`.
quick: .venv-light/.test
	OMP_NUM_THREADS=1 .venv-light/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m quick

# What the suite takes on two quiet cores: the one place where that stands.
MINUTES := 14

# Tests that measure time or want every core run by themselves at the end.
# The tests that need no PyTorch run where there is none.
SIDE_BY_SIDE := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: .venv/.dev .venv-light/.test
	$(SAY) "Testing in $(WORKERS) processes, first without PyTorch ($(MINUTES) minutes on two cores) ..."
	OMP_NUM_THREADS=1 .venv-light/bin/python $(SIDE_BY_SIDE) -m "not torch and not alone"
	OMP_NUM_THREADS=1 $(BIN)/python $(SIDE_BY_SIDE) -m "torch and not alone"
	$(SAY) "Testing what needs the machine for itself (about two minutes) ..."
	.venv-light/bin/python -m pytest -m "alone and not torch"
	$(BIN)/python -m pytest -m "alone and torch"

# Real programs against the server: those of tests/clients/programs.toml that are in the folder CLIENTS_DIR, or those
# that CLIENTS names; `--install` among them has npm and pip install what is not there.
CLIENTS ?=
test-clients: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/clients/run.py $(CLIENTS)

mutants: .venv/.dev
	$(BIN)/python tests/mutants/run.py

check: .venv/.dev
	$(SAY) "Looking for style, types and layers (about a minute) ..."
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

page:
	@test -x $(BIN)/python || $(MAKE) .venv/.dev
	$(BIN)/python hatch_page.py

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

# The page in front of what computes in a browser; the kernels for it need a compiler that PyPI has.
site: .venv/.run
	$(BIN)/python hatch_page.py
	@$(BIN)/python -c "import ziglang" 2>/dev/null || $(INSTALL) ziglang
	$(BIN)/python hatch_build.py --wasm
	$(BIN)/llamarium site --out site --force

# Each model takes about ten minutes; MODELS="--model '1B Q4_0'" chooses some.
MODELS ?=
peers: .venv/.dev
	$(BIN)/python bench/peer_table.py $(MODELS)

wheels: .venv-wheels/.made
	$(SAY) "Building wheels for Linux, macOS and Windows (some minutes the first time) ..."
	.venv-wheels/bin/python hatch_wheels.py

clean:
	rm -rf .venv .venv-light .venv-wheels dist build

# What pip fetches, one line a file, with its size.
FETCHED := sed -un 's/^ *\(Downloading\|Using cached\) \([^ ]*\) \(([^)]*)\).*/  \1 \2 \3/p'

# Compilers and downloads side by side; where one of them fails, the installation after them says why.
.venv/.run: pyproject.toml constraints.txt hatch_build.py hatch_compiler.py hatch_page.py $(wildcard native/*) $(shell find web docs/learn -type f -not -path '*/node_modules/*')
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(SAY) "Installing Llamarium; where they have changed, the CPU kernels are compiled and the page is built (a minute) ..."
	@$(INSTALL) --no-compile hatchling editables
	@$(BIN)/python hatch_build.py --best 2>/dev/null & $(BIN)/python hatch_page.py 2>/dev/null & \
	$(BIN)/python -c $(DEPENDENCIES) | \
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt --progress-bar off --no-compile -r /dev/stdin | $(FETCHED); wait
	@$(INSTALL) --no-compile $$(test -e src/llamarium/page/dist/index.html && echo --no-build-isolation) -e .
	@touch $@

# torch first and by its pinned version: otherwise pip may take another build of it for a dependency. instructor last and
# alone: it runs with newer versions of jiter and rich than its bounds allow, which openai and others need.
.venv/.dev: .venv/.run
	$(SAY) "Installing what the tests need (a few minutes the first time) ..."
	$(BIN)/python hatch_build.py
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps instructor
	@touch $@

.venv-light/.test: pyproject.toml constraints.txt .venv/.run
	@test -x .venv-light/bin/python || $(PYTHON) -m venv .venv-light
	.venv-light/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# PyPI's ziglang compiles and links for other processors and older systems: 100 MB.
.venv-wheels/.made: constraints.txt
	@test -x .venv-wheels/bin/python || $(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/pip install --quiet --disable-pip-version-check -c constraints.txt hatchling ziglang auditwheel deflate zopfli
	@touch $@
