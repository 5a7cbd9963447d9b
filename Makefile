# Wraps the `dspark` command. `make help` lists the targets and variables.

MODEL ?=
# Another model never lands in the embedded one's folder.
NAME ?= $(if $(MODEL),$(patsubst %.gguf,%,$(notdir $(patsubst %/,%,$(MODEL)))),smollm2)
DTYPE ?= fp32
# What runs the engines: onnxruntime, or tensorrt (the installed tensorrt, else tensorrt_rtx).
TARGET ?= onnxruntime
COMPUTE_CAPABILITY ?=
SERVING ?=
# The embedded model's own drafter goes with it; another model brings its own or none.
DRAFTER ?= $(if $(MODEL),,$(patsubst %/config.json,%,$(wildcard models/dspark_smollm2_135m/config.json)))
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ARGS ?=
CONFIG ?= training/configs/dspark_smollm2_135m.toml
TRAINING ?= build/training/$(basename $(notdir $(CONFIG)))
TOKENS ?= 550000
CONCURRENCY ?= 1:8
POLICIES ?= off,fixed
PYTHON ?=

DSPARK := .venv/bin/dspark
# One stamp for each content of pyproject.toml: installing happens once.
INSTALLED := .venv/.installed-$(shell sha256sum pyproject.toml | cut -c 1-16)
PYTHONS := $(or $(PYTHON),python3.12 python3.11 python3.13 python3)

.PHONY: help install export engines repo serve perf test test-engines test-gpu soak clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo 'MODEL=<Hugging Face folder or .gguf>   the embedded SmolLM2-135M-Instruct when empty'
	@echo 'NAME=$(NAME)  DTYPE=$(DTYPE) (fp32, fp16, bf16)  DRAFTER=$(DRAFTER)'
	@echo 'TARGET=$(TARGET) (onnxruntime, tensorrt)  COMPUTE_CAPABILITY=<SM86[,SM89...]>  SERVING=<decoder options as JSON>'
	@echo 'HOST=$(HOST)  HTTP_PORT=$(HTTP_PORT)  GRPC_PORT=$(GRPC_PORT)  METRICS_PORT=$(METRICS_PORT)'
	@echo 'ARGS=<more options of dspark serve>   CONCURRENCY=$(CONCURRENCY)   POLICIES=$(POLICIES)'
	@echo 'PYTHON=<a Python from 3.11 to 3.13 for .venv>'

install: $(INSTALLED) ## make .venv with the pinned dependencies

export: $(INSTALLED) ## checkpoint to ONNX, with a parity report
	$(DSPARK) export --name $(NAME) --dtype $(DTYPE) \
	  $(if $(MODEL),--model $(MODEL)) $(if $(DRAFTER),--drafter $(DRAFTER))

engines: export ## export, build, measure and package: everything up to the model repository
	$(DSPARK) build --name $(NAME) --target $(TARGET) $(if $(SERVING),--config $(SERVING)) \
	  $(if $(COMPUTE_CAPABILITY),--compute-capability $(COMPUTE_CAPABILITY))
# Plans for a GPU that is elsewhere are built and packaged; there is nothing here to measure them on.
ifneq ($(filter onnxruntime,$(TARGET))$(wildcard /dev/nvidiactl),)
	$(DSPARK) profile --name $(NAME)
	$(DSPARK) calibrate --name $(NAME)
endif
	$(DSPARK) package --name $(NAME)

repo: $(INSTALLED) ## package the model repository from engines that are built
	$(DSPARK) package --name $(NAME)

serve: engines ## all of it, then Triton in the foreground; Ctrl-C stops it
	$(DSPARK) serve --name $(NAME) --host $(HOST) --http-port $(HTTP_PORT) \
	  --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) $(ARGS)

perf: engines ## NVIDIA's perf_analyzer on a server of its own; CONCURRENCY=1:8 POLICIES=off,fixed
	$(DSPARK) bench perf --name $(NAME) --concurrency $(CONCURRENCY) --policies $(POLICIES)

drafter: engines ## train the embedded model's drafter from nothing (hours); run again to go on
	$(DSPARK) train-data --name $(NAME) --out build/$(NAME)/answers --tokens $(TOKENS)
	$(DSPARK) train --config $(CONFIG) --work-dir $(TRAINING) \
	  $(if $(wildcard $(TRAINING)/checkpoint.pt),--resume) $(ARGS)

test: $(INSTALLED) ## lint, format check, type check and tests; needs no GPU
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest --numprocesses 2 --dist loadfile

soak: $(INSTALLED) ## 10,000 requests, 20,000 mutated ones and all faults against a tiny model (minutes)
	DSPARK_SOAK=1 .venv/bin/pytest --timeout 3600 -s tests/runtime/test_prefix_cache.py \
	  tests/triton_repo/test_soak.py tests/triton_repo/test_fuzz.py

test-engines: $(INSTALLED) ## TensorRT-RTX builds in every combination of head, dtype and GPU (long)
	.venv/bin/pytest -m engines --timeout 3600

test-gpu: $(INSTALLED) ## all tests of the loop on TensorRT engines; needs a GPU and TensorRT
	DSPARK_TEST_TARGET=tensorrt .venv/bin/pytest tests/runtime tests/triton_repo

clean: ## remove build outputs; .venv stays
	rm -rf build

$(INSTALLED): | .venv/bin/pip
	.venv/bin/pip install --disable-pip-version-check --editable '.[dev]'
# Only its files are used, so what its Python code requires does not matter; one such requirement,
# numpy 1, cannot be met on Python 3.13.
	.venv/bin/pip install --disable-pip-version-check --quiet --no-deps \
	  $$(sed -nE 's/.*"(nvidia-pytriton==[0-9.]+).*/\1/p' pyproject.toml)
	@rm -f .venv/.installed-*
	@touch $@

.venv/bin/pip:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    echo "making .venv with $$($$python --version)"; \
	    exec $$python -m venv .venv; \
	  fi; \
	done; \
	echo 'There is no Python from 3.11 to 3.13 with venv among: $(PYTHONS).' \
	  'Install one (Debian, Ubuntu: apt-get install python3-venv) or name one with PYTHON=.' >&2; \
	exit 1
