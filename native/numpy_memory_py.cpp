// Memory for new numpy arrays out of the arena, by numpy's own hook for allocators (NEP 49).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "world.hpp"

namespace nb = nanobind;

namespace roundelay {

namespace {

// As numpy lays them out, from 1.22 on; numpy's headers are not needed to build this.
struct NumpyAllocator {
    void* context;
    void* (*allocate)(void*, std::size_t);
    void* (*allocate_zeros)(void*, std::size_t, std::size_t);
    void* (*reallocate)(void*, void*, std::size_t);
    void (*release)(void*, void*, std::size_t);
};
struct NumpyHandler {
    char name[127];
    std::uint8_t version;
    NumpyAllocator allocator;
};
constexpr const char* capsule_name = "mem_handler";
constexpr std::size_t set_handler = 304;  // its place in numpy's table of functions

// What is too small to gain anything, and all memory of a forked child, is ordinary.
class ArenaArrays {
   public:
    ArenaArrays(std::shared_ptr<World> world, std::size_t least)
        : world_(std::move(world)), least_(least) {}

    // The arena's memory is always zeroed.
    void* allocate(std::size_t bytes, bool zeros) {
        if (bytes < least_ || world_->foreign())
            return zeros ? std::calloc(1, std::max<std::size_t>(bytes, 1))
                         : std::malloc(std::max<std::size_t>(bytes, 1));
        try {
            auto block = std::make_shared<Block>(world_, Block::reserve(*world_, bytes, 1), bytes);
            void* data = block->data(0);
            const std::lock_guard guard(mutex_);
            blocks_[data] = {std::move(block), bytes};
            return data;
        } catch (const std::exception&) {
            return nullptr;  // numpy raises MemoryError
        }
    }

    void* reallocate(void* data, std::size_t bytes) {
        if (data == nullptr) return allocate(bytes, false);
        if (!inside(data)) return std::realloc(data, std::max<std::size_t>(bytes, 1));
        void* other = allocate(bytes, false);
        if (other == nullptr) return nullptr;
        std::memcpy(other, data, std::min(bytes, length(data)));
        release(data);
        return other;
    }

    void release(void* data) {
        if (!inside(data)) return std::free(data);
        if (world_->foreign()) return;  // a lock that a thread held stays locked in a child
        std::shared_ptr<Block> gone;    // after the lock is
        const std::lock_guard guard(mutex_);
        const auto found = blocks_.find(data);
        gone = std::move(found->second.block);
        blocks_.erase(found);
    }

   private:
    struct Held {
        std::shared_ptr<Block> block;
        std::size_t bytes;
    };
    bool inside(const void* data) const { return world_->offset_of(data) != World::nowhere; }
    std::size_t length(void* data) {
        if (world_->foreign()) return blocks_.find(data)->second.bytes;
        const std::lock_guard guard(mutex_);
        return blocks_.find(data)->second.bytes;
    }

    std::shared_ptr<World> world_;
    std::size_t least_;
    std::mutex mutex_;
    std::map<void*, Held> blocks_;
};

ArenaArrays& of(void* context) { return *static_cast<ArenaArrays*>(context); }

// Arrays keep the handler that made them, and so what it stands on.
nb::capsule numpy_handler(std::shared_ptr<World> world, std::size_t least) {
    auto* handler = new NumpyHandler{
        "roundelay_arena",
        1,
        {new ArenaArrays(std::move(world), least),
         [](void* context, std::size_t bytes) { return of(context).allocate(bytes, false); },
         [](void* context, std::size_t count, std::size_t item) -> void* {
             std::size_t bytes = 0;
             if (__builtin_mul_overflow(count, item, &bytes)) return nullptr;
             return of(context).allocate(bytes, true);
         },
         [](void* context, void* data, std::size_t bytes) {
             return of(context).reallocate(data, bytes);
         },
         [](void* context, void* data, std::size_t) { of(context).release(data); }}};
    return nb::capsule(handler, capsule_name, [](void* data) noexcept {
        auto* gone = static_cast<NumpyHandler*>(data);
        delete static_cast<ArenaArrays*>(gone->allocator.context);
        delete gone;
    });
}

// From here on, and in this context of Python's, arrays come from a handler; returns the one before.
nb::object set_numpy_handler(nb::object handler) {
    nb::object api = nb::module_::import_("numpy._core._multiarray_umath").attr("_ARRAY_API");
    auto** functions = static_cast<void**>(PyCapsule_GetPointer(api.ptr(), nullptr));
    if (functions == nullptr) throw nb::python_error();
    using Set = PyObject* (*)(PyObject*);
    PyObject* before = reinterpret_cast<Set>(functions[set_handler])(handler.ptr());
    if (before == nullptr) throw nb::python_error();
    return nb::steal(before);
}

}  // namespace

void register_numpy_memory(nb::module_& module) {
    module.def("numpy_handler", &numpy_handler, nb::arg("world"), nb::arg("least"));
    module.def("set_numpy_handler", &set_numpy_handler, nb::arg("handler"));
}

}  // namespace roundelay
