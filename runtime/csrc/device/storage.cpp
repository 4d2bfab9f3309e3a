#include "device/storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <numeric>

#include "device/addresses.h"
#include "record/recorder.h"

namespace torchtpu {

MemoryStats memory_stats[kMaxDevices];

// ---- bases

namespace {

struct Bases {  // under bases_lock
  std::unordered_map<std::string, c10::weak_intrusive_ptr<Base>> table;
  size_t purge_at = 1024;  // entries; those that nobody holds are dropped then
};
Bases& bases = *new Bases();

}  // namespace

Base::Base(std::vector<int64_t> shape, at::ScalarType dtype)
    : shape(std::move(shape)),
      dtype(dtype),
      nbytes(c10::multiply_integers(this->shape) * static_cast<int64_t>(c10::elementSize(dtype))) {}

BaseRef intern_base(std::vector<int64_t> shape, at::ScalarType dtype) {
  std::string key(reinterpret_cast<const char*>(shape.data()), shape.size() * sizeof(int64_t));
  key.push_back(static_cast<char>(dtype));
  SpinGuard guard(bases_lock);
  auto found = bases.table.find(key);
  if (found != bases.table.end()) {
    if (BaseRef base = found->second.lock()) return base;
    bases.table.erase(found);
  }
  auto base = c10::make_intrusive<Base>(std::move(shape), dtype);
  bases.table.emplace(std::move(key), base);
  if (bases.table.size() >= bases.purge_at) {
    std::erase_if(bases.table, [](const auto& entry) { return entry.second.expired(); });
    bases.purge_at = std::max<size_t>(1024, 2 * bases.table.size());
  }
  return base;
}

int64_t num_bases() {
  SpinGuard guard(bases_lock);
  return static_cast<int64_t>(bases.table.size());
}

BaseRef base_for(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  c10::SmallVector<int, 8> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return strides[a] > strides[b]; });
  int64_t expected = 1, extent = 1, numel = 1;
  bool dense = true;
  for (int64_t size : sizes) numel *= size;
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    if (sizes[*it] == 1) continue;
    dense &= strides[*it] == expected;
    expected *= sizes[*it];
    extent += (sizes[*it] - 1) * strides[*it];
  }
  if (numel == 0) return intern_base({0}, dtype);
  if (!dense) return intern_base({extent}, dtype);
  std::vector<int64_t> shape;
  for (int d : order) shape.push_back(sizes[d]);
  return intern_base(std::move(shape), dtype);
}

BaseRef flat_base(int64_t nbytes, at::ScalarType dtype) {
  auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  return nbytes % itemsize == 0 ? intern_base({nbytes / itemsize}, dtype) : intern_base({nbytes}, at::kByte);
}

// ---- Python references

namespace {
std::vector<PyObject*>* dead_objects = new std::vector<PyObject*>();
}  // namespace

void defer_decref(PyObject* object) {
  if (!object) return;
  SpinGuard guard(decref_lock);
  dead_objects->push_back(object);
}

void drain_decrefs() {
  std::vector<PyObject*> dead;
  {
    SpinGuard guard(decref_lock);
    dead.swap(*dead_objects);
  }
  [&]() noexcept {  // as what calls Python is (gil.h)
    for (PyObject* object : dead) Py_DECREF(object);
  }();
}

// ---- buffers

Buffer::Buffer(BaseRef held, c10::DeviceIndex device, BufferState state)
    : base(std::move(held)), device(device), state(state), is_counted(state != BufferState::kError) {
  auto& stats = memory_stats[device];
  stats.buffers++;
  if (!is_counted) return;
  int64_t now = stats.allocated += base->nbytes;
  stats.total += base->nbytes;
  for (int64_t peak = stats.peak; now > peak && !stats.peak.compare_exchange_weak(peak, now);) {
  }
}

void Buffer::give_up_memory() {
  if (is_counted) memory_stats[device].allocated -= base->nbytes;
  is_counted = false;
}

void Buffer::take_back_memory() {
  if (!is_counted) memory_stats[device].allocated += base->nbytes;
  is_counted = true;
}

Buffer::~Buffer() {
  state_lock.assert_free();
  give_up_memory();
  memory_stats[device].buffers--;
  for (PyObject* held : {object, guard, error}) defer_decref(held);
}

bool has_dead_buffers = false;
namespace {
std::vector<BufferRef>* dead_buffers = new std::vector<BufferRef>();  // under state_lock
}  // namespace

void bury(BufferRef buffer) {
  state_lock.assert_held();
  if (!buffer) return;
  dead_buffers->push_back(std::move(buffer));
  has_dead_buffers = true;
}

void unlock_and_destroy() {
  std::vector<BufferRef> dead;
  dead.swap(*dead_buffers);
  has_dead_buffers = false;
  state_lock.unlock();
}

// ---- storages

namespace {

// Hands out no memory.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    TORCH_CHECK(false, "tpu memory belongs to its runtime: allocate a tensor or a torch.UntypedStorage instead");
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void*) {};
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "tpu memory cannot be copied by address");
  }
};
DeviceAllocator* tpu_allocator = new DeviceAllocator();

c10::Device device_of(c10::DeviceIndex index) { return {c10::DeviceType::PrivateUse1, index}; }

// Under state_lock.
void place(TpuStorage* s, size_t nbytes) {
  s->address = take_address(s, nbytes);
  s->set_data_ptr_noswap(c10::DataPtr(reinterpret_cast<void*>(s->address), device_of(s->device_index)));
}

