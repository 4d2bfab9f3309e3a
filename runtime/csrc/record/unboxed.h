// Records calls with C++ arguments, without a boxed stack on the hit path.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "record/recorder.h"

namespace torchtpu {

inline IValue boxed(const at::OptionalIntArrayRef& ints) { return ints ? IValue(*ints) : IValue(); }
inline IValue boxed(c10::SymIntArrayRef ints) { return C10_AS_INTARRAYREF_SLOW(ints); }
inline IValue boxed(c10::string_view text) { return std::string(text); }
template <class T>
IValue boxed(const T& value) {
  return value;
}

// The arguments of one call as IValues that own none of the tensors.
template <size_t N>
class Borrowed {
 public:
  template <class... Args>
  explicit Borrowed(const Args&... args) : Borrowed() {  // from here on the destructor runs, should one of them throw
    size_t i = 0;
    ((values_[i++] = borrowed(args)), ...);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    for (IValue& v : values_) {
      if (v.isTensor()) std::move(v).toTensor().unsafeReleaseTensorImpl();
    }
  }
  const IValue* data() const { return values_.data(); }

 private:
  Borrowed() = default;

  static IValue borrowed(const at::Tensor& t) { return c10::MaybeOwnedTraits<at::Tensor>::createBorrow(t); }
  static IValue borrowed(const std::optional<at::Tensor>& t) { return t ? borrowed(*t) : IValue(); }
  template <class T>
  static IValue borrowed(const T& value) {
    return boxed(value);
  }

  std::array<IValue, N> values_;
};

// Records one call of `kernel`; the arguments stand in the schema's order.
template <class... Args>
void record(const RecordKernel& kernel, Results& results, const Args&... args) {
  {
    Borrowed<sizeof...(Args)> borrowed(args...);
    if (C10_LIKELY(kernel.hit(borrowed.data(), results))) return;
  }
  Stack stack{boxed(args)...};
  kernel.call(&stack);
  for (auto& result : stack) results.push_back(std::move(result));
}

// That of an op of the table of lowerings.
const RecordKernel& kernel_of(const std::string& name);

struct UnboxedKernel {
  c10::KernelFunction function;
  c10::impl::CppSignature signature;
};
// The kernel for callers with C++ arguments; none where the op's signature is not among those of hot ops.
std::optional<UnboxedKernel> unboxed_kernel(const RecordKernel* kernel);

}  // namespace torchtpu
