#include "record/infer.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtilsMulti.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>

#include "bind/bridge.h"
#include "record/inference_cache.h"

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

// A trial run warns of nothing where the call itself does.
class Silence {
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

// The warnings of kernels are lost with them; those of resized results are not, which shape functions give.
bool loses_warnings(const OpInfo& info) { return !info.may_resize; }

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

// "var" of "var.correction_out".
std::string_view base_name(const OpInfo& info) { return std::string_view(info.name).substr(0, info.name.find('.')); }

// Argument `at` is on another device than `first`.
[[noreturn]] void refuse_device(const OpInfo& info, const IValue* args, c10::Device first, size_t at,
                                c10::Device other) {
  std::optional<c10::Device> read;
  for (size_t i = 0; i < info.args.size() && !info.handle.hasTag(at::Tag::pointwise); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (!info.args[i].is_out && !read) read = t.device();
      if (!info.args[i].is_out || !read || t.device() == *read) return;
      TORCH_CHECK(base_name(info) != "mode", "expected device '", *read, "' but got '", t.device(), "' for ",
                  info.handle.schema().arguments()[i].name(), " output");
      TORCH_CHECK(false, "Expected out tensor to have device ", *read, ", but got ", t.device(), " instead");
    });
  }
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ",
              other, "! (when checking argument for argument ", info.handle.schema().arguments()[at].name(),
              " in method aten::", info.name, ")");
}

void check_devices(const OpInfo& info, const IValue* args) {
  std::optional<c10::Device> first;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (is_tpu(t) && !first) first = t.device();
    });
  }
  if (!first) {
    for (size_t i = 0; info.random && i < info.args.size(); i++) {  // the generator alone has led here
      for_each_tensor(args[i], [&](const at::Tensor& t) {
        TORCH_CHECK(!t.device().is_cpu(), "Expected a 'cpu' device type for generator but found 'tpu'");
      });
    }
    return;
  }
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (t.device() == *first || (t.dim() == 0 && t.device().is_cpu() && !info.args[i].is_written)) return;
      refuse_device(info, args, *first, i, t.device());
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

bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

bool has_mask(const OpInfo& info, const IValue* args) {
  bool found = false;
  for (size_t i = 0; i < info.args.size() && info.has_optional_list; i++) {
    if (args[i].isList()) for_each_tensor(args[i], [&](const at::Tensor& t) { found |= is_mask(t); });
  }
  return found;
}

bool writes_through_mask(const OpInfo& info, const IValue* args) {
  return info.name.find("index_put") != std::string::npos && has_mask(info, args);
}

// Reading through a mask has a shape that depends on data; writing through one has not.
bool reads_through_mask(const OpInfo& info, const IValue* args) {
  return info.name.find("index_put") == std::string::npos && has_mask(info, args);
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
         std::ranges::none_of(op.schema().arguments(), [](const auto& argument) {
           return argument.name().ends_with("pivots") && !argument.is_out();
         });
}

// Whether an error is about values, which a trial on made-up ones says nothing about.
bool is_about_values(const c10::Error& error) {
  return dynamic_cast<const c10::LinAlgError*>(&error) != nullptr ||
         std::string_view(error.what_without_backtrace()).ends_with("ZeroDivisionError");
}

// torch's meta kernels are Python with wordings of their own: the CPU kernel's error is the one users know. Where the
// shapes do not fit it names how many ones a mask has, which are read only if it is `known` that there is an error.
void raise_cpu_error(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_warn = false,
                     bool known = false) {
  std::optional<Silence> silence;
  if (!may_warn) silence.emplace();
  SharedArgs shared(at::kCPU);
  bool has_ones = writes_through_mask(info, args);
  Stack stack = convert_args(info, args, at::kCPU, [&](const at::Tensor& t) {
    return known && has_ones && is_mask(t) && is_tpu(t) ? t.cpu() : shared(t);
  });
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    bool is_of_count =
        has_ones && !known &&
        std::string_view(error.what_without_backtrace()).find("shape mismatch") != std::string_view::npos;
    if (!is_about_values(error) && !is_of_count) throw;
  }
}

// Which overlaps matter, and what an op does to nothing, differs from op to op: the CPU kernel knows.
void check_overlap(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_ask_cpu) {
  if (may_ask_cpu) return raise_cpu_error(info, op, args, loses_warnings(info));
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

// `count` ones along each dimension of a tensor, with gaps between them or without.
at::Tensor ones_like(const at::Tensor& t, int64_t count, bool has_gaps = false) {
  c10::SmallVector<int64_t, 5> sizes(t.dim(), count);
  if (has_gaps) sizes.back() *= 2;
  at::Tensor made = at::ones(sizes, t.options().device(at::kCPU));
  return has_gaps ? made.slice(-1, 0, sizes.back(), 2) : made;
}

// Runs the op on one element of each argument, or on `most` along a dimension; returns its results.
Stack try_on_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_warn = false,
                 int64_t most = 1) {
  std::optional<Silence> silence;
  if (!may_warn) silence.emplace();
  Stack stack = convert_args(info, args, at::kCPU, [&](const at::Tensor& t) {
    at::DimVector sizes(t.sizes());
    for (int64_t& size : sizes) size = std::clamp<int64_t>(size, 1, most);
    return at::ones(sizes, t.options().device(at::kCPU));
  });
  op.callBoxed(&stack);
  return stack;
}

