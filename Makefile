# One command sets everything up and runs: make train, make test. Everything lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH  := $(VENV)/.bench-installed
DOCS   := $(VENV)/.docs-installed
BROWSER := $(VENV)/.browser-installed
JOBS   ?= 2
PORT   ?= 8000
OLDEST_TORCH ?= 2.6.0
GPU_PYTHON ?= python3
GPU_WORKERS ?= 8
OLDEST_TESTS ?= tests/data tests/train tests/cli tests/diagnose tests/nn tests/backward tests/test_network.py

OLDEST := $(VENV)-torch-$(OLDEST_TORCH)
AUDIT  := $(VENV)-audit
FRESH  := $(VENV)-fresh

.PHONY: setup train test test-slow test-gpu test-browser setup-oldest test-oldest test-endurance fuzz leaks audit lint docs demo demo-build package bench bench-gpu paper clean help

help:
	@echo "make train      set up, then train an implicit network on the digits set (CPU)"
	@echo "make test       set up, lint, type-check, run the tests"
	@echo "make lint       ruff and mypy"
	@echo "make docs       build the docs site into build/site, without warnings and without network access"
	@echo "make demo       a page that shows a network converging: built in a minute, served on http://127.0.0.1:$(PORT)"
	@echo "make package    build sdist and wheel into dist, install the wheel in a fresh environment, train and report with it"
	@echo "make bench      measure against TorchDEQ, in minutes; writes results/*.json and shows the figures before"
	@echo "make bench-gpu  training steps and predictions against peers on a GPU; writes results/gpu; run it again to go on"
	@echo "make paper      the paper's studies on digits, on a CPU, in minutes; python -m reproduction --help for more"
	@echo "make test-endurance  kills at every file operation, 200 at random (writes results/kills.json), 2,000 mutated checkpoints"
	@echo "make test-slow  the tests marked slow (writes results/export.json);  make test-gpu  the tests that need CUDA"
	@echo "make test-browser  the pages (docs site, demo, report) in Chromium, which it installs; writes docs/images/*.png"
	@echo "make test-oldest  the tests of the library on torch $(OLDEST_TORCH), or on OLDEST_TORCH=2.15.0; downloads 3 GB, since its wheel brings CUDA"
	@echo "make fuzz       100,000 damaged files; make leaks  10,000 steps per backward mode; both write results/*.json"
	@echo "make audit      look up known vulnerabilities of the pinned packages (needs the advisory service of PyPI)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "banach needs Python 3.11 or newer, got " + sys.version.split()[0] + "; run: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(BENCH): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

$(BROWSER): $(DOCS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	touch $@

setup: $(STAMP)

train: setup
	$(BIN)/banach train

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu and not browser" --cov=src/banach --cov-report=
	@echo "line coverage of src/banach: $$($(BIN)/coverage report --format=total)%"

test-slow: setup
	WRITE_RESULTS=1 $(BIN)/python -m pytest -m "slow and not gpu"

test-endurance: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m slow tests/train/test_kills.py tests/train/test_mutations.py
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python tests/random_kills.py

test-browser: $(BROWSER)
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || apt-get install -y chromium || { \
	  echo "test-browser needs Chromium, which apt-get could not install; run: sudo apt-get install chromium" >&2; exit 2; }
	$(BIN)/python -m pytest -m browser tests/browser

# The pinned packages, but for torch and for sympy, which torch 2.6 pins itself.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v -E '^(torch|sympy)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt torch==$(OLDEST_TORCH) -e '.[dev]'
	touch $@

setup-oldest: $(OLDEST)/.installed

test-oldest: setup-oldest
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) -m "not slow and not gpu and not browser" $(OLDEST_TESTS)

fuzz: setup
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz

leaks: setup
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/leaks.py

# Without the service pip-audit skips every package and exits with 0, hence --strict.
audit:
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r constraints.txt || { \
	  echo "audit: vulnerabilities were found, or the advisory service could not be reached; see the lines above" >&2; exit 1; }

# One thread per worker: with PyTorch's default, twelve workers on 16 cores finished no test in four minutes.
test-gpu:
	OMP_NUM_THREADS=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal -p no:benchmark

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)
	$(BIN)/zensical build --strict --clean
	$(BIN)/python -m pytest -m slow tests/test_docs.py
	@echo "open build/site/index.html; for its search run: $(BIN)/zensical serve"

demo: setup
	PYTHONPATH=src $(BIN)/python demo/build.py --serve --port $(PORT)

demo-build: setup
	PYTHONPATH=src $(BIN)/python demo/build.py

# The wheel is built from the sdist, so both are tested.
package:
	rm -rf dist $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet -c constraints.txt build
	$(FRESH)/bin/python -m build --outdir dist .
	$(FRESH)/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[app]"
	$(FRESH)/bin/python tests/smoke.py

bench: $(BENCH)
	$(BIN)/python -m benchmarks cpu

bench-gpu:
	@$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null || { echo "bench-gpu needs a Python that has torch with CUDA, got $(GPU_PYTHON); run: make bench-gpu GPU_PYTHON=..." >&2; exit 2; }
	@PYTHONPATH=build/torchdeq $(GPU_PYTHON) -c 'import torchdeq' 2> /dev/null || $(GPU_PYTHON) -m pip install --quiet --no-deps --target build/torchdeq torchdeq==0.1.0 || echo "TorchDEQ 0.1.0 cannot be installed: it will be left out"
	PYTHONPATH=src:build/torchdeq $(GPU_PYTHON) -m benchmarks gpu

paper: setup
	$(BIN)/python -m reproduction all --quick

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(AUDIT) $(FRESH) .mypy_cache .ruff_cache .pytest_cache
