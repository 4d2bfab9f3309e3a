// Which recorder a thread records into: its family's own, one per device.

#include <Python.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "launch/queue.h"
#include "record/recorder.h"

namespace torchtpu {

namespace {

// One recorder per device; shared by a thread and the autograd threads that work for it.
struct Family : c10::DebugInfoBase {
  std::array<std::atomic<Recorder*>, kMaxDevices> recorders{};  // made under families_mutex
  std::atomic<PyThreadState*> owner{nullptr};                   // may have ended
};

std::mutex families_mutex;
std::vector<std::shared_ptr<Family>>* free_families = new std::vector<std::shared_ptr<Family>>();
std::vector<Recorder*>* every_recorder = new std::vector<Recorder*>();

// A thread's own family; handed on, with its trie, to the next thread when this one ends.
struct OwnFamily {
  std::shared_ptr<Family> family;
  ~OwnFamily() {
    if (!family || runtime.process != Process::kRuns) return;
    runtime.num_threads--;
    {
      StateGuard guard(state_lock);
      for (Recorder* r : family->recorders) {
        if (!r) continue;
        cut_locked(*r, "thread_end", "");
        r->transaction = std::make_shared<Transaction>();  // the next thread's
      }
    }
    wake_launcher();
    std::lock_guard<std::mutex> guard(families_mutex);
    free_families->push_back(std::move(family));
  }
};

thread_local OwnFamily own;

// A profiler takes its state from the top of what a thread carries: the family goes below it.
void carry(const std::shared_ptr<Family>& family) {
  using c10::DebugInfoKind;
  using c10::ThreadLocalDebugInfo;
  std::shared_ptr<c10::DebugInfoBase> profiler;
  if (ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE)) {
    try {
      profiler = ThreadLocalDebugInfo::_pop(DebugInfoKind::PROFILER_STATE);
    } catch (const c10::Error&) {  // it is not at the top now: what is there puts back what was before it
    }
  }
  ThreadLocalDebugInfo::_push(DebugInfoKind::TEST_INFO_2, family);
  if (profiler) ThreadLocalDebugInfo::_push(DebugInfoKind::PROFILER_STATE, profiler);
}

Family& own_family() {
  if (!own.family) {
    runtime.num_threads++;
    std::lock_guard<std::mutex> guard(families_mutex);
    if (free_families->empty()) {
      own.family = std::make_shared<Family>();
    } else {
      own.family = std::move(free_families->back());
      free_families->pop_back();
    }
  }
  own.family->owner = PyGILState_GetThisThreadState();
  carry(own.family);
  return *own.family;
}

}  // namespace

bool has_recorded() { return own.family != nullptr; }

PyThreadState* callers_state() {
  auto* info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2);
  if (!info || own.family) return nullptr;
  PyThreadState* owner = static_cast<Family*>(info)->owner;
  for (PyThreadState* alive = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); alive;
       alive = PyThreadState_Next(alive)) {
    if (alive == owner) return owner;
  }
  return nullptr;
}

Recorder& recorder_for(c10::DeviceIndex device) {
  auto* info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2);
  auto* family = info ? static_cast<Family*>(info) : &own_family();
  std::atomic<Recorder*>& known = family->recorders[device];
  Recorder* r = known.load(std::memory_order_acquire);
  if (C10_LIKELY(r != nullptr)) return *r;
  assert_no_spin_lock();
  std::lock_guard<std::mutex> guard(families_mutex);
  r = known;
  if (!r) {
    r = new Recorder(device);
    every_recorder->push_back(r);
    known.store(r, std::memory_order_release);
  }
  return *r;
}

std::vector<Recorder*> all_recorders() {
  std::lock_guard<std::mutex> guard(families_mutex);
  return *every_recorder;
}

}  // namespace torchtpu
