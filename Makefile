# The front door: `make help`.

# libnbd's binding is a system package for the system's Python, so the virtual environment is made by that one.
PYTHON ?= /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= auto
FUZZ_SECONDS ?= 60

TEST_PACKAGES := python3-libnbd qemu-utils nbdkit libnbd-bin gnutls-bin mount util-linux diffutils iproute2 gcc libc6-dev bmap-tools \
	xz-utils gzip pigz bzip2 zstd lz4
# half a gigabyte: not for each run of the tests
CPU_PACKAGES := qemu-user-static gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross

.DEFAULT_GOAL := help
.PHONY: help checksum test cpus lint types fuzz bench man completions docs dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# --- the main job ---------------------------------------------------------------------------------------------------

checksum: $(VENV)/installed  ## install, and print the checksum of IMAGE (without IMAGE: of a small sample)
ifdef IMAGE
	@$(BIN)/imgsum checksum -- '$(subst ','\'',$(value IMAGE))'
else
	@sample=$$(mktemp -d) && trap 'rm -r "$$sample"' EXIT && \
	truncate -s 64M "$$sample/sample.img" && \
	printf 'a boot sector' | dd of="$$sample/sample.img" conv=notrunc status=none && \
	echo "no IMAGE=... was given: here is the checksum of a sparse 64 MiB sample" >&2 && \
	$(BIN)/imgsum checksum "$$sample/sample.img"
endif

# --- for developers -------------------------------------------------------------------------------------------------

test: $(VENV)/tested  ## install what the tests need, and run them all
	@tools/install-packages --optional $(TEST_PACKAGES)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

cpus: $(VENV)/tested  ## the C on aarch64 and on older CPUs, emulated
	@tools/install-packages $(CPU_PACKAGES)
	$(BIN)/python -m pytest -m emulated $(PYTEST_ARGS)

fuzz: $(VENV)/tested  ## random and damaged images against QEMU, for FUZZ_SECONDS each
	$(BIN)/python tests/fuzz_qcow2.py --seconds $(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz_formats.py --seconds $(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz_index.py --seconds $(FUZZ_SECONDS)

lint: $(VENV)/linted  ## ruff, its format too
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/linted  ## mypy, strict
	$(BIN)/mypy

docs: man completions  ## what is made from the parser: man pages and completions

man: $(VENV)/documented  ## docs/man/*.1, from the parser
	$(BIN)/python tools/make_docs.py man

completions: $(VENV)/documented  ## completions/*, from the parser
	$(BIN)/python tools/make_docs.py completions

bench: $(VENV)/benched  ## measure against the peers that are installed; BENCH_ARGS="--only NAME"
	$(BIN)/python -m bench $(BENCH_ARGS)

dist: $(VENV)/linted  ## the wheel and the source archive, in dist/
	$(BIN)/pip install -q build
	$(BIN)/python -m build

clean:  ## remove all that was made
	rm -rf $(VENV) dist build *.egg-info imgsum/hash/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- the virtual environment ----------------------------------------------------------------------------------------
# Each stamp says what was installed into it. `pip install --group` needs a recent pip, so that comes first.

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imgsum needs Python 3.11 or newer")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tools/install-packages python3-venv
	$(PYTHON) -m venv --system-site-packages $(VENV)
	@$(BIN)/pip install -q --upgrade 'pip>=25.1' >&2

# The C extension is built where there is a compiler. Without one, hashlib is used.
$(VENV)/installed: pyproject.toml setup.py imgsum/hash/lanes.c | $(VENV)/bin/python
	@$(BIN)/pip install -q --editable . >&2
	@touch $@

GROUP_tested := test
GROUP_linted := lint
GROUP_documented := docs
GROUP_benched := bench

$(VENV)/tested $(VENV)/linted $(VENV)/documented $(VENV)/benched: $(VENV)/%: $(VENV)/installed
	@$(BIN)/pip install -q --group $(GROUP_$*) >&2
	@touch $@
