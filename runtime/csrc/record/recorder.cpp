#include "record/recorder.h"

#include <algorithm>

#include "bind/bridge.h"
#include "launch/collection.h"
#include "launch/handover.h"
#include "launch/queue.h"
#include "launch/signals.h"
#include "record/infer.h"
#include "record/insert.h"
#include "region/subgraph.h"

namespace torchtpu {

Runtime runtime;

uint64_t new_epoch() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

Recorder::Recorder(c10::DeviceIndex device) : device(device), epoch(new_epoch()), at(&trie->root) {}

// ---- values

void forget_value(TpuStorage* s) {
  state_lock.assert_held();
  if (s->value >= 0 && s->recorder && s->recorder->epoch == s->epoch) s->recorder->live[s->value] = nullptr;
  s->value = kNoValue;
  s->epoch = 0;
}

int32_t input_value(Recorder& r, const BufferRef& buffer, bool is_shared) {
  auto known = static_cast<int32_t>(r.inputs.size()), slot = known;
  if (buffer->epoch == r.epoch && buffer->slot < known && r.inputs[buffer->slot] == buffer) {
    slot = buffer->slot;
  } else if (is_shared) {  // another recorder may have numbered it since
    slot = static_cast<int32_t>(std::find(r.inputs.begin(), r.inputs.end(), buffer) - r.inputs.begin());
  }
  if (slot == known) {
    r.inputs.push_back(buffer);
    buffer->regions++;
    buffer->epoch = r.epoch;
    buffer->slot = slot;
  }
  return ~slot;
}

void drop_inputs(Recorder& r, size_t count) {
  for (size_t i = count; i < r.inputs.size(); i++) {
    r.inputs[i]->regions--;
    bury(std::move(r.inputs[i]));
  }
  r.inputs.resize(count);
}

int32_t value_of_slow(Recorder& r, TpuStorage* s) {
  state_lock.assert_held();
  if (s->recorder && s->recorder != &r) {
    if (s->value >= 0 && s->recorder->epoch == s->epoch) cut_locked(*s->recorder, "other_thread", "");
    s->is_shared = true;
  }
  if (!s->buffer) return kNoValue;
  s->recorder = &r;
  s->epoch = r.epoch;
  s->value = input_value(r, s->buffer, s->is_shared);
  return s->value;
}

void move_value(TpuStorage* from, TpuStorage* to) {
  StateGuard guard(state_lock);
  to->set_buffer(from->buffer);
  if (from->value >= 0 && from->recorder && from->recorder->epoch == from->epoch) {
    to->recorder = from->recorder;
    to->epoch = from->epoch;
    to->value = from->value;
    to->recorder->live[to->value] = to;
    from->value = kNoValue;
    from->epoch = 0;
  } else if (from->value != kNoValue) {  // the buffer keeps its input number: a buffer is donated once
    to->recorder = from->recorder;
    to->epoch = from->epoch;
    to->value = from->value;
  }
  from->set_buffer({});
  to->base = from->base;
}

// ---- applying a node: new values for outputs and written storages

namespace {

void set_value(Recorder& r, TpuStorage* s, int32_t value) {
  s->set_buffer({});
  s->recorder = &r;
  s->epoch = r.epoch;
  s->value = value;
  r.live[value] = s;
}

void apply_write(Recorder& r, const WriteMeta& w, const at::Tensor& t) {
  auto* s = static_cast<TpuStorage*>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (w.is_resized) {
    t.unsafeGetTensorImpl()->set_sizes_and_strides(w.meta.sizes, w.meta.strides, w.offset);
    s->set_size(static_cast<size_t>(w.meta.base->nbytes));
  }
  set_value(r, s, w.value);
  s->base = w.meta.base;
}

at::Tensor apply_result(Recorder& r, const TensorMeta& m) {
  if (m.is_undefined) return {};
  at::Tensor t = make_tensor_locked(m.sizes, m.strides, m.dtype, m.base, r.device);
  set_value(r, static_cast<TpuStorage*>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()), m.value);
  return t;
}

IValue apply_return(Recorder& r, const ReturnMeta& ret) {
  switch (ret.kind) {
    case ReturnMeta::kAlias:
      break;
    case ReturnMeta::kTensor:
      return apply_result(r, ret.tensors[0]);
    case ReturnMeta::kList: {
      std::vector<at::Tensor> list;
      list.reserve(ret.tensors.size());
      for (const auto& m : ret.tensors) list.push_back(apply_result(r, m));
      return list;
    }
    case ReturnMeta::kConstant:
      return ret.constant;
  }
  return {};
}

void apply(Recorder& r, Node& node, const IValue* args, Results& results) {
  if (static_cast<int32_t>(r.live.size()) < node.next_value) r.live.resize(node.next_value + 64, nullptr);
  for (const auto& w : node.writes) {
    if (w.element < 0) {
      apply_write(r, w, args[w.arg].toTensor());
    } else {
      const at::Tensor& t = args[w.arg].toListRef()[w.element].toTensor();
      apply_write(r, w, t);
      if (node.info->is_foreach && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (const auto& ret : node.returns) results.push_back(apply_return(r, ret));
}

// ---- finding the node

struct Found {
  Node* node = nullptr;
  Node* fork = nullptr;  // the path to inherit lifted numbers from
};

Found find_child(Recorder& r, const OpInfo& info, const IValue* args, LiftedNumbers& lifted, bool is_retry) {
  Found found;
  auto attempt = [&](Node* child) {
    lifted.clear();
    Match m = match_node(r, *child, info, args, lifted);
    if (m == Match::kYes) found.node = child;
    if (m == Match::kButNumbers) found.fork = child;
    return m == Match::kYes;
  };
  Node* last = r.at->last;
  if (last && attempt(last)) {
    if (!is_retry) r.shadow = nullptr;
    return found;
  }
  for (auto& child : r.at->children) {
    if (child.get() != last && attempt(child.get())) {
      r.at->last = child.get();
      if (!is_retry) r.shadow = nullptr;
      return found;
    }
  }
  if (!found.fork && r.shadow) {
    for (auto& child : r.shadow->children) {
      lifted.clear();
      if (match_node(r, *child, info, args, lifted) != Match::kNo) {
        found.fork = child.get();
        break;
      }
    }
  }
  return found;
}

void draw_random(Recorder& r, const Node& node, const IValue* args, LiftedNumbers& lifted) {
  std::optional<at::Generator> generator;
  int at = node.info->generator_arg;
  if (at >= 0 && args[at].isGenerator()) generator = args[at].toGenerator();
  Draw draw = next_philox(generator, r.device, node.rng_increment);
  lifted.ints[lifted.random_at] = static_cast<int64_t>(draw.seed);
  lifted.ints[lifted.random_at + 1] = static_cast<int64_t>(draw.offset);
  r.changes.draws.push_back(std::move(draw));
}

// Under state_lock.  False where the op stream is new.
bool try_hit(Recorder& r, const OpInfo& info, const IValue* args, bool is_retry, Results& results) {
  LiftedNumbers lifted;
  Found found = find_child(r, info, args, lifted, is_retry);
  if (!found.node || (found.node->is_asked_again && !is_retry)) return false;
  if (lifted.random_at >= 0) draw_random(r, *found.node, args, lifted);
  r.floats.insert(r.floats.end(), lifted.floats.begin(), lifted.floats.end());
  r.ints.insert(r.ints.end(), lifted.ints.begin(), lifted.ints.end());
  (is_retry ? runtime.counters.misses : runtime.counters.hits)++;
  r.at = found.node;
  apply(r, *found.node, args, results);
  return true;
}

// ---- the call

c10::DeviceIndex find_device(const OpInfo& info, const IValue* args) {
  for (size_t i = 0; i < info.args.size(); i++) {
    if (args[i].isTensor()) {
      const at::Tensor& t = args[i].toTensor();
      if (!t.defined() || !is_tpu(t)) continue;
      auto* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      return s && !is_foreign(s) ? static_cast<TpuStorage*>(s)->device_index : t.device().index();
    } else if (args[i].isTensorList()) {
      auto list = args[i].toListRef();
      for (const IValue& v : list) {
        if (is_tpu(v.toTensor())) return v.toTensor().device().index();
      }
    }
  }
  if (info.device_arg >= 0 && args[info.device_arg].isDevice() && args[info.device_arg].toDevice().has_index()) {
    return args[info.device_arg].toDevice().index();
  }
  return current_device();
}

// The node for this call, made where the op stream is new; false where the op cannot be recorded.
bool learn(Recorder& r, const OpInfo& info, const IValue* args) {
  std::shared_ptr<const Inferred> inferred = infer(info, info.handle, args);
  if (!inferred) return false;
  if (info.may_resize) grow_outputs(info, args, inferred->args);
  std::string line = current_line();
  StateGuard guard(state_lock);
  LiftedNumbers lifted;
  Found found = find_child(r, info, args, lifted, true);
  return found.node || insert(r, info, args, found.fork, *inferred, std::move(line));
}

// A call that is not recorded leaves no trace: the inputs above `known` that its arguments have become are forgotten.
// Under state_lock.
void forget_new_inputs(Recorder& r, const OpInfo& info, const IValue* args, size_t known) {
  auto forget = [&](const at::Tensor& t) {
    if (!t.defined() || !is_tpu(t) || !t.unsafeGetTensorImpl()->has_storage()) return;
    auto* impl = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (is_foreign(impl)) return;
    auto* s = static_cast<TpuStorage*>(impl);
    if (s->epoch == r.epoch && s->value != kNoValue && s->value < 0 && static_cast<size_t>(~s->value) >= known) {
      forget_value(s);
    }
  };
  if (r.inputs.size() == known) return;
  for (size_t i = 0; i < info.args.size(); i++) {
    if (args[i].isTensor()) forget(args[i].toTensor());
    if (!args[i].isList()) continue;
    for (const IValue& e : args[i].toListRef()) {
      if (e.isTensor()) forget(e.toTensor());
    }
  }
  drop_inputs(r, known);
}

// Records a call that no node matches yet; false where it cannot be recorded.  An error of its own may lead to the CPU,
// one of a signal handler's may not: they wait.
bool learn_cleanly(Recorder& r, const OpInfo& info, const IValue* args) {
  SignalsDeferred deferred;
  const Node* at;
  uint64_t epoch;
  size_t known;
  {
    StateGuard guard(state_lock);
    at = r.at;
    epoch = r.epoch;
    known = r.inputs.size();
  }
  auto undo = [&] {
    StateGuard guard(state_lock);
    if (r.epoch == epoch && r.at == at) forget_new_inputs(r, info, args, known);
  };
  try {
    if (learn(r, info, args)) return true;
  } catch (...) {
    undo();
    throw;
  }
  undo();
  return false;
}

// Does what is due before the next op is recorded; another thread's cut may make more due meanwhile.
void open_region(Recorder& r) {
  collect_deferred();
  const char* boundary;
  bool begins;
  {
    StateGuard guard(state_lock);
    leave_speculative_tail(r);
    boundary = r.boundary;
    begins = boundary || r.is_empty();
  }
  if (boundary) cut(r, boundary);
  std::shared_ptr<CodePlace> place = begins ? current_place() : nullptr;
  StateGuard guard(state_lock);
  if (r.is_empty() && !begins) return;
  if (r.is_empty()) r.entry.swap(place);
  r.is_open = !r.speculative_tail && !r.boundary;
}

}  // namespace

bool RecordKernel::hit(const IValue* args, Results& results, bool is_retry) const {
  check_running();
  offer_gil();
  c10::DeviceIndex device = find_device(info, args);
  Recorder& r = recorder_for(device);
  const char* due = nullptr;
  for (bool is_done = false; !is_done;) {
    {
      StateGuard guard(state_lock);
      if (C10_LIKELY(r.is_open)) {
        size_t known = r.inputs.size();
        if (C10_UNLIKELY(!try_hit(r, info, args, is_retry, results))) {
          forget_new_inputs(r, info, args, known);
          r.is_open = !r.is_empty();  // the next call may be another one, elsewhere
          return false;
        }
        if (r.at->depth >= runtime.limits.max_ops) due = "max_ops";
        if (r.at->bytes >= runtime.limits.max_bytes) due = "max_bytes";
        is_done = true;
      }
    }
    if (C10_UNLIKELY(!is_done)) open_region(r);
  }
  if (C10_UNLIKELY(due != nullptr)) cut_at_cap(r, due);
  if (C10_UNLIKELY(has_arrivals.load(std::memory_order_relaxed))) wake_launcher();
  if (C10_UNLIKELY(runtime.is_synchronous)) synchronize(device);
  return true;
}

void RecordKernel::call(Stack* stack) const {
  size_t given = info.args.size();
  Results results;
  for (bool is_prepared = false, is_retry = false;;) {
    const IValue* args = stack->data() + stack->size() - given;
    if (C10_LIKELY(hit(args, results, is_retry))) break;
    c10::DeviceIndex device = find_device(info, args);
    if (!is_prepared) {
      is_prepared = true;
      if (run_in_parts(*this, stack)) return;
      if (prepare_args(info, device, stack)) continue;
    }
    if (!learn_cleanly(recorder_for(device), info, stack->data() + stack->size() - given)) {
      run_unrecorded(info.handle, stack);
      return;
    }
    is_retry = true;
  }
  for (size_t i = 0; i < results.size(); i++) {
    if (info.return_alias[i] >= 0) results[i] = (*stack)[stack->size() - given + info.return_alias[i]];
  }
  torch::jit::drop(*stack, given);
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace torchtpu
