// The locks of the runtime: what each guards, and the order in which they are taken.
//
//   queue->order            launches happen one after the other; never waited for with the GIL held
//   the GIL                 Python, and what a launch writes before it announces its outputs; see gil.h
//   mutexes                 queue->mutex: the launch queue; families_mutex: who has which recorder; handover->mutex:
//   whose
//                           turn the GIL is; Markers::mutex: events.  None is taken under another one.
//   state_lock              recorders, tries, the values, bases and addresses of storages, Buffer's fields that say so,
//                           counters, and what was cut and has not reached the launch queue
//   leaves: decref_lock     Python objects to release
//           bases_lock      interned bases
//           random_lock     the state of every generator
//
// A thread takes a lock only where all that it holds stand above it.  So nothing that takes the GIL or a mutex runs
// under a spin lock, nor anything that waits, calls into torch's dispatcher or may destroy a host tensor, whose Python
// object takes the GIL: a buffer that dies under state_lock is destroyed after it.  Builds with TORCHTPU_CHECKS_LOCKS,
// which those for the sanitizers are, end the process where that is not so.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <mutex>

namespace torchtpu {

#ifdef TORCHTPU_CHECKS_LOCKS
constexpr bool kChecksLocks = true;
#else
constexpr bool kChecksLocks = false;
#endif

// Held for well under a microsecond by all but a cut.
class SpinLock {
 public:
  void lock() noexcept {
    if constexpr (kChecksLocks) check_free();
    if (C10_UNLIKELY(flag_.test_and_set(std::memory_order_acquire))) spin();
    if constexpr (kChecksLocks) note_held();
  }
  void unlock() noexcept {
    if constexpr (kChecksLocks) note_free();
    flag_.clear(std::memory_order_release);
  }
  // For functions that are called under the lock.
  void assert_held() const noexcept {
    if constexpr (kChecksLocks) check_held();
  }
  // For functions that take the lock, or that must not run under it.
  void assert_free() const noexcept {
    if constexpr (kChecksLocks) check_free();
  }

 private:
  void spin() noexcept;
  void note_held() noexcept;
  void note_free() noexcept;
  void check_held() const noexcept;
  void check_free() const noexcept;

  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
  std::atomic<const void*> owner_{nullptr};  // names the thread; in builds that check
};
using SpinGuard = std::lock_guard<SpinLock>;

// The calling thread holds no spin lock: it may wait.
void check_no_spin_lock() noexcept;
inline void assert_no_spin_lock() noexcept {
  if constexpr (kChecksLocks) check_no_spin_lock();
}

extern SpinLock state_lock, decref_lock, bases_lock, random_lock;

extern bool has_dead_buffers;  // see bury; under state_lock
void unlock_and_destroy();     // state_lock, and then the dead buffers

// Holds state_lock, and destroys what died under it once it is free.
class StateGuard {
 public:
  explicit StateGuard(SpinLock& lock) : lock_(lock) { lock_.lock(); }
  StateGuard(const StateGuard&) = delete;
  ~StateGuard() {
    if (C10_UNLIKELY(has_dead_buffers)) {
      unlock_and_destroy();
    } else {
      lock_.unlock();
    }
  }

 private:
  SpinLock& lock_;  // state_lock
};

// Takes every spin lock, so that no other thread holds one while the process forks.
void lock_all_spin_locks() noexcept;
void unlock_all_spin_locks() noexcept;

}  // namespace torchtpu
