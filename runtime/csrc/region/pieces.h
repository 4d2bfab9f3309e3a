// Pieces: divides a recorded program into parts of few ops, by what the ops are and nothing else.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torchtpu {

namespace py = pybind11;

// What decides an op's part of a program's text, but for the values that it takes and where views begin.
struct Sign {
  uint32_t number;
  uint64_t hash;  // of all but sizes; the same in every process
  // What its lowering says, once it was asked.
  bool is_known = false, has_checks = false;
  std::vector<uint32_t> used;  // of its run-time arguments
};

// Divides programs; what it has seen of ops and pieces it knows by numbers.  The GIL is held.
class Divider {
 public:
  // `maps(op)`: whether an op goes through its lists in step.  `facts([(op, element), ...])`: of each op, or of what it
  // does to one element of its lists, whether it has checks and which of its run-time arguments are used.  `ints(op)`:
  // the places of its arguments that may be run-time ints, below 64.
  Divider(py::object maps, py::object facts, py::object ints)
      : maps_(std::move(maps)), facts_(std::move(facts)), ints_(std::move(ints)) {}
  // The pieces, each as what runtime.partition.pieces.Piece is made with, but for the first two.  The ops at the places
  // `apart` and `alone`, both in ascending order, are pieces of their own; what those that are `apart` make is not
  // donated, and only what they write into is donated to them, as to all pieces of an op where programs of the kind are
  // often new. Many ops in a row that read nothing are one piece, but not there.
  py::list divide(const py::object& program, const std::vector<size_t>& apart, const std::vector<size_t>& alone,
                  bool is_often_new);

  struct Call;

 private:
  bool maps(const std::string& name, py::handle op);
  uint64_t ints(const std::string& name, py::handle op);
  std::shared_ptr<Sign> sign_of(const std::string& text, const std::string& mark);
  std::vector<Call> calls_of(const py::tuple& ops);
  void learn(const std::vector<Call>& calls, const py::tuple& ops);
  int64_t identity_of(const std::string& text);

  py::object maps_, facts_, ints_;
  std::unordered_map<std::string, bool> goes_in_step_;
  std::unordered_map<std::string, uint64_t> takes_ints_;  // a bit for each place
  std::unordered_map<std::string, std::shared_ptr<Sign>> signs_;
  std::unordered_map<std::string, int64_t> identities_;
};

// Where pieces end, but the last, of ops with these hashes: behind the largest of so many, of equal ones the later.
std::vector<size_t> ends_of(const std::vector<uint64_t>& hashes, size_t most_ops);

void bind_pieces(py::module& m);

}  // namespace torchtpu
