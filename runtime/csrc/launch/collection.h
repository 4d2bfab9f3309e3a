// Python's cyclic garbage collector waits while a thread is inside what finalizers may wait for.
//
// CPython collects in whichever thread allocates, and runs the user's finalizers there: one that reads a tensor, in the
// thread that plans regions, waited for a region that only this thread could plan.  So no collection begins while one
// of our threads runs Python; those that are due begin in the user's threads, before a region and in waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace torchtpu {

// Called once, before all else here.
void begin_collection();

// The GIL is held where it begins and where it ends.
class CollectionDeferred {
 public:
  CollectionDeferred() noexcept;
  CollectionDeferred(const CollectionDeferred&) = delete;
  CollectionDeferred& operator=(const CollectionDeferred&) = delete;
  ~CollectionDeferred();
};

// Wakes threads of ours that have nothing to do: collections go on while they wait.  All is called with the GIL held.
class Bell {
 public:
  uint64_t count() const { return count_; }
  void ring();
  // Returns once the bell has been rung after that was the count.  A CollectionDeferred lives in the calling thread.
  void wait(uint64_t seen);

 private:
  std::mutex mutex_;
  std::condition_variable rung_;
  uint64_t count_ = 0;
};

// Collects if that is due and was deferred.  Finalizers run here: the caller holds no lock.
void collect_deferred();

// Collections go on in a forked child, which has none of the threads.  The GIL is held.
void forget_deferred_collections();

}  // namespace torchtpu
