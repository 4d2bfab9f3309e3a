// Calls that the hit path does not know: brings their arguments into a form that a node can match, or divides the call
// into parts that can.

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_conj_physical.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "record/infer.h"

namespace torchtpu {

namespace {

at::Tensor resolve(const at::Tensor& t) {
  at::Tensor plain = t;
  if (plain.is_conj()) plain = at::_conj_physical(plain.conj());
  if (plain.is_neg()) plain = plain._neg_view().neg();
  return plain;
}

// ---- single arguments

bool is_cpu_index(const IValue& v) { return v.isTensor() && v.toTensor().defined() && v.toTensor().device().is_cpu(); }

// True where it changed something.
bool prepare_tensor(const at::Tensor& t) {
  bool was_foreign = is_foreign(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  auto* s = storage_of(t);
  StateGuard guard(state_lock);
  const BaseRef before = s->base;
  ensure_base(s, t.unsafeGetTensorImpl());
  return was_foreign || s->base != before;
}

bool prepare_tensors(IValue& v) {
  bool changed = false;
  auto tensors = v.toTensorVector();
  for (at::Tensor& t : tensors) {
    if (!is_tpu(t)) continue;
    if (is_lazy(t)) {
      t = resolve(t);
      changed = true;
    }
    changed |= prepare_tensor(t);
  }
  if (changed) v = tensors;
  return changed;
}

bool prepare_indices(c10::List<IValue> list, c10::DeviceIndex device) {
  bool changed = false;
  for (size_t e = 0; e < list.size(); e++) {
    IValue v = list.get(e);
    if (is_cpu_index(v)) {
      list.set(e, v.toTensor().to(c10::Device(c10::DeviceType::PrivateUse1, device)));
      changed = true;
    } else if (v.isTensor() && v.toTensor().defined()) {
      changed |= prepare_tensor(v.toTensor());
    }
  }
  return changed;
}

// ---- several views of one storage

struct Place {
  TpuStorage* storage;
  int64_t begin, end;  // bytes
  size_t arg, element;
};

std::vector<Place> places_of(const OpInfo& info, const IValue* args) {
  std::vector<Place> places;
  auto add = [&](const at::Tensor& t, size_t arg, size_t element) {
    if (!t.defined() || !is_tpu(t)) return;
    if (t.numel() == 0) {  // it touches no byte, and its storage is written all the same
      places.push_back({storage_of(t), 0, 0, arg, element});
      return;
    }
    auto* storage = storage_of(t);  // the offset is in this one from now on
    int64_t last = t.storage_offset(), itemsize = static_cast<int64_t>(t.element_size());
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    places.push_back({storage, t.storage_offset() * itemsize, (last + 1) * itemsize, arg, element});
  };
  for (size_t i = 0; i < info.args.size(); i++) {
    if (args[i].isTensor()) add(args[i].toTensor(), i, 0);
    if (!args[i].isTensorList()) continue;
    auto list = args[i].toTensorVector();
    for (size_t e = 0; e < list.size(); e++) add(list[e], i, e);
  }
  std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.storage < b.storage; });
  return places;
}

// Calls f for each two places in one storage of which at least one is written.
template <class F>
void for_each_pair(const OpInfo& info, const std::vector<Place>& places, F&& f) {
  for (size_t i = 0; i < places.size(); i++) {
    for (size_t j = i + 1; j < places.size() && places[j].storage == places[i].storage; j++) {
      if (info.args[places[i].arg].is_written || info.args[places[j].arg].is_written) f(places[i], places[j]);
    }
  }
}

// Two writes of one op into a storage that holds nothing yet need a value to follow one another in.
bool define_written(const OpInfo& info, const IValue* args) {
  std::vector<TpuStorage*> undefined;
  for_each_pair(info, places_of(info, args), [&](const Place& a, const Place& b) {
    if (!info.args[a.arg].is_written || !info.args[b.arg].is_written) return;
    StateGuard guard(state_lock);
    if (!a.storage->buffer && a.storage->value == kNoValue) undefined.push_back(a.storage);
  });
  for (TpuStorage* s : undefined) flat_view(*s).zero_();
  return !undefined.empty();
}

// A list op's elements follow one another: an element that another one writes is read after that write.  One that is
// written to more than once is an error, after those before it were written.
bool follows_itself(const OpInfo& info, const IValue* args) {
  bool found = false;
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || !args[i].isTensorList()) continue;
    for (const at::Tensor& t : args[i].toTensorVector()) found |= at::has_internal_overlap(t) == at::MemOverlap::Yes;
  }
  for_each_pair(info, places_of(info, args), [&](const Place& a, const Place& b) {
    found |= a.element != b.element && a.begin < b.end && b.begin < a.end;
  });
  return found;
}

