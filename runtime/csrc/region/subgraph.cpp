// A subgraph: the ops of a pending region that one value needs, launched beside the region, whose program stays the
// same.
//
// The first few values of a trie get a program each.  A stream that is read at ever other places then runs in pieces
// of equal length, each a program that returns all it computes: whatever is read, these programs serve.  A piece
// goes on beyond the read, as the stream did last time; what these ops lack is an input that failed, and what depends
// on it is not computed.

#include "region/subgraph.h"

#include <algorithm>

#include "bind/bridge.h"
#include "launch/queue.h"
#include "region/loop.h"
#include "region/split.h"

namespace torchtpu {

namespace {

constexpr int32_t kFewestOps = 32;       // a shorter stream is cut: compiling it is cheap
constexpr int32_t kMostOpsOfTail = 8;    // recorded for a read alone
constexpr size_t kMostOpsOfWhole = 512;  // a larger subgraph runs in pieces
constexpr int kMostWholes = 8;           // subgraphs of a trie that have a program of their own
constexpr int32_t kOpsOfPiece = 128;
constexpr int kCheapness =
    8;  // a subgraph is cheap where this many times its ops were recorded since the last read here
constexpr int64_t kFewestNewPlans = 8;
constexpr int kMostOverBudget = 2;  // over budget at one place, before the region is cut there

// The last node that an earlier region passed through and went on from: r.at, or the one where a speculative tail
// began.
Node* find_fork(const Recorder& r) {
  const Node* from = nullptr;
  for (Node* node = r.at; node; from = node, node = node->parent) {
    if (node->hot_child && node->hot_child != from) return node;
    bool is_plain = node->info && node->writes.empty() && node->next_value > node->parent->next_value;
    if (!is_plain || r.at->depth - node->depth >= kMostOpsOfTail) break;
  }
  return nullptr;
}

// The places in the path of the ops that `value` needs.  An op without results is an assertion: what is made after it
// depends on it.
std::vector<size_t> ops_for(const std::vector<const Node*>& path, int32_t value) {
  std::vector<uint8_t> is_needed(path.back()->next_value, 0);
  is_needed[value] = 1;
  std::vector<size_t> places;
  for (size_t i = path.size(); i-- > 0;) {
    auto first = is_needed.begin() + path[i]->parent->next_value, last = is_needed.begin() + path[i]->next_value;
    bool is_assertion = first == last && !places.empty();
    if (!is_assertion && std::find(first, last, 1) == last) continue;
    places.push_back(i);
    for (const auto& key : path[i]->args) {
      for (const auto& t : key.tensors) {
        if (t.value >= 0) is_needed[t.value] = 1;
      }
    }
  }
  std::reverse(places.begin(), places.end());
  return places;
}

// Stands for what is not recorded yet: no launch waits for it, and what depends on it is not computed.
BufferRef missing(const BaseRef& base, c10::DeviceIndex device) {
  return c10::make_intrusive<Buffer>(base, device, BufferState::kError);
}

// Adds to the trie's plans those of a node, whatever has become of them.
struct CountAgain {
  ~CountAgain() { trie.plans += static_cast<int64_t>(plans.size()); }
  Trie& trie;
  const std::vector<std::shared_ptr<Plan>>& plans;
};

// Launches of parts of a pending region.
class Beside {
 public:
  Beside(Recorder& r, const std::string& line) : r_(r), line_(line) {}

  // Launches the ops at `places` of a path, of which the first `recorded` ops are part of the region; the others have
  // the numbers of their first time.  Keeps `wanted`, or else every value that they make.
  void launch(const std::vector<const Node*>& path, const std::vector<size_t>& places, size_t recorded,
              std::optional<int32_t> wanted) {
    Recorder again(r_.device);
    again.trie = r_.trie;
    again.at = &r_.trie->root;
    int32_t known_inputs = recorded ? path[recorded - 1]->next_input : 0;
    std::vector<BufferRef> inputs;
    std::unordered_map<int32_t, int32_t> now;  // the region's numbers -> the launch's
    std::vector<int32_t> before;               // the reverse, of values that the launch makes
    auto number = [&](int32_t value, const BaseRef& base) {
      auto [it, is_new] = now.try_emplace(value, ~static_cast<int32_t>(inputs.size()));
      if (!is_new) return it->second;
      BufferRef buffer;
      if (value >= 0) {
        buffer = made_[value];
      } else if (~value < known_inputs) {
        buffer = r_.inputs[~value];
      }
      inputs.push_back(buffer ? buffer : missing(base, r_.device));
      return it->second;
    };
    for (size_t i : places) {
      const Node &old = *path[i], &parent = *old.parent;
      std::vector<ArgKey> call = old.args;
      if (i < recorded) {
        const double* next_float = r_.floats.data() + parent.floats;
        const int64_t* next_int = r_.ints.data() + parent.ints;
        call = call_of(old, next_float, next_int);
      }
      for (auto& key : call) {
        for (auto& t : key.tensors) {
          if (t.value != kNoValue) t.value = number(t.value, t.base);
        }
      }
      for (int32_t value = parent.next_value; value < old.next_value; value++) {
        now[value] = again.at->next_value + value - parent.next_value;
        before.push_back(value);
      }
      record_again(again, old, std::move(call));
    }
    std::vector<int32_t> outputs;
    for (int32_t value = 0; value < again.at->next_value; value++) {
      if (!wanted || before[value] == *wanted) outputs.push_back(value);
    }
    auto buffers = queue(again, std::move(inputs), std::move(outputs));
    for (const auto& [value, buffer] : buffers) made_[before[value]] = buffer;
  }

