// Spin locks, and the checks that they are taken as they should be.

#include "device/locks.h"

#include <sched.h>

#include <cstdio>
#include <cstdlib>

namespace torchtpu {

SpinLock state_lock, decref_lock, bases_lock, random_lock;

namespace {

thread_local int num_held = 0;  // spin locks of this thread, in builds that check
const void* this_thread() { return &num_held; }

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "torchtpu: %s\n", what);
  std::abort();
}

}  // namespace

void SpinLock::spin() noexcept {
  for (int spins = 0; flag_.test_and_set(std::memory_order_acquire);) {
    while (flag_.test(std::memory_order_relaxed)) {
      if (++spins % 256 == 0) sched_yield();
    }
  }
}

void SpinLock::note_held() noexcept {
  owner_.store(this_thread(), std::memory_order_relaxed);
  num_held++;
}

void SpinLock::note_free() noexcept {
  check_held();
  owner_.store(nullptr, std::memory_order_relaxed);
  num_held--;
}

void SpinLock::check_held() const noexcept {
  if (owner_.load(std::memory_order_relaxed) != this_thread()) fail("a spin lock is not held that has to be");
}

void SpinLock::check_free() const noexcept {
  if (owner_.load(std::memory_order_relaxed) == this_thread()) fail("a spin lock is held that must not be");
}

void check_no_spin_lock() noexcept {
  if (num_held > 0) fail("a thread that holds a spin lock takes the GIL or a mutex");
}

void lock_all_spin_locks() noexcept {
  for (SpinLock* lock : {&state_lock, &decref_lock, &bases_lock, &random_lock}) lock->lock();
}

void unlock_all_spin_locks() noexcept {
  for (SpinLock* lock : {&random_lock, &bases_lock, &decref_lock, &state_lock}) lock->unlock();
}

}  // namespace torchtpu
