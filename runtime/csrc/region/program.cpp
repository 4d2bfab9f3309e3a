// A plan, or a pending region, as Python's runtime.ir.program.Program.

#include "region/program.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <bit>

namespace torchtpu {

namespace {

const auto kBool = caffe2::TypeMeta::Make<bool>();

// A frozen dataclass with slots.  Instances are made as its own `__init__` makes them, a Python call each, of which a
// region takes hundreds.
class FrozenClass {
 public:
  explicit FrozenClass(py::object type) : type_(std::move(type)), fields_(type_.attr("__slots__")) {}

  template <class... T>
  py::object operator()(const T&... values) const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    if (!made) throw py::error_already_set();
    TORCH_INTERNAL_ASSERT(sizeof...(values) <= fields_.size());
    size_t i = 0;
    (set(made, i++, as_object(values)), ...);
    for (; i < fields_.size(); i++) set(made, i, py::none());
    return made;
  }

 private:
  static py::object as_object(const py::object& given) { return given; }
  template <class T>
    requires(!std::is_base_of_v<py::object, T>)
  static py::object as_object(const T& given) {
    return py::cast(given);
  }

  void set(const py::object& made, size_t i, const py::object& value) const {
    if (PyObject_GenericSetAttr(made.ptr(), PyTuple_GET_ITEM(fields_.ptr(), i), value.ptr())) {
      throw py::error_already_set();
    }
  }

  py::object type_;
  py::tuple fields_;
};

struct RegionClasses {
  py::module_ m = py::module_::import("torchtpu.runtime.ir.program");
  py::object base = m.attr("Base");
  FrozenClass lifted{m.attr("Lifted")}, operand{m.attr("Operand")}, scalar{m.attr("Scalar")}, random{m.attr("Random")},
      result{m.attr("Result")}, write{m.attr("Write")}, op{m.attr("Op")}, program{m.attr("Program")};
};

const RegionClasses& classes() {
  static auto* found = new RegionClasses();
  return *found;
}

template <class T>
py::tuple as_tuple(const T& values) {
  py::tuple t(values.size());
  for (size_t i = 0; i < values.size(); i++) t[i] = py::cast(values[i]);
  return t;
}

template <class T>
py::tuple as_tuple(const T* values, size_t n) {
  py::tuple t(n);
  for (size_t i = 0; i < n; i++) t[i] = py::cast(values[i]);
  return t;
}

class Converter {
 public:
  py::object convert(const Node* node) {
    const OpInfo& info = *node->info;
    py::tuple args(node->args.size());
    lifted_offsets_.clear();
    knows_only_bools_ = is_of_bools(*node);
    static const ArgInfo kNothing;
    for (size_t i = 0; i < node->args.size(); i++) {
      args[i] = arg(node->args[i], i < info.args.size() ? info.args[i] : kNothing, static_cast<int>(i));
    }
    py::tuple results(node->returns.size()), writes(node->writes.size());
    for (size_t i = 0; i < node->returns.size(); i++) results[i] = result(node->returns[i]);
    for (size_t i = 0; i < node->writes.size(); i++) writes[i] = write(node->writes[i]);
    return classes().op(info.name, args, results, writes, node->line, settings(*node));
  }

  py::object base(const Base* b) {
    auto& known = bases_[b];
    if (!known) known = classes().base(as_tuple(b->shape), py::cast(b->dtype));
    return known;
  }

  int floats = 0, ints = 0;

 private:
  py::object settings(const Node& node) {
    std::string words = node.info->multiplies ? name_of(node.settings.precision) : "";
    if (node.settings.default_dtype != at::kFloat) {
      words += (words.empty() ? "" : " ") + py::cast<std::string>(py::str(py::cast(node.settings.default_dtype)));
    }
    return words.empty() ? py::object(py::none()) : py::str(words);
  }

  static const char* name_of(at::Float32MatmulPrecision precision) {
    switch (precision) {
      case at::Float32MatmulPrecision::HIGHEST:
        return "highest";
      case at::Float32MatmulPrecision::HIGH:
        return "high";
      case at::Float32MatmulPrecision::MEDIUM:
        return "medium";
    }
    return "";
  }

  py::object lifted(const char* kind) { return classes().lifted(kind, kind[0] == 'f' ? floats++ : ints++); }

  static bool is_of_bools(const Node& node) {
    auto are_bools = [](const auto& of) {
      return std::all_of(of.tensors.begin(), of.tensors.end(), [](const auto& t) { return t.dtype == kBool; });
    };
    for (size_t i = 0; i < node.args.size(); i++) {
      bool is_out = i < node.info->args.size() && node.info->args[i].is_out;
      if (!is_out && !are_bools(node.args[i])) return false;
    }
    return std::all_of(node.returns.begin(), node.returns.end(), are_bools);
  }

  // Beside other dtypes a bool is 1 or 0 to PyTorch.
  bool is_int(const NumberKey& key) const { return key.kind == NumberKey::kBool && !knows_only_bools_; }

  py::object scalar(const NumberKey& key) { return is_int(key) ? py::int_(key.bits) : number(key); }