constexpr std::string_view kRefusal = "not implemented for '";

bool is_not_implemented(const c10::Error& error) {
  return dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
}

// Whether PyTorch has no kernel for a dtype.
bool is_refusal(const c10::Error& error) {
  return std::string_view(error.what_without_backtrace()).find(kRefusal) != std::string_view::npos;
}

bool is_any_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

// Whether the op is computed by LAPACK, which knows no half precision, as CUDA's libraries do not.
bool decomposes(const OpInfo& info) {
  return is_any_of(base_name(info), {"_linalg_eigh", "_linalg_eigvals", "_linalg_solve_ex", "_linalg_svd", "cholesky",
                                     "geqrf", "linalg_cholesky_ex", "linalg_eig", "linalg_householder_product",
                                     "linalg_lu", "linalg_lu_factor_ex", "linalg_qr", "ormqr"});
}

// Whether the op, which has no kernel for half precision, has none for float32 either: it is one on integers.
bool refuses_floats(const OpInfo& info, const IValue* args) {
  Silence silence;
  Stack stack = convert_args(info, args, at::kCPU, [](const at::Tensor& t) {
    bool is_half = c10::isReducedFloatingType(t.scalar_type());
    return ones_like(t, 1).to(is_half ? at::kFloat : t.scalar_type());
  });
  try {
    info.handle.callBoxed(&stack);
  } catch (const c10::Error& error) {
    return is_refusal(error);
  }
  return false;
}

// Ops on elements, and losses of elements, that PyTorch does not tag as such.
bool is_on_elements(const OpInfo& info) {
  return is_any_of(base_name(info),
                   {"binary_cross_entropy", "binary_cross_entropy_with_logits", "floor_divide", "floor_divide_",
                    "huber_loss", "mse_loss", "polar", "rsub", "smooth_l1_loss", "soft_margin_loss"});
}

// Whether neither CUDA nor XLA computes the op on the wider unsigned integers, or on floats of eight bits: of those
// kernels mostly do no more than copy elements.
bool has_no_rare_dtypes(const OpInfo& info, bool is_float8) {
  if (decomposes(info) || is_any_of(base_name(info), {"linalg_solve_triangular", "triangular_solve"})) return true;
  if (is_float8)
    return info.handle.hasTag(at::Tag::pointwise) || is_on_elements(info) ||
           is_any_of(base_name(info), {"_unsafe_masked_index_put_accumulate", "frexp", "index_add", "index_add_",
                                       "index_reduce", "index_reduce_", "put", "put_", "scatter_add", "scatter_add_",
                                       "scatter_reduce", "scatter_reduce_"});
  return is_any_of(base_name(info), {"glu", "index_fill", "index_fill_", "logcumsumexp", "silu", "silu_"});
}

// Lowerings take more dtypes than the CPU has kernels for, and ops that it has none for.  Of the dtypes below the CPU
// takes as many as CUDA, but for one.
bool lacks_kernel(const OpInfo& info, const IValue* args, const c10::Error& error) {
  // kernels that are only there to be replaced raise too; none of them is pointwise
  if (!is_refusal(error)) return is_not_implemented(error) && !info.handle.hasTag(at::Tag::pointwise);
  std::string_view text = error.what_without_backtrace();
  text.remove_prefix(text.find(kRefusal) + kRefusal.size());
  text = text.substr(0, text.find('\''));
  if (text == "Bool" && info.name.starts_with("abs")) return true;
  if ((text == "BFloat16" || text == "Half") && (decomposes(info) || refuses_floats(info, args))) return false;
  bool is_float8 = text.starts_with("Float8");
  if ((is_float8 || text.starts_with("UInt")) && has_no_rare_dtypes(info, is_float8)) return false;
  return std::ranges::none_of(
      std::initializer_list<at::ScalarType>{at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kBool,
                                            at::kByte, at::kChar, at::kShort, at::kInt, at::kLong},
      [&](at::ScalarType type) { return text == c10::toString(type); });
}

// Raises what the CPU kernel does; false where there is none but one to be replaced, which says so.
bool has_words_of_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  try {
    raise_cpu_error(info, op, args, false, true);
  } catch (const c10::Error& error) {
    if (!is_not_implemented(error)) throw;
    if (std::string_view(error.what_without_backtrace()).find("to override this function") == std::string_view::npos)
      throw;
    return false;
  }
  return true;
}

