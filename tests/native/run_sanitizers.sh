#!/usr/bin/env bash
# Build the native core with sanitizers and run all tests of the thread world under them: calls, mail,
# groups, background calls, mismatches, timeouts, and a thousand worlds. Ranks that are killed or stopped
# are processes, and stay out. Then random orders of close, drop, fork and exit, of threads and processes.
#   tests/native/run_sanitizers.sh [address|thread] [pytest arguments]
# Python and numpy stay as they are; the runtime is preloaded and told to look at our code only.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
KINDS=(address thread)
case ${1:-} in
    address | thread) KINDS=("$1"); shift ;;
esac

runtime() { g++ -print-file-name="$1" | xargs readlink -f; }

build() { # kind, flags
    local folder=build/sanitize-$1
    cmake -S . -B "$folder" -G Ninja -DSKBUILD_PROJECT_NAME=roundelay \
        -DSKBUILD_PROJECT_VERSION=0 -DCMAKE_BUILD_TYPE=Debug \
        -DCMAKE_CXX_FLAGS="$2 -O1 -g -fno-omit-frame-pointer" \
        -DPython_EXECUTABLE="$(readlink -f "$(dirname "$PYTHON")")/$(basename "$PYTHON")" \
        -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" >/dev/null
    cmake --build "$folder" >"$folder/build.log" || { cat "$folder/build.log"; exit 1; }
    # The tests then import this core instead of the installed one.
    cat >"$folder/sanitized_core.py" <<PLUGIN
import glob, importlib.util, sys
spec = importlib.util.spec_from_file_location("roundelay._core", glob.glob("$folder/_core*.so")[0])
core = importlib.util.module_from_spec(spec)
sys.modules["roundelay._core"] = core
spec.loader.exec_module(core)

def on_threads(item):
    if "test_world.py" in item.nodeid:
        return "optimized" not in item.name  # it runs another Python
    if "test_slices.py" in item.nodeid:
        return "threads" in item.name
    used = set(getattr(item, "fixturenames", ()))
    return "worlds" in item.name or (
        used & {"ranks", "threads"} and "processes" not in used and "[processes" not in item.name
    )

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if on_threads(item)]
PLUGIN
}

for kind in "${KINDS[@]}"; do
    if [ "$kind" = address ]; then
        build address "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
        preload="$(runtime libasan.so):$(runtime libubsan.so):$(runtime libstdc++.so.6)"
    else
        build thread "-fsanitize=thread"
        preload="$(runtime libtsan.so):$(runtime libstdc++.so.6)"
    fi
    echo "== $kind"
    # Leaks are counted by a test of its own; Python itself never frees all it has.
    # Tests ask for memory that nobody has: it is not there, as without sanitizers.
    # Without address randomization: the thread sanitizer needs the lower part of the memory.
    sanitized=(setarch -R env LD_PRELOAD="$preload" PYTHONPATH="build/sanitize-$kind"
        PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1
        ASAN_OPTIONS="detect_leaks=0 abort_on_error=1 allocator_may_return_null=1" UBSAN_OPTIONS=print_stacktrace=1
        TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 die_after_fork=0 allocator_may_return_null=1" "$PYTHON")
    "${sanitized[@]}" -m pytest -q -s -p sanitized_core -p no:cacheprovider tests/communicator \
        tests/native/test_world.py tests/native/test_slices.py --ignore tests/communicator/test_torch.py "$@"
    "${sanitized[@]}" -c 'import runpy, sanitized_core
runpy.run_path("tests/native/lifetime_orders.py", run_name="__main__")' 0 "${ORDERS:-100}"
done
