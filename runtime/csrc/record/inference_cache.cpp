#include "record/inference_cache.h"

#include <ATen/Context.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <unordered_map>

namespace torchtpu {

namespace {

// Signatures of one generation; two are kept.
constexpr size_t kGeneration = 4096;

class SignatureWriter {
 public:
  std::string bytes;

  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  // Of this argument; false for a value of a kind that is not written.
  bool put_argument(const OpInfo& info, const ArgInfo& arg, const IValue& v) {
    arg_ = info.is_foreach && info.lifts && arg.is_liftable ? &arg : nullptr;
    return put_value(v);
  }

 private:
  void put_double(double value) { put(std::bit_cast<int64_t>(value)); }
  void put_ints(at::IntArrayRef ints) {
    put(ints.size());
    bytes.append(reinterpret_cast<const char*>(ints.data()), ints.size() * sizeof(int64_t));
  }

  void put_tensor(const at::Tensor& t) {
    put(t.defined());
    if (!t.defined()) return;
    auto* impl = t.unsafeGetTensorImpl();
    put(t.scalar_type());
    put(t.device().type());
    put(t.device().index());
    put(impl->is_wrapped_number());
    put_ints(t.sizes());
    put_ints(t.strides());
    put(t.storage_offset());
    put(place_of(impl->unsafe_storage().unsafeGetStorageImpl()));
    put(t.storage().nbytes());
  }

  // A number that programs take when they run leaves the shape and dtype as they are: a step size, say.
  bool is_any(double value) const {
    NumberKey key{.kind = NumberKey::kDouble, .bits = std::bit_cast<int64_t>(value)};
    return arg_ && std::abs(value) <= (arg_->is_element ? kLargestOfIntegers : kLargestOfAll) &&
           !is_structural(*arg_, key);
  }

  bool put_value(const IValue& v) {
    if (v.isNone()) {
      put('0');
    } else if (v.isTensor()) {
      put('t');
      if (v.toTensor().defined() && (!v.toTensor().has_storage() || v.toTensor().layout() != at::kStrided))
        return false;
      put_tensor(v.toTensor());
    } else if (v.isInt()) {
      put('i');
      put(v.toInt());
    } else if (v.isDouble()) {
      bool any = is_any(v.toDouble());
      put(any ? 'n' : 'd');
      if (!any) put_double(v.toDouble());
    } else if (v.isBool()) {
      put('b');
      put(v.toBool());
    } else if (v.isComplexDouble()) {
      put('c');
      put_double(v.toComplexDouble().real());
      put_double(v.toComplexDouble().imag());
    } else if (v.isString()) {
      put('s');
      put(v.toStringRef().size());
      bytes += v.toStringRef();
    } else if (v.isDevice()) {
      put('v');
      put(v.toDevice().type());
      put(v.toDevice().index());
    } else if (v.isGenerator()) {
      put('g');
    } else if (v.isIntList()) {
      put('I');
      put_ints(v.toIntVector());
    } else if (v.isList()) {
      put('l');
      auto list = v.toListRef();
      put(list.size());
      return std::ranges::all_of(list, [&](const IValue& e) { return put_value(e); });
    } else {
      return false;
    }
    return true;
  }

  // The number of the storage among those of the call.
  size_t place_of(c10::StorageImpl* storage) {
    auto found = std::ranges::find(storages_, storage);
    size_t place = found - storages_.begin();
    if (found == storages_.end()) storages_.push_back(storage);
    return place;
  }
  c10::SmallVector<c10::StorageImpl*, 8> storages_;
  const ArgInfo* arg_ = nullptr;  // where its numbers may be any
};

using Generation = std::unordered_map<std::string, std::shared_ptr<const Inferred>>;

struct Cache {
  std::mutex mutex;  // innermost: nothing is called under it that locks, or that frees a tensor of the user's
  Generation young, old;
  InferenceCounts counts;
};

Cache& cache() {
  static auto* made = new Cache();
  return *made;
}

}  // namespace

std::optional<std::string> signature_of(const OpInfo& info, const IValue* args) {
  SignatureWriter writer;
  writer.bytes.reserve(256);
  writer.put(&info);
  writer.put(c10::get_default_dtype_as_scalartype());
  writer.put(at::globalContext().deterministicAlgorithms());
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!writer.put_argument(info, info.args[i], args[i])) return std::nullopt;
  }
  return std::move(writer.bytes);
}

std::shared_ptr<const Inferred> find_inferred(const std::string& signature) {
  std::scoped_lock guard(cache().mutex);
  if (auto it = cache().young.find(signature); it != cache().young.end()) return it->second;
  auto it = cache().old.find(signature);
  if (it == cache().old.end()) return nullptr;
  std::shared_ptr<const Inferred> found = it->second;
  cache().young.insert(cache().old.extract(it));
  return found;
}

void keep_inferred(std::string signature, std::shared_ptr<const Inferred> inferred) {
  Generation forgotten;
  std::scoped_lock guard(cache().mutex);
  if (cache().young.size() >= kGeneration) {
    forgotten.swap(cache().old);
    cache().old.swap(cache().young);
  }
  cache().young.insert_or_assign(std::move(signature), std::move(inferred));
}

void count_inference(const OpInfo& info, bool is_on_meta) {
  std::scoped_lock guard(cache().mutex);
  cache().counts.all++;
  if (is_on_meta) cache().counts.on_meta[info.name]++;
}

InferenceCounts inference_counts() {
  std::scoped_lock guard(cache().mutex);
  return cache().counts;
}

void reset_inference_counts() {
  std::scoped_lock guard(cache().mutex);
  cache().counts = {};
}

}  // namespace torchtpu
