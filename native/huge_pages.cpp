#include "huge_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <string_view>

namespace roundelay {

namespace {

constexpr std::uintptr_t huge_bytes = 2 << 20;
constexpr std::uint64_t often = 16;      // from here on it was measured to pay
constexpr int collapse = 25;             // MADV_COLLAPSE, of Linux 6.1; older ones refuse it

// The kernel would make huge pages on request also where whoever runs the machine wants none.
bool wanted() {
    const int fd = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    char text[64];
    const ssize_t got = read(fd, text, sizeof text);
    close(fd);
    return got > 0 && std::string_view(text, std::size_t(got)).find("[never]") == std::string_view::npos;
}

}  // namespace

void HugePages::note_read(const std::byte* at, std::size_t bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(at);
    const std::uintptr_t begin = (first + huge_bytes - 1) / huge_bytes * huge_bytes;
    const std::uintptr_t end = (first + bytes) / huge_bytes * huge_bytes;
    if (begin >= end) return;
    Seen& seen = seen_[begin / huge_bytes % seen_.size()];
    if (seen.begin != begin || seen.end != end) seen = {begin, end, 0};
    if (++seen.times < often || !std::has_single_bit(seen.times)) return;
    static const bool allowed = wanted();
    // Where there is no such memory now, the pages stay as they are.
    if (allowed) madvise(reinterpret_cast<void*>(begin), end - begin, collapse);
}

}  // namespace roundelay
