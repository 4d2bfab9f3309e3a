// What became of a launch: in come the engine's arrays and errors, out go buffers that are ready or have failed.
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "bind/bridge.h"
#include "launch/queue.h"

namespace torchtpu {

namespace {

// The first failure that no read has raised.
std::atomic<PyObject*> unseen_error{nullptr};

void keep_unseen(PyObject* error) {
  PyObject* none = nullptr;
  if (unseen_error.compare_exchange_strong(none, error)) Py_INCREF(error);
}

}  // namespace

void work_done(Work& work, const std::vector<PyObject*>& objects, const std::vector<PyObject*>& guards) {
  for (size_t i = 0; i < work.outputs.size(); i++) {
    auto& buffer = work.outputs[i];
    if (!buffer) continue;
    Py_INCREF(objects[i]);
    buffer->object = objects[i];
    if (!guards.empty()) {
      Py_XINCREF(guards[i]);
      buffer->guard = guards[i];
    }
    buffer->state.store(BufferState::kReady, std::memory_order_release);
  }
  work.outputs.clear();
}

void work_spoil(Work& work, size_t output, PyObject* error) {
  BufferRef buffer = std::move(work.outputs[output]);
  if (!buffer) return;
  Py_INCREF(error);
  buffer->error = error;
  buffer->state.store(BufferState::kError, std::memory_order_release);
  if (!work.is_slice) keep_unseen(error);  // the region will fail too, if it is computed
}

void work_failed(Work& work, PyObject* error) {
  for (size_t i = 0; i < work.outputs.size(); i++) work_spoil(work, i, error);
  work.outputs.clear();
  if (!work.is_slice) keep_unseen(error);
}

void raise_unseen_error() {
  PyObject* error = unseen_error.exchange(nullptr);
  if (!error) return;
  defer_decref(error);
  raise_stored(error);
}

void mark_seen(PyObject* error) {
  if (unseen_error.compare_exchange_strong(error, nullptr)) defer_decref(error);
}

std::string describe_run(const Plan& plan, const CodePlace* entry, const std::string& line) {
  const Node* first = plan.node;
  while (first->parent->info) first = first->parent;
  std::string entered = entry ? entry->line() : "";
  if (!entered.empty() && !first->line.empty() && entered != first->line) return "entered from " + entered;
  return line.empty() || plan.line.empty() || line == plan.line ? "" : "ended at " + line;
}

}  // namespace torchtpu
