// Evicts the op streams that ended longest ago from the trie.

#include <algorithm>

#include "launch/queue.h"

namespace torchtpu {

namespace {

void drop_plans(Trie& trie, Node& node) {
  trie.plans -= static_cast<int64_t>(node.plans.size());
  node.plans.clear();
  if (!node.reads) return;
  trie.plans -= static_cast<int64_t>(node.reads->plans.size());
  node.reads.reset();
}

// A plan keeps its trie and a trie its plans: both go when nobody launches the plans any more.
void replace_trie(Recorder& r) {
  for (Node* end : r.trie->ends) drop_plans(*r.trie, *end);
  r.trie = std::make_shared<Trie>();
  r.at = &r.trie->root;
  r.is_open = false;
  r.shadow = nullptr;
}

// Whether somebody else has a plan of the node, one that the node itself may have given up, or the node.
bool is_in_use(const Node& node) {
  auto has_users = [](const auto& plan) { return plan.use_count() > 1; };
  if (std::any_of(node.plans.begin(), node.plans.end(), has_users)) return true;
  if (node.reads && std::any_of(node.reads->plans.begin(), node.reads->plans.end(), has_users)) return true;
  size_t own = node.plans.size() + (node.reads ? node.reads->plans.size() : 0);
  return static_cast<size_t>(node.holders.load(std::memory_order_acquire)) > own;
}

// Deletes a node that nothing needs, and those above it that only led there.
void prune(Trie& trie, Node* node) {
  while (node->info && node->children.empty() && !node->end) {
    if (node->holders.load(std::memory_order_acquire) > 0) {  // forgotten once it is let go
      node->end = trie.ends.insert(trie.ends.end(), node);
      return;
    }
    auto stream = trie.streams.find(node->skeleton);
    if (stream != trie.streams.end()) {
      if (stream->second.previous == node) stream->second.previous = nullptr;
      if (stream->second.last == node) trie.streams.erase(stream);
    }
    Node* parent = node->parent;
    if (parent->last == node) parent->last = nullptr;
    if (parent->hot_child == node) parent->hot_child = nullptr;
    std::erase_if(parent->children, [&](const auto& child) { return child.get() == node; });
    trie.nodes--;
    node = parent;
  }
}

}  // namespace

void note_end(Trie& trie, Node& node) {
  if (node.end) {
    trie.ends.splice(trie.ends.begin(), trie.ends, *node.end);
  } else {
    trie.ends.push_front(&node);
    node.end = trie.ends.begin();
  }
}

void forget_oldest(Trie& trie) {
  if (trie.walks > 0) return;
  for (auto it = trie.ends.end(); it != trie.ends.begin();) {
    if (trie.nodes <= runtime.limits.max_nodes && trie.plans <= runtime.limits.max_plans) return;
    Node* node = *--it;
    if (is_in_use(*node)) continue;
    it = trie.ends.erase(it);
    node->end.reset();
    runtime.counters.forgotten++;
    drop_plans(trie, *node);
    prune(trie, node);
  }
}

void forget_streams() {
  for (Recorder* r : all_recorders()) {
    StateGuard guard(state_lock);
    cut_locked(*r, "forget_streams", "");
    replace_trie(*r);
  }
  wake_launcher();
}

}  // namespace torchtpu
