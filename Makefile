# Every target sets itself up on a fresh machine: a virtual environment with pinned dependencies.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# the release of PyTorch; empty: the pinned one. test-versions sets it, and VENV to one folder a combination
TORCH  ?=
# wall-clock seconds of training per method in the demo
SECONDS_EACH ?= 100
# a new folder each time, so no earlier run is lost
DEMO_OUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
# Criteo's train.txt, plain or .gz, for bench-dlrm (default: synthetic clicks, whose quality figures mean nothing)
CRITEO ?=

# training per run of the frontier, 600s or 1600steps, and runs of each case
BUDGET ?= 600s
SEEDS ?= 3

.PHONY: help install demo docs test test-versions test-newest zoo faults dist check bench bench-dlrm frontier gpu gpu-dry format clean

help:
	@echo "make demo    train a language model of code dense, narrow (also with helpers) and compressed for the same time, and compare them (11 minutes)"
	@echo "make docs    build the documentation site, with the API reference, in site/"
	@echo "make test    run the tests (10 minutes)"
	@echo "make test-versions TORCH=2.15.0 PYTHON=python3.11   run the tests with that PyTorch and Python, in an environment of its own"
	@echo "make test-newest            run the tests with the newest releases of all dependencies that pyproject.toml admits, and the pinned PyTorch, or TORCH=2.15.0"
	@echo "make zoo     check every family of models, write docs/zoo.md (30 minutes)"
	@echo "make faults  kill, damage, interrupt and starve everything, write docs/faults.md (8 minutes)"
	@echo "make dist    build the wheel and the sdist, try them in an empty environment"
	@echo "make check   check lint, format and types"
	@echo "make bench   measure steps, memory and lookups on this CPU, write docs/benchmarks.md (15 minutes)"
	@echo "make bench-dlrm CRITEO=train.txt.gz   measure DLRM's size, memory, speed and quality at the full table sizes (5 minutes)"
	@echo "make frontier BUDGET=600s   train language models of every format and width for the same time, write docs/frontier.md (hours; continues where it was stopped)"
	@echo "make gpu     run the tests and benchmarks that need a GPU with the PyTorch of PYTHON (9 minutes)"
	@echo "make gpu-dry compile the Triton kernels for GPUs that are not here, count steps, eager and compiled, write docs/gpu.md (25 minutes)"
	@echo "make format  apply lint fixes and the formatter"
	@echo "make clean   remove the virtual environment and caches"

install: $(VENV)/.installed

# the editable installation compiles the kernels
$(VENV)/.installed: requirements.lock pyproject.toml hatch_build.py src/comera/kernels/cpp/compiler.py $(wildcard src/comera/kernels/cpp/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned packages need Python 3.11 or later, found " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@echo "setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@# another torch comes with the triton that it was built for, and may need an older setuptools
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; s/^triton==[^;]*/triton/; s/^setuptools==[^;]*/setuptools/)' requirements.lock > $(VENV)/requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	@# galore-torch depends on a GPU library that its plain optimizer does not use
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps galore-torch==1.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	@$(BIN)/comera compare lm --methods dense,narrow,narrow_conv,hashed_ngrams,comera \
		--data.vocab_size 32768 --seconds $(SECONDS_EACH) --out $(DEMO_OUT) --model.hidden 64 --model.heads 2 \
		--compress.format dense --compress.embedding low_rank --compress.embedding_rank 32 --compress.ngrams 4 \
		--baselines.narrow.hidden 48 --baselines.narrow_conv.hidden 48 \
		--baselines.hashed_ngrams.hidden 48 --baselines.hashed_ngrams.order 4 --baselines.hashed_ngrams.rows 16384
	@echo "three lines that the compressed model completes:"
	@for prompt in "def read(self" "    for name in" "    def __init__(self"; do \
		$(BIN)/comera generate $(DEMO_OUT)/comera "$$prompt" --max_new_tokens 40 --temperature 0.5; echo "--"; done

docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with the search: $(BIN)/python -m http.server --directory site"

test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

test-versions:
	@$(if $(TORCH),,echo "which PyTorch? for example: make test-versions TORCH=2.15.0 PYTHON=python3.11"; exit 2)
	@$(MAKE) --no-print-directory test VENV=.venv-$(notdir $(PYTHON))-torch-$(TORCH)

