# Every target works in a fresh clone: it makes .venv from constraints.txt when that is missing or out of date.
#
#   PYTHON  the interpreter that .venv is made with
#   TORCH   another torch than the default, one of the pairs in constraints.txt: `make test TORCH=2.14.1`
#   JOBS    how many processes run the tests, each with one thread: one a core unless it is said
#   ARGS    passed on to the program behind a target: `make demo ARGS=--all`, `make test ARGS="-k scales -x"`

PYTHON ?= python3
JOBS ?= auto
TORCH ?=
ARGS ?=
VENV := .venv$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
BENCHMARKS := import_time planning compile_time conversion linear_latency experts loading_memory loading_speed saving

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-llm test check format readme golden notebooks bench gpu sweep clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv (every other target does so by itself)

$(STAMP): $(VENV)/constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[test,check]'
	@touch $@

# The line of another pair, in place of whatever constraints.txt pins of the same packages.
$(VENV)/constraints.txt: constraints.txt
	$(if $(TORCH),@grep -q '^#: torch==$(TORCH) ' constraints.txt || { echo "constraints.txt names no pair for torch $(TORCH)"; exit 2; })
	@mkdir -p $(VENV)
	awk -v pair='$(TORCH)' '/^#:/ && $$2 == "torch==" pair { for (i = 2; i <= NF; i++) { split($$i, pin, "=="); own[pin[1]]; print $$i } } \
		{ split($$1, pin, "=="); if (!(pin[1] in own)) print }' constraints.txt > $@

demo: $(STAMP) ## every scheme on a real sentence encoder (ARGS=--all compiles every scheme)
	$(BIN)/python benchmarks/demo.py $(ARGS)

demo-llm: $(STAMP) ## every scheme on a small decoder: perplexity, KL, a sentence (ARGS="--model qwen" for a bigger one)
	$(BIN)/python benchmarks/demo_llm.py $(ARGS)

test: $(STAMP) ## all tests but the full sweep and those for a GPU; notebooks, README and the wheel are among them
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) $(ARGS)

check: $(STAMP) ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources as `check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(STAMP) ## write the generated tables of README.md anew
	$(BIN)/python tests/test_readme.py

golden: $(STAMP) ## write the golden table of the kernels' machine code anew
	OMP_NUM_THREADS=1 $(BIN)/python tests/kernels/test_golden_code.py

notebooks: $(STAMP) ## run the notebooks
	$(BIN)/pytest tests/test_notebooks.py $(ARGS)

bench: $(STAMP) ## measure against peers (ARGS=--save writes benchmarks/results)
	@failed=0; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(ARGS) || failed=1; done; exit $$failed

gpu: $(STAMP) ## all tests and benchmarks for a GPU, one JSON of results (ARGS="--part quantize" for a part)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

sweep: $(STAMP) ## every scheme, route, dtype and model, compiled (long)
	PYTHONPATH=tests/e2e OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -p sweep_table --numprocesses $(JOBS) $(ARGS)

clean: ## remove environments, caches and what was built
	rm -rf .venv .venv-torch* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
