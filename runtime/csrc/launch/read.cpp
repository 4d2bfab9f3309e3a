// Reads a tensor's values to the host, or raises the error that kept them from being computed.

#include "launch/read.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/python_headers.h>

#include "bind/bridge.h"
#include "launch/queue.h"

namespace torchtpu {

namespace {

// A value this small is kept on the host after the first read: reading it again costs nothing.
constexpr int64_t kMaxKeptBytes = 4096;

struct CountReading {
  CountReading() { num_reading++; }
  ~CountReading() { num_reading--; }
};

at::Tensor known_on_host(Buffer& buffer) {
  StateGuard guard(state_lock);
  return buffer.host;
}

}  // namespace

Reading::Reading(const at::Tensor& t, bool may_read_beside)
    : options_(t.options().device(at::kCPU)),
      is_conj_(t.is_conj()),
      is_neg_(t.is_neg()),
      sizes_(t.sizes().vec()),
      strides_(t.strides().vec()) {
  check_running();
  if (t.numel() == 0) return;
  if (reads_are_observed.load(std::memory_order_relaxed)) {
    started_ = seconds_now();
    line_ = current_line();
  }
  auto* s = storage_of(t);
  offset_ = t.storage_offset();
  value_ = may_read_beside ? materialize_to_read(s) : ReadValue{materialize(s, "read")};
}

Reading::~Reading() {
  if (value_.buffer) value_.buffer->readers--;
}

bool Reading::is_sound() const {
  if (!value_.is_subgraph || known_on_host(*value_.buffer).defined()) return true;
  CountReading reading;
  wait_ready(value_.buffer);
  return value_.buffer->state == BufferState::kReady && (!value_.buffer->guard || has_passed(value_.buffer->guard));
}

at::Tensor Reading::host_value() const {
  const BufferRef& buffer = value_.buffer;
  if (at::Tensor known = known_on_host(*buffer); known.defined()) return known;
  CountReading reading;
  wait_ready(buffer);
  if (buffer->state == BufferState::kError) raise_failure(buffer->error);
  if (buffer->guard) resolve_guard(buffer->guard);
  at::Tensor host = download(buffer->object);
  if (buffer->base->nbytes <= kMaxKeptBytes) {
    host = host.clone();
    StateGuard guard(state_lock);
    if (!buffer->host.defined()) buffer->host = host;
  }
  return host;
}

at::Tensor Reading::wait() const {
  int64_t elements = c10::multiply_integers(sizes_);
  if (elements == 0) return at::empty_strided(sizes_, strides_, options_);
  if (!value_.buffer) return at::zeros(sizes_, options_);
  at::Tensor host = host_value();
  if (started_ > 0) {
    auto itemsize = static_cast<int64_t>(options_.dtype().itemsize());
    report_read(line_, started_, seconds_now() - started_, elements * itemsize);
  }
  at::Tensor view = at::empty({0}, options_);
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(host.storage());
  impl->set_sizes_and_strides(sizes_, strides_, offset_);
  if (is_conj_) view = view.conj();
  if (is_neg_) view = view._neg_view();
  return view;
}

at::Tensor read_to_host(const at::Tensor& t) {
  std::optional<Reading> reading(std::in_place, t);
  if (!reading->is_sound()) reading.emplace(t, false);
  return reading->wait();
}

void synchronize(c10::DeviceIndex device) {
  check_running();
  auto is_meant = [&](c10::DeviceIndex index) { return device < 0 || index == device; };
  for (c10::DeviceIndex index = 0; index < device_count(); index++) {
    if (is_meant(index)) cut_to_wait(recorder_for(index), "synchronize");
  }
  bool is_observed = reads_are_observed.load(std::memory_order_relaxed);
  double started = is_observed ? seconds_now() : 0;
  wait_all();
  for (c10::DeviceIndex index = 0; index < device_count(); index++) {
    if (is_meant(index)) finish_device(index);
  }
  if (is_observed) report_read(current_line(), started, seconds_now() - started, 0);
  raise_unseen_error();
}

}  // namespace torchtpu
