// The trie of op streams seen before: finds the node that an op call matches, or makes a new one.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/storage.h"

namespace torchtpu {

using c10::IValue;
using Stack = torch::jit::Stack;

// What the Python table of lowerings says of an op (one row of `register_ops`).
struct OpFacts {
  std::vector<std::pair<std::string, std::optional<std::vector<double>>>> structural;
  bool lifts = false;
  bool random = false;
  std::vector<std::string> mutates;
  bool has_infer = false;
  std::vector<std::string> ints;  // int arguments that may be lifted
  bool runs_once = false;         // it has an effect beside its results
  bool multiplies = false;        // its result depends on torch.set_float32_matmul_precision
  bool elementwise = false;       // each element of a result depends on those at its place in the arguments
};

enum class ArgRole : uint8_t { kPlain, kDtype, kPlacement };  // kPlacement: layout, device, pin_memory, memory_format

struct ArgInfo {
  bool is_written = false;
  bool is_out = false;
  bool is_number = false;          // a Scalar or a list of them
  bool is_element = false;         // a Scalar that becomes an element as it is, or is refused
  bool is_liftable = false;        // a Scalar, a float, a list of them, a tensor (for 0-dim CPU tensors), one of `ints`
  bool is_structural = false;      // every value changes meaning
  std::vector<double> structural;  // these values do
  ArgRole role = ArgRole::kPlain;
};

struct OpInfo {
  OpInfo(const c10::OperatorHandle& handle, const OpFacts& facts);
  std::string name;  // "add_.Tensor"; an op that is not ATen's keeps its namespace
  c10::OperatorHandle handle;
  std::vector<ArgInfo> args;
  std::vector<int> return_alias;  // per return: the argument it is, or -1
  int generator_arg = -1;
  int device_arg = -1;
  bool lifts, random, has_infer, multiplies, runs_once, elementwise, has_optional_list = false, may_resize = false;
  bool is_foreach = false;  // bumps the version of each tensor it writes; for other ops a kernel above does
};

// How one tensor argument is referenced.
struct TensorKey {
  int32_t value = kNoValue;  // >= 0 made in the region, < 0 input ~value, kNoValue undefined or (in a list) None
  bool is_none = false;
  bool is_offset_lifted = false;
  caffe2::TypeMeta dtype;
  BaseRef base;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 10> geometry;  // sizes, then strides
};

// A number as it is compared: by bits, so that -0.0 differs from 0.0 and NaN equals itself.
struct NumberKey {
  enum Kind : uint8_t { kInt, kDouble, kBool, kComplex } kind = kInt;
  bool is_lifted = false;
  int64_t bits = 0;
  int64_t imaginary_bits = 0;
  at::ScalarType element = at::ScalarType::Undefined;  // the dtype that must hold it
};

struct ArgKey {
  enum Kind : uint8_t { kNone, kTensor, kNumber, kInts, kTensors, kNumbers, kCpuScalar, kRandom, kOther } kind = kNone;
  bool is_wrapped = false;  // kCpuScalar
  caffe2::TypeMeta dtype;   // kCpuScalar
  NumberKey number;
  std::vector<TensorKey> tensors;
  std::vector<NumberKey> numbers;
  std::vector<int64_t> ints;
  IValue other;
};

double as_double(const NumberKey& key);
// Whether this value changes what a call means, so that it stays in a program's text.
bool is_structural(const ArgInfo& arg, const NumberKey& key);

struct TensorMeta {
  c10::SmallVector<int64_t, 5> sizes, strides;
  caffe2::TypeMeta dtype;
  BaseRef base;
  int32_t value = kNoValue;
  bool is_undefined = false;
};

struct ReturnMeta {
  enum Kind : uint8_t { kAlias, kTensor, kList, kConstant } kind = kAlias;
  std::vector<TensorMeta> tensors;
  IValue constant;
};

struct WriteMeta {
  int arg;
  int element;  // -1 where the argument is a tensor
  int32_t value;
  bool is_resized;
  bool replaces;
  int64_t offset;
  TensorMeta meta;  // the argument's geometry after the call
};

struct Plan;

// What a node knows of reads in the middle of regions.
struct Reads {
  std::vector<std::shared_ptr<Plan>> plans;  // subgraphs that end here
  bool has_program = false;                  // a value made here has a subgraph of its own
  bool was_read = false;                     // a value was read when the stream stood here
  int64_t last_at = 0;                       // ops that the recorder had seen at the last read here
  int over_budget = 0;                       // reads here for which a cut would have been cheaper
};

// What an op's result depends on beside its arguments.
struct Settings {
  at::Float32MatmulPrecision precision{};                    // torch.set_float32_matmul_precision, if the op multiplies
  at::ScalarType default_dtype = at::ScalarType::Undefined;  // torch.set_default_dtype

