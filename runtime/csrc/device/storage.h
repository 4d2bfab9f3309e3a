// Storages and buffers: a tensor's storage holds a versioned value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/locks.h"

struct _object;
using PyObject = _object;

namespace torchtpu {

// The contiguous n-d array that holds one version of a storage, in memory order.  Interned: equal bases are one
// pointer while anybody holds it.
struct Base : c10::intrusive_ptr_target {
  Base(std::vector<int64_t> shape, at::ScalarType dtype);
  const std::vector<int64_t> shape;  // row-major
  const at::ScalarType dtype;
  const int64_t nbytes;
};
using BaseRef = c10::intrusive_ptr<Base>;
BaseRef intern_base(std::vector<int64_t> shape, at::ScalarType dtype);
int64_t num_bases();  // interned ones, some of which nobody may hold any more
// The base of a storage born as (sizes, strides): the permuted shape where those are dense, else one flat dimension.
BaseRef base_for(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
BaseRef flat_base(int64_t nbytes, at::ScalarType dtype);

struct OpInfo;

// The op that made a value, and its line.
struct Maker {
  const OpInfo* op = nullptr;               // null: an upload
  std::shared_ptr<const std::string> line;  // null where nobody asked
};

enum class BufferState : uint8_t { kPending, kReady, kError };

// A value on the device, or on its way there.  `object`, `guard`, `error` and `restored` are written once, before
// `state` changes.
struct Buffer : c10::intrusive_ptr_target {
  Buffer(BaseRef base, c10::DeviceIndex device, BufferState state);
  ~Buffer() override;

  // A launch takes this memory for its outputs: it no longer counts as allocated.
  void give_up_memory();
  // That launch did not happen.
  void take_back_memory();

  const BaseRef base;
  c10::DeviceIndex device;
  std::atomic<BufferState> state;
  std::atomic<int32_t> holders{0};  // storages whose present value this is; 0 lets a launch take the memory
  int32_t regions = 0;              // pending regions that read it, of any thread; under state_lock
  uint64_t epoch = 0;               // the region that numbered it last, as input `slot`; under state_lock
  int32_t slot = 0;
  std::atomic<int32_t> readers{0};  // threads copying it to the host; a launch that takes the memory waits for them
  PyObject* object = nullptr;       // the engine's array; null while pending and for a host tensor not yet uploaded
  PyObject* guard = nullptr;        // unresolved device-side checks, or null
  PyObject* error = nullptr;        // the exception that a read raises
  // Of a value that failed: what its storage held right before the op that failed, or null where it held nothing then.
  c10::intrusive_ptr<Buffer> restored;
  bool is_counted = true;  // in memory_stats
  at::Tensor host;         // the same bytes on the host: an upload, or a small value that was read
  Maker maker;
  double made_at = 0;  // seconds of the steady clock
};
using BufferRef = c10::intrusive_ptr<Buffer>;
// Lets go of a buffer under state_lock: it is destroyed once the lock is free, for a host tensor may take the GIL then.
void bury(BufferRef buffer);

struct Recorder;
constexpr int32_t kNoValue = INT32_MIN;

// A storage's present value is `value` (in the region `epoch`), else `buffer`, else undefined.
struct TpuStorage final : c10::StorageImpl {
  TpuStorage(size_t nbytes, c10::DeviceIndex device);
  ~TpuStorage() override;
  void release_resources() override;

  void set_buffer(BufferRef b);  // under state_lock
  void set_size(size_t nbytes);  // under state_lock; the address changes where the bytes outgrow it

  BaseRef base;  // null until the first tensor gives the bytes a shape; under state_lock
  BufferRef buffer;
  Recorder* recorder = nullptr;  // whose region `epoch` is
  uint64_t epoch = 0;            // the region for which `value` holds; epochs are never reused
  int32_t value = kNoValue;      // >= 0: made in that region; < 0: its input ~value
  uint64_t address = 0;          // data_ptr(); 0 where it has none
  bool is_shared = false;        // read by more than one recorder
  c10::DeviceIndex device_index;

 private:
  void drop();
};

c10::Allocator* device_allocator();
bool is_foreign(const c10::StorageImpl* storage);
bool is_tpu(const at::Tensor& t);
// Conjugated or negated by a mark only; recorded ops see none.
inline bool is_lazy(const at::Tensor& t) {
  constexpr c10::DispatchKeySet marks({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return t.unsafeGetTensorImpl()->key_set().has_any(marks);
}
// The storage of a tpu tensor.  Legacy unpickling wraps our address in a plain StorageImpl, and a DLPack capsule of a
// view one within our bytes: the address finds the real one, and the tensor is moved onto it.  Throws for a storage
// this backend did not make.  Takes state_lock for that.
TpuStorage* storage_of(const at::Tensor& t);
// The same for a tensor that has been asked for its storage before; with or without state_lock.
TpuStorage* own_storage_of(const at::Tensor& t);
// The base of a storage whose bytes are what `t`, a tensor over them, shows.
BaseRef shown_base(const TpuStorage& storage, const c10::TensorImpl* t);
// Gives a storage born as bytes a base, now that `t` shows a geometry.  Under state_lock.
void ensure_base(TpuStorage* storage, const c10::TensorImpl* t);

at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, BaseRef base,
                       c10::DeviceIndex device);
at::Tensor make_tensor_locked(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, BaseRef base,
                              c10::DeviceIndex device);

// Gives back to every storage whose value failed with this error what it held before.  Under state_lock.
void restore_storages(const PyObject* error);

// The buffers of a device's storages, each once.
std::vector<BufferRef> live_buffers(c10::DeviceIndex device);

// Releases a Python object without taking the GIL; drained by the next thread that holds it.
void defer_decref(PyObject* object);
void drain_decrefs();

struct MemoryStats {
  std::atomic<int64_t> allocated{0}, peak{0}, buffers{0}, total{0};
};
constexpr int kMaxDevices = 64;
extern MemoryStats memory_stats[kMaxDevices];

}  // namespace torchtpu
