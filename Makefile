# axolotl-unlearn: `make demo` and `make test` are all a newcomer needs.
WITH   ?= 3.13 3.12 3.11
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= out/demo
LUME_DIR ?= ../shared/lume
PYTHONS ?= 3.11 3.12 3.13

# Everything runs offline and quietly; nothing is fetched from a model or data hub.
export HF_HUB_OFFLINE = 1
export HF_DATASETS_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
export AXOLOTL_DO_NOT_TRACK = 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
# What a failed command has begun is no result: it is made again.
.DELETE_ON_ERROR:
.PHONY: help setup demo reproduce reproduce-real test test-quick test-stack test-pythons test-newest test-zero fuzz quality format bench bench-counts bench-gpu docs-tables site clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## build .venv with pinned versions (newest Python of 3.13, 3.12, 3.11; WITH=3.12)

# pyenv's Pythons are found where they lie: its commands in PATH fail for versions that are not chosen.
# torch comes first: a range elsewhere would otherwise take a newer build.
$(VENV)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	@if ! test -x $(BIN)/python; then \
	  for version in $(WITH); do \
	    for python in python$$version $$(ls -d $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | sort -rV); do \
	      "$$python" -c 'import ensurepip' 2>/dev/null && break 2; python=; done; done; \
	  if test -z "$$python"; then echo "none of Python $(WITH) is here; install one" >&2; exit 2; fi; \
	  "$$python" -m venv $(VENV); fi
	@echo "set-up, once: 4.5 to 7 GB in $(VENV), some minutes (6 with a fast connection), mostly torch"
	@echo "[1/3] $$(date +%T) $$($(BIN)/python -V) in $(VENV)"
	@set -e; \
	version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	pip="$(BIN)/python -m pip install -q -c constraints/$$version.txt"; \
	torch=torch; if test ! -e /dev/nvidia0 -a ! -e /dev/kfd; then \
	  cpu=$$(cat constraints/$$version.txt constraints/3.12.txt | grep -m1 '^torch==')+cpu; \
	  if $$pip --dry-run --no-deps "$$cpu" >/dev/null 2>&1; then torch=$$cpu; \
	    echo "      no GPU is here: the build of torch for a CPU ($$cpu), 3 GB less"; else \
	    echo "      no GPU is here, and pip's index has no $$cpu: its own build, on Linux for CUDA and 3 GB more"; \
	    echo "      (PIP_EXTRA_INDEX_URL names an index of CPU builds)"; fi; fi; \
	echo "[2/3] $$(date +%T) torch, the largest package"; \
	$$pip "$$torch"; \
	if test $$version = 3.13; then $$pip setuptools wheel cffi; $$pip --no-build-isolation zstandard; fi; \
	echo "[3/3] $$(date +%T) axolotl, mergekit, lm-eval and this package"; \
	$$pip -e '.[dev]'
	@touch $@
	@echo "      $$(date +%T) set-up is done"

demo: setup  ## memorise, forget twice, merge, delete exactly, evaluate, report (tiny model, five minutes)
	@echo "about five minutes on two idle cores, more on busy ones; what the commands say is in out/logs"
	@OMP_WAIT_POLICY=PASSIVE CUDA_VISIBLE_DEVICES= python -m research.demo

reproduce: setup  ## the paper's story over fresh seeds, tiny model (OUT=dir, ARGS="--seeds 511 512")
	python -m research.studies.reproduce $(if $(filter file,$(origin OUT)),out/reproduce,$(OUT)) $(ARGS)

reproduce-real: setup  ## the same with SmolLM2-135M and LUME, hours, resumable (LUME_DIR=..., TOFU_DIR=...)
	LUME_DIR=$(LUME_DIR) python -m research.studies.reproduce $(if $(filter file,$(origin OUT)),out/real,$(OUT)) --real $(ARGS)

test: setup  ## the whole test suite
	OMP_NUM_THREADS=1 python tests/each_file.py

test-quick: setup  ## without the slow tests
	OMP_NUM_THREADS=1 python tests/each_file.py -m 'not slow'

# What meets Axolotl, transformers, PEFT, mergekit and lm-eval: CI runs it on the oldest versions, too.
STACK := test_upstream_hooks test_train_axolotl test_stock_commands

test-stack: setup  ## the quick tests that meet Axolotl, PEFT, mergekit and lm-eval
	OMP_NUM_THREADS=1 python tests/each_file.py -m 'not slow' $(STACK:%=tests/%.py)

test-pythons:  ## the suite under each Python that is here (PYTHONS="3.11 3.13")
	@for version in $(PYTHONS); do \
	  $(MAKE) --no-print-directory setup test WITH=$$version VENV=.venv-$$version; code=$$?; \
	  test $$code = 0 || exit $$code; \
	done

test-newest:  ## the suite with the newest of everything that resolves, without pins and upper bounds
	$(MAKE) --no-print-directory setup VENV=.venv-newest
	.venv-newest/bin/python -m pip install -q --upgrade --upgrade-strategy eager \
	  $$(.venv-newest/bin/python tests/unpinned.py)
	$(MAKE) --no-print-directory test VENV=.venv-newest

# DeepSpeed stays out of the environment: with it, every command would import it.
ZERO := .zero/deepspeed
$(ZERO): $(VENV)/.ready
	$(BIN)/python -m pip install -q --target $(@D) --no-deps deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 ninja

test-zero: setup $(ZERO)  ## LoRA and full fine-tuning under ZeRO on two processes of the CPU, with DeepSpeed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.zero python -m pytest -q tests/test_training_processes.py tests/test_performance_distributed.py -k "zero or goes_on or ddp"

fuzz: setup  ## 200 000 bad inputs; 2 000 trainings and 2 000 templates against plain ones
	FUZZ_CASES=200000 TRAINING_DRAWS=2000 TEMPLATE_DRAWS=2000 OMP_NUM_THREADS=1 \
	  python -m pytest -q --timeout 0 tests/test_fuzz.py tests/test_fuzz_training.py tests/test_data_templates.py

quality: setup  ## format and lint check
	ruff format --check .
	ruff check .

format: setup  ## format in place
	ruff format .
	ruff check --fix .

bench: setup  ## step time and memory against other ways (CPU)
	python -m research.benchmarks.run

bench-counts: setup  ## what a step asks of the host, counted on a pretended device
	python -m research.benchmarks.counts

bench-gpu:  ## tests, steps and the whole recipe at full size on one GPU, in MINUTES (9)
	research/benchmarks/gpu.sh

docs-tables: setup  ## write the tables of README and docs from research/results
	python research/tables.py
	python docs/generate.py

site: setup  ## build the documentation as a site in out/site; dead links fail
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

clean:  ## remove what runs have written
	rm -rf out
