// Ends a pending region elsewhere than where it is cut: makes works of its first parts, and records the ops after them
// again from the root of the trie.

#include "region/split.h"

#include <algorithm>
#include <bit>

#include "bind/bridge.h"
#include "launch/queue.h"
#include "region/loop.h"

namespace torchtpu {

// ---- recording again

std::vector<ArgKey> call_of(const Node& node, const double*& floats, const int64_t*& ints) {
  std::vector<ArgKey> args = node.args;
  auto give = [&](NumberKey& key) {
    if (key.is_lifted) key.bits = key.kind == NumberKey::kDouble ? std::bit_cast<int64_t>(*floats++) : *ints++;
  };
  for (auto& key : args) {
    if (key.kind == ArgKey::kRandom) {
      key.number.bits = *ints++;
      key.number.imaginary_bits = *ints++;
    }
    if (key.kind == ArgKey::kNumber || key.kind == ArgKey::kCpuScalar) give(key.number);
    for (auto& number : key.numbers) give(number);
    for (auto& t : key.tensors) {
      if (t.is_offset_lifted) t.offset = *ints++;
    }
  }
  return args;
}

namespace {

// Numbers that were lifted in the old region stay lifted.
void lift_as_before(const std::vector<ArgKey>& before, std::vector<ArgKey>& keys) {
  for (size_t i = 0; i < keys.size(); i++) {
    keys[i].number.is_lifted |= before[i].number.is_lifted;
    for (size_t e = 0; e < keys[i].numbers.size(); e++) {
      keys[i].numbers[e].is_lifted |= before[i].numbers[e].is_lifted;
    }
    for (size_t e = 0; e < keys[i].tensors.size(); e++) {
      keys[i].tensors[e].is_offset_lifted |= before[i].tensors[e].is_offset_lifted;
    }
  }
}

// The node below r.at for a call that `old` stands for in the region before.
Node* node_again(Recorder& r, const Node& old, std::vector<ArgKey> call, const Node* fork) {
  const int32_t shift = old.parent->next_value - r.at->next_value;
  auto node = std::make_unique<Node>();
  node->info = old.info;
  node->args = std::move(call);
  lift_keys(*old.info, fork, node->args);
  lift_as_before(old.args, node->args);
  node->returns = old.returns;
  node->writes = old.writes;
  for (auto& ret : node->returns) {
    for (auto& m : ret.tensors) m.value -= m.is_undefined ? 0 : shift;
  }
  for (auto& w : node->writes) {
    w.value -= shift;
    w.meta.value = w.value;
  }
  node->rng_increment = old.rng_increment;
  node->settings = old.settings;
  node->line = old.line;
  return add_node(*r.trie, *r.at, std::move(node), old.next_value - shift);
}

}  // namespace

void record_again(Recorder& r, const Node& old, std::vector<ArgKey> call) {
  LiftedNumbers lifted;
  Node *next = nullptr, *fork = nullptr;
  for (auto& child : r.at->children) {
    if (child->settings != old.settings) continue;
    lifted.clear();
    Match m = match_keys(*child, *old.info, call, lifted);
    if (m == Match::kYes) next = child.get();
    if (m == Match::kYes) break;
    if (m == Match::kButNumbers) fork = child.get();
  }
  if (!next) {
    next = node_again(r, old, call, fork);
    lifted.clear();
    match_keys(*next, *old.info, call, lifted);
  }
  r.at->last = next;
  r.floats.insert(r.floats.end(), lifted.floats.begin(), lifted.floats.end());
  r.ints.insert(r.ints.end(), lifted.ints.begin(), lifted.ints.end());
  r.at = next;
}

namespace {

// Ends regions after each of `ends`, nodes on the path to r.at; the ops after the last one are the pending region.
// Works are queued in order; nobody is woken.
void cut_after(Recorder& r, const std::vector<Node*>& ends, const char* reason, const std::string& line) {
  note_end(*r.trie, *r.at);
  r.trie->walks++;
  const std::vector<const Node*> path = path_to(r.at);
  const std::vector<BufferRef> inputs = r.inputs;
  const std::vector<double> floats = r.floats;
  const std::vector<int64_t> ints = r.ints;
  std::vector<TpuStorage*> holders(r.live.begin(), r.live.begin() + r.at->next_value);
  std::vector<BufferRef> made(holders.size());  // by old value, once its region has ended
  std::vector<int32_t> last_read(holders.size(), -1), last_taken(inputs.size(), -1);  // by place in the path
  for (size_t i = 0; i < path.size(); i++) {
    for (const auto& key : path[i]->args) {
      for (const auto& t : key.tensors) {
        if (t.value >= 0) last_read[t.value] = static_cast<int32_t>(i);
        if (t.value < 0 && t.value != kNoValue) last_taken[~t.value] = static_cast<int32_t>(i);
      }
    }
  }

  auto hold = [&](int32_t from, int by) {  // what is read later is not to be donated
    for (size_t i = 0; i < inputs.size(); i++) inputs[i]->regions += last_taken[i] >= from ? by : 0;
    for (size_t v = 0; v < made.size(); v++) {
      if (made[v] && last_read[v] >= from) made[v]->regions += by;
    }
  };
  auto end_region = [&](const Node* end, int32_t shift) {
    std::vector<KeptValue> kept;
    for (int32_t value = shift; value < end->next_value; value++) {
      if (last_read[value] >= end->depth) kept.push_back({value - shift, {}});
    }
    hold(end->depth, 1);
    cut_locked(r, reason, line, &kept);
    hold(end->depth, -1);  // before the new buffers, which nobody holds yet, are known
    for (auto& k : kept) made[k.value + shift] = std::move(k.buffer);
  };
  std::fill(r.live.begin() + ends[0]->next_value, r.live.end(), nullptr);
  r.at = ends[0];
  r.floats.resize(ends[0]->floats);
  r.ints.resize(ends[0]->ints);
  end_region(ends[0], 0);
  for (size_t e = 0; e < ends.size(); e++) {
    const Node* begin = ends[e];
    const Node* end = e + 1 < ends.size() ? ends[e + 1] : path.back();
    const int32_t shift = begin->next_value;
    auto value_now = [&](int32_t value) {
      if (value == kNoValue) return value;
      if (value >= shift) return value - shift;
      return input_value(r, value < 0 ? inputs[~value] : made[value], true);
    };
    const double* next_float = floats.data() + begin->floats;
    const int64_t* next_int = ints.data() + begin->ints;
    for (int32_t i = begin->depth; i < end->depth; i++) {
      std::vector<ArgKey> call = call_of(*path[i], next_float, next_int);
      for (auto& key : call) {
        for (auto& t : key.tensors) t.value = value_now(t.value);
      }
      record_again(r, *path[i], std::move(call));
    }
    if (static_cast<int32_t>(r.live.size()) < r.at->next_value) r.live.resize(r.at->next_value, nullptr);
    for (int32_t value = shift; value < end->next_value; value++) {
      TpuStorage* s = holders[value];
      if (!s) continue;
      s->epoch = r.epoch;
      s->value = value - shift;
      r.live[s->value] = s;
    }
    if (end != path.back()) end_region(end, shift);
  }
  r.trie->walks--;
}

}  // namespace

void cut_at_cap(Recorder& r, const char* reason) {
  std::string line = current_line();
  {
    StateGuard guard(state_lock);
    Node* end = end_of_laps(r.at);
    if (!end) end = r.at->best;
    if (end && end != r.at) {
      cut_after(r, {end}, reason, line);
    } else {
      cut_locked(r, reason, std::move(line));
    }
  }
  wake_launcher();
  throttle();
}

// ---- what is known

namespace {

// Whether a region that ended at `end`, on the path to r.at, left a program that makes all that is needed afterwards.
bool is_served(const Recorder& r, const Node* end) {
  std::vector<int32_t> needed;
  std::vector<uint8_t> is_read(end->next_value, 0);
  for (const Node* node = r.at; node != end; node = node->parent) {
    for (const auto& key : node->args) {
      for (const auto& t : key.tensors) {
        if (t.value >= 0 && t.value < end->next_value) is_read[t.value] = 1;
      }
    }
  }
  for (int32_t value = 0; value < end->next_value; value++) {
    if (r.live[value] || is_read[value]) needed.push_back(value);
  }
  return std::any_of(end->plans.begin(), end->plans.end(), [&](const auto& plan) {
    bool has_inputs = plan->inputs.size() <= r.inputs.size();
    for (size_t i = 0; has_inputs && i < plan->inputs.size(); i++) has_inputs = plan->inputs[i] == r.inputs[i]->base;
    return has_inputs && plan->state != Plan::kFailed &&
           std::includes(plan->outputs.begin(), plan->outputs.end(), needed.begin(), needed.end());
  });
}

}  // namespace

void split_by_known(Recorder& r, const std::string& line) {
  for (;;) {
    Node* end = r.at;
    while (end->info && !is_served(r, end)) end = end->parent;
    if (!end->info || end == r.at) return;
    cut_after(r, {end}, "frozen", line);
  }
}

// ---- shapes that keep changing

namespace {

constexpr size_t kFewestOpsToSplit = 32;  // below this, compiling the whole is cheap
constexpr size_t kFewestOpsOfRun = 4;     // a shorter run of ops that stay the same is not worth a launch
constexpr int kStreamsBeforeSplit = 2;    // compiled whole, until it is clear that the shapes go on changing
constexpr size_t kMostParts = 256;

// The ends of the runs of ops that stay the same where an op stream comes with other shapes, and of those between them,
// but the last; none where the runs are too few to be worth it.
std::vector<int64_t> ends_of_runs(std::vector<bool> is_same) {
  for (size_t i = 0; i < is_same.size();) {  // short runs join their neighbours
    size_t j = i;
    while (j < is_same.size() && is_same[j] == is_same[i]) j++;
    if (is_same[i] && j - i < kFewestOpsOfRun) std::fill(is_same.begin() + i, is_same.begin() + j, false);
    i = j;
  }
  const auto same = std::count(is_same.begin(), is_same.end(), true);
  std::vector<int64_t> ends;
  for (size_t i = 1; i < is_same.size(); i++) {
    if (is_same[i] != is_same[i - 1]) ends.push_back(i);
  }
  if (is_same.size() < kFewestOpsToSplit || same * 2 < std::ssize(is_same) || ends.size() >= kMostParts) ends.clear();
  return ends;
}

bool is_same_geometry(const TensorKey& a, const TensorKey& b) {
  return a.geometry == b.geometry && a.dtype == b.dtype && a.base == b.base &&
         (a.is_offset_lifted || b.is_offset_lifted || a.offset == b.offset);
}

bool is_same_number(const NumberKey& a, const NumberKey& b) {
  return a.is_lifted == b.is_lifted && (a.is_lifted || a.bits == b.bits);
}

bool is_same_result(const TensorMeta& a, const TensorMeta& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype && a.base == b.base;
}

// Whether two calls of one op on the same values, with as many results, agree in geometry and numbers: then one
// program most likely serves both.
bool is_same_call(const Node& a, const Node& b) {
  if (a.info != b.info || a.settings != b.settings) return false;
  for (size_t i = 0; i < a.args.size(); i++) {
    const ArgKey &x = a.args[i], &y = b.args[i];
    if (x.ints != y.ints || x.dtype != y.dtype || x.numbers.size() != y.numbers.size() ||
        x.tensors.size() != y.tensors.size())
      return false;
    if (!is_same_number(x.number, y.number)) return false;
    for (size_t e = 0; e < x.numbers.size(); e++) {
      if (!is_same_number(x.numbers[e], y.numbers[e])) return false;
    }
    for (size_t e = 0; e < x.tensors.size(); e++) {
      if (!is_same_geometry(x.tensors[e], y.tensors[e])) return false;
    }
  }
  for (size_t i = 0; i < a.returns.size(); i++) {
    if (a.returns[i].tensors.size() != b.returns[i].tensors.size()) return false;
    for (size_t e = 0; e < a.returns[i].tensors.size(); e++) {
      if (!is_same_result(a.returns[i].tensors[e], b.returns[i].tensors[e])) return false;
    }
  }
  return true;
}

// Whether two streams have the same ops, none of which has an effect beside its results.
bool has_same_ops(const Node& now, const Node& then) {
  if (now.depth != then.depth) return false;
  for (const Node *a = &now, *b = &then; a->info; a = a->parent, b = b->parent) {
    if (a->info->runs_once || a->info != b->info || a->settings != b->settings) return false;
  }
  return true;
}

std::vector<Node*> ends_of_same_calls(Node* now, const Node* before) {
  std::vector<Node*> path;
  std::vector<bool> is_same;
  for (Node* node = now; node->info; node = node->parent, before = before->parent) {
    path.push_back(node);
    is_same.push_back(is_same_call(*node, *before));
  }
  std::reverse(path.begin(), path.end());
  std::reverse(is_same.begin(), is_same.end());
  std::vector<Node*> ends;
  for (int64_t end : ends_of_runs(std::move(is_same))) ends.push_back(path[end - 1]);
  return ends;
}

// ---- laps of a loop that never reads

bool has_other_results(const Node& a, const Node& b) {
  for (size_t i = 0; i < a.returns.size(); i++) {
    for (size_t e = 0; e < a.returns[i].tensors.size() && e < b.returns[i].tensors.size(); e++) {
      if (!is_same_result(a.returns[i].tensors[e], b.returns[i].tensors[e])) return true;
    }
  }
  return false;
}

// The ends of the laps of a loop whose shapes change from lap to lap; none where there is none, or where what one lap
// makes is read by ever more of the later ones.
std::vector<Node*> ends_of_laps(Node* now) {
  std::vector<Node*> path;
  for (Node* node = now; node->info; node = node->parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  Laps laps = find_laps({path.begin(), path.end()}, 3);
  size_t length = laps.end - laps.begin;
  if (laps.period < kFewestOpsOfRun || length * 2 < path.size() || length / laps.period > kMostParts) return {};
  size_t changes = 0;
  for (size_t begin = laps.begin + laps.period; begin + laps.period <= laps.end; begin += laps.period) {
    bool has_changed = false;
    for (size_t i = begin; i < begin + laps.period; i++)
      has_changed |= has_other_results(*path[i], *path[i - laps.period]);
    changes += has_changed;
  }
  if (changes * 2 < length / laps.period) return {};

  std::vector<int32_t> crossing(path.size() + 2, 0);  // values that are made before a place and read there or later
  std::vector<size_t> last_read(now->next_value, 0);
  for (size_t i = 0; i < path.size(); i++) {
    for (const auto& key : path[i]->args) {
      for (const auto& t : key.tensors) {
        if (t.value >= 0) last_read[t.value] = i;
      }
    }
  }
  for (size_t i = 0; i < path.size(); i++) {
    for (int32_t value = path[i]->parent->next_value; value < path[i]->next_value; value++) {
      if (last_read[value] <= i) continue;
      crossing[i + 1]++;
      crossing[last_read[value] + 1]--;
    }
  }
  for (size_t i = 1; i < crossing.size(); i++) crossing[i] += crossing[i - 1];
  size_t middle = laps.begin + laps.period, first = middle;
  for (size_t place = middle; place < middle + laps.period; place++) {
    auto cost = [&](size_t at) { return std::make_pair(crossing[at], path[at]->info->name); };
    if (cost(place) < cost(first)) first = place;
  }
  size_t last = first + (laps.end - first) / laps.period * laps.period;
  if (crossing[last == path.size() ? last - laps.period : last] > crossing[first]) return {};
  std::vector<Node*> ends;
  for (size_t place = first % laps.period; place < path.size() && place <= last; place += laps.period) {
    if (place > 0 && place >= laps.begin) ends.push_back(path[place - 1]);
  }
  return ends;
}

}  // namespace

const Node* note_sizes(Recorder& r) {
  if (!r.at->plans.empty()) return nullptr;
  Trie::Stream& stream = r.trie->streams[r.at->skeleton];
  if (stream.last == r.at) return nullptr;
  const Node* before = stream.previous = std::exchange(stream.last, r.at);
  if (before == nullptr || before->depth != r.at->depth) return nullptr;
  return ++stream.changes < kStreamsBeforeSplit ? nullptr : before;
}

void split_by_shape(Recorder& r, const std::string& line) {
  bool may_split = r.at->plans.empty() && r.at->depth >= kFewestOpsToSplit && !is_exact() && runtime.policy.gives_room;
  if (may_split) {
    std::vector<Node*> ends = ends_of_laps(r.at);
    if (!ends.empty()) cut_after(r, ends, "lap", line);
  }
  const Node* before = note_sizes(r);
  if (!before || r.at->depth < static_cast<int32_t>(kFewestOpsToSplit) || find_smaller(r)) return;
  std::vector<Node*> ends = ends_of_same_calls(r.at, before);
  if (ends.empty()) return;
  cut_after(r, ends, "shape", line);
  note_sizes(r);
}

std::shared_ptr<Plan> find_smaller(const Recorder& r) {
  auto found = r.trie->streams.find(r.at->skeleton);
  if (is_exact() || !runtime.policy.gives_room || found == r.trie->streams.end() ||
      found->second.changes < kStreamsBeforeSplit)
    return nullptr;
  const Node* other = found->second.last == r.at ? found->second.previous : found->second.last;
  if (!other || other->plans.empty() || !has_same_ops(*r.at, *other)) return nullptr;
  return other->plans.front();
}

}  // namespace torchtpu
