#include "record/trie.h"

#include <bit>

#include "record/recorder.h"

namespace torchtpu {

namespace {

NumberKey complex_key(c10::complex<double> value) {
  return {NumberKey::kComplex, false, std::bit_cast<int64_t>(value.real()), std::bit_cast<int64_t>(value.imag())};
}

// A number read from an IValue or a 0-dim CPU tensor; false for what is none.
bool read_number(const IValue& v, NumberKey& key) {
  if (v.isInt()) {
    key = {NumberKey::kInt, false, v.toInt()};
  } else if (v.isDouble()) {
    key = {NumberKey::kDouble, false, std::bit_cast<int64_t>(v.toDouble())};
  } else if (v.isBool()) {
    key = {NumberKey::kBool, false, v.toBool()};
  } else if (v.isComplexDouble()) {
    key = complex_key(v.toComplexDouble());
  } else {
    return false;
  }
  return true;
}

bool read_cpu_scalar(const at::Tensor& t, NumberKey& key) {
  const auto* impl = t.unsafeGetTensorImpl();
  const void* data = impl->storage_initialized() ? t.const_data_ptr() : nullptr;
  if (!data || impl->is_conj() || impl->is_neg()) return false;
  double value;
  switch (impl->dtype().toScalarType()) {
    case at::kLong:
      key = {NumberKey::kInt, false, *static_cast<const int64_t*>(data)};
      return true;
    case at::kBool:
      key = {NumberKey::kBool, false, *static_cast<const bool*>(data)};
      return true;
    case at::kDouble:
      value = *static_cast<const double*>(data);
      break;
    case at::kFloat:
      value = *static_cast<const float*>(data);
      break;
    case at::kBFloat16:
      value = *static_cast<const at::BFloat16*>(data);
      break;
    case at::kHalf:
      value = *static_cast<const at::Half*>(data);
      break;
    case at::kInt:
      key = {NumberKey::kInt, false, *static_cast<const int32_t*>(data)};
      return true;
    case at::kShort:
      key = {NumberKey::kInt, false, *static_cast<const int16_t*>(data)};
      return true;
    case at::kChar:
      key = {NumberKey::kInt, false, *static_cast<const int8_t*>(data)};
      return true;
    case at::kByte:
      key = {NumberKey::kInt, false, *static_cast<const uint8_t*>(data)};
      return true;
    case at::kComplexDouble:
      key = complex_key(*static_cast<const c10::complex<double>*>(data));
      return true;
    case at::kComplexFloat:
      key = complex_key(static_cast<c10::complex<double>>(*static_cast<const c10::complex<float>*>(data)));
      return true;
    default:
      return false;
  }
  key = {NumberKey::kDouble, false, std::bit_cast<int64_t>(value)};
  return true;
}

Match match_number(const NumberKey& key, const NumberKey& given, LiftedNumbers& lifted) {
  if (key.kind != given.kind) return Match::kNo;
  if (key.is_lifted) {
    if (key.kind == NumberKey::kDouble) {
      lifted.floats.push_back(std::bit_cast<double>(given.bits));
    } else {
      lifted.ints.push_back(given.bits);
    }
    return Match::kYes;
  }
  if (key.bits == given.bits && key.imaginary_bits == given.imaginary_bits) return Match::kYes;
  return key.kind == NumberKey::kBool || key.kind == NumberKey::kComplex ? Match::kNo : Match::kButNumbers;
}

template <typename T>
bool overflows_as(const NumberKey& key) {
  return key.kind == NumberKey::kDouble ? c10::overflows<T>(as_double(key)) : c10::overflows<T>(key.bits);
}

// Whether PyTorch refuses a number as an element of this dtype.
bool overflows(at::ScalarType dtype, const NumberKey& key) {
  switch (dtype) {
    case at::kByte:
      return overflows_as<uint8_t>(key);
    case at::kChar:
      return overflows_as<int8_t>(key);
    case at::kShort:
      return overflows_as<int16_t>(key);
    case at::kUInt16:
      return overflows_as<uint16_t>(key);
    case at::kInt:
      return overflows_as<int32_t>(key);
    case at::kUInt32:
      return overflows_as<uint32_t>(key);
    case at::kLong:
      return overflows_as<int64_t>(key);
    case at::kHalf:
      return overflows_as<at::Half>(key);
    case at::kBFloat16:
      return overflows_as<at::BFloat16>(key);
    case at::kFloat8_e4m3fn:
      return overflows_as<at::Float8_e4m3fn>(key);
    case at::kFloat8_e5m2:
      return overflows_as<at::Float8_e5m2>(key);
    case at::kFloat:
    case at::kComplexFloat:
      return overflows_as<float>(key);
    default:
      return false;
  }
}

// Whether a call with this number has a branch of its own: the number changes the op's meaning, or may be refused.
bool stands_alone(const ArgInfo& arg, at::ScalarType element, const NumberKey& number) {
  return is_structural(arg, number) || (arg.is_element && overflows(element, number));
}

// A lifted branch refuses the values that need one of their own.
Match match_liftable(const ArgInfo& arg, const NumberKey& key, const NumberKey& given, LiftedNumbers& lifted) {
  if (key.is_lifted && stands_alone(arg, key.element, given)) return Match::kNo;
  Match m = match_number(key, given, lifted);
  if (m == Match::kButNumbers &&
      (!arg.is_liftable || stands_alone(arg, key.element, key) || stands_alone(arg, key.element, given))) {
    return Match::kNo;
  }
  return m;
}

inline Match match_tensor(Recorder& r, const TensorKey& key, const at::Tensor& t, LiftedNumbers& lifted) {
  const auto* impl = t.unsafeGetTensorImpl();
  if (key.is_none || !impl->has_storage() || is_lazy(t)) return Match::kNo;
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (is_foreign(s)) return Match::kNo;
  auto* storage = static_cast<TpuStorage*>(s);
  if (storage->device_index != r.device || value_of(r, storage) != key.value || storage->base != key.base) {
    return Match::kNo;
  }
  size_t dims = impl->dim();
  if (dims * 2 != key.geometry.size() || impl->dtype() != key.dtype ||
      memcmp(key.geometry.data(), impl->sizes().data(), dims * sizeof(int64_t)) != 0 ||
      memcmp(key.geometry.data() + dims, impl->strides().data(), dims * sizeof(int64_t)) != 0) {
    return Match::kNo;
  }
  if (key.is_offset_lifted) {
    lifted.ints.push_back(impl->storage_offset());
    return Match::kYes;
  }
  return impl->storage_offset() == key.offset ? Match::kYes : Match::kButNumbers;
}

inline Match match_element(Recorder& r, const TensorKey& key, const IValue& v, LiftedNumbers& lifted) {
  if (v.isNone() || (v.isTensor() && !v.toTensor().defined())) return key.is_none ? Match::kYes : Match::kNo;
  return v.isTensor() && is_tpu(v.toTensor()) ? match_tensor(r, key, v.toTensor(), lifted) : Match::kNo;
}

inline void merge(Match& all, Match one) {
  if (one == Match::kNo) all = Match::kNo;
  if (one == Match::kButNumbers && all == Match::kYes) all = Match::kButNumbers;
}

Match match_arg(Recorder& r, const ArgInfo& arg, const ArgKey& key, const IValue& v, LiftedNumbers& lifted) {
  Match all = Match::kYes;
  NumberKey given;
  switch (key.kind) {
    case ArgKey::kTensor: {
      if (!v.isTensor()) return Match::kNo;
      const at::Tensor& t = v.toTensor();
      return t.defined() && is_tpu(t) ? match_tensor(r, key.tensors[0], t, lifted) : Match::kNo;
    }
    case ArgKey::kNone:
      return v.isNone() || (v.isTensor() && !v.toTensor().defined()) ? Match::kYes : Match::kNo;
    case ArgKey::kNumber:
      return read_number(v, given) ? match_liftable(arg, key.number, given, lifted) : Match::kNo;
    case ArgKey::kCpuScalar: {
      if (!v.isTensor()) return Match::kNo;
      const at::Tensor& t = v.toTensor();
      if (!t.defined() || t.dim() != 0 || !t.device().is_cpu() || t.dtype() != key.dtype ||
          t.unsafeGetTensorImpl()->is_wrapped_number() != key.is_wrapped || !read_cpu_scalar(t, given)) {
        return Match::kNo;
      }
      return match_liftable(arg, key.number, given, lifted);
    }
    case ArgKey::kInts: {
      if (!v.isIntList()) return Match::kNo;
      auto list = v.toIntList();
      if (list.size() != key.ints.size()) return Match::kNo;
      for (size_t i = 0; i < key.ints.size(); i++) {
        if (list[i] != key.ints[i]) return Match::kNo;
      }
      return Match::kYes;
    }
    case ArgKey::kTensors: {
      if (!v.isList()) return Match::kNo;
      auto list = v.toListRef();
      if (list.size() != key.tensors.size()) return Match::kNo;
      for (size_t i = 0; i < list.size() && all != Match::kNo; i++) {
        merge(all, match_element(r, key.tensors[i], list[i], lifted));
      }
      return all;
    }
    case ArgKey::kNumbers: {
      if (!v.isList() || v.isTensorList()) return Match::kNo;
      auto list = v.toList();
      if (list.size() != key.numbers.size()) return Match::kNo;
      for (size_t i = 0; i < list.size() && all != Match::kNo; i++) {
        merge(all, read_number(list.get(i), given) ? match_liftable(arg, key.numbers[i], given, lifted) : Match::kNo);
      }
      return all;
    }
    case ArgKey::kRandom:
      lifted.random_at = static_cast<int>(lifted.ints.size());
      lifted.ints.append(2, 0);
      return Match::kYes;
    case ArgKey::kOther:
      if (v.isDevice() && key.other.isDevice()) return v.toDevice() == key.other.toDevice() ? Match::kYes : Match::kNo;
      return v.tagKind() == key.other.tagKind() && v == key.other ? Match::kYes : Match::kNo;
  }
  return Match::kNo;
}

TensorKey make_tensor_key(Recorder& r, const at::Tensor& t) {
  TensorKey key;
  const auto* impl = t.unsafeGetTensorImpl();
  auto* s = own_storage_of(t);
  ensure_base(s, impl);
  key.value = value_of(r, s);
  key.base = s->base;
  key.dtype = impl->dtype();
  key.offset = impl->storage_offset();
  key.geometry.append(impl->sizes().begin(), impl->sizes().end());
  key.geometry.append(impl->strides().begin(), impl->strides().end());
  return key;
}

bool make_list_key(Recorder& r, const ArgInfo& arg, const IValue& v, ArgKey& key) {
  if (v.isIntList() && (!arg.is_liftable || v.toIntList().empty())) {
    key.kind = ArgKey::kInts;
    key.ints = v.toIntVector();
    return true;
  }
  auto list = v.toList();
  bool numbers = list.size() > 0, tensors = true;
  for (size_t i = 0; i < list.size(); i++) {
    IValue e = list.get(i);
    numbers &= e.isDouble() || e.isInt() || e.isBool() || e.isComplexDouble();
    tensors &= e.isNone() || (e.isTensor() && (!e.toTensor().defined() || is_tpu(e.toTensor())));
  }
  if (numbers) {
    key.kind = ArgKey::kNumbers;
    for (size_t i = 0; i < list.size(); i++) read_number(list.get(i), key.numbers.emplace_back());
    return true;
  }
  if (!tensors) {
    for (size_t i = 0; i < list.size(); i++) {
      if (list.get(i).isTensor()) return false;
    }
    key.kind = ArgKey::kOther;
    key.other = v;
    return true;
  }
  key.kind = ArgKey::kTensors;
  for (size_t i = 0; i < list.size(); i++) {
    IValue e = list.get(i);
    if (e.isTensor() && e.toTensor().defined()) {
      key.tensors.push_back(make_tensor_key(r, e.toTensor()));
    } else {
      key.tensors.emplace_back().is_none = true;
    }
  }
  return true;
}

bool make_key(Recorder& r, const ArgInfo& arg, const IValue& v, ArgKey& key) {
  if (v.isNone() || (v.isTensor() && !v.toTensor().defined())) {
    key.kind = ArgKey::kNone;
    return true;
  }
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (is_tpu(t)) {
      key.kind = ArgKey::kTensor;
      key.tensors.push_back(make_tensor_key(r, t));
      return true;
    }
    key.kind = ArgKey::kCpuScalar;
    key.dtype = t.dtype();
    key.is_wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    return t.dim() == 0 && t.device().is_cpu() && read_cpu_scalar(t, key.number);
  }
  if (read_number(v, key.number)) {
    key.kind = ArgKey::kNumber;
    return true;
  }
  if (v.isList()) return make_list_key(r, arg, v, key);
  key.kind = ArgKey::kOther;
  key.other = v;
  return true;
}

// 0, 1, -1 and 2 stay in the program's text: they are the numbers compilers fold.
bool is_plain_constant(const NumberKey& key) {
  double value = as_double(key);
  return value == 0 || value == 1 || value == -1 || value == 2;
}

void lift_number(const OpInfo& info, const ArgInfo& arg, const NumberKey* fork, NumberKey& key) {
  if (!arg.is_liftable || stands_alone(arg, key.element, key)) return;
  bool differs = fork && (fork->is_lifted || (fork->bits != key.bits && !stands_alone(arg, key.element, *fork)));
  bool at_sight = info.lifts && key.kind == NumberKey::kDouble && !is_plain_constant(key);
  key.is_lifted = differs || at_sight;
}

}  // namespace