  // What the launches made, by the region's numbers.
  BufferRef made(int32_t value) { return made_[value]; }
  void forget_from(int32_t value) {
    std::erase_if(made_, [&](const auto& item) { return item.first >= value; });
  }

 private:
  std::shared_ptr<Plan> find_plan(Recorder& again, const std::vector<BufferRef>& inputs,
                                  const std::vector<int32_t>& outputs) {
    Node& node = *again.at;
    auto& plans = reads_of(node).plans;
    note_end(*again.trie, node);
    again.trie->plans -= static_cast<int64_t>(plans.size());
    CountAgain count{*again.trie, plans};
    std::erase_if(plans, [](const auto& known) { return known->state == Plan::kFailed; });
    std::vector<BaseRef> bases;
    for (const auto& input : inputs) bases.push_back(input->base);
    for (const auto& plan : plans) {
      if (plan->outputs == outputs && plan->inputs == bases) return plan;
    }
    auto plan = make_plan(again, std::move(bases), outputs, std::vector<uint8_t>(inputs.size(), 0), line_);
    plans.push_back(plan);
    return plan;
  }

  std::vector<std::pair<int32_t, BufferRef>> queue(Recorder& again, std::vector<BufferRef> inputs,
                                                   std::vector<int32_t> outputs) {
    auto work = std::make_shared<Work>();
    work->is_subgraph = true;
    work->plan = find_plan(again, inputs, outputs);
    work->device = again.device;
    work->transaction = r_.transaction;
    work->reason = "subgraph";
    work->line = line_;
    work->inputs = std::move(inputs);
    work->floats = pack(again.floats);
    work->ints = pack(again.ints);
    std::vector<std::pair<int32_t, BufferRef>> made;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& output = work->outputs.emplace_back(
          c10::make_intrusive<Buffer>(work->plan->output_bases[i], again.device, BufferState::kPending));
      made.emplace_back(outputs[i], output);
    }
    runtime.counters.subgraphs++;
    enqueue(work);
    return made;
  }

  Recorder& r_;
  const std::string& line_;
  std::unordered_map<int32_t, BufferRef> made_;
};

bool has_effects(const std::vector<const Node*>& path, const std::vector<size_t>& places) {
  return std::any_of(places.begin(), places.end(), [&](size_t i) { return path[i]->info->runs_once; });
}

// The path that the region's first `fork->depth` ops had last time, to its end.
std::vector<const Node*> hot_path_of(const Node* fork) {
  std::vector<const Node*> path = path_to(fork);
  while ((fork = fork->hot_child)) path.push_back(fork);
  return path;
}

// Computes what the ops at `places` need by pieces of the hot path; then the ops of the speculative tail.
BufferRef run_pieces(Recorder& r, const Node* fork, const std::vector<const Node*>& path,
                     const std::vector<size_t>& places, int32_t value, const std::string& line) {
  auto hot_path = hot_path_of(fork);
  auto begin_of_tail = static_cast<size_t>(fork->depth);
  Beside beside(r, line);
  std::vector<std::vector<size_t>> pieces;
  for (size_t begin = 0; begin < begin_of_tail; begin += kOpsOfPiece) {
    size_t end = std::min(begin + kOpsOfPiece, hot_path.size());
    auto first = std::lower_bound(places.begin(), places.end(), begin);
    if (first == places.end() || *first >= std::min(end, begin_of_tail)) continue;
    auto& piece = pieces.emplace_back();
    for (size_t i = begin; i < end; i++) piece.push_back(i);
    if (has_effects(hot_path, piece)) return {};
  }
  for (const auto& piece : pieces) beside.launch(hot_path, piece, begin_of_tail, std::nullopt);
  beside.forget_from(fork->next_value);
  auto tail = std::lower_bound(places.begin(), places.end(), begin_of_tail);
  if (tail != places.end()) beside.launch(path, {tail, places.end()}, path.size(), value);
  return beside.made(value);
}

// Whether a cut would save what reads at this place cost; never where it would change what is computed further.
bool is_too_dear(Recorder& r, size_t ops) {
  if (is_exact()) return false;
  Reads& reads = reads_of(*r.at);
  int64_t now = r.recorded + r.at->depth, since = now - std::exchange(reads.last_at, now);
  bool is_over_budget = reads.was_read && static_cast<int64_t>(ops) * kCheapness > since;
  reads.was_read = true;
  return is_over_budget && ++reads.over_budget > kMostOverBudget;
}

// Whether this is a marked end, where values are alive that were not when a region ended here before: gradients that
// die before the next op.  A cut would run another program, and so may compute other bits.
bool may_have_less_alive(const Recorder& r) {
  if (!r.boundary || !is_exact()) return false;
  auto last = r.live.begin() + r.at->next_value;
  auto alive = static_cast<size_t>(r.at->next_value - std::count(r.live.begin(), last, nullptr));
  const auto& plans = r.at->plans;
  return std::any_of(plans.begin(), plans.end(), [&](const auto& plan) { return plan->outputs.size() < alive; });
}

// Whether most regions that a read on this line ends are new: what comes after it is new then as well.
bool keeps_being_new(const Recorder& r, const std::string& line) {
  auto place = r.trie->places.find(line);
  if (is_exact() || place == r.trie->places.end()) return false;
  return place->second.plans >= kFewestNewPlans && 2 * place->second.plans > place->second.regions;
}

// The last op from which the region goes on as it did before, wherever a value is read now; null where it may end here.
const Node* find_trunk(const Recorder& r) {
  if (may_have_less_alive(r)) return r.at;
  return r.boundary || !r.at->plans.empty() ? nullptr : find_fork(r);
}

}  // namespace