  bool operator==(const Settings&) const = default;
};

struct Node {
  const OpInfo* info = nullptr;
  Node* parent = nullptr;
  std::vector<ArgKey> args;
  std::vector<ReturnMeta> returns;
  std::vector<WriteMeta> writes;
  int32_t next_value = 0;       // values made up to here
  int32_t next_input = 0;       // inputs numbered up to here; more, at a cut, are of calls that came to nothing
  int32_t depth = 0;            // ops up to here
  bool is_asked_again = false;  // whether the op is refused does not follow from what is compared
  int64_t bytes = 0;            // bytes produced up to here
  uint64_t rng_increment = 0;
  int32_t floats = 0, ints = 0;  // lifted numbers up to here
  uint64_t hash = 0;             // of the op, its geometry and how far back its arguments were made
  uint64_t context = 0;          // of the last ops' hashes
  uint64_t skeleton = 0;         // of the ops up to here and the values they take, whatever the shapes
  Node* best = nullptr;          // where a cap that strikes here cuts; null while the region is too short
  Settings settings;             // at the call
  std::string line;              // where the op was first recorded
  std::vector<std::unique_ptr<Node>> children;
  Node* last = nullptr;                      // the child taken last time
  std::vector<std::shared_ptr<Plan>> plans;  // programs that end here, by live set and donation
  std::vector<uint8_t> donation;             // inputs free at every visit so far
  int donation_shrinks = 0;
  Node* hot_child = nullptr;                      // the child that the last region took which went on from here
  std::unique_ptr<Reads> reads;                   // null where there were none
  std::atomic<int> holders{0};                    // what outlives the pending region and names this node: see HeldNode
  std::optional<std::list<Node*>::iterator> end;  // its place in Trie::ends
};
inline Reads& reads_of(Node& node) {
  if (!node.reads) node.reads = std::make_unique<Reads>();
  return *node.reads;
}

// The ops from the root to `node`, with it.
std::vector<const Node*> path_to(const Node* node);

struct Trie;

// A node that the trie does not forget, nor the path to it, as long as this lives.  Made under state_lock; a thread
// without it may read what is set once: op, arguments, results, line, counts and parents.
class HeldNode {
 public:
  HeldNode(std::shared_ptr<Trie> trie, Node* node) : trie_(std::move(trie)), node_(node) { node_->holders++; }
  HeldNode(const HeldNode&) = delete;
  ~HeldNode() { node_->holders.fetch_sub(1, std::memory_order_release); }
  operator const Node*() const { return node_; }
  const Node* operator->() const { return node_; }

 private:
  std::shared_ptr<Trie> trie_;
  Node* node_;
};

struct Trie {
  struct Stream {
    const Node* last = nullptr;      // where it ended when its shapes were new last
    const Node* previous = nullptr;  // and the time before
    int changes = 0;                 // times that it came with new shapes
  };
  struct Place {
    int64_t regions = 0;  // that ended here, known ones too
    int64_t plans = 0;    // that were made of them
  };
  Node root;
  int64_t nodes = 0, plans = 0;
  std::list<Node*> ends;  // where regions ended, the latest first; every leaf that is not being recorded is one
  int walks = 0;          // while somebody holds nodes that the pending region has left, nothing is forgotten
  int wholes = 0;         // values that have a subgraph of their own
  std::unordered_map<uint64_t, Stream> streams;   // by skeleton
  std::unordered_map<std::string, Place> places;  // where regions ended, by line
};

// The numbers a call hands to lifted arguments, in argument order.
struct LiftedNumbers {
  c10::SmallVector<double, 8> floats;
  c10::SmallVector<int64_t, 8> ints;
  int random_at = -1;  // where (seed, offset) go in `ints`
  void clear() {
    floats.clear();
    ints.clear();
    random_at = -1;
  }
};

enum class Match : uint8_t { kNo, kYes, kButNumbers };  // kButNumbers: equal except for numbers that may be lifted

// What torch.set_float32_matmul_precision, its relatives and torch.set_default_dtype say now, for an op.
Settings settings_for(const OpInfo& info);
struct Recorder;
Match match_node(Recorder& r, const Node& node, const OpInfo& info, const IValue* args, LiftedNumbers& lifted);
// Describes the arguments of a call; false for an argument that cannot be recorded.
bool make_keys(Recorder& r, const OpInfo& info, const IValue* args, std::vector<ArgKey>& keys);
// Lifts, in `keys`, what differs from `fork` (a node that matches but for numbers) and what `info.lifts` says.
void lift_keys(const OpInfo& info, const Node* fork, std::vector<ArgKey>& keys);

// The same for a call that has been described already; numbers of `given` are the call's own.
Match match_keys(const Node& node, const OpInfo& info, const std::vector<ArgKey>& given, LiftedNumbers& lifted);
// Notes that recording left `node`, which is an end from now on.
void note_end(Trie& trie, Node& node);
// Forgets the ends that were reached longest ago, and the ops that led to nothing else, until the trie keeps its
// limits. The pending region is empty.
void forget_oldest(Trie& trie);
// Hangs `node`, whose op, arguments, results and line are set, below `parent`.
Node* add_node(Trie& trie, Node& parent, std::unique_ptr<Node> node, int32_t next_value);

}  // namespace torchtpu
