// Registers a boxed kernel in the dispatcher for each op of the table of lowerings.

#include <torch/library.h>

#include <set>

#include "record/unboxed.h"

namespace torchtpu {

namespace {

auto* kernels = new std::unordered_map<std::string, const RecordKernel*>();

// In no order: polygamma takes its number first, polygamma_ second.
std::set<std::string> argument_types(const c10::FunctionSchema& schema) {
  std::set<std::string> types;
  for (const auto& arg : schema.arguments()) {
    if (!arg.is_out()) types.insert(arg.name() + ":" + arg.real_type()->str());
  }
  return types;
}

bool has_out(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& a) { return a.is_out(); });
}

bool is_mutable(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const auto& a) { return a.alias_info() && a.alias_info()->isWrite(); });
}

// Composite ops are taken apart above autograd: a kernel of ours would lose their gradient.
bool may_register(const c10::OperatorHandle& handle) {
  return !handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         handle.hasKernelForDispatchKey(c10::DispatchKey::Autograd) ||
         handle.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
}

// Ops with kernels of this backend's own (device/), which record them by `kernel_of`.
bool is_native(const std::string& name) { return name == "copy_" || name == "convolution"; }

using Overloads = std::unordered_map<std::string, std::vector<c10::OperatorHandle>>;

Overloads aten_overloads() {
  Overloads overloads;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    if (auto handle = dispatcher.findSchema(name)) overloads[name.name.substr(6)].push_back(*handle);
  }
  return overloads;
}

// The functional op itself, its in-place form and its out= form.  Names of overloads do not tell: pow_.Scalar is the
// in-place form of pow.Tensor_Scalar.
std::vector<c10::OperatorHandle> variants_of(const c10::OperatorHandle& handle, const Overloads& overloads) {
  std::vector<c10::OperatorHandle> found{handle};
  const auto& schema = handle.schema();
  if (is_mutable(schema)) return found;
  std::string name = schema.name().substr(6);
  auto types = argument_types(schema);
  if (auto it = overloads.find(name); it != overloads.end()) {
    for (const auto& other : it->second) {
      if (has_out(other.schema()) && argument_types(other.schema()) == types) found.push_back(other);
    }
  }
  if (auto it = overloads.find(name + "_"); it != overloads.end()) {
    for (const auto& other : it->second) {
      if (is_mutable(other.schema()) && argument_types(other.schema()) == types) found.push_back(other);
    }
  }
  return found;
}

struct Boxed final : c10::OperatorKernel {
  explicit Boxed(const RecordKernel& kernel) : kernel(kernel) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const { kernel.call(stack); }
  const RecordKernel& kernel;
};

void install(const RecordKernel& kernel, torch::Library& library) {
  if (auto unboxed = unboxed_kernel(&kernel)) {
    static auto* handles = new std::vector<c10::RegistrationHandleRAII>();
    handles->push_back(c10::Dispatcher::singleton().registerImpl(
        kernel.info.handle.operator_name(), c10::DispatchKey::PrivateUse1, std::move(unboxed->function),
        unboxed->signature, nullptr, "torchtpu"));
    return;
  }
  library.impl(kernel.info.name.c_str(), torch::CppFunction::makeFromBoxedKernel(
                                             c10::BoxedKernel::makeFromFunctor(std::make_unique<Boxed>(kernel))));
}

}  // namespace

void register_op(const std::string& name, const OpFacts& facts) {
  auto dot = name.find('.');
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
  auto* library = new torch::Library(torch::Library::IMPL, std::string(*handle.schema().getNamespace()),
                                     c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  install(*new RecordKernel(handle, facts), *library);
}

std::unordered_map<std::string, std::string> register_ops(const std::vector<std::pair<std::string, OpFacts>>& table) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto overloads = aten_overloads();
  std::unordered_map<std::string, std::string> served;
  std::unordered_map<std::string, bool> is_listed;
  for (const auto& [name, facts] : table) is_listed[name] = true;
  for (const auto& [name, facts] : table) {
    if (name.find("::") != std::string::npos) {
      register_op(name, facts);
      continue;
    }
    auto dot = name.find('.');
    auto handle = c10::Dispatcher::singleton().findSchema(
        {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    TORCH_CHECK(handle, "torchtpu: aten::", name, " has a lowering but PyTorch has no such op");
    TORCH_CHECK(may_register(*handle), "torchtpu: aten::", name, " is composite and must not have a lowering");
    for (const auto& variant : variants_of(*handle, overloads)) {
      auto kernel = std::make_unique<RecordKernel>(variant, facts);
      std::string variant_name = kernel->info.name;
      if (served.count(variant_name) ||
          (variant_name != name && (is_listed.count(variant_name) || !may_register(variant))))
        continue;
      served[variant_name] = name;
      const RecordKernel* known = kernel.release();  // lives as long as the dispatcher
      (*kernels)[variant_name] = known;
      if (!is_native(variant_name)) install(*known, *library);
    }
  }
  return served;
}

const RecordKernel& kernel_of(const std::string& name) { return *kernels->at(name); }

void record_copy(const at::Tensor& dst, const at::Tensor& src) {
  static const RecordKernel& kernel = kernel_of("copy_");
  Results results;
  record(kernel, results, dst, src, false);
}

}  // namespace torchtpu
