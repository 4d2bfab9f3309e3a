#include "launch/handover.h"

#include <Python.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace torchtpu {

namespace {

// Lives until the process ends, as threads may be inside then.
struct Handover {
  std::mutex mutex;               // guards is_given and changes of gil_is_wanted
  std::condition_variable given;  // for the launcher
  std::condition_variable taken;  // for recording threads
  bool is_given = false;
};
Handover* handover = new Handover();

// Without an op for so long there is nobody to disturb.
constexpr auto kPatience = std::chrono::milliseconds(1);

}  // namespace

std::atomic<bool> gil_is_wanted{false};

void await_gil() {
  std::unique_lock<std::mutex> lock(handover->mutex);
  gil_is_wanted = true;
  handover->given.wait_for(lock, kPatience, [] { return handover->is_given; });
}

void took_gil() {
  {
    std::lock_guard<std::mutex> lock(handover->mutex);
    gil_is_wanted = handover->is_given = false;
  }
  handover->taken.notify_all();
}

void hurry_gil() {
  {
    std::lock_guard<std::mutex> lock(handover->mutex);
    handover->is_given = true;
  }
  handover->given.notify_one();
}

void stand_aside() {
  if (PyGILState_Check()) return;
  std::unique_lock<std::mutex> lock(handover->mutex);
  if (!gil_is_wanted) return;
  handover->is_given = true;
  handover->given.notify_one();
  handover->taken.wait_for(lock, kPatience, [] { return !gil_is_wanted; });
}

}  // namespace torchtpu