bool has_shape_function(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

bool takes_element(const OpInfo& info) {
  return std::ranges::any_of(info.args, [](const ArgInfo& arg) { return arg.is_element; });
}

// Whether the op multiplies tensors of one dtype, none of which is a mask or quantized.
bool is_plain_product(const OpInfo& info) {
  return is_any_of(base_name(info), {"addbmm", "addbmm_", "addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_",
                                     "bmm", "convolution", "dot", "linalg_cross", "linear", "mm", "mv", "vdot"});
}

// Whether an op of one tensor may have no kernel for a dtype on the CPU that it has none for on CUDA either.
bool may_lack_kernels(const OpInfo& info, const c10::OperatorHandle& op) {
  return has_shape_function(op) || !(info.is_foreach || is_any_of(base_name(info), {"histc", "nansum", "trace"}));
}

// Ops of several tensors, the first of which may have a dtype that no kernel takes.
bool may_lack_kernels_for_first(const OpInfo& info) {
  return is_any_of(base_name(info), {"_log_softmax_backward_data",
                                     "_native_batch_norm_legit",
                                     "_prelu_kernel",
                                     "_softmax_backward_data",
                                     "bucketize",
                                     "fractional_max_pool2d",
                                     "fractional_max_pool3d",
                                     "grid_sampler_2d",
                                     "grid_sampler_3d",
                                     "index_reduce",
                                     "index_reduce_",
                                     "linalg_householder_product",
                                     "linalg_solve_triangular",
                                     "max_pool2d_with_indices_backward",
                                     "max_unpool2d",
                                     "max_unpool3d",
                                     "multi_margin_loss",
                                     "native_batch_norm",
                                     "native_group_norm",
                                     "nll_loss2d_forward",
                                     "nll_loss_forward",
                                     "ormqr",
                                     "scatter_reduce",
                                     "scatter_reduce_",
                                     "searchsorted",
                                     "segment_reduce",
                                     "triangular_solve"});
}

// What a kernel may refuse that shape functions, and torch's meta kernels, let pass.
enum class Refuses { kNothing, kAnything, kDtype };

Refuses may_refuse(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  if (info.random) return Refuses::kNothing;
  if (op.hasTag(at::Tag::pointwise) || is_on_elements(info)) return Refuses::kAnything;
  int tensors = 0;
  bool has_number = false, is_mixed = false, has_input = false, has_out = false, is_plain = is_plain_product(info);
  bool has_half = false, is_first_number = false, is_first_rare = false, is_first_float8 = false;
  std::optional<at::ScalarType> first;
  for (size_t i = 0; i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      at::ScalarType type = t.scalar_type();
      bool is_number = !c10::isFloatingType(type) || c10::isFloat8Type(type);
      if (tensors++ == 0) {
        is_first_number = is_number;
        is_first_float8 = c10::isFloat8Type(type);
        is_first_rare = is_first_float8 || c10::isBarebonesUnsignedType(type);
      }
      has_out |= info.args[i].is_out && has_input;
      has_input |= !info.args[i].is_out;
      has_number |= is_number;
      has_half |= c10::isReducedFloatingType(type);
      // masks, and the weights of quantized models, have dtypes of their own
      if (!is_plain && (type == at::kBool || type == at::kInt || c10::elementSize(type) == 1)) return;
      is_mixed |= first && type != *first;
      first = type;
    });
  }
  if (((info.multiplies || is_plain) && is_mixed) || (is_plain && first == at::kBool) ||
      (tensors && takes_element(info)) || has_out)
    return Refuses::kAnything;
  if (has_half && decomposes(info)) return Refuses::kAnything;
  if (is_first_number && may_lack_kernels_for_first(info)) return Refuses::kDtype;
  if (is_first_rare && has_no_rare_dtypes(info, is_first_float8)) return Refuses::kDtype;
  return tensors == 1 && has_number && may_lack_kernels(info, op) ? Refuses::kDtype : Refuses::kNothing;
}

// Asks of one element; the call itself says it best, where `may_ask_cpu`.  Returns the results, where there are any.
Stack check_dtypes(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args, bool may_ask_cpu) {
  Refuses refuses = may_refuse(info, op, args);
  if (refuses == Refuses::kNothing || !has_cpu_kernel(op)) return {};
  for (int64_t most : {1, 8}) {
    try {
      Stack made = try_on_cpu(info, op, args, loses_warnings(info) && op.hasTag(at::Tag::pointwise), most);
      if (most > 1) return {};
      if (takes_element(info))
        try_on_cpu(info, op, args, false, 2);  // into one element, numbers too large are put as inf
      return made;
    } catch (const c10::Error& error) {
      bool is_open = refuses == Refuses::kDtype && !is_refusal(error);  // perhaps it is about the shapes made up here
      if (is_open && most == 1) continue;
      if (is_open || lacks_kernel(info, args, error)) return {};
      if (may_ask_cpu) {
        raise_cpu_error(info, op, args);
        return {};
      }
      std::string_view text = error.what_without_backtrace();
      bool names_dtypes =
          std::ranges::any_of(std::initializer_list<std::string_view>{"same dtype", "converted", "to have dtype"},
                              [&](std::string_view words) { return text.find(words) != std::string_view::npos; });
      if (is_not_implemented(error) || names_dtypes) throw;
      return {};
    }
  }
  return {};
}

// Thrown where a shape function asks for more than shapes.
struct NeedsKernel {};

