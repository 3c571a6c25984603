#include "peer_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

#include "world.hpp"

namespace roundelay {

namespace {

// A page that is empty in a forked child: what a child inherits proves nothing of its parent.
Proof* make_page() {
    void* page = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return new Proof{};
    madvise(page, page_bytes, MADV_WIPEONFORK);
    return new (page) Proof{};
}

Proof& page() {
    static Proof& made = *make_page();
    return made;
}

// 0 where there is no Yama.
int ptrace_scope() {
    const int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char digit = '0';
    const bool known = read(fd, &digit, 1) == 1;
    close(fd);
    return known ? digit - '0' : 0;
}

}  // namespace

Proof kept_proof() { return page(); }

const Proof& own_proof() {
    static std::mutex& mutex = *new std::mutex;
    const std::lock_guard guard(mutex);
    Proof& proof = page();
    if (proof.words == Proof{}.words &&
        getrandom(proof.words.data(), sizeof proof.words, 0) != ssize_t(sizeof proof.words))
        proof.words = {};  // it proves nothing then, and nobody is read
    return proof;
}

void let_ranks_read() {
    const pid_t parent = getppid();
    if (ptrace_scope() == 1 && parent > 1) prctl(PR_SET_PTRACER, parent, 0, 0, 0);
}

const char* why_no_peer_memory() {
    const char* given = std::getenv("ROUNDELAY_PEER_MEMORY");
    if (given != nullptr && std::string_view(given) == "0") return "ROUNDELAY_PEER_MEMORY=0";
    return nullptr;
}

bool read_peer(const RankInfo& rank, void* to, std::uint64_t from, std::size_t bytes, bool proved) {
    Proof seen{};
    // The kernel looks the process up once: what comes with the proof is of the same one.
    const iovec here[2] = {{to, bytes}, {&seen, sizeof seen}};
    const iovec there[2] = {{reinterpret_cast<void*>(from), bytes},
                            {reinterpret_cast<void*>(rank.proof_at.load()), sizeof seen}};
    const unsigned long parts = proved ? 2 : 1;
    const ssize_t got = process_vm_readv(pid_t(rank.pid.load()), here, parts, there, parts, 0);
    if (got != ssize_t(bytes + (proved ? sizeof seen : 0))) return false;
    return !proved || (seen.words != Proof{}.words && seen.words[0] == rank.proof[0].load() &&
                       seen.words[1] == rank.proof[1].load());
}

}  // namespace roundelay
