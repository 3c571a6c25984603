#include "plan.hpp"

#include <algorithm>

namespace roundelay {

namespace {

std::size_t length(std::size_t count, std::size_t parts, std::size_t part) {
    return cut(count, parts, part + 1) - cut(count, parts, part);
}

}  // namespace

const Geometry& Plan::even(std::size_t count) {
    for (const Kept& kept : kept_)
        if (kept.count == count) return kept.geometry;
    if (kept_.size() >= 64) kept_.clear();
    const std::vector<std::size_t> counts(blocks, count);
    kept_.push_back({count, uneven(counts)});
    return kept_.back().geometry;
}

Geometry Plan::uneven(std::span<const std::size_t> counts) const {
    Geometry made;
    // Where each block begins in each rank's buffers.
    const auto starts = [&](const std::vector<std::vector<std::uint32_t>>& buffers) {
        std::vector<std::vector<std::size_t>> found;
        for (const auto& blocks_of : buffers) {
            std::vector<std::size_t> at{0};
            for (std::uint32_t block : blocks_of) at.push_back(at.back() + counts[block]);
            found.push_back(std::move(at));
        }
        return found;
    };
    const auto in = starts(in_blocks), out = starts(out_blocks);
    for (const Operand& operand : operands) {
        if (operand.space == Space::slot) {
            made.operands.push_back(0);
            continue;
        }
        const auto& at = operand.space == Space::in ? in : out;
        made.operands.push_back(at[operand.rank][operand.position] +
                                cut(counts[operand.block], parts, operand.part));
    }
    for (const Line& line : lines)
        made.lengths.push_back(line.kind == Kind::apply
                                   ? length(counts[line.block], parts, line.part)
                                   : 0);
    // All ranks must agree on the number of slices, so the longest chunk of any counts.
    for (std::size_t count : counts) made.longest = std::max(made.longest, length(count, parts, 0));
    look_ahead(made);
    return made;
}

// The lines that read this rank's input, and those that fold others' slots, pair up in order: the
// first is needed first in the next slice, and the second is what waits for other cores.
void Plan::look_ahead(Geometry& made) const {
    made.ahead.resize(lines.size());
    std::size_t remote = 0;
    for (std::size_t local = 0; local < lines.size(); ++local) {
        if (lines[local].kind != Kind::apply) continue;
        const auto source = [&](const Line& line, auto wanted) {
            const std::size_t begin = line.first + line.dsts, end = begin + line.srcs;
            std::size_t at = begin;
            while (at < end && !wanted(operands[at])) ++at;
            return at < end ? at : Geometry::Ahead::none;
        };
        const std::size_t operand = source(lines[local], [&](const Operand& one) {
            return one.space == Space::in && one.rank == rank;
        });
        if (operand == Geometry::Ahead::none) continue;
        const auto reads_others = [&](const Operand& one) {
            return one.space == Space::slot && one.rank != rank;
        };
        while (remote < lines.size() &&
               (lines[remote].kind != Kind::apply || lines[remote].srcs == 1 ||
                source(lines[remote], reads_others) == Geometry::Ahead::none))
            ++remote;
        if (remote == lines.size()) return;
        made.ahead[remote++] = {operand, made.lengths[local]};
    }
}

}  // namespace roundelay
