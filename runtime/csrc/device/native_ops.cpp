// What no lowering can do: allocation, views, host copies, storage surgery and the CPU fallback.

#include <ATen/Dispatch_v2.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_conj_physical.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "bind/bridge.h"
#include "launch/queue.h"

namespace torchtpu {

namespace {

using at::Tensor;

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

// ---- allocation

bool fills_uninitialized() {
  return at::globalContext().deterministicFillUninitializedMemory() && at::globalContext().deterministicAlgorithms();
}

// With what PyTorch fills memory that nobody has written where programs have to be deterministic.
void fill_uninitialized(const Tensor& t) {
  auto type = t.scalar_type();
  if (at::isFloatingType(type) || at::isComplexType(type)) {
    t.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    AT_DISPATCH_V2(type, "fill_uninitialized",
                   AT_WRAP([&] { t.fill_(at::Scalar(std::numeric_limits<scalar_t>::max())); }),
                   AT_EXPAND(AT_INTEGRAL_TYPES_V2), at::kBool);
  }
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  check_running();
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "tpu tensors are strided; got layout ", *layout);
  for (int64_t size : sizes)
    TORCH_CHECK(size >= 0, "Trying to create tensor with negative dimension ", size, ": ", sizes);
  TORCH_CHECK(sizes.size() == strides.size(), "dimensionality of sizes (", sizes.size(),
              ") must match dimensionality of strides (", strides.size(), ")");
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));  // raises where a stride is negative
  auto index = index_of(device);
  TORCH_CHECK(index < device_count(), "tpu error: invalid device ordinal ", int(index), ": there are ",
              int(device_count()), " devices");
  Tensor t = make_tensor(sizes, strides, c10::scalarTypeToTypeMeta(type), base_for(sizes, strides, type), index);
  if (fills_uninitialized() && t.numel() > 0) fill_uninitialized(t);
  return t;
}

Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<c10::Device> device, std::optional<bool> pin,
                           std::optional<at::MemoryFormat> format) {
  Tensor shape = at::detail::empty_meta(sizes, dtype, std::nullopt, c10::Device(at::kMeta), std::nullopt, format);
  return empty_strided(shape.sizes(), shape.strides(), dtype, layout, device, pin);
}

// Counts from 0 and adds the start, a number like any other: the length alone decides the program.
Tensor arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step,
              std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<c10::Device> device,
              std::optional<bool> pin) {
  bool counts_ints = start.isIntegral(false) && end.isIntegral(false) && step.isIntegral(false) &&
                     (!dtype || at::isIntegralType(*dtype, false));
  int64_t length;
  bool is_shifted =
      counts_ints && start.toLong() != 0 && !__builtin_sub_overflow(end.toLong(), start.toLong(), &length);
  if (!dtype && start.isIntegral(true) && end.isIntegral(true) && step.isIntegral(true)) dtype = at::kLong;
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  Tensor made = at::empty({0}, type, layout, device, pin, std::nullopt);
  if (!is_shifted) return at::arange_out(made, start, end, step);
  return at::arange_out(made, 0, length, step).add_(start);
}

Tensor arange_by_one(const at::Scalar& start, const at::Scalar& end, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  return arange(start, end, 1, dtype, layout, device, pin);
}

// ---- host to device, device to host, device to device

bool covers_storage(const Tensor& t) {
  auto* s = storage_of(t);
  return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() &&
         t.numel() * static_cast<int64_t>(t.element_size()) == static_cast<int64_t>(s->nbytes());
}

// A copy now: nobody can tell it from PyTorch's, which waits for the first write.
Tensor lazy_clone(const Tensor& self) {
  Tensor flat = flat_view(*storage_of(self)).clone();
  return at::empty({0}, self.options()).set_(flat.storage(), self.storage_offset(), self.sizes(), self.strides());
}

constexpr int64_t kFewestBytesToName = 1 << 16;  // a smaller upload is nobody's reason for a full device

// A private contiguous copy of `src` becomes the storage's value; nothing is recorded.
void upload_whole(const Tensor& dst, const Tensor& src) {
  BaseRef base = base_for(dst.sizes(), dst.strides(), dst.scalar_type());
  Tensor host = at::detail::empty_strided_cpu(dst.sizes(), dst.strides(), dst.scalar_type());
  host.copy_(src);  // raises PyTorch's error where src does not fit
  auto buffer = c10::make_intrusive<Buffer>(base, dst.device().index(), BufferState::kReady);
  c10::SmallVector<int64_t, 5> strides(base->shape.size());
  int64_t stride = 1;
  for (size_t i = strides.size(); i-- > 0; stride *= base->shape[i]) strides[i] = stride;
  buffer->host = host.as_strided(base->shape, strides);  // the same bytes in memory order
  buffer->made_at = seconds_now();
  if (base->nbytes >= kFewestBytesToName) buffer->maker.line = std::make_shared<std::string>(current_line());
  auto* s = storage_of(dst);
  StateGuard guard(state_lock);
  s->set_buffer(std::move(buffer));
  s->base = std::move(base);
}

