// Ranks as forked children, all of them in one call and with as little Python as can be.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>
#include <vector>

#include "lock_py.hpp"
#include "world.hpp"

namespace roundelay {

namespace {

[[noreturn]] void throw_errno(int number, const char* what) {
    throw std::system_error(number, std::generic_category(), what);
}

// Descriptors that are closed unless they were handed on.
class Ends {
   public:
    ~Ends() {
        for (int fd : fds_)
            if (fd >= 0) ::close(fd);
    }
    void add(int fd) { fds_.push_back(fd); }
    int take(int at) { return std::exchange(fds_[std::size_t(at)], -1); }
    std::vector<int> take_all() { return std::exchange(fds_, {}); }

   private:
    std::vector<int> fds_;
};

void end_with_parent(int parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent) _exit(128 + SIGKILL);  // it went before we could ask
}

// What a child inherits and should not heed, and what it should not look through for garbage: so far
// as it is not written to, it stays shared.
class Inherited {
   public:
    explicit Inherited(nb::handle heedless)
        : signals_(nb::module_::import_("_signal")),
          handle_(signals_.attr("signal")),
          wake_(signals_.attr("set_wakeup_fd")),
          usual_(signals_.attr("SIG_DFL")),
          freeze_(nb::module_::import_("gc").attr("freeze")),
          heedless_(heedless),
          collects_(PyGC_Disable() != 0) {}
    ~Inherited() {
        if (collects_) PyGC_Enable();
    }
    Inherited(const Inherited&) = delete;
    Inherited& operator=(const Inherited&) = delete;

    void leave() const {
        try {
            freeze_();
            wake_(-1);
            handle_(SIGINT, heedless_);
            handle_(SIGTERM, usual_);
        } catch (nb::python_error& error) {
            error.restore();
            PyErr_Print();
            _exit(1);  // nothing may be raised in the midst of the parent's program
        }
    }

   private:
    nb::object signals_, handle_, wake_, usual_, freeze_;
    nb::handle heedless_;
    bool collects_;
};

// End and reap children; none is left behind.
void end_all(const std::vector<int>& pids) {
    for (int pid : pids) kill(pid, SIGKILL);
    for (int pid : pids)
        while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
        }
}

// What a fork has brought: in the parent its children, in a child its place among them.
struct Forked {
    int rank = -1;  // none in the parent
    std::vector<int> pids, channels;  // of the parent: to each child
    std::vector<int> ends;  // what tells the end of each; a child's own is -1
    int channel = -1, own = -1;  // of a child: to its parent, and what tells its own end

    // In a child: be a rank of the world, and wait until all are. None if the parent has gone.
    std::shared_ptr<World> join(World& inherited) {
        auto world = World::attach(inherited.fd(), inherited.token());
        world->enter(rank);
        // Each rank alone holds the writing end of its pipe: the end of that is its death.
        world->watch(std::move(ends), own);
        const Unlocked unlocked;
        std::uint64_t word = 0;  // the length of an empty message: I am here, and so are all
        if (send(channel, &word, sizeof word, MSG_NOSIGNAL) < 0) return nullptr;
        ssize_t done = 0;
        while ((done = recv(channel, &word, sizeof word, MSG_WAITALL)) < 0 && errno == EINTR) {
        }
        return done == sizeof word ? world : nullptr;
    }
};

// A child shares its parent's memory, page by page, until one of the two writes there; and to Python,
// looking at an object is writing. So between two forks, and before a child is a rank, little happens.
//
// All or none, and with the interpreter lock: nobody else forks while these descriptors are open, of
// which a copy would hide the end of a rank. `heedless` is what a child does at Ctrl-C, which reaches
// the whole terminal: the parent decides, and its children hear it from there.
Forked fork_ranks(int size, bool tied, nb::handle heedless) {
    if (PySys_Audit("os.fork", nullptr) < 0) throw nb::python_error();
    Ends readers, writers, parents, children, ends;
    for (int rank = 0; rank < size; ++rank) {
        int pair[2];
        if (pipe2(pair, O_CLOEXEC) != 0) throw_errno(errno, "pipe");
        readers.add(pair[0]);
        writers.add(pair[1]);
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
            throw_errno(errno, "socketpair");
        parents.add(pair[0]);
        children.add(pair[1]);
    }
    std::vector<int> pids;
    pids.reserve(std::size_t(size));
    const int parent = getpid();
    const Inherited inherited(heedless);
    int error = 0;
    PyOS_BeforeFork();
    for (int rank = 0; rank < size && error == 0; ++rank) {
        const int pid = fork();
        if (pid < 0) {
            error = errno;
        } else if (pid > 0) {
            pids.push_back(pid);
        } else {
            signal(SIGINT, SIG_IGN);  // until it has left what it inherited
            if (tied) end_with_parent(parent);
            PyOS_AfterFork_Child();
            inherited.leave();
            ::close(readers.take(rank));
            return {rank, {}, {}, readers.take_all(), children.take(rank), writers.take(rank)};
        }
    }
    PyOS_AfterFork_Parent();
    for (std::size_t rank = 0; rank < pids.size() && error == 0; ++rank) {
        const int end = int(syscall(SYS_pidfd_open, pids[rank], 0));
        if (end < 0) error = errno;
        ends.add(end);
    }
    const bool interrupted = error == 0 && PyErr_CheckSignals() < 0;
    if (error == 0 && !interrupted)
        return {-1, std::move(pids), parents.take_all(), ends.take_all()};
    end_all(pids);
    if (interrupted) throw nb::python_error();
    throw_errno(error, "fork");
}

}  // namespace

void register_fork(nb::module_& module) {
    module.def("end_with_parent", &end_with_parent, nb::arg("parent"));
    module.def("fork_ranks", &fork_ranks, nb::arg("size"), nb::arg("tied"), nb::arg("heedless"));
    nb::class_<Forked>(module, "Forked")
        .def_ro("rank", &Forked::rank)
        .def_ro("pids", &Forked::pids)
        .def_ro("channels", &Forked::channels)
        .def_ro("ends", &Forked::ends)
        .def_ro("channel", &Forked::channel)
        .def("join", &Forked::join);
}

}  // namespace roundelay