# The chosen torch comes first, and stays: as a dependency of others it would come anew, built for a GPU.
NEWEST := .venv-newest
test-newest:
	@$(PYTHON) -m venv $(NEWEST)
	@sed -n 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/p' requirements.lock > $(NEWEST)/torch.txt
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(NEWEST)/torch.txt hatchling editables
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		-c $(NEWEST)/torch.txt --no-build-isolation --editable ".[train,docs,onnx,energy,dev]" scipy tensorly tensorly-torch
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps galore-torch
	@$(NEWEST)/bin/python -m pip freeze > $(NEWEST)/requirements.txt
	@echo "newer than requirements.lock:"; \
		grep -v -x -i -f requirements.lock $(NEWEST)/requirements.txt | grep == || echo "nothing"
	@OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest --numprocesses 2

# Families of packages that are no dependencies are checked where they are installed. The CPU builds of torchvision are
# not on the usual index; those for a GPU need such a torch:
#     make zoo VENV=.venv-zoo TORCH=2.14.1 WITH="torchvision==0.29.1 timm diffusers neuraloperator"
zoo: install
	@$(if $(WITH),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(WITH))
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "zoo or not zoo" tests/zoo --zoo-page docs/zoo.md

faults: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "faults or not faults" tests/faults --faults-page docs/faults.md

dist: install
	@$(BIN)/python -m hatchling build --clean --directory dist
	@$(BIN)/python -m pytest tests/packaging --built dist

check: install
	@$(BIN)/ruff check src tests benchmarks examples hatch_build.py
	@$(BIN)/ruff format --check src tests benchmarks examples hatch_build.py
	@$(BIN)/mypy

bench: install
	@$(BIN)/python benchmarks/step.py --cases "batch 32" "batch 1" "batch 1, bf16" --repeats 5
	@$(BIN)/python benchmarks/recompute.py --repeats 5
	@$(BIN)/python benchmarks/tiny.py
	@$(BIN)/python benchmarks/roofline.py --repeats 2
	@$(BIN)/python benchmarks/shrunk_step.py --repeats 7
	@$(BIN)/python benchmarks/lookup.py --seconds 0.3
	@$(BIN)/python benchmarks/layer.py --seconds 0.5
	@$(BIN)/python benchmarks/block_product.py --repeats 6
	@$(BIN)/python benchmarks/heads.py --repeats 8
	@$(BIN)/python benchmarks/decoder.py --repeats 8
	@$(BIN)/python benchmarks/optimizer.py
	@$(BIN)/python benchmarks/projections.py times
	@$(BIN)/python benchmarks/peers.py
	@$(BIN)/python benchmarks/page.py

bench-dlrm: install
	@$(BIN)/python benchmarks/dlrm.py $(if $(CRITEO),--path $(CRITEO))
	@$(BIN)/python benchmarks/page.py

frontier: install
	@$(BIN)/python benchmarks/frontier.py costs
	@$(BIN)/python benchmarks/frontier.py speed
	@$(BIN)/python benchmarks/frontier.py tune --budget $(BUDGET)
	@$(BIN)/python benchmarks/frontier.py final --budget $(BUDGET) --seeds $(SEEDS)
	@$(BIN)/python benchmarks/frontier_page.py

gpu:
	-@PYTHONPATH=src $(PYTHON) -m comera.kernels.cpp.compiler
	@REQUIRE_GPU=1 PYTHONPATH=src $(PYTHON) -m pytest tests/gpu
	@PYTHONPATH=src $(PYTHON) benchmarks/gpu_kernels.py
	@PYTHONPATH=src $(PYTHON) benchmarks/gpu_step.py

gpu-dry: install
	@$(BIN)/python benchmarks/gpu_dry.py
	@$(BIN)/python benchmarks/gpu_roofline.py
	@$(BIN)/python benchmarks/gpu_inductor.py
	@$(BIN)/python benchmarks/gpu_page.py

format: install
	@$(BIN)/ruff check --fix src tests benchmarks examples hatch_build.py
	@$(BIN)/ruff format src tests benchmarks examples hatch_build.py

clean:
	rm -rf $(VENV) src/comera/kernels/cpp/prebuilt .pytest_cache .mypy_cache .ruff_cache .hypothesis