// Uploaded bytes (a loaded file's) are from now on what a tensor over them shows: programs read elements then, never
// bytes, and a slice of a length that changes is padded.
void show_elements(const Tensor& t) {
  if (t.element_size() == 1 || t.numel() == 0) return;
  auto* s = storage_of(t);
  BufferRef bytes;
  BaseRef base;
  {
    StateGuard guard(state_lock);
    bytes = s->buffer;
    bool is_upload = bytes && bytes->state == BufferState::kReady && bytes->host.defined() && !bytes->guard;
    if (!s->base || s->base->dtype != at::kByte || !is_upload) return;
    base = shown_base(*s, t.unsafeGetTensorImpl());
  }
  if (base->dtype == at::kByte || base->nbytes != bytes->base->nbytes) return;
  auto elements = c10::make_intrusive<Buffer>(base, bytes->device, BufferState::kReady);
  elements->host = bytes->host.flatten().view(base->dtype).view(base->shape);
  elements->maker = bytes->maker;
  elements->made_at = bytes->made_at;
  StateGuard guard(state_lock);
  if (s->buffer != bytes) return;
  s->set_buffer(std::move(elements));
  s->base = std::move(base);
}

// The bytes of a whole storage are copied as the elements that they are; whether both are whole storages' bytes.
bool copy_storage(const Tensor& dst, const Tensor& src) {
  auto is_bytes = [](const Tensor& t) { return t.scalar_type() == at::kByte && t.dim() == 1 && covers_storage(t); };
  if (dst.sizes() != src.sizes() || dst.numel() == 0 || !is_bytes(dst) || !is_bytes(src)) return false;
  BaseRef base;
  {
    StateGuard guard(state_lock);
    base = storage_of(src)->base;
  }
  if (!base || base->dtype == at::kByte || base->nbytes != src.numel()) return false;
  Tensor from = flat_view(*storage_of(src)).view(base->shape);
  Tensor to = at::empty({0}, from.options()).set_(dst.storage(), 0, from.sizes(), from.strides());
  record_copy(to, from);
  return true;
}

void copy_to_device(const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) return;
  if (covers_storage(dst)) return upload_whole(dst, src);
  Tensor whole = at::empty(dst.sizes(), dst.options());
  upload_whole(whole, src);
  record_copy(dst, whole);
}

// Recorded ops see no lazy conjugation or negation: the copy writes through the plain alias.
void copy_on_device(Tensor dst, Tensor src) {
  if (src.is_conj()) src = at::_conj_physical(src.conj());
  if (src.is_neg()) src = src._neg_view().neg();
  if (dst.is_conj()) {
    dst = dst.conj();
    src = at::_conj_physical(src);
  }
  if (dst.is_neg()) {
    dst = dst._neg_view();
    src = src.to(dst.scalar_type()).neg();
  }
  record_copy(dst, src);
}

bool is_same_view(const Tensor& a, const Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.dtype() == b.dtype() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// XLA has no complex32: a part of a tensor is written on the host, and the whole of it uploaded again.
void copy_complex_half(const Tensor& dst, const Tensor& src) {
  Tensor flat = flat_view(*storage_of(dst)), host = read_to_host(flat);
  Tensor part = host.as_strided(dst.sizes(), dst.strides(), dst.storage_offset());
  (dst.is_conj() ? part.conj() : part).copy_(is_tpu(src) ? read_to_host(src) : src);
  upload_whole(flat, host);
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  TORCH_CHECK(self.defined() && src.defined(), "copy_: undefined tensor");
  if (self.is_same(src) || is_same_view(self, src)) return self;
  if (is_tpu(self) && self.scalar_type() == at::kComplexHalf && self.numel() > 0 && !covers_storage(self)) {
    copy_complex_half(self, src);
    return self;
  }
  if (is_tpu(self) && is_tpu(src) && self.device() == src.device()) {
    if (copy_storage(self, src)) return self;
    if (src.is_complex() && !self.is_complex() && self.scalar_type() != at::kBool)
      TORCH_WARN_ONCE("Casting complex values to real discards the imaginary part");
    copy_on_device(self, src);
  } else if (is_tpu(self)) {
    TORCH_CHECK(is_tpu(src) || src.device().is_cpu(), "copy_: cannot copy from ", src.device(), " to ", self.device());
    Tensor host = is_tpu(src) ? read_to_host(src) : src;
    if (self.is_conj() || self.is_neg()) {
      Tensor plain = at::empty(self.sizes(), self.options());
      copy_to_device(plain, host);
      copy_on_device(self, plain);
    } else {
      copy_to_device(self, host);
    }
  } else {
    self.copy_(read_to_host(src), non_blocking);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor target = dst;
  copy_(target, self, non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  Tensor target = dst;
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  copy_(target, self, false);
  return dst;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "a Tensor with ", self.numel(), " elements cannot be converted to Scalar");
  return read_to_host(self).item();
}

bool equal(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.device() == other.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", self.device(), " and ",
              other.device(), "!");
  if (self.sizes() != other.sizes()) return false;
  return self.numel() == 0 || at::eq(self, other).all().item<bool>();
}

// ---- storages and geometry

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  for (int64_t s : size) TORCH_CHECK(s >= 0, "Trying to create tensor with negative dimension ", s, ": ", size);
  auto* impl = self.unsafeGetTensorImpl();
  bool is_same = self.sizes() == size;
  if (!is_same) impl->generic_set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  if (is_same) return self;  // PyTorch looks at the storage only where the sizes change
  auto* s = storage_of(self);
  auto needed = static_cast<size_t>(self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() == 0 || needed <= s->nbytes()) return self;
  auto before = static_cast<int64_t>(s->nbytes() / self.element_size());
  resize_storage(*s, needed);
  if (fills_uninitialized()) {
    auto grown = static_cast<int64_t>(needed / self.element_size()) - before;
    fill_uninitialized(self.as_strided({grown}, {1}, before));
  }
  return self;
}

