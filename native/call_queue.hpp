// Calls of one communicator in the order they were made, in the background or at once.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "wait.hpp"

namespace roundelay {

// A queue of calls. Whoever has the turn runs; who comes later stands behind, be it a thread that
// waits or a task that nobody waits for. The thread that runs tasks holds on to the queue itself:
// forgotten by everybody, it ends with the last task.
class CallQueue : public std::enable_shared_from_this<CallQueue> {
   public:
    struct Task {
        std::function<void()> work;  // none: a thread that waits for its turn
        std::exception_ptr error;
        std::atomic<bool> done = false;
        std::int64_t began_ns = 0, ended_ns = 0;  // by the monotonic clock
    };
    static constexpr auto nap = std::chrono::milliseconds(50);

    // In the background, after everything that came before.
    void submit(const std::shared_ptr<Task>& task) {
        {
            const std::lock_guard guard(mutex_);
            if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
            push(task);
        }
        changed_.notify_all();
    }

    // Until the task is done or a nap has passed; tells whether it is.
    bool wait(const Task& task) {
        std::unique_lock guard(mutex_);
        const Wanted here(wanted_);
        return changed_.wait_for(guard, nap, [&] { return task.done.load(); });
    }

    // Take the turn on this thread, after everything that came before. While that takes waiting,
    // `goes_on` is asked from time to time; false gives up, and tells so.
    template <class GoesOn>
    bool enter(GoesOn goes_on) {
        std::uint32_t free = 0;
        if (state_.compare_exchange_strong(free, busy)) return true;
        const auto turn = std::make_shared<Task>();
        std::unique_lock guard(mutex_);
        push(turn);
        const Wanted here(wanted_);
        while (!ready() || queue_.front() != turn) {
            guard.unlock();
            const bool on = goes_on();  // may run Python, and throw
            guard.lock();
            if (!on) {
                std::erase(queue_, turn);
                if (queue_.empty()) state_.fetch_and(~queued);
                changed_.notify_all();  // who stood behind may be the first now
                return false;
            }
            changed_.wait_for(guard, nap, [&] { return ready() && queue_.front() == turn; });
        }
        take();
        return true;
    }

    // Give the turn to the next.
    void leave() {
        if ((state_.fetch_sub(busy) & queued) == 0) return;  // waking nobody costs no core
        { const std::lock_guard guard(mutex_); }
        changed_.notify_all();
    }

    // Nothing more will be submitted: the thread ends with what it has, which is waited for or not.
    void forget(bool waits) {
        std::thread thread;
        {
            const std::lock_guard guard(mutex_);
            forgotten_ = true;
            thread.swap(thread_);
        }
        changed_.notify_all();
        if (!thread.joinable()) return;
        if (waits)
            thread.join();
        else
            thread.detach();
    }

    // How many threads stand still until something here is done.
    const std::atomic<int>& wanted() const { return wanted_; }
    // Whether a task has failed so far.
    bool failed() const { return failed_; }

    // A task has waited so long for a rank; whoever waits for the task next may tell.
    void note_slow(int rank, std::int64_t ns) {
        slow_rank_ = rank;
        slow_ns_ = ns;
    }
    std::pair<int, std::int64_t> take_slow() {
        const std::int64_t ns = slow_ns_.load() == 0 ? 0 : slow_ns_.exchange(0);
        return {slow_rank_, ns};
    }

   private:
    static constexpr std::uint32_t busy = 1, queued = 2;

    struct Wanted {
        explicit Wanted(std::atomic<int>& count) : count_(count) { ++count_; }
        ~Wanted() { --count_; }
        std::atomic<int>& count_;
    };

    // Under the mutex. While anybody is queued, only those who hold it take the turn.
    void push(const std::shared_ptr<Task>& task) {
        queue_.push_back(task);
        state_.fetch_or(queued);
    }
    bool ready() const { return !queue_.empty() && (state_ & busy) == 0; }
    std::shared_ptr<Task> take() {
        auto first = queue_.front();
        queue_.pop_front();
        state_ = queue_.empty() ? busy : busy | queued;
        return first;
    }

    std::shared_ptr<Task> next() {
        std::unique_lock guard(mutex_);
        const auto mine = [&] { return ready() && queue_.front()->work != nullptr; };
        changed_.wait(guard, [&] { return mine() || (forgotten_ && queue_.empty()); });
        return mine() ? take() : nullptr;
    }

    void run() {
        pthread_setname_np(pthread_self(), "roundelay-calls");
        while (const auto task = next()) {
            task->began_ns = now_ns();
            try {
                task->work();
            } catch (...) {
                task->error = std::current_exception();
                failed_ = true;
            }
            task->ended_ns = now_ns();
            task->work = nullptr;  // and with it all that only the call kept
            slow_ns_ = 0;
            {
                const std::lock_guard guard(mutex_);
                task->done = true;
                state_.fetch_and(~busy);
            }
            changed_.notify_all();
        }
    }

    std::atomic<std::uint32_t> state_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::list<std::shared_ptr<Task>> queue_;
    bool forgotten_ = false;
    std::thread thread_;
    std::atomic<bool> failed_ = false;
    std::atomic<int> wanted_ = 0, slow_rank_ = -1;
    std::atomic<std::int64_t> slow_ns_ = 0;
};

}  // namespace roundelay