// While a shape function runs: the kernel that it hands its results to does nothing.
void skip_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  bool is_out = std::ranges::any_of(arguments, [](const auto& a) { return a.is_out(); });
  bool is_view = std::ranges::any_of(op.schema().returns(),
                                     [](const auto& r) { return r.alias_info() && !r.alias_info()->isWrite(); });
  if (is_view || op.schema().name() == "aten::resize_") {  // geometry, which is what is asked for
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
  }
  if (!is_out) throw NeedsKernel();
  Stack results(stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()), stack->end());
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// Asks PyTorch's C++ shape function; false where it has no answer.  On meta tensors torch runs Python code in its
// place, which chooses other strides; what is dispatched to a backend that has no kernels is PyTorch's own code for any
// device.
bool call_shape_function(const c10::OperatorHandle& op, Stack* stack) {
  Stack given = *stack;
  try {
    c10::impl::IncludeDispatchKeyGuard backend(c10::DispatchKey::PrivateUse2);
    op.callBoxed(stack);
    return true;
  } catch (const NeedsKernel&) {
    *stack = std::move(given);
    return false;
  }
}

at::Tensor meta_of(const at::Tensor& t) {
  if (!t.defined()) return t;
  return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
}

// A result of an op on elements as the CPU kernels' iterator lays it out; undefined where no tensor is given.
at::Tensor laid_out_by_iterator(const OpInfo& info, const Stack& args, at::ScalarType dtype) {
  if (is_any_of(base_name(info), {"deg2rad", "rad2deg"})) {  // their kernels make it themselves, like the argument
    const at::Tensor& t = args[0].toTensor();
    if (t.is_non_overlapping_and_dense()) return at::detail::empty_strided_meta(t.sizes(), t.strides(), dtype);
  }
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).check_all_same_device(false);
  config.add_owned_output(at::Tensor()).declare_static_dtype_and_device(dtype, at::kMeta);
  bool makes_tensors = info.name.find("calar") != std::string::npos;  // overloads that wrap their numbers
  bool has_input = false;
  for (size_t i = 0; i < args.size(); i++) {
    const IValue& v = args[i];
    bool is_tensor = v.isTensor() && v.toTensor().defined() && !info.args[i].is_out;
    bool is_exponent = is_any_of(base_name(info), {"ldexp", "ldexp_"}) && i == 1;  // of a power, which is contiguous
    if (is_tensor && is_exponent)
      config.add_owned_const_input(at::detail::empty_meta(v.toTensor().sizes(), at::kFloat));
    else if (is_tensor)
      config.add_owned_const_input(v.toTensor());
    if (v.isScalar() && makes_tensors) config.add_owned_const_input(at::empty({}, at::device(at::kMeta)));
    has_input |= is_tensor;
  }
  return has_input ? config.build().output() : at::Tensor();
}

// Ranges: what they are asked to fill keeps its shape where it has as many elements.
bool is_range(const OpInfo& info) {
  return std::ranges::any_of(std::initializer_list<std::string_view>{"arange.", "range.", "linspace.", "logspace."},
                             [&](std::string_view words) { return info.name.starts_with(words); });
}

void run_range(const OpInfo& info, const c10::OperatorHandle& op, Stack* stack) {
  size_t i = 0;
  while (!info.args[i].is_out) i++;
  at::Tensor out = (*stack)[i].toTensor(), made = at::empty({0}, out.options());
  (*stack)[i] = made;
  op.callBoxed(stack);
  if (made.numel() != out.numel()) {
    if (out.numel() > 0 && !info.name.starts_with("l")) {
      TORCH_WARN("The number of elements in the out tensor of shape ", out.sizes(), " is ", out.numel(),
                 " which does not match the computed number of elements ", made.numel(),
                 ". Note that this may occur as a result of rounding error. The out tensor will be resized to a tensor "
                 "of shape (",
                 made.numel(), ",).");
    }
    out.resize_(made.sizes());
  }
  stack->back() = out;
}

// An out= argument of another shape gets the strides of a new result; torch's Python code makes it contiguous.
void run_with_outputs(const OpInfo& info, const c10::OperatorHandle& op, Stack* stack) {
  if (info.may_resize && is_range(info)) return run_range(info, op, stack);
  Stack args = *stack;
  std::vector<std::pair<at::Tensor, at::DimVector>> outputs;
  for (size_t i = 0; i < info.args.size() && op.hasTag(at::Tag::pointwise); i++) {
    if (!info.args[i].is_out || !args[i].isTensor()) continue;
    outputs.emplace_back(args[i].toTensor(), args[i].toTensor().sizes());
  }
  op.callBoxed(stack);
  for (const auto& [out, before] : outputs) {
    if (out.sizes() == before) continue;
    at::Tensor made = laid_out_by_iterator(info, args, out.scalar_type());
    if (made.defined() && made.sizes() == out.sizes()) out.as_strided_(made.sizes(), made.strides());
  }
}

