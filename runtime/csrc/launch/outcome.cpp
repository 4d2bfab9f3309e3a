// Turns the engine's arrays and errors after a launch into buffers that are ready or have failed.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>

#include "bind/bridge.h"
#include "device/gil.h"
#include "launch/queue.h"
#include "launch/read.h"
#include "launch/signals.h"

namespace torchtpu {

namespace {

// The first failure that no read has raised.
std::atomic<PyObject*> unseen_error{nullptr};

constexpr const char* kSeen = "_tpu_was_raised";

// The GIL is held; so it is in mark_seen: an output may fail with an error after a read of another has raised it.
void keep_unseen(PyObject* error) {
  PyObject* none = nullptr;
  if (PyObject_HasAttrString(error, kSeen)) return;
  if (unseen_error.compare_exchange_strong(none, error)) Py_INCREF(error);
}

void set_ready(Buffer& buffer, PyObject* object, PyObject* guard) {
  Py_INCREF(object);
  buffer.object = object;
  Py_XINCREF(guard);
  buffer.guard = guard;
  buffer.state.store(BufferState::kReady, std::memory_order_release);
}

// Whether a launch has consumed an input.
bool is_gone(const Buffer& buffer) {
  if (!buffer.object) return false;
  try {
    return py::handle(buffer.object).attr("is_deleted")().cast<bool>();
  } catch (py::error_already_set&) {
    return false;
  }
}

// What the storage of an output that fails held before.
BufferRef find_restored(Work& work, size_t output) {
  if (work.restored.size() > output && work.restored[output]) return std::move(work.restored[output]);
  if (!work.versions) work.versions = versions_of(work.plan->node);
  int32_t root = oldest(*work.versions, work.plan->outputs[output]);
  if (root >= 0 || root == kNoValue) return {};
  const BufferRef& input = work.inputs[~root];
  return input && !is_gone(*input) ? restored_by(input) : BufferRef();
}

// A launch before its turn that fails, or that has more to say than its values, comes to nothing.
bool gives_up(Work& work) {
  if (work.is_subgraph || work.ahead == Ahead::kNo) return false;
  work.ahead = Ahead::kGivenUp;
  return true;
}

// A thread that sees a buffer fail finds the transaction failed.
void fail_transaction(Work& work, PyObject* error) {
  PyObject* none = nullptr;
  if (work.transaction && work.transaction->error.compare_exchange_strong(none, error)) Py_INCREF(error);
}

// What eager PyTorch would not have come to, as its ops did not run.  The GIL is held.
void undo(const HostChanges& changes) {
  take_back(changes.draws);
  SignalsDeferred deferred;
  for (auto step = changes.steps.rbegin(); step != changes.steps.rend(); ++step) {
    auto done = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(step->get()));
    if (!done) PyErr_WriteUnraisable(step->get());
  }
}

// The regions queued in the calling thread's failed transactions fail without being launched, the pending ones are
// dropped.
void end_transactions(PyObject* error) {
  for (Recorder* r : all_recorders()) {
    WorkRef last;
    std::shared_ptr<Transaction> transaction;
    {
      StateGuard guard(state_lock);
      transaction = r->transaction;
      if (transaction->error != error) continue;
      last = transaction->last.lock();
    }
    if (r != &recorder_for(r->device)) continue;
    if (last) wait_done(last);
    AcquireGil gil;
    HostChanges undone;
    {
      StateGuard guard(state_lock);
      if (r->transaction != transaction) continue;
      drop_region(*r, error);
      undone = std::move(transaction->undone);
    }
    undo(undone);
  }
}

// The GIL is held, which keeps the error alive.
PyObject* failure_of(const Recorder& r) {
  StateGuard guard(state_lock);
  return r.transaction->error;
}

void mark_seen(PyObject* error) {
  AcquireGil gil;
  if (PyObject_SetAttrString(error, kSeen, Py_True) != 0) PyErr_Clear();  // an exception with slots
  if (unseen_error.compare_exchange_strong(error, nullptr)) defer_decref(error);
}

}  // namespace

Transaction::~Transaction() { defer_decref(error); }

Versions versions_of(const Node* end) {
  Versions versions;
  for (const Node* node = end; node->info; node = node->parent) {
    for (const auto& w : node->writes) versions[w.value] = node->args[w.arg].tensors[std::max(w.element, 0)].value;
  }
  return versions;
}

