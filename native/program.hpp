// A rank's compiled program as the interpreter walks it, and where its chunks lie for given counts.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace roundelay {

// Where part `part` of `parts` begins in `count` elements: `split` in schedule/layout.py makes the
// same cuts, and a test compares the two.
inline std::size_t cut(std::size_t count, std::size_t parts, std::size_t part) {
    return part * (count / parts) + std::min(part, count % parts);
}

enum class Space : std::uint8_t { in, out, slot };
inline constexpr std::array<std::string_view, 3> space_names = {"in", "out", "slot"};
enum class Kind : std::uint8_t { wait, apply, post };
inline constexpr std::array<std::string_view, 3> kind_names = {"wait", "apply", "post"};

struct Operand {
    Space space;
    std::uint16_t rank;
    std::uint32_t at;        // number of a slot
    std::uint32_t position;  // of the block in that rank's buffer
    std::uint32_t block;
    std::uint32_t part;
};

struct Instruction {
    Kind kind;
    bool complete;           // apply: the fold that brings in the last contribution
    std::uint16_t dsts;      // apply: how many destinations, then how many sources
    std::uint16_t srcs;
    std::uint16_t rank;      // wait
    std::uint32_t post;      // wait, post
    std::uint32_t first;     // apply: its first operand
    std::uint32_t block;     // apply: whose length it moves
    std::uint32_t part;
};

// Where everything lies for one set of counts, in elements.
struct Geometry {
    std::vector<std::size_t> operands;  // offset of each in its buffer
    std::vector<std::size_t> lengths;   // of each instruction that applies
    std::size_t longest = 0;            // chunk of any rank
    // For each instruction that folds others' slots: the operand of this rank's input whose next slice it
    // fetches ahead, and how many elements that has; or none.
    struct Ahead {
        static constexpr std::size_t none = ~std::size_t{0};
        std::size_t operand = none, length = 0;
    };
    std::vector<Ahead> ahead;
};

// Blocks in the order of a buffer: so many from the first, each so far from the one before.
struct Run {
    std::uint32_t first, step, count;
};

class Program {
   public:
    // From the words of engines/_native/encode.py; throws std::runtime_error where they are no program.
    static std::unique_ptr<Program> decode(std::span<const std::uint32_t> words);

    int rank = 0;
    int size = 1;
    std::uint8_t algorithm = 0xff;  // its number, if it has one
    std::uint32_t posts = 0;
    std::uint32_t slots = 0;   // of the rank that has most
    std::uint32_t blocks = 1;
    std::uint32_t parts = 1;
    bool reaches_in = false;   // reads other ranks' inputs where they lie
    bool reaches_out = false;  // reads and writes other ranks' outputs
    bool in_place = false;     // every rank's input and output are one buffer
    bool hears_all = false;    // this rank ends it after all have begun it; each was compared on the way
    bool collects = false;     // this rank waits for many before it posts anything
    bool folds = false;        // this rank does: several sources into one
    std::vector<bool> posts_last;  // by rank: its program ends with a post, after all its reads
    std::vector<std::uint32_t> leads;  // by rank: its posts before its first wait
    std::size_t head = 0;              // this rank's instructions before its first wait
    std::uint32_t name = 0;    // hash of collective, algorithm and root
    std::uint32_t in_here = 0, out_here = 0, most = 0;  // blocks of this rank's, and of any buffer
    std::vector<Instruction> instructions;
    std::vector<Operand> operands;
    // The blocks of each rank in whose buffers operands lie; needed for offsets with uneven counts.
    std::vector<std::vector<Run>> in_blocks, out_blocks;

    // The geometry for `count` elements in every block, kept for the next call.
    const Geometry& even(std::size_t count);
    Geometry uneven(std::span<const std::size_t> counts) const;

   private:
    template <class Count, class Start>
    Geometry lay_out(Count count_of, Start start_of) const;
    void look_ahead(Geometry& made) const;

    struct Kept {
        std::size_t count;
        Geometry geometry;
    };
    std::vector<Kept> kept_;
};

}  // namespace roundelay
