// What a group tells of its calls: to those who look on, and to a trace.
#include <numeric>

#include "group.hpp"

namespace roundelay {

void Group::set_trace(std::shared_ptr<Trace> trace) {
    trace_ = std::move(trace);
    if (trace_ != nullptr)
        trace_->list_group(mine_->serial.load(std::memory_order_relaxed), rank_, size_);
}

std::uint64_t Group::show(CallMark& mark, const Call& call, const Program& program,
                          std::span<const std::size_t> counts, std::size_t count) {
    const std::size_t most =
        counts.empty() ? program.most * count
                       : std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    const std::uint64_t bytes = most * call.item;
    mark_ = &mark;
    if (!mark.traces()) [[likely]] return bytes;
    const CallRecord& record = call.record;
    const int me = world_rank(rank_);
    trace_->know_site(*world_, me, record.site);
    mark.begin({.number = 0, .asked_ns = 0, .began_ns = 0, .ended_ns = 0, .waited_ns = 0,
                .call = record.call, .bytes = bytes,
                .group = mine_->serial.load(std::memory_order_relaxed), .count = record.count,
                .site = record.site, .name = call.name, .thread = 0, .waits_for = -1,
                .kind = Traced::call, .collective = record.collective,
                .algorithm = record.algorithm, .dtype = record.dtype, .op = record.op,
                .failed = 0, .way = 0, .unused = 0},
               call.asked_ns);
    return bytes;
}

// As a trace numbers ways.
std::uint8_t Group::way_number(const Ways& ways, const Way& way) {
    if (way.program == ways.in_arena) return 5;
    const bool reads = way.program->reaches_in;
    return std::uint8_t(1 + (reads ? 2 : 0) + (way.past ? 1 : 0));
}

}  // namespace roundelay
