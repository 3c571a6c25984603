// Calls of one communicator in the order they were made, in the background or at once.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "wait.hpp"

namespace roundelay {

class Progress {
   public:
    struct Task {
        std::function<void()> work;
        std::exception_ptr error;
        bool done = false;
        std::int64_t began_ns = 0, ended_ns = 0;  // by the monotonic clock
    };

    ~Progress() {
        {
            const std::lock_guard guard(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

    // In the background, after everything submitted before.
    std::shared_ptr<Task> submit(std::function<void()> work) {
        auto task = std::make_shared<Task>();
        task->work = std::move(work);
        {
            const std::lock_guard guard(mutex_);
            queue_.push_back(task);
            if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
        }
        changed_.notify_all();
        return task;
    }

    bool done(const Task& task) {
        const std::lock_guard guard(mutex_);
        return task.done;
    }

    // Until the task is done or `limit` has passed; tells whether it is.
    template <class Duration>
    bool wait(const Task& task, Duration limit) {
        std::unique_lock guard(mutex_);
        ++wanted_;
        const bool done = changed_.wait_for(guard, limit, [&] { return task.done; });
        --wanted_;
        return done;
    }

    // How many threads stand still until something here is done.
    const std::atomic<int>& wanted() const { return wanted_; }

    // On this thread, after everything submitted before. While that takes waiting, `goes_on` is
    // asked from time to time; false gives up, and tells so.
    template <class Work, class GoesOn>
    bool run_now(Work work, GoesOn goes_on) {
        const auto free = [&] { return !busy_ && queue_.empty(); };
        {
            std::unique_lock guard(mutex_);
            while (!free()) {
                guard.unlock();
                if (!goes_on()) return false;
                guard.lock();
                ++waiting_;
                ++wanted_;
                changed_.wait_for(guard, std::chrono::milliseconds(50), free);
                --wanted_;
                --waiting_;
            }
            busy_ = true;
        }
        struct Done {
            Progress& self;
            ~Done() { self.finish(); }
        } const done{*this};
        work();
        return true;
    }

   private:
    void finish() {
        bool others = false;
        {
            const std::lock_guard guard(mutex_);
            busy_ = false;
            others = waiting_ > 0 || !queue_.empty();  // waking who has no turn costs its core
        }
        if (others) changed_.notify_all();
    }

    void run() {
        pthread_setname_np(pthread_self(), "roundelay-calls");
        while (true) {
            std::shared_ptr<Task> task;
            {
                std::unique_lock guard(mutex_);
                changed_.wait(guard, [&] { return stop_ || (!queue_.empty() && !busy_); });
                if (queue_.empty() && stop_) return;
                task = queue_.front();
                busy_ = true;
            }
            task->began_ns = now_ns();
            try {
                task->work();
            } catch (...) {
                task->error = std::current_exception();
            }
            task->ended_ns = now_ns();
            {
                const std::lock_guard guard(mutex_);
                queue_.pop_front();
                task->done = true;
                busy_ = false;
            }
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Task>> queue_;
    bool busy_ = false, stop_ = false;
    int waiting_ = 0;  // calls of other threads for their turn
    std::atomic<int> wanted_ = 0;
    std::thread thread_;
};

}  // namespace roundelay
