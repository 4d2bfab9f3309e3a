// Errors in plain words for ops on sparse and strided nested tensors, which this device does not have.
#include <ATen/NestedTensorImpl.h>
#include <torch/library.h>

namespace {

void refuse_sparse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": sparse tensors are not supported on tpu; use dense tensors, or move to the CPU first");
}

void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": strided nested tensors are not supported on tpu; make them with layout=torch.jagged, "
                              "or keep them on the CPU");
}

// Autograd asks each result for its sizes where an exception would end the process.
at::Tensor nested_sizes(const at::Tensor& self) {
  return static_cast<at::native::NestedTensorImpl*>(self.unsafeGetTensorImpl())->get_nested_sizes();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
}
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) { m.impl("_nested_tensor_size", nested_sizes); }
