// Ops whose route is decided above the device, by whether the call is differentiated or traced.

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_convolution.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/linear_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "device/gil.h"
#include "record/unboxed.h"

namespace py = pybind11;

namespace at::native {

namespace {

bool has_forward_grad(const Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }

bool has_matching_shapes(const Tensor& query, const Tensor& key, const Tensor& value, bool is_grouped) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  if (query.sym_numel() == 0 || key.sym_numel() == 0 || value.sym_numel() == 0) return false;
  auto size = [](const Tensor& t, int64_t dim) { return t.sym_size(dim); };
  bool heads_match = size(query, 1) == size(key, 1) || (is_grouped && size(query, 1) % size(key, 1) == 0);
  return heads_match && size(query, 0) == size(key, 0) && size(query, 0) == size(value, 0) &&
         size(key, 1) == size(value, 1) && size(key, 2) == size(value, 2) && size(query, 3) == size(key, 3);
}

// Whether the call is under torch.func.vmap, which has no rule for the fused op.
bool is_batched(const Tensor& t) {
  if (t.key_set().has(DispatchKey::FuncTorchBatched)) return true;
  if (!t.key_set().has(DispatchKey::FuncTorchGradWrapper)) return false;
  torchtpu::AcquireGil gil;
  auto functorch = py::module_::import("torch._C._functorch");  // its C++ headers need one that PyTorch does not bring
  py::object vmap = functorch.attr("TransformType").attr("Vmap");
  for (auto transform : functorch.attr("get_interpreter_stack")()) {
    if (transform.attr("key")().equal(vmap)) return true;
  }
  return false;
}

// The fused op takes what is dense, of matching shapes and differentiated in reverse; the composite takes the rest.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool is_grouped) {
  bool is_fused = at::globalContext().userEnabledOverrideableSDP() && isFloatingType(query.scalar_type()) &&
                  has_matching_shapes(query, key, value, is_grouped) && !has_forward_grad(query) &&
                  !has_forward_grad(key) && !has_forward_grad(value) && !is_batched(query) && !is_batched(key) &&
                  !is_batched(value);
  if (!is_fused) {
    TORCH_CHECK(at::globalContext().userEnabledMathSDP(), "No available kernel. Aborting execution.");
  }
  return static_cast<int64_t>(is_fused ? SDPBackend::overrideable : SDPBackend::math);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

}  // namespace at::native

namespace torchtpu {

namespace {

// One op forward and one backward, which keep the input's dimensions, by linear's generated autograd kernel. It has no
// forward-mode formula, no second derivative of complex numbers and no derivative by a weight that is a vector, and
// whoever watches the dispatch expects the ops that CUDA shows: these take the composite path.
at::Tensor linear(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::linear", "");
  // Of all devices only this one has it: the others' autograd keys hold the composite.
  static const auto generated = handle.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradNestedTensor);
  auto is_dual = [](const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); };
  if (keys.has(c10::DispatchKey::Python) || input.is_complex() || weight.dim() != 2 || is_dual(input) ||
      is_dual(weight) || (bias && is_dual(*bias))) {
    return at::native::linear(input, weight, bias);
  }
  torch::jit::Stack stack{input, weight, bias};
  generated.callBoxed(handle, keys, &stack);
  return stack[0].toTensor();
}

// TorchScript's tracer records no convolution, but the op that other devices' kernels call; without that, the result
// would be a constant of the traced graph.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool is_transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  if (at::tracer::impl::is_dispatch_enabled()) {
    const auto& context = at::globalContext();
    return at::_convolution_symint(input, weight, bias, stride, padding, dilation, is_transposed, output_padding,
                                   std::move(groups), context.benchmarkCuDNN(), context.deterministicCuDNN(),
                                   context.userEnabledCuDNN(), context.allowTF32CuDNN());
  }
  static const RecordKernel& kernel = kernel_of("convolution");
  Results results;
  record(kernel, results, input, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups);
  return std::move(results[0]).toTensor();
}

at::Tensor traced_convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              bool is_transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, bool, bool,
                              bool, bool) {
  return at::convolution_symint(input, weight, bias, stride, padding, dilation, is_transposed, output_padding,
                                std::move(groups));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("linear", &linear); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution", &convolution);
  m.impl("_convolution", &traced_convolution);
}

}  // namespace
}  // namespace torchtpu