int32_t oldest(const Versions& versions, int32_t value) {
  for (auto before = versions.find(value); before != versions.end(); before = versions.find(value)) {
    value = before->second;
  }
  return value;
}

BufferRef restored_by(const BufferRef& buffer) {
  return buffer->state.load(std::memory_order_acquire) == BufferState::kError ? buffer->restored : buffer;
}

void work_done(Work& work, const std::vector<PyObject*>& objects, const std::vector<PyObject*>& guards) {
  bool has_guards = std::any_of(guards.begin(), guards.end(), [](PyObject* guard) { return guard; });
  if (work.ahead == Ahead::kGivenUp || (has_guards && gives_up(work))) return;
  for (size_t i = 0; i < work.outputs.size(); i++) {
    if (work.outputs[i]) set_ready(*work.outputs[i], objects[i], guards.empty() ? nullptr : guards[i]);
  }
  work.outputs.clear();
}

void work_spoil(Work& work, size_t output, PyObject* error) {
  if (gives_up(work)) return;
  BufferRef buffer = std::move(work.outputs[output]);
  if (!buffer) return;
  Py_INCREF(error);
  buffer->error = error;
  buffer->restored = find_restored(work, output);
  buffer->give_up_memory();
  buffer->state.store(BufferState::kError, std::memory_order_release);
  if (!work.is_subgraph) keep_unseen(error);  // the region will fail too, if it is computed
}

void work_keep(Work& work, size_t output, PyObject* object, PyObject* guard) {
  if (gives_up(work)) return;
  BufferRef buffer = std::move(work.outputs[output]);
  if (buffer) set_ready(*buffer, object, guard);
}

void work_restore(Work& work, size_t output, BaseRef base, PyObject* object, PyObject* guard) {
  if (gives_up(work) || !work.outputs[output]) return;
  work.restored.resize(work.outputs.size());
  work.restored[output] = c10::make_intrusive<Buffer>(std::move(base), work.device, BufferState::kPending);
  work.restored[output]->maker = work.outputs[output]->maker;
  work.restored[output]->made_at = work.outputs[output]->made_at;
  set_ready(*work.restored[output], object, guard);
}

void work_take_back(Work& work, uint64_t seed, uint64_t offset) {
  if (gives_up(work)) return;
  const auto& draws = work.changes.draws;
  for (size_t i = 0; i < std::min(draws.size(), work.first_undone); i++) {
    if (draws[i].seed == seed && draws[i].offset == offset) work.first_undone = i;
  }
}

void work_failed(Work& work, PyObject* error) {
  if (gives_up(work)) return;
  if (!work.is_subgraph) fail_transaction(work, error);
  if (!work.is_subgraph && work.transaction) {
    StateGuard guard(state_lock);
    work.transaction->undone.add(std::exchange(work.changes, {}), work.first_undone);
  }
  for (size_t i = 0; i < work.outputs.size(); i++) work_spoil(work, i, error);
  work.outputs.clear();
  if (!work.is_subgraph) keep_unseen(error);
}

void work_passed(Work& work) {
  if (work.is_subgraph || !work.transaction->error) return;
  StateGuard guard(state_lock);
  work.transaction->undone.add(std::exchange(work.changes, {}));
}

void raise_failure(PyObject* error) {
  end_transactions(error);
  {
    StateGuard guard(state_lock);
    restore_storages(error);
  }
  mark_seen(error);
  raise_stored(error);
}

void end_raised_transactions() {
  AcquireGil gil;
  for (c10::DeviceIndex device = 0; device < device_count(); device++) {
    auto error = py::reinterpret_borrow<py::object>(failure_of(recorder_for(device)));
    if (!error || !PyObject_HasAttrString(error.ptr(), kSeen)) continue;
    end_transactions(error.ptr());
    StateGuard guard(state_lock);
    restore_storages(error.ptr());
  }
}

void raise_unseen_error() {
  SignalsDeferred deferred;
  PyObject* error = unseen_error.exchange(nullptr);
  if (!error) return;
  try {
    raise_failure(error);
  } catch (...) {
    defer_decref(error);
    throw;
  }
}

std::string describe_run(const Plan& plan, const CodePlace* entry, const std::string& line) {
  const Node* first = plan.node;
  while (first->parent->info) first = first->parent;
  std::string entered = entry ? entry->line() : "";
  if (!entered.empty() && !first->line.empty() && entered != first->line) return "entered from " + entered;
  return line.empty() || plan.line.empty() || line == plan.line ? "" : "ended at " + line;
}

}  // namespace torchtpu