// A list of tensors of several devices, or of 0-dim CPU tensors beside one of tpu tensors: the compiled optimizers'
// numbers.
bool lists_other_devices(const OpInfo& info, const IValue* args) {
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!args[i].isTensorList()) continue;
    std::optional<c10::Device> first;
    for (const at::Tensor& t : args[i].toTensorVector()) {
      if (!t.defined()) continue;
      if (t.dim() == 0 && t.device().is_cpu()) return true;
      if (t.device() != first.value_or(t.device())) return true;
      first = t.device();
    }
  }
  return false;
}

// ---- calls in parts

// Each lazy argument takes part as a plain tensor, which is copied back where it was written.
void run_on_plain(const RecordKernel& kernel, Stack* stack) {
  const OpInfo& info = kernel.info;
  size_t given = info.args.size();
  Stack args(stack->end() - static_cast<std::ptrdiff_t>(given), stack->end());
  Stack plain = args;
  for (size_t i = 0; i < given; i++) {
    if (args[i].isTensor() && args[i].toTensor().defined() && is_lazy(args[i].toTensor())) {
      plain[i] = resolve(args[i].toTensor());
    }
  }
  Stack results = plain;
  kernel.call(&results);
  for (size_t i = 0; i < given; i++) {
    if (info.args[i].is_written && args[i].isTensor() && args[i].toTensor().defined() && is_lazy(args[i].toTensor())) {
      args[i].toTensor().copy_(plain[i].toTensor());
    }
  }
  for (size_t i = 0; i < info.return_alias.size(); i++) {
    if (info.return_alias[i] >= 0) results[i] = args[info.return_alias[i]];
  }
  torch::jit::drop(*stack, given);
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace

bool prepare_args(const OpInfo& info, c10::DeviceIndex device, Stack* stack) {
  IValue* args = stack->data() + stack->size() - info.args.size();
  bool changed = false;
  for (size_t i = 0; i < info.args.size(); i++) {
    if (args[i].isTensor() && args[i].toTensor().defined() && is_tpu(args[i].toTensor())) {
      if (is_lazy(args[i].toTensor())) {
        args[i] = resolve(args[i].toTensor());
        changed = true;
      }
      changed |= prepare_tensor(args[i].toTensor());
    } else if (args[i].isTensorList()) {
      changed |= prepare_tensors(args[i]);
    } else if (info.has_optional_list && args[i].isList()) {
      changed |= prepare_indices(args[i].toList(), device);
    }
  }
  return define_written(info, args) || changed;
}

bool run_in_parts(const RecordKernel& kernel, Stack* stack) {
  const OpInfo& info = kernel.info;
  const IValue* args = stack->data() + stack->size() - info.args.size();
  for (size_t i = 0; i < info.args.size(); i++) {
    if (info.args[i].is_written && args[i].isTensor() && args[i].toTensor().defined() && is_lazy(args[i].toTensor())) {
      run_on_plain(kernel, stack);
      return true;
    }
  }
  if (info.is_foreach && lists_other_devices(info, args)) {
    info.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    return true;
  }
  if (!info.is_foreach || info.return_alias.size() > 0) return false;
  // An in-place list op that fails halfway has changed the tensors before.
  if (!follows_itself(info, args) && !is_refused_by_cpu(info, info.handle, args)) return false;
  info.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  return true;
}

void grow_outputs(const OpInfo& info, const IValue* args, const Stack& after) {
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_out || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const at::Tensor &before = args[i].toTensor(), &now = after[i].toTensor();
    if (before.storage_offset() == 0 || now.numel() == 0) continue;
    auto needed = static_cast<size_t>(now.storage_offset() + now.numel()) * now.element_size();
    auto* s = storage_of(before);
    if (before.sizes() != now.sizes() && needed > s->nbytes()) resize_storage(*s, needed);
  }
}

at::Tensor flat_view(TpuStorage& s) {
  auto nbytes = static_cast<int64_t>(s.nbytes());
  auto dtype = at::kByte;
  {
    StateGuard guard(state_lock);
    if (s.base && nbytes % static_cast<int64_t>(c10::elementSize(s.base->dtype)) == 0) dtype = s.base->dtype;
  }
  at::Tensor flat = at::empty(
      {0}, at::TensorOptions().dtype(dtype).device(c10::Device(c10::DeviceType::PrivateUse1, s.device_index)));
  flat.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&s)));
  int64_t length = nbytes / static_cast<int64_t>(c10::elementSize(dtype)), stride = 1;
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(&length, 1), at::IntArrayRef(&stride, 1));
  return flat;
}

}  // namespace torchtpu
