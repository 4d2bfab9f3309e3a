#include "record/infer.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "bind/bridge.h"

namespace torchtpu {

namespace {

// The largest arguments for which a failed call is run again on the CPU to get PyTorch's wording.
constexpr int64_t kMaxErrorBytes = 64 << 20;

// Inference sees none of the modes that the user's call runs under.
class PlainDispatch {
 public:
  PlainDispatch() : function_state_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~PlainDispatch() { at::impl::PythonTorchFunctionTLS::set_disabled_state(function_state_); }

 private:
  static c10::DispatchKeySet modes() {
    using K = c10::DispatchKey;
    return c10::DispatchKeySet({K::Python, K::PythonTLSSnapshot, K::PythonDispatcher, K::PreDispatch, K::Functionalize,
                                K::FuncTorchDynamicLayerBackMode, K::FuncTorchDynamicLayerFrontMode,
                                K::FuncTorchBatched, K::FuncTorchVmapMode, K::FuncTorchGradWrapper,
                                K::FuncTorchBatchedDecomposition}) |
           c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  }
  at::impl::TorchFunctionDisabledState function_state_;
  c10::impl::ExcludeDispatchKeyGuard exclude_{modes()};
};

// A trial run warns of nothing; the call itself does.
class Silence {
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

using Convert = std::function<at::Tensor(const at::Tensor&)>;

IValue convert_list(const IValue& v, const Convert& convert) {
  auto list = v.toList();
  c10::impl::GenericList out(list.elementType());
  for (size_t i = 0; i < list.size(); i++) {
    IValue e = list.get(i);
    out.push_back(e.isTensor() && e.toTensor().defined() ? IValue(convert(e.toTensor())) : e);
  }
  return out;
}

Stack convert_args(const OpInfo& info, const IValue* args, c10::DeviceType device, const Convert& convert) {
  Stack stack;
  for (size_t i = 0; i < info.args.size(); i++) {
    const IValue& v = args[i];
    if (v.isTensor()) {
      stack.push_back(v.toTensor().defined() ? IValue(convert(v.toTensor())) : v);
    } else if (v.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(convert(t));
      stack.push_back(list);
    } else if (v.isList() && !v.isIntList() && !v.isDoubleList() && !v.isBoolList()) {
      stack.push_back(convert_list(v, convert));
    } else if (v.isDevice()) {
      stack.push_back(c10::Device(device));
    } else if (v.isGenerator()) {
      stack.push_back(IValue());
    } else {
      stack.push_back(v);
    }
  }
  return stack;
}

// Tensors of another device, zero where they hold values, that are the same and share storages as the arguments do.
class SharedArgs {
 public:
  explicit SharedArgs(c10::DeviceType device) : device_(device) {}
  at::Tensor operator()(const at::Tensor& t) {
    if (!is_tpu(t)) return t;
    at::Tensor& made = tensors_[t.unsafeGetTensorImpl()];
    if (made.defined()) return made;
    auto* s = storage_of(t);
    made = at::empty({0}, t.options().device(device_));
    auto& storage = storages_[s];
    if (!storage)
      storage = at::zeros({static_cast<int64_t>(s->nbytes())}, at::device(device_).dtype(at::kByte)).storage();
    made.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return made;
  }

 private:
  c10::DeviceType device_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<TpuStorage*, c10::Storage> storages_;
};

template <class F>
void for_each_tensor(const IValue& v, F&& f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isList() && !v.isIntList() && !v.isDoubleList() && !v.isBoolList()) {
    auto list = v.toList();
    for (size_t i = 0; i < list.size(); i++) {
      IValue e = list.get(i);
      if (e.isTensor() && e.toTensor().defined()) f(e.toTensor());
    }
  }
}

void check_devices(const OpInfo& info, const IValue* args) {
  std::optional<c10::Device> first;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (is_tpu(t) && !first) first = t.device();
    });
  }
  if (!first) return;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (t.device() == *first || (t.dim() == 0 && t.device().is_cpu() && !info.args[i].is_written)) return;
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *first,
                  " and ", t.device(), "! (when checking argument for argument ",
                  info.handle.schema().arguments()[i].name(), " in method aten::", info.name, ")");
    });
  }
}

// Whether the op might write one element twice, or what it reads elsewhere, or has no element to work on.
bool is_odd(const OpInfo& info, const IValue* args) {
  bool found = false;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) { found |= t.numel() == 0; });
  }
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const at::Tensor& written = args[i].toTensor();
    found |= at::has_internal_overlap(written) == at::MemOverlap::Yes;
    for (size_t j = 0; j < info.args.size(); j++) {
      if (i == j) continue;
      for_each_tensor(args[j], [&](const at::Tensor& t) { found |= is_tpu(t) && t.is_alias_of(written); });
    }
  }
  return found;
}

