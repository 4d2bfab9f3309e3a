#include "infer.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "bridge.h"

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
                                K::FuncTorchDynamicLayerBackMode, K::FuncTorchDynamicLayerFrontMode, K::FuncTorchBatched,
                                K::FuncTorchVmapMode, K::FuncTorchGradWrapper, K::FuncTorchBatchedDecomposition}) |
           c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  }
  at::impl::TorchFunctionDisabledState function_state_;
  c10::impl::ExcludeDispatchKeyGuard exclude_{modes()};
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

// Meta tensors that share storages as the arguments do.
class MetaArgs {
 public:
  at::Tensor operator()(const at::Tensor& t) {
    if (!is_tpu(t)) return t;
    auto* s = storage_of(t);
    at::Tensor m = at::empty({0}, t.options().device(at::kMeta));
    auto [it, is_new] = storages_.try_emplace(s, m.storage());
    if (is_new) {
      m.storage().unsafeGetStorageImpl()->set_nbytes(s->nbytes());
    } else {
      m.unsafeGetTensorImpl()->set_storage_keep_dtype(it->second);
    }
    m.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return m;
  }

 private:
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

void check_overlap(const OpInfo& info, const IValue* args) {
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const at::Tensor& written = args[i].toTensor();
    at::assert_no_internal_overlap(written);
    for (size_t j = 0; j < info.args.size(); j++) {
      if (i == j) continue;
      for_each_tensor(args[j], [&](const at::Tensor& t) {
        if (is_tpu(t)) at::assert_no_partial_overlap(written, t);
      });
    }
  }
}

// Reading through a mask has a shape that depends on data; writing through one has not.
bool reads_through_mask(const OpInfo& info, const IValue* args) {
  bool found = false;
  bool may_read = info.has_optional_list && info.name.find("index_put") == std::string::npos;
  for (size_t i = 0; i < info.args.size() && may_read; i++) {
    if (!args[i].isList()) continue;
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    });
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

// torch's meta kernels are Python with wordings of their own: the CPU kernel's error is the one users know.
void raise_cpu_error(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  if (total_bytes(info, args) > kMaxErrorBytes) return;
  Stack stack = convert_args(info, args, at::kCPU, [](const at::Tensor& t) {
    if (!is_tpu(t)) return t;
    at::Tensor cpu = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
    return t.is_non_overlapping_and_dense() ? cpu.zero_() : cpu;
  });
  op.callBoxed(&stack);
}

}  // namespace

std::optional<Inferred> infer(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args) {
  check_devices(info, args);
  if (reads_through_mask(info, args)) return std::nullopt;
  PlainDispatch plain;
  check_overlap(info, args);
  Inferred inferred;
  MetaArgs meta;
  inferred.args = convert_args(info, args, at::kMeta, std::ref(meta));
  inferred.results = inferred.args;
  try {
    if (info.has_infer) {
      infer_in_python(info, &inferred.results);
    } else {
      op.callBoxed(&inferred.results);
    }
  } catch (...) {
    auto meta_error = std::current_exception();
    if (total_bytes(info, args) > kMaxErrorBytes) std::rethrow_exception(meta_error);
    raise_cpu_error(info, op, args);
    return std::nullopt;  // the CPU can do it
  }
  return inferred;
}

}  // namespace torchtpu
