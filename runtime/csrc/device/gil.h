// Taking the GIL, and letting go of it for a while: no spin lock may be held where the GIL is taken.
#pragma once

#include <pybind11/gil.h>

#include "device/locks.h"

namespace torchtpu {

struct WithoutSpinLock {
  WithoutSpinLock() { assert_no_spin_lock(); }
};
class AcquireGil : WithoutSpinLock, pybind11::gil_scoped_acquire {};

// Takes the GIL back where it ends.
class ReleaseGil {
 public:
  ~ReleaseGil() { assert_no_spin_lock(); }

 private:
  pybind11::gil_scoped_release released_;
};

}  // namespace torchtpu