Settings settings_for(const OpInfo& info) {
  Settings now{.default_dtype = c10::get_default_dtype_as_scalartype()};
  if (info.multiplies) now.precision = at::globalContext().float32MatmulPrecision();
  return now;
}

Match match_node(Recorder& r, const Node& node, const OpInfo& info, const IValue* args, LiftedNumbers& lifted) {
  if (node.info != &info || node.settings != settings_for(info)) return Match::kNo;
  Match all = Match::kYes;
  size_t given = info.args.size();
  for (size_t i = 0; i < node.args.size(); i++) {
    // A random op without a generator argument has one key more than arguments.
    static const IValue none;
    static const ArgInfo plain;
    merge(all, i < given ? match_arg(r, info.args[i], node.args[i], args[i], lifted)
                         : match_arg(r, plain, node.args[i], none, lifted));
    if (all == Match::kNo) return all;
  }
  return all;
}

bool make_keys(Recorder& r, const OpInfo& info, const IValue* args, std::vector<ArgKey>& keys) {
  keys.clear();
  for (size_t i = 0; i < info.args.size(); i++) {
    auto& key = keys.emplace_back();
    if (static_cast<int>(i) == info.generator_arg) {
      key.kind = ArgKey::kRandom;
    } else if (!make_key(r, info.args[i], args[i], key)) {
      return false;
    }
  }
  if (info.random && info.generator_arg < 0) keys.emplace_back().kind = ArgKey::kRandom;
  return true;
}

