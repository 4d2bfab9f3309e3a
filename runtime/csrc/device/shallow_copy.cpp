// Whether `tensor.data = other` and Module.to may take over storage and geometry in place: yes between dense strided
// tensors, as between CPU and CUDA, so that `.to("tpu")` keeps tied weights tied and an optimizer built before it
// valid.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {

bool is_dense_strided(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.key_set().has_all(c10::DispatchKeySet(c10::DispatchKey::Dense)) &&
         t.unsafeGetTensorImpl()->has_storage();
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return is_dense_strided(self) && is_dense_strided(from);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}
