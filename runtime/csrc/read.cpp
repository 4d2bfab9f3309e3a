// Reading is eager: in comes a tensor, out comes a host tensor with its values, or the error that kept them from being.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/python_headers.h>

#include "bridge.h"
#include "queue.h"

namespace torchtpu {

namespace {

// A value this small is kept on the host after the first read: reading it again costs nothing.
constexpr int64_t kMaxKeptBytes = 4096;

// Ends the reading that materialize() began.
struct EndReading {
  ~EndReading() {
    buffer.readers--;
    num_reading--;
  }
  Buffer& buffer;
};

at::Tensor host_value(const BufferRef& buffer) {
  num_reading++;
  EndReading reading{*buffer};
  wait_ready(buffer);
  if (buffer->state == BufferState::kError) {
    mark_seen(buffer->error);
    raise_stored(buffer->error);
  }
  if (buffer->host.defined()) return buffer->host;
  if (buffer->guard) resolve_guard(buffer->guard);
  at::Tensor host = download(buffer->object);
  if (buffer->base->nbytes <= kMaxKeptBytes) {
    host = host.clone();
    StateGuard guard(state_lock);
    if (!buffer->host.defined()) buffer->host = host;
  }
  return host;
}

}  // namespace

at::Tensor read_to_host(const at::Tensor& t) {
  check_running();
  auto options = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* s = storage_of(t);
  bool is_observed = reads_are_observed.load(std::memory_order_relaxed);
  double started = is_observed ? seconds_now() : 0;
  BufferRef buffer = materialize(s, "read");
  if (!buffer) return at::zeros(t.sizes(), options);
  at::Tensor host = host_value(buffer);
  if (is_observed) report_read(started, seconds_now() - started, static_cast<int64_t>(t.nbytes()));
  at::Tensor view = at::empty({0}, options);
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(host.storage());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) view = view.conj();
  if (t.is_neg()) view = view._neg_view();
  return view;
}

void synchronize(c10::DeviceIndex device) {
  check_running();
  auto is_meant = [&](c10::DeviceIndex index) { return device < 0 || index == device; };
  for (c10::DeviceIndex index = 0; index < device_count(); index++) {
    if (is_meant(index)) cut(recorder_for(index), "synchronize");
  }
  bool is_observed = reads_are_observed.load(std::memory_order_relaxed);
  double started = is_observed ? seconds_now() : 0;
  wait_all();
  for (c10::DeviceIndex index = 0; index < device_count(); index++) {
    if (is_meant(index)) finish_device(index);
  }
  if (is_observed) report_read(started, seconds_now() - started, 0);
  raise_unseen_error();
}

}  // namespace torchtpu
