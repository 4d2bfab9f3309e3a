// New nodes of the trie, and their hashes: equal in every process, and for every place in the region at which a loop's
// op is met.

#include <algorithm>

#include "record/recorder.h"
#include "record/trie.h"

namespace torchtpu {

namespace {

// The shortest region that a cap makes, as a part of the longest.
constexpr int kShortest = 8;

// A hash looks back half as far as a region is long before it may be cut: it then sees the same from any start.
int64_t reach() { return runtime.limits.max_ops / kShortest / 2; }
constexpr int64_t kReachOfLargeOps = 2;  // where few ops make many bytes

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 32);
}

uint64_t hash_text(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

uint64_t hash_number(const ArgInfo& arg, const NumberKey& number) {
  bool is_fixed = !arg.is_liftable || is_structural(arg, number);
  return mix(number.kind, is_fixed ? static_cast<uint64_t>(number.bits) : 1);
}

uint64_t hash_tensor(const TensorKey& t, int32_t next_value) {
  uint64_t hash = mix(t.is_none, static_cast<uint64_t>(t.dtype.toScalarType()));
  for (int64_t x : t.geometry) hash = mix(hash, static_cast<uint64_t>(x));
  bool is_near = t.value >= 0 && next_value - t.value <= reach();  // else as if made outside
  return mix(hash, is_near ? next_value - t.value : 0);
}

uint64_t hash_call(const Node& node, int32_t next_value) {
  uint64_t hash = hash_text(node.info->name);
  for (size_t i = 0; i < node.args.size(); i++) {
    static const ArgInfo plain;
    const ArgKey& key = node.args[i];
    const ArgInfo& arg = i < node.info->args.size() ? node.info->args[i] : plain;
    hash = mix(hash, key.kind);
    if (key.kind == ArgKey::kNumber || key.kind == ArgKey::kCpuScalar) hash = mix(hash, hash_number(arg, key.number));
    for (const auto& number : key.numbers) hash = mix(hash, hash_number(arg, number));
    for (const auto& t : key.tensors) hash = mix(hash, hash_tensor(t, next_value));
    for (int64_t x : key.ints) hash = mix(hash, static_cast<uint64_t>(x));
  }
  return hash;
}

uint64_t hash_context(const Node& node, int64_t ops) {
  uint64_t hash = 0;
  for (const Node* at = &node; ops-- > 0 && at->info; at = at->parent) hash = mix(hash, at->hash);
  return hash;
}

uint64_t hash_skeleton(const Node& node, uint64_t hash) {
  hash = mix(hash, hash_text(node.info->name));
  for (const auto& key : node.args) {
    hash = mix(hash, key.kind);
    for (const auto& t : key.tensors) hash = mix(hash, static_cast<uint64_t>(t.value));
  }
  return mix(hash, node.next_value);  // a list of results may be longer than last time
}

void count_lifted(Node& node) {
  auto count = [&](const NumberKey& number) {
    if (number.is_lifted) (number.kind == NumberKey::kDouble ? node.floats : node.ints)++;
  };
  for (const auto& key : node.args) {
    if (key.kind == ArgKey::kRandom) node.ints += 2;
    if (key.kind == ArgKey::kNumber || key.kind == ArgKey::kCpuScalar) count(key.number);
    for (const auto& number : key.numbers) count(number);
    for (const auto& t : key.tensors) node.ints += t.is_offset_lifted;
  }
}

int64_t bytes_made(const Node& node) {
  int64_t bytes = 0;
  for (const auto& ret : node.returns) {
    for (const auto& m : ret.tensors) bytes += m.base ? m.base->nbytes : 0;
  }
  for (const auto& w : node.writes) bytes += w.meta.base->nbytes;
  return bytes;
}

}  // namespace

std::vector<const Node*> path_to(const Node* node) {
  std::vector<const Node*> path;
  for (; node->info; node = node->parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

Node* add_node(Trie& trie, Node& parent, std::unique_ptr<Node> node, int32_t next_value) {
  node->parent = &parent;
  node->next_input = parent.next_input;
  for (const auto& key : node->args) {
    for (const auto& t : key.tensors) {
      if (t.value < 0 && t.value != kNoValue) node->next_input = std::max(node->next_input, ~t.value + 1);
    }
  }
  node->next_value = next_value;
  node->depth = parent.depth + 1;
  node->bytes = parent.bytes + bytes_made(*node);
  node->floats = parent.floats;
  node->ints = parent.ints;
  count_lifted(*node);
  node->hash = hash_call(*node, parent.next_value);
  node->skeleton = hash_skeleton(*node, parent.skeleton);
  node->best = parent.best;
  bool has_many = node->depth >= runtime.limits.max_ops / kShortest,
       has_large = node->bytes >= runtime.limits.max_bytes / kShortest;
  if (has_many || has_large) {
    node->context = hash_context(*node, has_many ? reach() : kReachOfLargeOps);
    if (!node->best || node->context >= node->best->context) node->best = node.get();
  }
  trie.nodes++;
  parent.last = node.get();
  parent.children.push_back(std::move(node));
  return parent.last;
}

}  // namespace torchtpu
