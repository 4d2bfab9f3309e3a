// Ends a recorder's pending region, and finds the plan that launches it.

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "bind/bridge.h"
#include "launch/queue.h"
#include "region/subgraph.h"

namespace torchtpu {

namespace {
constexpr int kFewestOpsToMark = 4;     // an optimizer step that ends so small a region is no boundary
constexpr size_t kMostPlans = 64;       // of one end: the oldest goes
constexpr size_t kMostLines = 1 << 14;  // where regions ended, that are counted
}  // namespace

namespace {

bool is_subset(const std::vector<int32_t>& small, const std::vector<int32_t>& large) {
  return std::includes(large.begin(), large.end(), small.begin(), small.end());
}

bool is_mask_subset(const std::vector<uint8_t>& small, const std::vector<uint8_t>& large) {
  for (size_t i = 0; i < small.size(); i++) {
    if (small[i] && !(i < large.size() && large[i])) return false;
  }
  return true;
}

// value -> base, for the values listed (ascending)
std::vector<BaseRef> bases_of(const Node* node, const std::vector<int32_t>& values) {
  std::vector<BaseRef> all(node->next_value);
  for (; node->info; node = node->parent) {
    for (const auto& ret : node->returns) {
      for (const auto& m : ret.tensors) {
        if (!m.is_undefined) all[m.value] = m.base;
      }
    }
    for (const auto& w : node->writes) all[w.value] = w.meta.base;
  }
  std::vector<BaseRef> bases;
  for (int32_t value : values) bases.push_back(all[value]);
  return bases;
}

std::vector<Maker> makers_of(const Node* node, const std::vector<int32_t>& values) {
  std::vector<Maker> all(node->next_value);
  for (; node->info; node = node->parent) {
    Maker maker{node->info, std::make_shared<std::string>(node->line)};
    for (const auto& ret : node->returns) {
      for (const auto& m : ret.tensors) {
        if (!m.is_undefined) all[m.value] = maker;
      }
    }
    for (const auto& w : node->writes) all[w.value] = maker;
  }
  std::vector<Maker> makers;
  for (int32_t value : values) makers.push_back(all[value]);
  return makers;
}

int64_t total_bytes(const std::vector<BaseRef>& bases) {
  int64_t bytes = 0;
  for (const auto& base : bases) bytes += base->nbytes;
  return bytes;
}

bool has_effects(const Node* end) {
  for (const Node* node = end; node->info; node = node->parent) {
    if (node->info->runs_once) return true;
  }
  return false;
}

bool writes_nothing(const Node* end, const std::vector<int32_t>& outputs) {
  Versions versions = versions_of(end);
  return std::none_of(outputs.begin(), outputs.end(), [&](int32_t value) {
    int32_t root = oldest(versions, value);
    return root < 0 && root != kNoValue;
  });
}

// A plan that computes more than is alive is good enough where the surplus is small.
constexpr int64_t kSmallSurplusBytes = 1 << 20;

bool is_usable(const Plan& plan, const std::vector<int32_t>& live, const std::vector<uint8_t>& free,
               int64_t live_bytes) {
  return is_subset(live, plan.outputs) && is_mask_subset(plan.donated, free) &&
         plan.output_bytes - live_bytes <= std::max(kSmallSurplusBytes, live_bytes / 50);
}

// The donation mask shrinks to what is free at every visit; after the second shrink nothing is donated any more.
const std::vector<uint8_t>& agree_on_donation(Node& node, const std::vector<uint8_t>& free) {
  if (node.plans.empty()) {
    node.donation = free;
  } else if (!is_mask_subset(node.donation, free)) {
    bool is_last = ++node.donation_shrinks > 2;
    for (size_t i = 0; i < node.donation.size(); i++) node.donation[i] &= !is_last && free[i];
  }
  return node.donation;
}

std::shared_ptr<Plan> choose_plan(Recorder& r, const std::vector<int32_t>& live, const std::vector<uint8_t>& free,
                                  const std::string& line) {
  Node& node = *r.at;
  if (r.trie->places.size() >= kMostLines) r.trie->places.clear();
  r.trie->places[line].regions++;
  // A build that failed is forgotten: who needs the program again builds it again.
  std::erase_if(node.plans, [](const auto& known) { return known->state == Plan::kFailed; });
  for (auto& plan : node.plans) {
    bool has_inputs = std::ranges::equal(plan->inputs, r.inputs, {}, {},
                                         [](const auto& input) -> const BaseRef& { return input->base; });
    if (has_inputs && plan->outputs == live && is_mask_subset(plan->donated, free)) return plan;
  }
  std::vector<BaseRef> inputs;
  for (const auto& input : r.inputs) inputs.push_back(input->base);
  if (is_exact()) {
    auto plan = make_plan(r, std::move(inputs), live, free, line);
    node.plans.push_back(plan);
    return plan;
  }
  auto bases = bases_of(&node, live);
  int64_t live_bytes = total_bytes(bases);
  std::shared_ptr<Plan> best;
  for (auto& plan : node.plans) {
    bool fits = plan->inputs == inputs && is_usable(*plan, live, free, live_bytes);
    if (fits && (!best || plan->output_bytes < best->output_bytes)) best = plan;
  }
  if (best) return best;
  std::vector<int32_t> outputs = live;
  for (auto& known : node.plans) {  // incomparable live sets converge to their union
    std::vector<int32_t> both;
    std::set_union(outputs.begin(), outputs.end(), known->outputs.begin(), known->outputs.end(),
                   std::back_inserter(both));
    if (total_bytes(bases_of(&node, both)) - live_bytes <= std::max(kSmallSurplusBytes, live_bytes / 50)) {
      outputs = std::move(both);
    }
  }
  auto plan = make_plan(r, std::move(inputs), std::move(outputs), agree_on_donation(node, free), line, find_smaller(r));
  r.trie->places[line].plans++;
  if (node.plans.size() >= kMostPlans) node.plans.erase(node.plans.begin());
  node.plans.push_back(plan);
  return plan;
}

void start_region(Recorder& r) {
  r.is_open = false;
  r.at = &r.trie->root;
  r.shadow = nullptr;
  r.boundary = nullptr;
  r.epoch = new_epoch();
  r.inputs.clear();
  r.floats.clear();
  r.ints.clear();
  for (auto& [value, subgraph] : r.subgraphs) bury(std::move(subgraph));
  r.subgraphs.clear();
  r.speculative_tail = nullptr;
  std::fill(r.live.begin(), r.live.end(), nullptr);
  forget_oldest(*r.trie);
}

}  // namespace

namespace {

std::string describe_op(const Node& node) { return node.info->name + " (" + node.line + ")"; }

// What an earlier region that began like the one that ends at `end` had where they part.
std::string describe_nearest(const Node* end) {
  const Node* from = nullptr;
  for (const Node* node = end;; from = node, node = node->parent) {
    if (node->hot_child && node->hot_child != from) {
      return "the nearest region known has " + describe_op(*node->hot_child) +
             (from ? " where this one has " + describe_op(*from) : " after the last op of this one");
    }
    if (!node->plans.empty()) {
      return from ? "the nearest region known ends before " + describe_op(*from)
                  : "a region known has the same ops, but other results";
    }
    if (!node->info) return "no region known begins with " + describe_op(*from);
  }
}

}  // namespace

bool is_exact() { return runtime.policy.is_exact || at::globalContext().deterministicAlgorithms(); }

std::shared_ptr<Plan> make_plan(const Recorder& r, std::vector<BaseRef> inputs, std::vector<int32_t> outputs,
                                std::vector<uint8_t> donated, const std::string& line, std::shared_ptr<Plan> before) {
  state_lock.assert_held();
  auto plan = std::make_shared<Plan>(r);
  plan->before = std::move(before);
  plan->inputs = std::move(inputs);
  plan->output_bases = bases_of(r.at, outputs);
  plan->output_makers = makers_of(r.at, outputs);
  plan->output_bytes = total_bytes(plan->output_bases);
  plan->outputs = std::move(outputs);
  plan->donated = std::move(donated);
  plan->has_effects = has_effects(r.at);
  plan->is_pure = !plan->has_effects && writes_nothing(r.at, plan->outputs);
  plan->line = line;
  plan->regions = r.trie->places[line].regions;
  if (runtime.policy.is_frozen) plan->nearest = describe_nearest(r.at);
  enqueue_plan(plan);
  return plan;
}

WorkRef cut_locked(Recorder& r, const char* reason, std::string line, std::vector<KeptValue>* kept) {
  state_lock.assert_held();
  if (!kept) leave_speculative_tail(r);
  if (r.is_empty()) {
    if (!r.inputs.empty()) {
      drop_inputs(r, 0);
      start_region(r);
    }
    r.boundary = nullptr;
    return nullptr;
  }
  if (kept) {
    note_sizes(r);
  } else {
    split_by_shape(r, line);
  }
  if (!kept && runtime.policy.is_frozen) split_by_known(r, line);
  auto kept_at = [&](int32_t value) -> KeptValue* {
    if (!kept) return nullptr;
    auto it = std::lower_bound(kept->begin(), kept->end(), value,
                               [](const KeptValue& k, int32_t sought) { return k.value < sought; });
    return it == kept->end() || it->value != value ? nullptr : &*it;
  };
  std::vector<int32_t> live;
  for (int32_t value = 0; value < r.at->next_value; value++) {
    if (r.live[value] || kept_at(value)) live.push_back(value);
  }
  drop_inputs(r, r.at->next_input);
  std::vector<uint8_t> free;
  for (const auto& input : r.inputs) free.push_back(input->holders == 0 && input->regions == 1);
  auto work = std::make_shared<Work>();
  note_end(*r.trie, *r.at);
  auto known = static_cast<int64_t>(r.at->plans.size());
  work->plan = choose_plan(r, live, free, line);
  r.trie->plans += static_cast<int64_t>(r.at->plans.size()) - known;
  work->device = r.device;
  work->transaction = r.transaction;
  if (!r.changes.draws.empty()) {  // those after them are of ops that are recorded again
    auto end = r.changes.draws.begin() + static_cast<int64_t>(count_draws(r.at));
    std::move(r.changes.draws.begin(), end, std::back_inserter(work->changes.draws));
    r.changes.draws.erase(r.changes.draws.begin(), end);
  }
  if (!kept) work->changes.steps = std::exchange(r.changes.steps, {});
  work->reason = reason;
  work->line = std::move(line);
  work->entry = std::move(r.entry);
  for (size_t i = 0; i < r.inputs.size(); i++) {
    r.inputs[i]->regions--;
    if (work->plan->donated[i]) r.inputs[i]->give_up_memory();
  }
  double now = seconds_now();
  for (size_t i = 0; i < work->plan->outputs.size(); i++) {
    int32_t value = work->plan->outputs[i];
    TpuStorage* s = r.live[value];
    KeptValue* keeper = kept_at(value);
    auto& output = work->outputs.emplace_back();
    if (!s && !keeper) continue;
    output = c10::make_intrusive<Buffer>(work->plan->output_bases[i], r.device, BufferState::kPending);
    output->maker = work->plan->output_makers[i];
    output->made_at = now;
    if (s) s->set_buffer(output);
    if (keeper) keeper->buffer = output;
    // A value once read stays what it was, and costs nothing.
    if (auto read = r.subgraphs.find(value); read != r.subgraphs.end()) output->host = read->second->host;
  }
  work->inputs = std::move(r.inputs);
  work->floats = pack(r.floats);
  work->ints = pack(r.ints);
  for (Node* node = r.at; node->info; node = node->parent) node->parent->hot_child = node;
  r.recorded += r.at->depth;
  runtime.counters.regions++;
  runtime.counters.cuts[reason]++;
  start_region(r);
  r.transaction->last = work;
  enqueue(work);
  return work;
}

void drop_region(Recorder& r, PyObject* error) {
  leave_speculative_tail(r);
  if (!r.is_empty()) {
    Versions versions = versions_of(r.at);
    for (int32_t value = 0; value < r.at->next_value; value++) {
      TpuStorage* s = r.live[value];
      if (!s) continue;
      auto failed = c10::make_intrusive<Buffer>(s->base, r.device, BufferState::kError);
      Py_INCREF(error);
      failed->error = error;
      int32_t root = oldest(versions, value);
      if (root < 0 && root != kNoValue) failed->restored = restored_by(r.inputs[~root]);
      s->set_buffer(std::move(failed));
    }
  }
  drop_inputs(r, 0);
  start_region(r);
  r.transaction->undone.add(std::exchange(r.changes, {}));
  r.transaction = std::make_shared<Transaction>();
}

WorkRef cut_to_wait(Recorder& r, const char* reason) {
  check_running();
  std::string line;
  bool is_marked;
  {
    StateGuard guard(state_lock);
    is_marked = r.boundary;
    if (is_marked) line = r.boundary_line;
  }
  if (!is_marked) line = current_line();
  WorkRef work;
  {
    StateGuard guard(state_lock);
    work = cut_locked(r, reason, std::move(line));
  }
  return work;
}

WorkRef cut(Recorder& r, const char* reason) {
  WorkRef work = cut_to_wait(r, reason);
  if (work) {
    wake_launcher();
    throttle();
  }
  return work;
}

size_t count_draws(const Node* end) {
  size_t count = 0;
  for (const Node* node = end; node->info; node = node->parent) count += node->info->random;
  return count;
}

void HostChanges::add(HostChanges later, size_t kept_draws) {
  for (size_t i = kept_draws; i < later.draws.size(); i++) draws.push_back(std::move(later.draws[i]));
  std::move(later.steps.begin(), later.steps.end(), std::back_inserter(steps));
}

void mark_boundary(const char* reason, const std::shared_ptr<PyObject>& undo) {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  std::string line = current_line();
  for (c10::DeviceIndex device = 0; device < device_count(); device++) {
    Recorder& r = recorder_for(device);
    StateGuard guard(state_lock);
    if (r.at->depth < kFewestOpsToMark) continue;
    r.boundary = reason;
    r.boundary_line = line;
    if (undo) r.changes.steps.push_back(undo);
    r.is_open = false;
  }
}

namespace {

// How long a read waits for the owner of a pending value to end its region itself.
constexpr auto kOwnerPatience = std::chrono::milliseconds(1);

bool is_pending(const TpuStorage* s) { return s->value >= 0 && s->recorder && s->recorder->epoch == s->epoch; }

// A cut in the middle of another thread's region would make that thread's programs depend on timing.
void await_owner(const TpuStorage* s) {
  auto deadline = std::chrono::steady_clock::now() + kOwnerPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    {
      StateGuard guard(state_lock);
      if (!is_pending(s)) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

ReadValue materialize(TpuStorage* s, const char* reason, bool may_read_beside) {
  const Recorder& own = recorder_for(s->device_index);
  bool is_ours;
  auto claim = [&](BufferRef buffer, bool is_subgraph) -> ReadValue {
    if (buffer) buffer->readers++;
    return {std::move(buffer), is_subgraph};
  };
  {
    StateGuard guard(state_lock);
    if (!is_pending(s)) return claim(s->buffer, false);
    is_ours = s->recorder == &own;
  }
  if (!is_ours) {
    reason = "other_thread";
    await_owner(s);
  }
  std::string line = current_line();
  StateGuard guard(state_lock);
  if (is_pending(s)) {
    BufferRef subgraph = may_read_beside ? read_beside(*s->recorder, s->value, is_ours, line) : BufferRef();
    if (subgraph) return claim(std::move(subgraph), true);
    auto& subgraphs = s->recorder->subgraphs;
    if (auto failed = subgraphs.find(s->value); failed != subgraphs.end()) {  // it could not be computed
      bury(std::move(failed->second));
      subgraphs.erase(failed);
    }
    cut_locked(*s->recorder, reason, std::move(line));
  }
  return claim(s->buffer, false);
}

}  // namespace

BufferRef materialize(TpuStorage* s, const char* reason) { return materialize(s, reason, false).buffer; }
ReadValue materialize_to_read(TpuStorage* s) { return materialize(s, "read", true); }

}  // namespace torchtpu