void run_on_meta(const OpInfo& info, const c10::OperatorHandle& op, Stack* stack) {
  if (op.schema().is_mutable()) return run_with_outputs(info, op, stack);
  Stack args = *stack;
  op.callBoxed(stack);
  bool is_on_elements =
      op.hasTag(at::Tag::pointwise) || is_any_of(base_name(info), {"hardswish_backward", "hardtanh_backward"});
  if (!is_on_elements || stack->size() != 1 || !stack->back().isTensor()) return;
  at::Tensor result = laid_out_by_iterator(info, args, stack->back().toTensor().scalar_type());
  if (result.defined() && result.sizes() == stack->back().toTensor().sizes()) stack->back() = result;
}

// By PyTorch's C++ shape function, of the arguments themselves, which an op without out= leaves in shape.
std::shared_ptr<const Inferred> infer_by_shape_function(const OpInfo& info, const c10::OperatorHandle& op,
                                                        const IValue* args) {
  Stack results(args, args + info.args.size());
  if (info.has_infer || info.may_resize || !has_shape_function(op) || !call_shape_function(op, &results)) return {};
  auto inferred = std::make_shared<Inferred>();
  inferred->args.resize(info.args.size());
  SharedArgs meta(at::kMeta);
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written) continue;
    if (!args[i].isTensor()) return {};
    inferred->args[i] = meta(args[i].toTensor());
  }
  for (const IValue& result : results) {
    if (!result.isTensor()) return {};
    inferred->results.emplace_back(meta_of(result.toTensor()));
  }
  return inferred;
}

bool is_list_of_tensors(const IValue& v) {
  return v.isList() && !v.isIntList() && !v.isDoubleList() && !v.isBoolList();
}

// Of a pointwise op without a shape function, in the dtype of what the CPU made of one element.
std::shared_ptr<const Inferred> infer_by_iterator(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args,
                                                  const Stack& element) {
  if (info.has_infer || info.may_resize || !op.hasTag(at::Tag::pointwise)) return {};
  if (element.size() != 1 || !element[0].isTensor()) return {};
  auto inferred = std::make_shared<Inferred>();
  inferred->args.assign(args, args + info.args.size());
  if (std::ranges::any_of(inferred->args, is_list_of_tensors)) return {};
  SharedArgs meta(at::kMeta);
  int64_t dim = 0;
  const at::Tensor* written = nullptr;
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!args[i].isTensor() || !args[i].toTensor().defined()) continue;
    inferred->args[i] = meta(args[i].toTensor());
    dim = std::max(dim, args[i].toTensor().dim());
    if (info.args[i].is_written) written = &args[i].toTensor();
  }
  const at::Tensor& one = element[0].toTensor();
  if (one.numel() != 1 || one.dim() != dim) return {};  // it is not what pointwise ops make
  at::Tensor result = laid_out_by_iterator(info, inferred->args, one.scalar_type());
  if (!result.defined() || (written && written->sizes() != result.sizes())) return {};
  inferred->results.emplace_back(std::move(result));
  return inferred;
}

// Whether an argument of an op on lists goes with each of these tensors: it is a list of tensors like them, of numbers,
// or one number, each of which fits every dtype.
bool goes_with(const std::vector<at::Tensor>& tensors, const IValue& v) {
  auto is_small = [](const IValue& n) {
    return n.isDouble() ? std::abs(n.toDouble()) <= kLargestOfAll : n.isInt() && std::abs(n.toInt()) <= kLargestOfAll;
  };
  if (!v.isList()) return is_small(v);
  if (v.toListRef().size() != tensors.size()) return false;
  if (!v.isTensorList()) return std::ranges::all_of(v.toListRef(), is_small);
  std::vector<at::Tensor> others = v.toTensorVector();
  return std::ranges::equal(tensors, others, [](const at::Tensor& one, const at::Tensor& other) {
    bool may_overlap = other.is_alias_of(one) && other.storage_offset() != one.storage_offset();
    return !may_overlap && is_tpu(other) && other.scalar_type() == one.scalar_type() && other.sizes() == one.sizes() &&
           other.strides() == one.strides();
  });
}

// Of an op that works through lists, element by element, of tensors that are alike and that PyTorch has kernels for:
// what it makes or writes is like them. PyTorch's Python code takes the lists apart and infers each.
std::shared_ptr<const Inferred> infer_lists_in_step(const OpInfo& info, const IValue* args) {
  if (!info.is_foreach || !info.elementwise || info.may_resize) return {};
  const auto* first = std::find_if(args, args + info.args.size(), [](const IValue& v) { return v.isTensorList(); });
  if (first == args + info.args.size()) return {};
  std::vector<at::Tensor> tensors = first->toTensorVector();
  bool makes_tensors = !info.return_alias.empty();
  bool is_plain = std::ranges::all_of(tensors, [&](const at::Tensor& t) {
    auto type = t.scalar_type();
    bool has_kernels = type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
    bool is_laid_out =
        makes_tensors ? t.strides() == c10::contiguous_strides(t.sizes()) : t.is_non_overlapping_and_dense();
    return has_kernels && is_tpu(t) && is_laid_out;
  });
  if (!is_plain || !std::all_of(args, args + info.args.size(), [&](const IValue& v) { return goes_with(tensors, v); }))
    return {};
  auto inferred = std::make_shared<Inferred>();
  SharedArgs meta(at::kMeta);
  for (size_t i = 0; i < info.args.size(); i++) {
    std::vector<at::Tensor> written;
    if (info.args[i].is_written)
      std::ranges::transform(args[i].toTensorVector(), std::back_inserter(written), std::ref(meta));
    inferred->args.emplace_back(std::move(written));
  }
  if (makes_tensors) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& t : tensors) made.emplace_back(at::detail::empty_meta(t.sizes(), t.scalar_type()));
    inferred->results.emplace_back(std::move(made));
  }
  return inferred;
}