c10::intrusive_ptr<c10::StorageImpl> make_storage_impl(c10::StorageImpl::use_byte_size_t, c10::SymInt nbytes,
                                                       c10::DataPtr data, c10::Allocator*, bool) {
  auto index = data.get() || data.device().has_index() ? data.device().index() : current_device();
  auto s = c10::make_intrusive<TpuStorage>(nbytes.expect_int(), index < 0 ? current_device() : index);
  StateGuard guard(state_lock);
  place(s.get(), s->nbytes());
  return s;
}

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, tpu_allocator);
  c10::SetStorageImplCreate(c10::DeviceType::PrivateUse1, &make_storage_impl);
  return true;
}();

}  // namespace

TpuStorage::TpuStorage(size_t nbytes, c10::DeviceIndex device)
    : c10::StorageImpl(use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device_of(device)), tpu_allocator, true),
      device_index(device) {}

TpuStorage::~TpuStorage() { drop(); }

void TpuStorage::release_resources() {
  drop();
  c10::StorageImpl::release_resources();
}

void TpuStorage::drop() {
  BufferRef dead;  // destroyed after the lock is released
  StateGuard guard(state_lock);
  forget_value(this);
  if (buffer) buffer->holders--;
  dead = std::move(buffer);
  give_back_address(std::exchange(address, 0));
}

void TpuStorage::set_buffer(BufferRef b) {
  forget_value(this);
  if (b) b->holders++;
  if (buffer) buffer->holders--;
  bury(std::exchange(buffer, std::move(b)));
}

void TpuStorage::set_size(size_t nbytes) {
  set_nbytes(nbytes);
  if (has_room_for(address, nbytes)) return;
  give_back_address(address);
  place(this, nbytes);
}

std::vector<BufferRef> live_buffers(c10::DeviceIndex device) {
  std::vector<BufferRef> found;
  {
    StateGuard guard(state_lock);
    for (const TpuStorage* s : storages_with_address()) {
      if (s->buffer && s->device_index == device) found.push_back(s->buffer);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void restore_storages(const PyObject* error) {
  for (TpuStorage* s : storages_with_address()) {
    if (!s->buffer || s->buffer->state.load(std::memory_order_acquire) != BufferState::kError) continue;
    BufferRef restored = s->buffer->error == error ? s->buffer->restored : BufferRef();
    // One of another size was given to the storage by an out= call; views that came since would not fit the old bytes.
    if (!restored || restored->base->nbytes != static_cast<int64_t>(s->nbytes())) continue;
    restored->take_back_memory();
    s->base = restored->base;
    s->set_buffer(std::move(restored));
  }
}

c10::Allocator* device_allocator() { return tpu_allocator; }
bool is_foreign(const c10::StorageImpl* storage) {
  return const_cast<c10::StorageImpl*>(storage)->allocator() != tpu_allocator;
}

bool is_tpu(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit);
}

TpuStorage* storage_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  TORCH_CHECK(impl->has_storage(), "tpu: a tensor without storage (", t.toString(), ") reached the device");
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (!is_foreign(s)) return static_cast<TpuStorage*>(s);
  c10::intrusive_ptr<TpuStorage> own;
  auto address = reinterpret_cast<uint64_t>(s->data());
  uint64_t behind = 0;  // bytes from the beginning of the storage to that of the foreign one, as of a view
  {
    StateGuard guard(state_lock);
    TpuStorage* found = find_storage(address);
    auto* alive = found ? c10::raw::weak_intrusive_ptr::lock(found) : nullptr;  // it may be dying
    if (alive) {
      own = c10::intrusive_ptr<TpuStorage>::reclaim(static_cast<TpuStorage*>(alive));
      behind = address - own->address;
    }
  }
  TORCH_CHECK(own && behind % impl->itemsize() == 0, "tpu: a tensor over a storage that this backend did not create");
  auto* result = own.get();
  impl->set_storage_keep_dtype(c10::Storage(std::move(own)));
  impl->set_storage_offset(impl->storage_offset() + static_cast<int64_t>(behind / impl->itemsize()));
  return result;
}

TpuStorage* own_storage_of(const at::Tensor& t) {
  auto* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(s && !is_foreign(s));
  return static_cast<TpuStorage*>(s);
}

BaseRef shown_base(const TpuStorage& s, const c10::TensorImpl* t) {
  auto dtype = t->dtype().toScalarType();
  BaseRef shown = t->storage_offset() == 0 ? base_for(t->sizes(), t->strides(), dtype) : BaseRef();
  bool covers = shown && shown->nbytes == static_cast<int64_t>(s.nbytes());
  return covers ? shown : flat_base(static_cast<int64_t>(s.nbytes()), dtype);
}

void ensure_base(TpuStorage* s, const c10::TensorImpl* t) {
  if (s->base && s->base->nbytes == static_cast<int64_t>(s->nbytes())) return;
  s->base = shown_base(*s, t);
}

namespace {
at::Tensor build_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, BaseRef base,
                        c10::DeviceIndex device, bool locked) {
  auto s = c10::make_intrusive<TpuStorage>(base->nbytes, device);
  s->base = std::move(base);
  if (locked) {
    place(s.get(), s->nbytes());
  } else {
    StateGuard guard(state_lock);
    place(s.get(), s->nbytes());
  }
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(s)),
                                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  if (sizes.size() != 1 || sizes[0] != 0) t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}
}  // namespace

at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, BaseRef base,
                       c10::DeviceIndex device) {
  return build_tensor(sizes, strides, dtype, std::move(base), device, false);
}

at::Tensor make_tensor_locked(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, BaseRef base,
                              c10::DeviceIndex device) {
  return build_tensor(sizes, strides, dtype, std::move(base), device, true);
}

}  // namespace torchtpu