namespace {

// A write beside another view of the same storage: whether they overlap decides what the call means.
bool writes_beside(const OpInfo& info, const std::vector<ArgKey>& keys, size_t arg, size_t element) {
  const TensorKey& key = keys[arg].tensors[element];
  for (size_t i = 0; i < info.args.size(); i++) {
    for (size_t e = 0; e < keys[i].tensors.size(); e++) {
      bool is_other = i != arg || e != element;
      if (is_other && keys[i].tensors[e].value == key.value && (info.args[i].is_written || info.args[arg].is_written)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

void lift_keys(const OpInfo& info, const Node* fork, std::vector<ArgKey>& keys) {
  if (info.may_resize && !info.lifts) fork = nullptr;  // the numbers may decide the result's shape
  for (size_t i = 0; i < info.args.size(); i++) {
    const ArgInfo& arg = info.args[i];
    ArgKey& key = keys[i];
    const ArgKey* old = fork ? &fork->args[i] : nullptr;
    if (arg.is_element && !keys[0].tensors.empty()) key.number.element = keys[0].tensors[0].dtype.toScalarType();
    if (key.kind == ArgKey::kNumber || key.kind == ArgKey::kCpuScalar) {
      lift_number(info, arg, old ? &old->number : nullptr, key.number);
    }
    for (size_t e = 0; e < key.numbers.size(); e++) {
      lift_number(info, arg, old ? &old->numbers[e] : nullptr, key.numbers[e]);
    }
    for (size_t e = 0; old && e < key.tensors.size(); e++) {
      bool differs = old->tensors[e].is_offset_lifted || old->tensors[e].offset != key.tensors[e].offset;
      key.tensors[e].is_offset_lifted = differs && !writes_beside(info, keys, i, e);
    }
  }
}

// ---- described calls

namespace {

Match match_tensor_keys(const TensorKey& key, const TensorKey& given, LiftedNumbers& lifted) {
  if (key.is_none || given.is_none) return key.is_none && given.is_none ? Match::kYes : Match::kNo;
  if (key.value != given.value || key.base != given.base || key.dtype != given.dtype ||
      key.geometry != given.geometry) {
    return Match::kNo;
  }
  if (key.is_offset_lifted) {
    lifted.ints.push_back(given.offset);
    return Match::kYes;
  }
  return key.offset == given.offset ? Match::kYes : Match::kButNumbers;
}

Match match_key(const ArgInfo& arg, const ArgKey& key, const ArgKey& given, LiftedNumbers& lifted) {
  if (key.kind != given.kind || key.tensors.size() != given.tensors.size() ||
      key.numbers.size() != given.numbers.size() || key.ints != given.ints) {
    return Match::kNo;
  }
  Match all = Match::kYes;
  switch (key.kind) {
    case ArgKey::kCpuScalar:
      if (key.dtype != given.dtype || key.is_wrapped != given.is_wrapped) return Match::kNo;
      return match_liftable(arg, key.number, given.number, lifted);
    case ArgKey::kNumber:
      return match_liftable(arg, key.number, given.number, lifted);
    case ArgKey::kRandom:
      lifted.ints.push_back(given.number.bits);
      lifted.ints.push_back(given.number.imaginary_bits);
      return all;
    case ArgKey::kOther:
      if (key.other.isDevice() && given.other.isDevice()) {
        return key.other.toDevice() == given.other.toDevice() ? all : Match::kNo;
      }
      return key.other.tagKind() == given.other.tagKind() && key.other == given.other ? all : Match::kNo;
    default:
      break;
  }
  for (size_t e = 0; e < key.tensors.size() && all != Match::kNo; e++) {
    merge(all, match_tensor_keys(key.tensors[e], given.tensors[e], lifted));
  }
  for (size_t e = 0; e < key.numbers.size() && all != Match::kNo; e++) {
    merge(all, match_liftable(arg, key.numbers[e], given.numbers[e], lifted));
  }
  return all;
}

}  // namespace

Match match_keys(const Node& node, const OpInfo& info, const std::vector<ArgKey>& given, LiftedNumbers& lifted) {
  if (node.info != &info) return Match::kNo;
  Match all = Match::kYes;
  for (size_t i = 0; i < node.args.size() && all != Match::kNo; i++) {
    static const ArgInfo plain;
    merge(all, match_key(i < info.args.size() ? info.args[i] : plain, node.args[i], given[i], lifted));
  }
  return all;
}

}  // namespace torchtpu
