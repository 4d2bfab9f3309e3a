// Kernels with C++ arguments for the signatures that hot ops have: the same kernel without a boxed stack.  A boxed call
// counts every tensor up and down, which takes the GIL where only a Python object held it, and that costs more than
// recording.

#include "record/unboxed.h"

namespace torchtpu {

namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using MaybeTensor = const std::optional<Tensor>&;
using MaybeType = std::optional<ScalarType>;

// ---- the letter of a type: a signature's letters name it as a schema's do

template <class T>
constexpr char kLetter = 0;
template <>
constexpr char kLetter<const Tensor&> = 't';
template <>
constexpr char kLetter<Tensor&> = 'm';
template <>
constexpr char kLetter<Tensor> = 't';
template <>
constexpr char kLetter<MaybeTensor> = 'o';
template <>
constexpr char kLetter<const Scalar&> = 's';
template <>
constexpr char kLetter<const std::optional<Scalar>&> = 'S';
template <>
constexpr char kLetter<int64_t> = 'i';
template <>
constexpr char kLetter<std::optional<int64_t>> = 'I';
template <>
constexpr char kLetter<SymInt> = 'y';
template <>
constexpr char kLetter<double> = 'd';
template <>
constexpr char kLetter<bool> = 'b';
template <>
constexpr char kLetter<std::optional<bool>> = 'B';
template <>
constexpr char kLetter<ScalarType> = 'e';
template <>
constexpr char kLetter<MaybeType> = 'E';
template <>
constexpr char kLetter<c10::string_view> = 'v';
template <>
constexpr char kLetter<at::OptionalIntArrayRef> = 'A';
template <>
constexpr char kLetter<SymIntArrayRef> = 'Y';
template <>
constexpr char kLetter<std::array<bool, 3>> = '3';

char letter_of(const c10::TypePtr& type, bool is_written, bool is_optional = false) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return letter_of(type->expectRef<c10::OptionalType>().getElementType(), is_written, true);
    case c10::TypeKind::TensorType:
      return is_optional ? 'o' : is_written ? 'm' : 't';
    case c10::TypeKind::NumberType:
      return is_optional ? 'S' : 's';
    case c10::TypeKind::IntType:
      return is_optional ? 'I' : 'i';
    case c10::TypeKind::SymIntType:
      return is_optional ? '?' : 'y';
    case c10::TypeKind::FloatType:
      return is_optional ? '?' : 'd';
    case c10::TypeKind::BoolType:
      return is_optional ? 'B' : 'b';
    case c10::TypeKind::ScalarTypeType:
      return is_optional ? 'E' : 'e';
    case c10::TypeKind::StringType:
      return is_optional ? '?' : 'v';
    case c10::TypeKind::ListType:
      switch (type->expectRef<c10::ListType>().getElementType()->kind()) {
        case c10::TypeKind::IntType:
          return is_optional ? 'A' : '?';
        case c10::TypeKind::SymIntType:
          return is_optional ? '?' : 'Y';
        case c10::TypeKind::BoolType:
          return is_optional ? '?' : kLetter<std::array<bool, 3>>;
        default:
          return '?';
      }
    default:
      return '?';
  }
}

std::string letters_of(const c10::FunctionSchema& schema) {
  std::string letters;
  for (const auto& arg : schema.arguments()) {
    bool is_written = arg.alias_info() && arg.alias_info()->isWrite();
    letters += letter_of(arg.real_type(), is_written);
    if (letters.back() == kLetter<std::array<bool, 3>> && arg.N() != 3) letters.back() = '?';
  }
  letters += '>';
  for (const auto& ret : schema.returns()) {
    letters += letter_of(ret.real_type(), ret.alias_info() && ret.alias_info()->isWrite());
  }
  return letters;
}

template <class T>
struct ReturnLetters {
  static std::string get() { return {kLetter<T>}; }
};
template <class... T>
struct ReturnLetters<std::tuple<T...>> {
  static std::string get() { return {kLetter<T>...}; }
};

// ---- the kernel of a signature

template <class T>
struct Unpack {
  static T get(Results& results) { return std::move(results[0]).toTensor(); }
};
template <class... T>
struct Unpack<std::tuple<T...>> {
  static std::tuple<T...> get(Results& results) { return get(results, std::index_sequence_for<T...>()); }
  template <size_t... I>
  static std::tuple<T...> get(Results& results, std::index_sequence<I...>) {
    return {std::move(results[I]).toTensor()...};
  }
};

template <class First, class... Rest>
Tensor& written(First& first, Rest&... rest) {
  if constexpr (std::is_same_v<First, Tensor>) {
    return first;
  } else {
    return written(rest...);
  }
}

