#include "region/replay.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bind/bridge.h"
#include "device/gil.h"

namespace torchtpu {

namespace {

bool is_slot(const py::handle& value) { return py::isinstance<Slot>(value); }

bool has_slots(const py::handle& value) {
  if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) return false;
  for (auto element : value) {
    if (is_slot(element)) return true;
  }
  return false;
}

c10::TypePtr without_optional(c10::TypePtr type) {
  auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

// An input as it is given: a tensor, or a number of a symbolic shape.
IValue read_input(const py::handle& value) {
  if (THPVariable_Check(value.ptr())) return THPVariable_Unpack(value.ptr());
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  TORCH_CHECK_TYPE(value.is_none(), "a compiled graph takes tensors and numbers, not ", py::str(py::type::of(value)));
  return {};
}

// A number given for a tensor, as Python's bindings take it.
at::Tensor wrap_number(const IValue& number) {
  at::Tensor t = c10::scalar_to_tensor(number.toScalar());
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

// The line that a replayed op was traced from, while it is recorded.
class LineScope {
 public:
  explicit LineScope(const std::string& line) : before_(std::exchange(replayed_line, &line)) {}
  ~LineScope() { replayed_line = before_; }

 private:
  const std::string* before_;
};

}  // namespace

Replay::Arg Replay::make_arg(const c10::Argument& declared, const py::handle& value) {
  Arg arg;
  auto type = without_optional(declared.real_type());
  arg.is_tensor = type->kind() == c10::TypeKind::TensorType;
  bool is_number = PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyComplex_Check(value.ptr());
  if (is_slot(value)) {
    arg.slots.push_back(value.cast<Slot>().index);
  } else if (has_slots(value)) {
    arg.is_list = true;
    arg.element_type = type->expectRef<c10::ListType>().getElementType();
    if (arg.element_type->kind() == c10::TypeKind::SymIntType) arg.element_type = c10::IntType::get();
    for (auto element : value) {
      bool is_given = is_slot(element);
      arg.slots.push_back(is_given ? element.cast<Slot>().index : -1);
      arg.elements.push_back(is_given ? IValue() : torch::jit::toIValue(element, arg.element_type));
    }
  } else if (arg.is_tensor && is_number) {
    arg.value = wrap_number(torch::jit::toIValue(value, c10::NumberType::get()));
  } else {
    arg.value = torch::jit::toIValue(value, declared.real_type());
  }
  return arg;
}

void Replay::set_constant(int slot, const at::Tensor& value) {
  constants_.emplace_back(slot, value);
  see(slot);
}

void Replay::add_op(const std::string& name, const std::string& overload, const py::list& args,
                    std::vector<int> results, std::vector<int> dying, std::string line) {
  Op op{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())};
  const auto& declared = op.handle->schema().arguments();
  TORCH_CHECK(args.size() <= declared.size(), "torchtpu: too many arguments for ", name);
  for (size_t i = 0; i < declared.size(); i++) {
    if (i < args.size()) {
      op.args.push_back(make_arg(declared[i], args[i]));
    } else {
      op.args.emplace_back().value = declared[i].default_value().value_or(IValue());
    }
  }
  for (int slot : results) see(slot);
  op.results = std::move(results);
  op.dying = std::move(dying);
  op.line = std::move(line);
  ops_.push_back(std::move(op));
}

void Replay::add_getitem(int slot, int index, int result, std::vector<int> dying) {
  see(result);
  auto& op = ops_.emplace_back();
  op.list = slot;
  op.index = index;
  op.results = {result};
  op.dying = std::move(dying);
}

IValue Replay::take(const Arg& arg, const Values& values) {
  if (!arg.is_list) {
    const IValue& value = arg.slots.empty() ? arg.value : values[arg.slots[0]];
    return arg.is_tensor && value.isScalar() ? IValue(wrap_number(value)) : value;
  }
  c10::impl::GenericList list(arg.element_type);
  list.reserve(arg.slots.size());
  for (size_t i = 0; i < arg.slots.size(); i++) {
    list.push_back(arg.slots[i] < 0 ? arg.elements[i] : values[arg.slots[i]]);
  }
  return list;
}

void Replay::run_op(const Op& op, Values& values, Stack& stack) const {
  if (op.handle) {
    for (const auto& arg : op.args) stack.push_back(take(arg, values));
    LineScope scope(op.line);
    op.handle->callBoxed(&stack);
    for (size_t i = 0; i < op.results.size(); i++) values[op.results[i]] = std::move(stack[i]);
    stack.clear();
  } else {
    values[op.results[0]] = values[op.list].toListRef()[op.index];
  }
  for (int slot : op.dying) values[slot] = {};
}

py::tuple Replay::run(py::list inputs) const {
  TORCH_CHECK(py::len(inputs) == static_cast<size_t>(inputs_), "a compiled graph of ", inputs_, " inputs got ",
              py::len(inputs));
  Values values(slots_);
  for (int i = 0; i < inputs_; i++) values[i] = read_input(inputs[i]);
  for (const auto& [slot, value] : constants_) values[slot] = value;
  inputs.attr("clear")();
  {
    ReleaseGil release;
    at::AutoDispatchBelowADInplaceOrView guard;  // AOTAutograd has traced what autograd does
    Stack stack;
    for (const auto& op : ops_) run_op(op, values, stack);
  }
  py::tuple outputs(outputs_.size());
  for (size_t i = 0; i < outputs_.size(); i++) {
    outputs[i] = outputs_[i] < 0 ? py::object(py::none()) : torch::jit::toPyObject(values[outputs_[i]]);
  }
  return outputs;
}

void bind_replay(py::module& m) {
  py::class_<Slot>(m, "Slot").def(py::init<int>()).def_readonly("index", &Slot::index);
  py::class_<Replay>(m, "Replay")
      .def(py::init<int>())
      .def("set_constant", &Replay::set_constant)
      .def("add_op", &Replay::add_op)
      .def("add_getitem", &Replay::add_getitem)
      .def("set_outputs", &Replay::set_outputs)
      .def("run", torch::wrap_pybind_function(&Replay::run));
}

}  // namespace torchtpu
