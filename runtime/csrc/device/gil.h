// Taking the GIL, and letting go of it for a while: no spin lock may be held where the GIL is taken.
#pragma once

#include <pybind11/gil.h>

#include "device/locks.h"

namespace torchtpu {

struct WithoutSpinLock {
  WithoutSpinLock() { assert_no_spin_lock(); }
};
// Where Python ends a thread that asks for the GIL, as it may while it ends itself (launch/process_end.h), destructors
// that need the GIL would run without it.  What is `noexcept` stops that: the thread waits there for the end of the
// process.  So are taking the GIL, giving it back and calling Python (calls.h).
class AcquireGil : WithoutSpinLock {
 public:
  AcquireGil() noexcept {}

 private:
  pybind11::gil_scoped_acquire taken_;
};

// Takes the GIL back where it ends.
class ReleaseGil {
 public:
  ~ReleaseGil() { assert_no_spin_lock(); }

 private:
  pybind11::gil_scoped_release released_;
};

}  // namespace torchtpu
