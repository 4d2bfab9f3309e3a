// The GIL's way from a recording thread to the launcher.
//
// CPython wakes a thread that waits for the GIL each time that its holder lets go of it, which a recording thread does
// for the microsecond of every op: mostly in vain, and dearly.  So the launcher says that it wants the GIL and sleeps;
// the recording thread sees that in its next op, where it has no GIL, and goes on once the launcher has taken it.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>

namespace torchtpu {

// For the launcher: returns when a recording thread stands aside, when somebody waits for what the launcher does, or
// after a millisecond.  `took_gil` says that it has the GIL now.
void await_gil();
void took_gil();
// Somebody waits for the launcher, and records nothing meanwhile.
void hurry_gil();

extern std::atomic<bool> gil_is_wanted;
void stand_aside();
// For a recording thread, in an op, holding no lock.
inline void offer_gil() {
  if (C10_UNLIKELY(gil_is_wanted.load(std::memory_order_relaxed))) stand_aside();
}

}  // namespace torchtpu
