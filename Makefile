# Three commands are enough on a bare machine: `make web`, `make demo` and `make test`.
# Each installs what it needs into .venv; only Python >= 3.11, a C++ compiler, git and make are given.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PAGE   := $(VENV)/.page

.PHONY: web demo test test-all test-fronts test-old-cpu lint bench docs browser sanitize site clean

# The local page, in a browser; PORT=8700 says where.
PORT ?= 0
web: $(PAGE)
	$(BIN)/roundelay web --port $(PORT)

demo: $(READY)
	$(BIN)/roundelay demo
	$(BIN)/roundelay prove --sizes 1-16
	mkdir -p out
	$(BIN)/roundelay explain all_reduce --algorithm ring -n 5 --out out/ring.html
	$(BIN)/roundelay run -n 2 examples/train_gpt.py --size nano --steps 300 --out out

# A worker per core and one more, since many tests wait for something; what a group of tests starts is
# started once. What needs torch in its own process runs apart, since that makes every fork slow
# (tests/conftest.py). `pytest` alone runs all.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart 100
both = failed=0; $(PYTEST) $(1) --torch without tests || failed=1; \
	$(PYTEST) $(1) --torch with tests src/roundelay || failed=1; exit $$failed

# Of the large grids a sample, by a seed that is printed. It is the commit's, so that runs of one commit
# are alike and each commit looks at other cells.
SEED ?= $(or $(shell git rev-parse --short HEAD 2>/dev/null),none)
test: $(READY) browser
	$(call both,--sample $(SEED))

test-all: $(READY) browser
	$(call both,)

# Every front (Horovod, JAX, Ray, Kubernetes, frameworks on torch) against the real thing, with what it
# needs in an environment of its own; it installs gigabytes and takes long.
test-fronts: $(READY)
	$(BIN)/python tests/fronts/every_front.py

# What depends on the CPU, as on one without AVX-512 and as on one without AVX2.
AVX2_CPU := ROUNDELAY_MAX_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
  NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR"
SSE_CPU := ROUNDELAY_MAX_ISA=sse2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
  NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
OLD_CPU := tests/native tests/engines tests/communicator tests/training/test_precision.py
test-old-cpu: $(READY)
	failed=0; $(AVX2_CPU) $(PYTEST) $(OLD_CPU) || failed=1; \
	$(SSE_CPU) $(PYTEST) $(OLD_CPU) || failed=1; exit $$failed

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sanitize: $(READY)
	PYTHON=$(BIN)/python bash tests/native/run_sanitizers.sh

bench: $(READY)
	for file in benchmarks/[!_]*.py; do $(BIN)/python $$file || exit 1; done

docs: $(READY)
	$(BIN)/python docs/generate.py

# The page with answers computed beforehand, and the documentation: opens from disk or any server.
site: $(READY)
	$(BIN)/python docs/site_build.py out/site

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Roundelay needs Python 3.11 or newer; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
endef

$(READY): $(SOURCES)
	$(environment)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group build --group test --group lint
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e .
	touch $@

# What the page needs and no more: no torch, no test tools.
$(PAGE): $(SOURCES)
	$(environment)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group build
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[web]'
	touch $@

# The page is tested in a real browser. Where there is none and we may install one, we do;
# otherwise those tests say so and are skipped.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	     && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	|| echo "No Chromium found: install one (apt install chromium) to run the browser tests too."

clean:
	rm -rf $(VENV) build out .mypy_cache .ruff_cache .pytest_cache .hypothesis
