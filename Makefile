# What people and CI type. `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# How many processes test; each keeps up to four engines of a tiny model open, about 1 GiB each. WORKERS=0 for one, with its output.
WORKERS ?= 2
# A file stays in one process, which opens its engines once; the long files come first, by name.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
SOURCES := vllm_specplugin tests benchmarks examples scripts setup.py

.PHONY: setup demo test test-unit validate-long lint format bench check-seams heads clean

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml scripts/setup.sh examples/*/pyproject.toml
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	touch $@

demo: setup
	$(BIN)/vllm-specplugin demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-unit: setup
	$(BIN)/python -m pytest tests/unit tests/contract $(PARALLEL) $(ARGS)

validate-long: setup
	SPECPLUGIN_LONG=1 $(BIN)/python -m pytest tests/engine/test_validate.py -k million $(ARGS)

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: setup
	$(BIN)/python benchmarks/ngram.py --markdown docs/benchmarks/ngram.md $(ARGS)
	$(BIN)/python benchmarks/verification.py --quick

check-seams: setup
	$(BIN)/python scripts/check_seams.py $(ARGS)

# Small versions of all four families on the demo's model, in less than 15 minutes; ARGS="PROMPTS=768 MINUTES=20" for good ones.
heads: setup
	for family in medusa eagle eagle3 mtp; do \
	  env PATH="$(CURDIR)/$(BIN):$$PATH" PROMPTS=160 MINUTES=1.5 WORK=build/heads $(ARGS) \
	    bash examples/learned_drafters/$$family.sh || exit 1; \
	done

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