// Ops whose kernels resize an out= argument that has elements without a word; most draws of random numbers are others.
bool resizes_silently(const OpInfo& info) {
  return (info.random && !is_any_of(info.name, {"normal.Tensor_Tensor_out", "normal.float_Tensor_out"})) ||
         is_any_of(base_name(info), {"addbmm", "eye", "log_sigmoid_forward", "narrow_copy", "randperm"});
}

// Ops whose kernels resize an out= argument that has elements before they look at it: it is contiguous then, where one
// without elements lies as a new result.
bool lies_contiguously(const OpInfo& info) {
  return is_any_of(base_name(info),
                   {"cholesky_inverse", "geqrf", "linalg_eig", "linalg_householder_product", "linalg_lstsq", "ormqr"});
}

// An out= argument that has elements and another shape is resized here, with PyTorch's warning: its Python code for
// meta tensors has another one.  False where the op refuses an output without elements.
bool infer_with_outputs(const OpInfo& info, const c10::OperatorHandle& op, Inferred& inferred) {
  Stack stack = inferred.args;
  std::vector<size_t> filled;
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_out || !stack[i].isTensor() || stack[i].toTensor().numel() == 0) continue;
    filled.push_back(i);
    stack[i] = at::empty({0}, stack[i].toTensor().options());
  }
  if (filled.empty()) return false;
  Stack given = stack;
  try {
    info.has_infer ? infer_in_python(info, &stack) : run_on_meta(info, op, &stack);
  } catch (...) {
    if (is_interrupt()) throw;
    return false;
  }
  for (size_t i : filled) {
    const at::Tensor &out = inferred.args[i].toTensor(), &made = given[i].toTensor();
    if (out.sizes() == made.sizes()) continue;
    if (!resizes_silently(info)) at::native::resize_output_check(out, made.sizes());
    out.resize_(made.sizes());
    if (!lies_contiguously(info)) out.as_strided_(made.sizes(), made.strides());
  }
  inferred.results = std::move(stack);
  for (size_t i = 0; i < info.return_alias.size(); i++) {
    if (info.return_alias[i] >= 0) inferred.results[i] = inferred.args[info.return_alias[i]];
  }
  return true;
}

// Results that torch's Python code lays out as the argument, and kernels contiguously; normalized batches, and their
// gradients, keep channels_last.
void lay_out_as_kernels_do(const OpInfo& info, Inferred& inferred) {
  std::string_view name = base_name(info);
  bool is_batch_norm = name.find("batch_norm") != std::string_view::npos;
  if (!is_batch_norm && !is_any_of(name, {"glu_backward", "huber_loss_backward", "log_sigmoid_forward",
                                          "nll_loss2d_forward", "normal", "smooth_l1_loss_backward"}))
    return;
  for (size_t i = 0; i < info.return_alias.size(); i++) {
    IValue& result = inferred.results[i];
    if (info.return_alias[i] >= 0 || !result.isTensor() || !result.toTensor().defined()) continue;
    at::Tensor made = result.toTensor();
    at::MemoryFormat format = at::MemoryFormat::Contiguous;
    if (is_batch_norm) {
      const at::Tensor& input = inferred.args[name.ends_with("backward") ? 1 : 0].toTensor();
      if (input.dim() == made.dim()) format = input.suggest_memory_format();
    }
    result = at::empty(made.sizes(), made.options(), format);
  }
}

// Numbers are drawn into the out= argument, whose shape may be larger than that of the mean added to them.
void infer_around_mean(Inferred& inferred) {
  double deviation = inferred.args[1].toDouble();
  TORCH_CHECK(deviation >= 0, "normal expects std >= 0.0, but found std ", deviation);
  const at::Tensor &mean = inferred.args[0].toTensor(), &out = inferred.args[3].toTensor();
  at::DimVector shape = at::infer_size_dimvector(mean.sizes(), out.sizes());
  at::native::resize_output(out, shape);
  TORCH_CHECK(c10::canCast(at::result_type(out, mean), out.scalar_type()), "result type ", at::result_type(out, mean),
              " can't be cast to the desired output type ", out.scalar_type());
  inferred.results = {out};
}

