// Laps of a loop that never reads: equal stretches of ops, each of which takes what the one before it made.

#include "region/loop.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace torchtpu {

namespace {

constexpr size_t kMostPeriods = 8;  // that are tried

// What laps of one loop have in common at an op: its name, and the region's inputs that it takes. Layers of a network
// take weights of their own.
uint64_t kind_of(const Node& node) {
  uint64_t hash = std::hash<const void*>()(node.info);
  for (const auto& key : node.args) {
    hash = hash * 31 + key.tensors.size();
    for (const auto& t : key.tensors) hash = hash * 0x100000001b3ull + static_cast<uint64_t>(std::min(t.value, 0));
  }
  return hash;
}

// Whether an op does what another one did a lap before: with the same inputs, with what was made as long before, or
// with what was made before the loop.
bool is_lap_later(const Node& now, const Node& then) {
  if (now.info != then.info || now.settings != then.settings || now.info->runs_once) return false;
  int32_t made = now.parent->next_value - then.parent->next_value;
  if (now.next_value - then.next_value != made) return false;
  for (size_t i = 0; i < now.args.size(); i++) {
    const auto &a = now.args[i].tensors, &b = then.args[i].tensors;
    if (a.size() != b.size()) return false;
    for (size_t e = 0; e < a.size(); e++) {
      if (a[e].value != b[e].value && (a[e].value < 0 || a[e].value - b[e].value != made)) return false;
    }
  }
  return true;
}

}  // namespace

Laps find_laps(const std::vector<const Node*>& path, size_t fewest) {
  std::unordered_map<uint64_t, size_t> places;
  std::map<size_t, size_t> counts;  // of the distances between ops of one kind
  for (size_t i = 0; i < path.size(); i++) {
    auto [it, is_first] = places.try_emplace(kind_of(*path[i]), i);
    if (!is_first) counts[i - std::exchange(it->second, i)]++;
  }
  std::vector<std::pair<size_t, size_t>> periods(counts.begin(), counts.end());
  std::stable_sort(periods.begin(), periods.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  periods.resize(std::min(periods.size(), kMostPeriods));
  Laps found;
  for (auto [period, count] : periods) {
    for (size_t i = period, begin = period; i <= path.size(); i++) {
      if (i < path.size() && is_lap_later(*path[i], *path[i - period])) continue;
      bool is_longer = i - begin + period > found.end - found.begin;
      if (i - begin >= (fewest - 1) * period && is_longer) found = {begin - period, i, period};
      begin = i + 1;
    }
  }
  return found;
}

namespace {

constexpr size_t kFewestOpsOfLap = 4;  // of a lap that is worth a program

// Where the first lap begins: it takes inputs where the others take what laps made.
size_t first_of(const Laps& laps, const std::vector<const Node*>& path) {
  size_t first = laps.begin;
  while (first > 0 && path[first - 1]->info == path[first - 1 + laps.period]->info) first--;
  return first;
}

}  // namespace

bool is_loop(const std::vector<const Node*>& path) {
  Laps laps = find_laps(path, 2);
  return laps.period >= kFewestOpsOfLap && (laps.end - first_of(laps, path)) * 4 >= path.size() * 3;
}

Node* end_of_laps(Node* last) {
  std::vector<const Node*> path = path_to(last);
  Laps laps = find_laps(path, 2);
  if (laps.period < kFewestOpsOfLap || first_of(laps, path) > 0) return nullptr;
  size_t end = path.size() / laps.period * laps.period;
  if (end > laps.end) return nullptr;
  while (last->depth > static_cast<int32_t>(end)) last = last->parent;
  return last;
}

}  // namespace torchtpu