Tensor& set_storage_offset(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  TORCH_CHECK(self.device() == source.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (self.sizes() == size && (stride.size() != size.size() || self.strides() == stride)) {
    impl->set_storage_offset(offset);  // PyTorch neither restrides nor grows where the sizes stay
    return self;
  }
  c10::SmallVector<int64_t, 5> strides(stride.begin(), stride.end());
  if (stride.size() != size.size()) {
    strides.resize(size.size());
    int64_t expected = 1;
    for (size_t i = size.size(); i-- > 0;) {
      strides[i] = expected;
      expected *= std::max<int64_t>(size[i], 1);
    }
  }
  impl->set_sizes_and_strides(size, strides, offset);
  if (self.numel() == 0) return self;
  auto* s = storage_of(self);
  int64_t extent = self.storage_offset() + 1;
  for (size_t i = 0; i < size.size(); i++) extent += (size[i] - 1) * strides[i];
  auto needed = static_cast<size_t>(extent) * self.element_size();
  if (needed > s->nbytes()) resize_storage(*s, needed);
  show_elements(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  Tensor fresh = at::empty({0}, self.options());
  return set_tensor(self, fresh);
}

Tensor view_dtype(const Tensor& self, at::ScalarType dtype) {
  Tensor view = at::native::view_dtype(self, dtype);
  show_elements(view);
  return view;
}

void record_stream(Tensor&, c10::Stream) {}

}  // namespace

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  TORCH_CHECK(!is_foreign(&storage), "tpu: cannot resize a storage that this backend did not create");
  auto& s = static_cast<TpuStorage&>(storage);
  auto old = static_cast<size_t>(s.nbytes());
  if (old == nbytes) return;
  {
    StateGuard guard(state_lock);
    if (old == 0 || nbytes == 0 || !s.base) {
      s.set_buffer({});
      s.base.reset();
      s.set_size(nbytes);
      return;
    }
  }
  // Kept bytes move through the storage's own flat view into a new value.
  Tensor flat = flat_view(s);
  if (nbytes % flat.element_size() != 0) flat = flat.view(at::kByte);
  auto itemsize = static_cast<int64_t>(flat.element_size());
  int64_t length = static_cast<int64_t>(nbytes) / itemsize, kept = std::min<int64_t>(length, flat.numel());
  Tensor grown = at::empty({length}, flat.options());
  if (kept < length) grown.zero_();
  grown.narrow(0, 0, kept).copy_(flat.narrow(0, 0, kept));
  move_value(storage_of(grown), &s);
  StateGuard guard(state_lock);
  s.set_size(nbytes);
}

void run_unrecorded(const c10::OperatorHandle& op, Stack* stack) {
  auto composed = op.operator_name();
  composed.name.replace(0, composed.name.find("::"), "torchtpu_composed");
  if (auto found = c10::Dispatcher::singleton().findSchema(composed)) {
    return found->callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, *stack);
  }
  run_on_cpu(op, stack);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  int64_t nbytes = 0;
  std::optional<at::ScalarType> dtype;
  auto count = [&](const Tensor& t) {
    if (!t.defined() || !is_tpu(t)) return;
    nbytes += static_cast<int64_t>(t.nbytes());
    if (!dtype) dtype = t.scalar_type();
  };
  for (const auto& v : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (v.isTensor()) count(v.toTensor());
    if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector()) count(t);
    }
  }
  std::string name = op.schema().name();
  if (!op.schema().overload_name().empty()) name += "." + op.schema().overload_name();
  report_fallback(name, dtype, nbytes);
  at::native::cpu_fallback(op, stack);
}

namespace {

void fallback(const c10::OperatorHandle& op, Stack* stack) { run_on_cpu(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("arange.start", &arange_by_one);
  m.impl("arange.start_step", &arange);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_lazy_clone", &lazy_clone);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("equal", &equal);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace
}  // namespace torchtpu
