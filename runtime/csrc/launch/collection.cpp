#include "launch/collection.h"

#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "device/gil.h"

namespace torchtpu {

namespace py = pybind11;

namespace {

std::atomic<int> num_deferring{0};  // written under the GIL
bool is_stopped = false;            // by us; the GIL guards this and what follows
long deferred_threshold = 0;        // of the youngest generation

// Nothing in its scope lets go of the GIL, so that nobody sees that the collector is disabled.
class CollectorDisabled {
 public:
  CollectorDisabled() : was_enabled_(PyGC_Disable() == 1) {}
  ~CollectorDisabled() {
    if (was_enabled_) PyGC_Enable();
  }

 private:
  py::error_scope pending_;
  bool was_enabled_;
};

// A threshold of 0 stops the collector, and leaves to the user what `gc.isenabled()` says.
struct Threshold {
  py::object get_all = py::module_::import("gc").attr("get_threshold");
  py::object set_youngest = py::module_::import("gc").attr("set_threshold");

  long get() const { return get_all().cast<py::tuple>()[0].cast<long>(); }
  void set(long value) const { set_youngest(value); }
};

const Threshold* known_threshold = nullptr;

const Threshold& threshold() { return *known_threshold; }

void stop() {
  if (is_stopped) return;
  CollectorDisabled disabled;
  long now = threshold().get();
  if (now == 0) return;  // by the user
  threshold().set(0);
  deferred_threshold = now;
  is_stopped = true;
}

void go_on() {
  if (!is_stopped) return;
  CollectorDisabled disabled;
  is_stopped = false;
  if (threshold().get() == 0) threshold().set(deferred_threshold);  // else it was set meanwhile
}

void begin_deferring() {
  if (num_deferring++ == 0) stop();
}

void end_deferring() {
  if (num_deferring > 0 && --num_deferring == 0) go_on();
}

}  // namespace

void begin_collection() { known_threshold = new Threshold(); }

CollectionDeferred::CollectionDeferred() noexcept { begin_deferring(); }

CollectionDeferred::~CollectionDeferred() { end_deferring(); }

void Bell::ring() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count_++;
  }
  rung_.notify_all();
}

void Bell::wait(uint64_t seen) {
  end_deferring();
  {
    ReleaseGil release;
    std::unique_lock<std::mutex> lock(mutex_);
    rung_.wait(lock, [&] { return count_ != seen; });
  }
  begin_deferring();
}

void collect_deferred() {
  if (num_deferring.load(std::memory_order_relaxed) == 0 || !Py_IsInitialized()) return;
  AcquireGil gil;
  if (num_deferring == 0) return;
  py::error_scope pending;
  go_on();
  Py_XDECREF(PySet_New(nullptr));  // an allocation begins a collection that is due
  if (num_deferring > 0) stop();
}

void forget_deferred_collections() {
  if (num_deferring.exchange(0) > 0) go_on();
}

}  // namespace torchtpu