template <class Signature>
struct Unboxed;

template <class Ret, class... Args>
struct Unboxed<Ret(Args...)> final : c10::OperatorKernel {
  explicit Unboxed(const RecordKernel* kernel) : kernel(kernel) {}
  Ret operator()(Args... args) const {
    Results results;
    record(*kernel, results, args...);
    if constexpr (std::is_reference_v<Ret>) {
      return written(args...);
    } else {
      return Unpack<Ret>::get(results);
    }
  }
  const RecordKernel* kernel;
};

struct Entry {
  std::string letters;
  c10::impl::CppSignature signature;
  c10::KernelFunction (*make)(const RecordKernel*);
};

template <class Signature>
struct Lettered;
template <class Ret, class... Args>
struct Lettered<Ret(Args...)> {
  static Entry entry() {
    static_assert(((kLetter<Args> != 0) && ...));
    return {std::string{kLetter<Args>...} + '>' + ReturnLetters<Ret>::get(),
            c10::impl::CppSignature::make<Ret(Args...)>(), [](const RecordKernel* kernel) {
              return c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Ret(Args...)>>(
                  std::make_unique<Unboxed<Ret(Args...)>>(kernel));
            }};
  }
};

template <class... Signatures>
std::vector<Entry> entries() {
  return {Lettered<Signatures>::entry()...};
}

using T2 = std::tuple<Tensor, Tensor>;
using T3 = std::tuple<Tensor, Tensor, Tensor>;
using In = const Tensor&;
using Number = const Scalar&;
using MaybeNumber = const std::optional<Scalar>&;

const std::vector<Entry>& known_signatures() {
  static const auto* known = new std::vector<Entry>(
      entries<
          // pointwise
          Tensor(In), Tensor(In, In), Tensor(In, In, In), Tensor(In, Number), Tensor(Number, In),
          Tensor(In, In, Number), Tensor(In, Number, Number), Tensor(In, In, In, Number),
          Tensor(In, MaybeNumber, MaybeNumber), Tensor(In, c10::string_view), Tensor(In, In, c10::string_view),
          Tensor(In, In, MaybeNumber, MaybeNumber),
          // in place
          Tensor&(Tensor&), Tensor&(Tensor&, In), Tensor&(Tensor&, Number), Tensor&(Tensor&, In, Number),
          Tensor&(Tensor&, Number, Number), Tensor&(Tensor&, In, In), Tensor&(Tensor&, In, In, Number),
          Tensor&(Tensor&, MaybeNumber, MaybeNumber),
          // out=
          Tensor&(In, Tensor&), Tensor&(In, In, Tensor&), Tensor&(In, In, Number, Tensor&),
          // products
          Tensor(In, In, In, Number, Number), Tensor&(Tensor&, In, In, Number, Number), Tensor(In, In, MaybeTensor),
          T3(In, In, In, std::array<bool, 3>),
          // reductions and normalisation
          Tensor(In, MaybeType), Tensor(In, at::OptionalIntArrayRef, bool, MaybeType), Tensor(In, int64_t, bool),
          Tensor(In, std::optional<int64_t>, bool), Tensor(In, In, int64_t, ScalarType), Tensor(In, int64_t, MaybeType),
          T2(In, int64_t, bool), T3(In, SymIntArrayRef, MaybeTensor, MaybeTensor, double),
          T3(In, In, SymIntArrayRef, In, In, MaybeTensor, MaybeTensor, std::array<bool, 3>),
          T3(In, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, bool, double, double),
          // losses and dropout
          Tensor(In, In, int64_t), Tensor(In, In, In, int64_t), T2(In, In, MaybeTensor, int64_t, SymInt),
          Tensor(In, In, In, MaybeTensor, int64_t, SymInt, In), T2(In, double, std::optional<bool>),
          Tensor(In, In, double),
          // indexing
          Tensor(In, In, SymInt, bool, bool), Tensor(In, In, SymInt, SymInt, bool), Tensor(In, int64_t, In),
          Tensor(In, int64_t, In, bool), Tensor(In, int64_t, In, In),
          Tensor(In, SymIntArrayRef, int64_t, SymInt, SymInt, SymInt)>());
  return *known;
}

}  // namespace

std::optional<UnboxedKernel> unboxed_kernel(const RecordKernel* kernel) {
  std::string letters = letters_of(kernel->info.handle.schema());
  for (const auto& entry : known_signatures()) {
    if (entry.letters == letters) return UnboxedKernel{entry.make(kernel), entry.signature};
  }
  return std::nullopt;
}

}  // namespace torchtpu