std::shared_ptr<const Inferred> infer_on_meta(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  auto inferred = std::make_shared<Inferred>();
  SharedArgs meta(at::kMeta);
  inferred->args = convert_args(info, args, at::kMeta, std::ref(meta));
  // torch's Python code takes no dimensions for none, kernels take them for all
  if (base_name(info) == "nansum" && args[1].isIntList() && args[1].toDimVector().empty()) inferred->args[1] = IValue();
  if (info.name == "normal.Tensor_float_out") return infer_around_mean(*inferred), inferred;
  if (info.may_resize && !is_range(info) && infer_with_outputs(info, op, *inferred)) return inferred;
  inferred->results = inferred->args;
  if (info.has_infer) {
    infer_in_python(info, &inferred->results);
    for (size_t i = 0; i < info.return_alias.size(); i++) {
      int alias = info.return_alias[i];
      if (alias < 0 || info.args[alias].is_out || !args[alias].isTensor()) continue;
      TORCH_CHECK(inferred->results[i].toTensor().sizes() == args[alias].toTensor().sizes(), "output with shape ",
                  args[alias].toTensor().sizes(), " doesn't match the shape ", inferred->results[i].toTensor().sizes());
    }
  } else {
    run_on_meta(info, op, &inferred->results);
    for (size_t i = 0; i < info.args.size() && !info.may_resize; i++) {
      if (!info.args[i].is_written || info.args[i].is_out || !args[i].isTensor()) continue;
      // torch's Python code gives some of them another shape
      TORCH_CHECK(inferred->args[i].toTensor().sizes() == args[i].toTensor().sizes(), "output with shape ",
                  args[i].toTensor().sizes(), " doesn't match the shape ", inferred->args[i].toTensor().sizes());
    }
  }
  lay_out_as_kernels_do(info, *inferred);
  return inferred;
}

// ---- what kernels refuse and warn of that shape functions do not see

bool has_byte_mask(const OpInfo& info, const IValue* args) {
  bool found = false;
  for (size_t i = 0; i < info.args.size() && info.name.find("index_put") != std::string::npos; i++) {
    if (!args[i].isList()) continue;
    for_each_tensor(args[i], [&](const at::Tensor& t) { found |= t.scalar_type() == at::kByte; });
  }
  return found;
}

// Whether arguments are of dimensions or dtypes that shape functions take and kernels mostly do not.
bool is_doubtful(const OpInfo& info, const IValue* args) {
  std::string_view name = base_name(info);
  auto dims = [&](size_t i) { return args[i].toTensor().dim(); };
  auto dtype_of = [&](size_t i) { return args[i].toTensor().scalar_type(); };
  if (name == "convolution") return dims(0) != dims(1);
  if (name == "linalg_lstsq") return dims(0) < dims(1) || dims(0) > dims(1) + 1;
  if (name == "logsumexp") return args[1].isIntList() && args[1].toDimVector().empty();
  if (is_any_of(name, {"index_fill", "index_fill_", "index_select"}))
    return !c10::isIntegralType(args[2].toTensor().scalar_type(), /*includeBool=*/false);
  if (is_any_of(info.name, {"bernoulli", "bernoulli.out", "multilabel_margin_loss_forward"}))
    return !c10::isFloatingType(dtype_of(0));
  if (name == "normal" && (args[0].isTensor() || args[1].isTensor())) {
    bool has_out = info.args.back().is_out && args[info.args.size() - 1].isTensor();
    return c10::isIntegralType(dtype_of(args[0].isTensor() ? 0 : 1), /*includeBool=*/true) ||
           (has_out && c10::isIntegralType(dtype_of(info.args.size() - 1), /*includeBool=*/true));
  }
  if (name == "aminmax") return c10::isComplexType(dtype_of(0));
  if (name == "searchsorted") return args[5].isTensor() && args[5].toTensor().scalar_type() != at::kLong;
  return false;
}

// Whether neither kernels nor XLA draw or count in a dtype.
bool makes_none(const OpInfo& info, const IValue* args, at::ScalarType type) {
  if (is_any_of(base_name(info), {"linspace", "logspace"}))
    return args[2].toInt() > 1 && (c10::isFloat8Type(type) || c10::isBarebonesUnsignedType(type) || type == at::kBool);
  return c10::isFloat8Type(type) &&
         is_any_of(base_name(info), {"cauchy_", "exponential_", "geometric_", "log_normal_", "normal", "normal_"});
}

void refuse_as_kernels_do(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  for (size_t i = 0; (info.random || is_range(info)) && i < info.args.size(); i++) {
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (t.defined() && makes_none(info, args, t.scalar_type())) try_on_cpu(info, op, args);  // which draws nothing
    });
  }
  if (base_name(info) == "nansum" && args[1].isIntList()) {
    auto dims = args[1].toDimVector();
    if (!dims.empty()) at::dim_list_to_bitset(dims, static_cast<size_t>(args[0].toTensor().dim()));
  }
  // the CPU, asked of made-up pivots, would read outside of the matrix
  if (is_any_of(base_name(info), {"linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"})) {
    for (size_t i = 0; i < info.args.size(); i++) {
      if (!info.args[i].is_out || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
      TORCH_CHECK(args[i].toTensor().dtype() == args[0].toTensor().dtype(), "Expected out tensor to have dtype ",
                  args[0].toTensor().dtype(), ", but got ", args[i].toTensor().dtype(), " instead");
    }
  }
  if (base_name(info) == "multinomial") {
    const at::Tensor& x = args[0].toTensor();
    TORCH_CHECK(x.dim() == 0 || x.size(-1) <= 1 << 24, "number of categories cannot exceed 2^24");
  }
  if (is_doubtful(info, args)) raise_cpu_error(info, op, args);
  // one number is filled in, which bytes are no mask for
  if (has_byte_mask(info, args) && args[2].toTensor().numel() == 1 && !args[3].toBool()) try_on_cpu(info, op, args);
}