  py::object number(const NumberKey& key) {
    if (key.is_lifted) return lifted(key.kind == NumberKey::kDouble ? "f" : "i");
    switch (key.kind) {
      case NumberKey::kInt:
        return py::int_(key.bits);
      case NumberKey::kDouble:
        return py::float_(std::bit_cast<double>(key.bits));
      case NumberKey::kComplex:
        return py::reinterpret_steal<py::object>(
            PyComplex_FromDoubles(std::bit_cast<double>(key.bits), std::bit_cast<double>(key.imaginary_bits)));
      case NumberKey::kBool:
        return py::bool_(key.bits != 0);
    }
    return py::none();
  }

  py::object operand(const TensorKey& key, int arg, int element) {
    if (key.is_none) return py::none();
    size_t dims = key.geometry.size() / 2;
    py::object offset = py::int_(key.offset);
    if (key.is_offset_lifted) offset = lifted_offsets_[{arg, element}] = lifted("i");
    py::object value = py::none();
    if (key.value != kNoValue) value = py::int_(key.value);
    return classes().operand(value, as_tuple(key.geometry.data(), dims), as_tuple(key.geometry.data() + dims, dims),
                             offset, py::cast(key.dtype.toScalarType()), base(key.base.get()));
  }

  py::object arg(const ArgKey& key, const ArgInfo& info, int index) {
    switch (key.kind) {
      case ArgKey::kNone:
        return py::none();
      case ArgKey::kTensor:
        return operand(key.tensors[0], index, -1);
      case ArgKey::kTensors: {
        py::tuple list(key.tensors.size());
        for (size_t e = 0; e < key.tensors.size(); e++) list[e] = operand(key.tensors[e], index, static_cast<int>(e));
        return list;
      }
      case ArgKey::kNumber:
        if (info.role == ArgRole::kDtype) return py::cast(static_cast<at::ScalarType>(key.number.bits));
        if (info.role == ArgRole::kPlacement) return py::none();
        return info.is_number ? scalar(key.number) : number(key.number);
      case ArgKey::kNumbers: {
        py::tuple list(key.numbers.size());
        for (size_t e = 0; e < key.numbers.size(); e++) {
          list[e] = info.is_number ? scalar(key.numbers[e]) : number(key.numbers[e]);
        }
        return list;
      }
      case ArgKey::kInts:
        return as_tuple(key.ints);
      case ArgKey::kCpuScalar:
        if (key.is_wrapped && key.dtype == kBool && !knows_only_bools_) {
          return classes().scalar(scalar(key.number), py::cast(at::kLong), true);
        }
        return classes().scalar(number(key.number), py::cast(key.dtype.toScalarType()), key.is_wrapped);
      case ArgKey::kRandom: {
        py::object seed = lifted("i");
        return classes().random(seed, lifted("i"));
      }
      case ArgKey::kOther:
        if (info.role == ArgRole::kPlacement) return py::none();
        return plain(torch::jit::toPyObject(key.other));
    }
    return py::none();
  }

  py::object plain(py::object value) { return py::isinstance<py::list>(value) ? py::tuple(value) : std::move(value); }

  py::object tensor(const TensorMeta& m) {
    if (m.is_undefined) return py::none();
    return classes().result(m.value, as_tuple(m.sizes), as_tuple(m.strides), py::cast(m.dtype.toScalarType()),
                            base(m.base.get()));
  }

  py::object result(const ReturnMeta& ret) {
    if (ret.kind == ReturnMeta::kTensor) return tensor(ret.tensors[0]);
    if (ret.kind != ReturnMeta::kList) return py::none();
    py::tuple list(ret.tensors.size());
    for (size_t i = 0; i < ret.tensors.size(); i++) list[i] = tensor(ret.tensors[i]);
    return list;
  }

  py::object write(const WriteMeta& w) {
    py::object element = w.element < 0 ? py::object(py::none()) : py::int_(w.element);
    auto found = lifted_offsets_.find({w.arg, w.element});
    py::object offset = found == lifted_offsets_.end() ? py::object(py::int_(w.offset)) : found->second;
    return classes().write(w.arg, element, w.value, as_tuple(w.meta.sizes), as_tuple(w.meta.strides), offset,
                           py::cast(w.meta.dtype.toScalarType()), base(w.meta.base.get()), w.replaces);
  }

  bool knows_only_bools_ = false;  // the op that is converted
  std::map<std::pair<int, int>, py::object> lifted_offsets_;
  std::unordered_map<const Base*, py::object> bases_;
};

}  // namespace

py::object make_program(const Node* node, const std::vector<BaseRef>& inputs, const std::vector<int32_t>& outputs,
                        const std::vector<uint8_t>& donated, const std::string& line) {
  const std::vector<const Node*> path = path_to(node);
  Converter converter;
  py::tuple ops(path.size()), bases(inputs.size());
  for (size_t i = 0; i < path.size(); i++) ops[i] = converter.convert(path[i]);
  for (size_t i = 0; i < inputs.size(); i++) bases[i] = converter.base(inputs[i].get());
  std::vector<int> taken;
  for (size_t i = 0; i < donated.size(); i++) {
    if (donated[i]) taken.push_back(static_cast<int>(i));
  }
  return classes().program(ops, bases, as_tuple(outputs), as_tuple(taken), converter.floats, converter.ints, line);
}

}  // namespace torchtpu
