// The c10d backend: passes torch.distributed's calls to a Python object's methods of the same names.

#include "bind/process_group.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bind/calls.h"
#include "device/gil.h"
#include "launch/queue.h"

namespace torchtpu {

namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void release(py::object& object) {
  if (!Py_IsInitialized()) {
    object.release();  // nobody may take the GIL any more
    return;
  }
  AcquireGil gil;
  object = py::object();
}

// Calls a method; the GIL is held.  Its exception passes through torch as the Python exception that it is.
template <class... Args>
py::object guarded(const py::object& object, const char* name, const Args&... args) {
  try {
    return call_method(object, name, args...);
  } catch (py::error_already_set& error) {
    error.restore();
  }
  throw_python_error();
}

// One call on tensors of the device: `call` is the Python object that knows what became of it.
class CallWork final : public c10d::Work {
 public:
  explicit CallWork(py::object call) : call_(std::move(call)) {}
  ~CallWork() override { release(call_); }

  bool isCompleted() override { return ask<bool>("is_completed"); }
  bool isSuccess() const override { return ask<bool>("is_success"); }
  bool wait(std::chrono::milliseconds) override { return ask<bool>("wait"); }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return ask<Tensors>("results"); }
  // Completed at once: what reads the tensors comes after the call in the device's order.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  template <class T>
  T ask(const char* name) const {
    AcquireGil gil;
    return guarded(call_, name).template cast<T>();
  }
  py::object call_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(py::object group, int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size),
        group_(std::move(group)),
        options_(c10::make_intrusive<c10d::Backend::Options>("tpu", timeout)) {}
  ~Backend() override { release(group_); }

  const std::string getBackendName() const override { return "tpu"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    tell("set_timeout", timeout);
  }
  c10d::ErrorType getError() override {
    AcquireGil gil;
    return guarded(group_, "has_failed").cast<bool>() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }
  void waitForPendingWorks() override { tell("drain"); }
  void abort() override { tell("abort"); }
  void shutdown() override { tell("shutdown"); }

  void startCoalescing() override { tell("start_coalescing"); }
  WorkPtr endCoalescing() override { return work("end_coalescing"); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return counted("broadcast", tensors, o.rootRank);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return counted("all_reduce", tensors, o.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return counted("all_reduce", tensors, o.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return counted("reduce", tensors, o.reduceOp, o.rootRank);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return counted("all_gather", outputs, inputs);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return counted("all_gather_coalesced", outputs, inputs);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return counted("all_gather_into_tensors", Tensors{output}, Tensors{input});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return counted("all_gather_into_tensors", outputs, inputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    return counted("gather", outputs, inputs, o.rootRank);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) override {
    return counted("scatter", outputs, inputs, o.rootRank);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& o) override {
    return counted("reduce_scatter", outputs, inputs, o.reduceOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    return counted("reduce_scatter_tensors", Tensors{output}, Tensors{input}, o.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    return counted("reduce_scatter_tensors", outputs, inputs, o.reduceOp);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    return counted("all_to_all_single", output, input, output_splits, input_splits);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return counted("all_to_all", outputs, inputs);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override { return work("send", tensors, destination, tag); }
  WorkPtr recv(Tensors& tensors, int source, int tag) override { return work("recv", tensors, source, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return work("recv_any_source", tensors, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return counted("barrier"); }

 private:
  template <class... Args>
  void tell(const char* name, const Args&... args) {
    AcquireGil gil;
    guarded(group_, name, args...);
  }
  template <class... Args>
  WorkPtr work(const char* name, const Args&... args) {
    AcquireGil gil;
    py::object made = guarded(group_, name, args...);
    if (py::isinstance<c10d::Work>(made)) return made.cast<WorkPtr>();  // tensors of the CPU
    return c10::make_intrusive<CallWork>(std::move(made));
  }
  template <class... Args>
  WorkPtr counted(const char* name, const Args&... args) {
    sequence_++;
    return work(name, args...);
  }

  py::object group_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

void bind_process_group(pybind11::module_& m) {
  m.def(
      "make_backend",
      [](py::object group, int rank, int size, std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Backend>(std::move(group), rank, size, timeout);
      });
  m.def(
      "cut_all",
      [] {
        for (Recorder* r : all_recorders()) {
          StateGuard guard(state_lock);
          cut_locked(*r, "idle", "");
        }
        wake_launcher();
      },
      py::call_guard<ReleaseGil>());
}

}  // namespace torchtpu