// Reading through a mask has a shape that depends on data; writing through one has not.
bool reads_through_mask(const OpInfo& info, const IValue* args) {
  bool found = false;
  bool may_read = info.has_optional_list && info.name.find("index_put") == std::string::npos;
  for (size_t i = 0; i < info.args.size() && may_read; i++) {
    if (!args[i].isList()) continue;
    for_each_tensor(
        args[i], [&](const at::Tensor& t) { found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
  }
  return found;
}

int64_t total_bytes(const OpInfo& info, const IValue* args) {
  int64_t bytes = 0;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (is_tpu(t)) bytes += static_cast<int64_t>(t.storage().nbytes());
    });
  }
  return bytes;
}

// Whether the CPU has a kernel that made-up values cannot harm: pivots are not checked, and zeros lie outside of the
// matrix.
bool has_cpu_kernel(const c10::OperatorHandle& op) {
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) &&
         std::ranges::none_of(op.schema().arguments(),
                              [](const auto& argument) { return argument.name().ends_with("pivots"); });
}

// torch's meta kernels are Python with wordings of their own: the CPU kernel's error is the one users know.
void raise_cpu_error(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  Silence silence;
  SharedArgs shared(at::kCPU);
  Stack stack = convert_args(info, args, at::kCPU, std::ref(shared));
  op.callBoxed(&stack);
}

// Which overlaps matter, and what an op does to nothing, differs from op to op: the CPU kernel knows.
void check_overlap(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_ask_cpu) {
  if (may_ask_cpu) return raise_cpu_error(info, op, args);
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    at::assert_no_internal_overlap(args[i].toTensor());
    for (size_t j = 0; j < info.args.size(); j++) {
      if (i == j) continue;
      for_each_tensor(args[j], [&](const at::Tensor& t) {
        if (is_tpu(t)) at::assert_no_partial_overlap(args[i].toTensor(), t);
      });
    }
  }
}

// Runs the op on one element of each argument.
void try_on_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  Silence silence;
  Stack stack = convert_args(info, args, at::kCPU, [](const at::Tensor& t) {
    return at::ones(c10::SmallVector<int64_t, 5>(t.dim(), 1), t.options().device(at::kCPU));
  });
  op.callBoxed(&stack);
}

constexpr std::string_view kRefusal = "not implemented for '";

bool is_not_implemented(const c10::Error& error) {
  return dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
}

// Whether PyTorch has no kernel for a dtype.
bool is_refusal(const c10::Error& error) {
  return std::string_view(error.what_without_backtrace()).find(kRefusal) != std::string_view::npos;
}

// Lowerings take more dtypes than the CPU has kernels for, and ops that it has none for.  Of the dtypes below the CPU
// takes as many as CUDA, but for one.
bool lacks_kernel(const OpInfo& info, const c10::Error& error) {
  // kernels that are only there to be replaced raise too; none of them is pointwise
  if (!is_refusal(error)) return is_not_implemented(error) && !info.handle.hasTag(at::Tag::pointwise);
  std::string_view text = error.what_without_backtrace();
  text.remove_prefix(text.find(kRefusal) + kRefusal.size());
  text = text.substr(0, text.find('\''));
  if (text == "Bool" && info.name.starts_with("abs")) return true;
  return std::ranges::none_of(
      std::initializer_list<at::ScalarType>{at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kBool,
                                            at::kByte, at::kChar, at::kShort, at::kInt, at::kLong},
      [&](at::ScalarType type) { return text == c10::toString(type); });
}

bool has_shape_function(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Whether a number of the caller's, which may not fit the dtype, becomes an element.
bool takes_element(const c10::OperatorHandle& op) {
  return std::ranges::any_of(op.schema().arguments(), [](const auto& argument) {
    bool is_element = argument.name() == "value" || argument.name() == "fill_value";
    return is_element && argument.real_type()->kind() == c10::TypeKind::NumberType;
  });
}

// What a kernel may refuse that shape functions, and torch's meta kernels, let pass.
enum class Refuses { kNothing, kAnything, kDtype };

Refuses may_refuse(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  if (info.random) return Refuses::kNothing;
  if (op.hasTag(at::Tag::pointwise)) return Refuses::kAnything;
  int tensors = 0;
  bool has_number = false, is_mixed = false;
  std::optional<at::ScalarType> first;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      at::ScalarType type = t.scalar_type();
      tensors++;
      has_number |= !c10::isFloatingType(type);
      // masks, and the weights of quantized models, have dtypes of their own
      if (type == at::kBool || type == at::kInt || c10::elementSize(type) == 1) return;
      is_mixed |= first && type != *first;
      first = type;
    });
  }
  if ((info.multiplies && is_mixed) || (tensors && takes_element(op))) return Refuses::kAnything;
  return tensors == 1 && has_number && has_shape_function(op) ? Refuses::kDtype : Refuses::kNothing;
}

