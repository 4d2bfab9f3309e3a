// Compiled graphs: records the ops of a traced graph for the inputs of each call.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "record/trie.h"

namespace torchtpu {

namespace py = pybind11;

// An argument that is known at the call only: the value in this slot.
struct Slot {
  int index;
};

// A graph as a list of ops on slots.  Its inputs are the first slots; each op's results take the slots listed for it.
// Immutable once the last op is added, so that several threads may run it.
class Replay {
 public:
  explicit Replay(int inputs) : inputs_(inputs), slots_(inputs) {}
  // A value that is there at every call.
  void set_constant(int slot, const at::Tensor& value);
  // `args` follow the schema: Slot, lists of these, plain values.  `dying` are the slots nobody reads afterwards.
  void add_op(const std::string& name, const std::string& overload, const py::list& args, std::vector<int> results,
              std::vector<int> dying, std::string line);
  // results[0] is element `index` of the list in `slot`.
  void add_getitem(int slot, int index, int result, std::vector<int> dying);
  void set_outputs(std::vector<int> outputs) { outputs_ = std::move(outputs); }
  // Records the ops and returns the outputs (-1: None).  Empties `inputs`, so that what dies in the graph can die.
  py::tuple run(py::list inputs) const;

 private:
  struct Arg {
    IValue value;            // the argument, where it is constant
    std::vector<int> slots;  // one, or one per element; -1: the constant element
    std::vector<IValue> elements;
    bool is_list = false, is_tensor = false;
    c10::TypePtr element_type;  // of a list with slots
  };
  struct Op {
    std::optional<c10::OperatorHandle> handle;  // none: an element of a list
    std::vector<Arg> args;
    std::vector<int> results, dying;
    int list = 0, index = 0;
    std::string line;
  };
  using Values = std::vector<IValue>;

  static Arg make_arg(const c10::Argument& declared, const py::handle& value);
  static IValue take(const Arg& arg, const Values& values);
  void run_op(const Op& op, Values& values, Stack& stack) const;
  void see(int slot) { slots_ = std::max(slots_, slot + 1); }

  int inputs_, slots_;
  std::vector<std::pair<int, at::Tensor>> constants_;
  std::vector<Op> ops_;
  std::vector<int> outputs_;
};

void bind_replay(py::module& m);

}  // namespace torchtpu