void warn_of_freedom(const OpInfo& info, const IValue* args, const at::Tensor& made) {
  int64_t numel = args[0].toTensor().numel();
  if (made.numel() == 0 || args[2].isNone() && numel / made.numel() > 1) return;
  double correction = args[2].isNone() ? 1 : args[2].toScalar().toDouble();
  if (static_cast<double>(numel / made.numel()) - correction > 0) return;
  TORCH_WARN(base_name(info),
             "(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor (input "
             "numel divided by output numel).");
}

// Kernels of which each call, on whatever it is, warns that they are to go or to change.
bool always_warns(const OpInfo& info) {
  return is_any_of(base_name(info), {"_aminmax", "cholesky", "index_reduce", "index_reduce_", "triangular_solve"});
}

void warn_as_kernels_do(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args,
                        const Inferred& inferred) {
  std::string_view name = base_name(info);
  try {
    if (name == "var" || name == "std" || name == "var_mean" || name == "std_mean") {
      warn_of_freedom(info, args, inferred.results[0].toTensor());
    } else if (name == "searchsorted" || name == "bucketize") {
      bool has_gaps = false;
      auto shorten = [&](const at::Tensor& t) {
        has_gaps |= !t.is_contiguous();
        return ones_like(t, 2, !t.is_contiguous());
      };
      Stack stack = convert_args(info, args, at::kCPU, shorten);
      if (has_gaps) op.callBoxed(&stack);
    } else if (always_warns(info)) {
      try_on_cpu(info, op, args, true);
    } else if (has_byte_mask(info, args)) {
      TORCH_WARN("indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.");
    }
  } catch (const c10::Error&) {  // of what was made up here
  }
}

std::shared_ptr<const Inferred> infer_call(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args,
                                           bool odd) {
  std::optional<std::string> signature = info.may_resize || odd ? std::nullopt : signature_of(info, args);
  if (signature) {
    if (auto known = find_inferred(*signature)) return known;
  }
  if (auto inferred = odd ? nullptr : infer_lists_in_step(info, args)) {
    count_inference(info, false);
    if (signature) keep_inferred(std::move(*signature), inferred);
    return inferred;
  }
  bool may_ask_cpu = total_bytes(info, args) <= kMaxErrorBytes && has_cpu_kernel(op);
  if (odd) check_overlap(info, op, args, may_ask_cpu && !info.random);
  Stack element = check_dtypes(info, op, args, may_ask_cpu);
  std::shared_ptr<const Inferred> inferred;
  try {
    inferred = infer_by_shape_function(info, op, args);
    if (!inferred) inferred = infer_by_iterator(info, op, args, element);
    count_inference(info, !inferred);
    if (!inferred) inferred = infer_on_meta(info, op, args);
  } catch (...) {
    if (!may_ask_cpu || is_interrupt() || !has_words_of_cpu(info, op, args)) throw;
    return nullptr;  // the CPU can do it
  }
  if (signature) keep_inferred(std::move(*signature), inferred);
  return inferred;
}

}  // namespace

bool is_refused_by_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  PlainDispatch plain;
  try {
    try_on_cpu(info, op, args);
  } catch (const c10::Error& error) {
    return !lacks_kernel(info, args, error);
  }
  return false;
}

// XLA has no complex32; the CPU has. Half precision may be a part of one.
bool is_complex_half(const IValue& value) {
  bool found = false;
  for_each_tensor(value, [&](const at::Tensor& t) {
    if (!t.defined()) return;
    found |= t.scalar_type() == at::kComplexHalf;
    if (t.scalar_type() != at::kHalf || !t.is_privateuseone()) return;
    StateGuard guard(state_lock);
    const BaseRef& base = storage_of(t)->base;
    found |= base && base->dtype == at::kComplexHalf;
  });
  return found;
}

std::shared_ptr<const Inferred> infer(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  check_devices(info, args);
  if (reads_through_mask(info, args) || std::any_of(args, args + info.args.size(), is_complex_half)) return nullptr;
  bool odd = is_odd(info, args);  // the answer may lie in which tensors are the same
  PlainDispatch plain;
  refuse_as_kernels_do(info, op, args);
  auto inferred = infer_call(info, op, args, odd);
  if (inferred && std::ranges::any_of(inferred->results, is_complex_half)) return nullptr;
  if (inferred && !odd) warn_as_kernels_do(info, op, args, *inferred);
  return inferred;
}

TORCH_LIBRARY_IMPL(_, PrivateUse2, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&skip_kernel>()); }

}  // namespace torchtpu
