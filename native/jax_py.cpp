// The handler that XLA calls for a collective in a program that JAX compiled.
//
// By its foreign function interface in C, whose header comes with jaxlib. Built only where that is found.
#include <nanobind/nanobind.h>

#include <xla/ffi/api/c_api.h>

#include <cstdio>
#include <exception>

#include "bound_call_py.hpp"

namespace roundelay {

namespace {

// Python knows these words: fronts/jax_programs.py.
XLA_FFI_Error* failed(const XLA_FFI_Api* api, const char* how, long long number) {
    char text[160];
    std::snprintf(text, sizeof text, "[roundelay call %lld %s]", number, how);
    XLA_FFI_Error_Create_Args error{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text,
                                    XLA_FFI_Error_Code_ABORTED};
    return api->XLA_FFI_Error_Create(&error);
}

XLA_FFI_Error* told(const XLA_FFI_Api* api, Outcome outcome, long long number) {
    switch (outcome) {
        case Outcome::done: return nullptr;
        case Outcome::broken: return failed(api, "broken", number);
        case Outcome::closed: return failed(api, "closed", number);
        case Outcome::nested: return failed(api, "nested", number);
        case Outcome::interrupted: return failed(api, "interrupted", number);
    }
    return nullptr;
}

// What a handler is asked first: for which version of the interface it was built.
bool is_question(const XLA_FFI_CallFrame* frame) {
    if (frame->extension_start == nullptr ||
        frame->extension_start->type != XLA_FFI_Extension_Metadata)
        return false;
    auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
    asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return true;
}

// The last argument and the last result are tokens, which order calls and hold nothing.
void* buffer(void** each, std::int64_t size) {
    return size < 2 ? nullptr : static_cast<XLA_FFI_Buffer*>(each[0])->data;
}

// Ranks that are threads of this process share the threads of its XLA: a call that kept one while it
// waits for other ranks could keep those from running. It goes on in the background instead.
XLA_FFI_Error* begin(XLA_FFI_CallFrame* frame, const BoundCall& bound, long long number) {
    const XLA_FFI_Api* api = frame->api;
    XLA_FFI_Future_Create_Args made{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
    if (XLA_FFI_Error* error = api->XLA_FFI_Future_Create(&made)) return error;
    const auto ended = [api, future = made.future, number](Outcome outcome) {
        if (outcome == Outcome::done) {
            XLA_FFI_Future_SetAvailable_Args all{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE,
                                                 nullptr, future};
            api->XLA_FFI_Future_SetAvailable(&all);
            return;
        }
        XLA_FFI_Future_SetError_Args all{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future,
                                         told(api, outcome, number)};
        api->XLA_FFI_Future_SetError(&all);
    };
    frame->future = made.future;
    const Outcome outcome = bound.start(buffer(frame->args.args, frame->args.size),
                                        buffer(frame->rets.rets, frame->rets.size), ended);
    if (outcome != Outcome::done) ended(outcome);
    return nullptr;
}

XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
    if (is_question(frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[0]);
    const auto number = *static_cast<const std::int64_t*>(scalar->value);
    const BoundCall* bound = BoundCall::find(number);
    if (bound == nullptr) return failed(frame->api, "unknown", number);
    if (bound->shared) return begin(frame, *bound, number);
    try {
        return told(frame->api,
                    bound->run(buffer(frame->args.args, frame->args.size),
                               buffer(frame->rets.rets, frame->rets.size)),
                    number);
    } catch (const std::exception& error) {
        return failed(frame->api, error.what(), number);
    }
}

}  // namespace

void register_jax(nb::module_& module) {
    module.def("jax_handler", [] {
        return nb::capsule(reinterpret_cast<void*>(&handle), "xla._CUSTOM_CALL_TARGET");
    });
}

}  // namespace roundelay