BufferRef read_beside(Recorder& r, int32_t value, bool is_owner, const std::string& line) {
  if (auto known = r.subgraphs.find(value); known != r.subgraphs.end()) return known->second;
  auto path = path_to(r.at);
  const Node* fork = r.at;
  if (is_owner) {
    fork = keeps_being_new(r, line) ? nullptr : find_trunk(r);
    if (!fork || !fork->info) return {};
    auto hot_path = hot_path_of(fork);
    if (static_cast<int32_t>(hot_path.size()) < kFewestOps || (!is_exact() && is_loop(hot_path))) return {};
  }
  auto places = ops_for(path, value);
  if (has_effects(path, places) || (is_owner && is_too_dear(r, places.size()))) return {};
  bool& has_program = reads_of(*const_cast<Node*>(path[places.back()])).has_program;
  BufferRef buffer;
  if (has_program || (places.size() <= kMostOpsOfWhole && (!is_owner || r.trie->wholes < kMostWholes))) {
    if (is_owner && !std::exchange(has_program, true)) r.trie->wholes++;
    Beside beside(r, line);
    beside.launch(path, places, path.size(), value);
    buffer = beside.made(value);
  } else if (is_owner) {
    buffer = run_pieces(r, fork, path, places, value, line);
  }
  if (!buffer) return {};
  if (fork != r.at) {
    r.speculative_tail = const_cast<Node*>(fork);
    r.is_open = false;
  }
  r.subgraphs[value] = buffer;
  return buffer;
}

namespace {

// Forgets the inputs above `count`: storages that have become these inputs are numbered anew when they are used.
void renumber(Recorder& r, int32_t count) {
  drop_inputs(r, static_cast<size_t>(count));
  r.epoch = new_epoch();
  for (int32_t i = 0; i < count; i++) {
    r.inputs[i]->epoch = r.epoch;
    r.inputs[i]->slot = i;
  }
  for (TpuStorage* s : r.live) {
    if (s) s->epoch = r.epoch;
  }
}

}  // namespace

void leave_speculative_tail(Recorder& r) {
  Node* fork = std::exchange(r.speculative_tail, nullptr);
  if (!fork) return;
  auto of_tail = r.subgraphs.lower_bound(fork->next_value);
  for (int32_t value = fork->next_value; value < r.at->next_value; value++) {
    if (r.live[value] && !r.subgraphs.contains(value)) return;
  }
  for (auto it = of_tail; it != r.subgraphs.end(); ++it) {
    if (TpuStorage* s = r.live[it->first]) s->set_buffer(it->second);
    bury(std::move(it->second));
  }
  r.subgraphs.erase(of_tail, r.subgraphs.end());
  note_end(*r.trie, *r.at);
  r.at = fork;
  r.shadow = nullptr;
  r.floats.resize(fork->floats);
  r.ints.resize(fork->ints);
  if (!r.changes.draws.empty()) {
    r.changes.draws.erase(r.changes.draws.begin() + static_cast<int64_t>(count_draws(fork)), r.changes.draws.end());
  }
  if (static_cast<int32_t>(r.inputs.size()) > fork->next_input) renumber(r, fork->next_input);
}

}  // namespace torchtpu