// Asks of one element; the call itself says it best, where `may_ask_cpu`.
void check_dtypes(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_ask_cpu) {
  Refuses refuses = may_refuse(info, op, args);
  if (refuses == Refuses::kNothing || !has_cpu_kernel(op)) return;
  try {
    try_on_cpu(info, op, args);
  } catch (const c10::Error& error) {  // perhaps for the shapes that were made up here
    if (lacks_kernel(info, error) || (refuses == Refuses::kDtype && !is_refusal(error))) return;
    if (may_ask_cpu) return raise_cpu_error(info, op, args);
    std::string_view text = error.what_without_backtrace();
    bool names_dtypes =
        text.find("same dtype") != std::string_view::npos || text.find("converted") != std::string_view::npos;
    if (is_not_implemented(error) || names_dtypes) throw;
  }
}

// Asks PyTorch's C++ shape function.  On meta tensors torch runs Python code in its place, which chooses other strides;
// what is dispatched to a backend that has no kernels is PyTorch's own code for any device.
void call_shape_function(const c10::OperatorHandle& op, Stack* stack) {
  for (IValue& v : *stack) {  // a 0-dim CPU tensor would choose another device; a number becomes one on its way
    bool is_on_cpu = v.isTensor() && v.toTensor().defined() && v.toTensor().device().is_cpu();
    if (is_on_cpu && !v.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      v = at::empty({}, v.toTensor().options().device(at::kMeta));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse2), stack);
}

// Lays out the result of an op on elements as the CPU kernels' iterator does.
void lay_out_as_iterator(const OpInfo& info, const Stack& args, Stack* results) {
  if (results->size() != 1 || !results->back().isTensor()) return;
  auto dtype = results->back().toTensor().scalar_type();
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).check_all_same_device(false);
  config.add_owned_output(at::Tensor()).declare_static_dtype_and_device(dtype, at::kMeta);
  bool makes_tensors = info.name.find("calar") != std::string::npos;  // overloads that wrap their numbers
  bool has_input = false;
  for (const IValue& v : args) {
    bool is_tensor = v.isTensor() && v.toTensor().defined();
    if (is_tensor) config.add_owned_const_input(v.toTensor());
    if (v.isScalar() && makes_tensors) config.add_owned_const_input(at::empty({}, at::device(at::kMeta)));
    has_input |= is_tensor;
  }
  if (!has_input) return;
  at::TensorIterator iterator = config.build();
  if (iterator.output().sizes() == results->back().toTensor().sizes()) results->back() = iterator.output();
}

void run_on_meta(const OpInfo& info, const c10::OperatorHandle& op, Stack* stack) {
  if (op.schema().is_mutable()) return op.callBoxed(stack);
  if (has_shape_function(op)) return call_shape_function(op, stack);
  Stack args = *stack;
  op.callBoxed(stack);
  if (op.hasTag(at::Tag::pointwise)) lay_out_as_iterator(info, args, stack);
}

}  // namespace

bool is_refused_by_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  PlainDispatch plain;
  try {
    try_on_cpu(info, op, args);
  } catch (const c10::Error& error) {
    return !lacks_kernel(info, error);
  }
  return false;
}

std::optional<Inferred> infer(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  check_devices(info, args);
  if (reads_through_mask(info, args)) return std::nullopt;
  PlainDispatch plain;
  bool may_ask_cpu = total_bytes(info, args) <= kMaxErrorBytes && has_cpu_kernel(op);
  if (is_odd(info, args)) check_overlap(info, op, args, may_ask_cpu && !info.random);
  check_dtypes(info, op, args, may_ask_cpu);
  Inferred inferred;
  SharedArgs meta(at::kMeta);
  inferred.args = convert_args(info, args, at::kMeta, std::ref(meta));
  inferred.results = inferred.args;
  try {
    if (info.has_infer) {
      infer_in_python(info, &inferred.results);
    } else {
      run_on_meta(info, op, &inferred.results);
    }
  } catch (...) {
    if (!may_ask_cpu) throw;
    raise_cpu_error(info, op, args);
    return std::nullopt;  // the CPU can do it
  }
  return inferred;
}

}  // namespace torchtpu
