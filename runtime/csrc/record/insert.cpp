#include "record/insert.h"

#include <c10/core/Contiguity.h>

#include <algorithm>

#include "record/recorder.h"

namespace torchtpu {

namespace {

TensorMeta describe(const at::Tensor& t, int32_t* next_value) {
  TensorMeta m;
  if (!t.defined()) {
    m.is_undefined = true;
    return m;
  }
  m.sizes.append(t.sizes().begin(), t.sizes().end());
  m.strides.append(t.strides().begin(), t.strides().end());
  m.dtype = t.dtype();
  m.base = base_for(t.sizes(), t.strides(), t.scalar_type());
  m.value = (*next_value)++;
  return m;
}

bool covers_storage(const TensorMeta& m, int64_t offset, int64_t storage_nbytes) {
  return offset == 0 && base_for(m.sizes, m.strides, m.dtype.toScalarType())->nbytes == storage_nbytes &&
         c10::_compute_non_overlapping_and_dense<int64_t>(m.sizes, m.strides);
}

void add_write(Node& node, int arg, int element, const at::Tensor& before, const at::Tensor& after,
               int32_t* next_value) {
  auto* s = own_storage_of(before);
  WriteMeta w{arg,
              element,
              0,
              before.sizes() != after.sizes() || before.strides() != after.strides(),
              false,
              after.storage_offset(),
              describe(after, next_value)};
  w.value = w.meta.value;
  auto nbytes = static_cast<int64_t>(s->nbytes());
  if (w.is_resized && w.offset == 0) nbytes = std::max<int64_t>(nbytes, w.meta.base->nbytes);
  w.replaces = covers_storage(w.meta, w.offset, nbytes);
  if (!w.replaces) w.meta.base = s->base;
  node.writes.push_back(std::move(w));
}

void add_returns(Node& node, const OpInfo& info, const Stack& results, int32_t* next_value) {
  for (size_t i = 0; i < info.return_alias.size(); i++) {
    auto& ret = node.returns.emplace_back();
    if (info.return_alias[i] >= 0) continue;
    const IValue& v = results[results.size() - info.return_alias.size() + i];
    if (v.isTensor()) {
      ret.kind = ReturnMeta::kTensor;
      ret.tensors.push_back(describe(v.toTensor(), next_value));
    } else if (v.isTensorList()) {
      ret.kind = ReturnMeta::kList;
      for (const at::Tensor& t : v.toTensorVector()) ret.tensors.push_back(describe(t, next_value));
    } else {
      ret.kind = ReturnMeta::kConstant;
      ret.constant = v;
    }
  }
}

void add_writes(Node& node, const OpInfo& info, const IValue* args, const Inferred& inferred, int32_t* next_value) {
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || args[i].isNone()) continue;
    if (args[i].isTensor()) {
      if (args[i].toTensor().defined()) {
        add_write(node, i, -1, args[i].toTensor(), inferred.args[i].toTensor(), next_value);
      }
    } else {
      auto before = args[i].toTensorVector(), after = inferred.args[i].toTensorVector();
      for (size_t e = 0; e < before.size(); e++) add_write(node, i, e, before[e], after[e], next_value);
    }
  }
}

uint64_t rng_increment(const Node& node) {
  uint64_t numel = 1;
  auto count = [&](const TensorMeta& m) {
    uint64_t n = 1;
    for (int64_t size : m.sizes) n *= size;
    numel = std::max(numel, n);
  };
  for (const auto& ret : node.returns) {
    for (const auto& m : ret.tensors) count(m);
  }
  for (const auto& w : node.writes) count(w.meta);
  return (numel + 3) / 4 * 4;
}

// Whether the op writes a tensor without elements and reads it, too: PyTorch refuses that of one tensor, and allows it
// of two that are alike.
bool writes_nothing_it_reads(const OpInfo& info, const IValue* args) {
  auto is_read = [&](size_t written, const at::Tensor& t) {
    for (size_t i = 0; i < info.args.size(); i++) {
      if (i != written && args[i].isTensor() && is_tpu(args[i].toTensor()) && args[i].toTensor().is_alias_of(t)) {
        return true;
      }
    }
    return false;
  };
  for (size_t i = 0; i < info.args.size(); i++) {
    if (!info.args[i].is_written || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    if (is_tpu(args[i].toTensor()) && args[i].toTensor().numel() == 0 && is_read(i, args[i].toTensor())) return true;
  }
  return false;
}

}  // namespace

bool insert(Recorder& r, const OpInfo& info, const IValue* args, const Node* fork, const Inferred& inferred,
            std::string line) {
  state_lock.assert_held();
  auto node = std::make_unique<Node>();
  if (!make_keys(r, info, args, node->args)) return false;
  lift_keys(info, fork, node->args);
  node->info = &info;
  node->line = std::move(line);
  node->settings = settings_for(info);
  node->is_asked_again = writes_nothing_it_reads(info, args);
  int32_t next_value = r.at->next_value;
  add_returns(*node, info, inferred.results, &next_value);
  add_writes(*node, info, args, inferred, &next_value);
  if (info.random) node->rng_increment = rng_increment(*node);
  r.shadow = const_cast<Node*>(fork);
  add_node(*r.trie, *r.at, std::move(node), next_value);
  return true;
}

}  // namespace torchtpu
