#include "program.hpp"

#include <algorithm>
#include <stdexcept>

namespace roundelay {

namespace {

// From so many on, asking for what all of them show at once was measured to pay.
constexpr std::ptrdiff_t many_waits = 3;

std::size_t length(std::size_t count, std::size_t parts, std::size_t part) {
    return cut(count, parts, part + 1) - cut(count, parts, part);
}

// Words taken from the front, and never more than there are.
class Reader {
   public:
    explicit Reader(std::span<const std::uint32_t> words) : words_(words) {}
    std::uint32_t next() {
        if (words_.empty()) fail();
        const std::uint32_t word = words_.front();
        words_ = words_.subspan(1);
        return word;
    }
    // How many of something come next that takes so many words each.
    std::size_t many(std::size_t each) {
        const std::size_t count = next();
        if (count > words_.size() / each) fail();
        return count;
    }
    bool flag() { return next() != 0; }
    bool empty() const { return words_.empty(); }
    [[noreturn]] static void fail() { throw std::runtime_error("these bytes are no program"); }

   private:
    std::span<const std::uint32_t> words_;
};

std::vector<std::vector<Run>> read_blocks(Reader& reader, int size) {
    std::vector<std::vector<Run>> found(std::size_t(size), std::vector<Run>{});
    for (auto& runs : found) {
        runs.resize(reader.many(3));
        for (Run& run : runs) {
            run.first = reader.next();
            run.step = reader.next();
            run.count = reader.next();
        }
    }
    return found;
}

}  // namespace

std::unique_ptr<Program> Program::decode(std::span<const std::uint32_t> words) {
    Reader reader(words);
    auto program = std::make_unique<Program>();
    program->rank = int(reader.next());
    program->hears_all = reader.flag();
    program->posts = reader.next();
    program->slots = reader.next();
    program->blocks = reader.next();
    program->parts = std::max<std::uint32_t>(reader.next(), 1);
    program->reaches_in = reader.flag();
    program->reaches_out = reader.flag();
    program->in_place = reader.flag();
    program->name = reader.next();
    program->in_here = reader.next();
    program->out_here = reader.next();
    program->most = reader.next();
    program->posts_last.resize(reader.many(2));
    program->size = int(program->posts_last.size());
    program->leads.resize(program->posts_last.size());
    for (std::size_t other = 0; other < program->posts_last.size(); ++other) {
        program->posts_last[other] = reader.flag();
        program->leads[other] = reader.next();
    }
    program->instructions.resize(reader.many(9));
    for (Instruction& instruction : program->instructions) {
        instruction.kind = Kind(reader.next());
        instruction.complete = reader.flag();
        instruction.dsts = std::uint16_t(reader.next());
        instruction.srcs = std::uint16_t(reader.next());
        program->folds = program->folds || instruction.srcs > 1;
        instruction.rank = std::uint16_t(reader.next());
        instruction.post = reader.next();
        instruction.first = reader.next();
        instruction.block = reader.next();
        instruction.part = reader.next();
    }
    program->head = std::size_t(std::ranges::find(program->instructions, Kind::wait, &Instruction::kind) -
                                program->instructions.begin());
    const auto end_of_head =
        std::ranges::find(program->instructions, Kind::post, &Instruction::kind);
    program->collects =
        std::count_if(program->instructions.begin(), end_of_head,
                      [](const Instruction& one) { return one.kind == Kind::wait; }) >= many_waits;
    program->operands.resize(reader.many(6));
    for (Operand& operand : program->operands) {
        operand.space = Space(reader.next());
        operand.rank = std::uint16_t(reader.next());
        operand.at = reader.next();
        operand.position = reader.next();
        operand.block = reader.next();
        operand.part = reader.next();
    }
    program->in_blocks = read_blocks(reader, program->size);
    program->out_blocks = read_blocks(reader, program->size);
    if (!reader.empty()) Reader::fail();
    return program;
}

const Geometry& Program::even(std::size_t count) {
    for (const Kept& kept : kept_)
        if (kept.count == count) return kept.geometry;
    if (kept_.size() >= 64) kept_.clear();
    Geometry made = lay_out([&](std::uint32_t) { return count; },
                            [&](const Operand& operand) { return operand.position * count; });
    made.longest = length(count, parts, 0);
    kept_.push_back({count, std::move(made)});
    return kept_.back().geometry;
}

Geometry Program::uneven(std::span<const std::size_t> counts) const {
    // Where each block begins in the buffers.
    const auto starts = [&](const std::vector<std::vector<Run>>& buffers) {
        std::vector<std::vector<std::size_t>> found;
        for (const auto& runs : buffers) {
            std::vector<std::size_t> at{0};
            for (const Run& run : runs)
                for (std::size_t n = 0; n < run.count; ++n)
                    at.push_back(at.back() + counts[run.first + n * run.step]);
            found.push_back(std::move(at));
        }
        return found;
    };
    const auto in = starts(in_blocks), out = starts(out_blocks);
    Geometry made = lay_out([&](std::uint32_t block) { return counts[block]; },
                            [&](const Operand& operand) {
                                const auto& at = operand.space == Space::in ? in : out;
                                return at[operand.rank][operand.position];
                            });
    // All ranks must agree on the number of slices, so the longest chunk of any counts.
    for (std::size_t count : counts) made.longest = std::max(made.longest, length(count, parts, 0));
    return made;
}

template <class Count, class Start>
Geometry Program::lay_out(Count count_of, Start start_of) const {
    Geometry made;
    for (const Operand& operand : operands) {
        if (operand.space == Space::slot)
            made.operands.push_back(0);
        else
            made.operands.push_back(start_of(operand) +
                                    cut(count_of(operand.block), parts, operand.part));
    }
    for (const Instruction& instruction : instructions)
        made.lengths.push_back(
            instruction.kind == Kind::apply ? length(count_of(instruction.block), parts, instruction.part) : 0);
    look_ahead(made);
    return made;
}

// The instructions that read this rank's input, and those that fold others' slots, pair up in order: the
// first is needed first in the next slice, and the second is what waits for other cores.
void Program::look_ahead(Geometry& made) const {
    made.ahead.resize(instructions.size());
    std::size_t remote = 0;
    for (std::size_t local = 0; local < instructions.size(); ++local) {
        if (instructions[local].kind != Kind::apply) continue;
        const auto source = [&](const Instruction& instruction, auto wanted) {
            const std::size_t begin = instruction.first + instruction.dsts, end = begin + instruction.srcs;
            std::size_t at = begin;
            while (at < end && !wanted(operands[at])) ++at;
            return at < end ? at : Geometry::Ahead::none;
        };
        const std::size_t operand = source(instructions[local], [&](const Operand& one) {
            return one.space == Space::in && one.rank == rank;
        });
        if (operand == Geometry::Ahead::none) continue;
        const auto reads_others = [&](const Operand& one) {
            return one.space == Space::slot && one.rank != rank;
        };
        while (remote < instructions.size() &&
               (instructions[remote].kind != Kind::apply || instructions[remote].srcs == 1 ||
                source(instructions[remote], reads_others) == Geometry::Ahead::none))
            ++remote;
        if (remote == instructions.size()) return;
        made.ahead[remote++] = {operand, made.lengths[local]};
    }
}

}  // namespace roundelay
