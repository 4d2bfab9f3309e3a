// Outlines: what programs have in common that differ in sizes, and what these are.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torchtpu {

namespace py = pybind11;

// Reads programs; of tensors and ints that it has seen it asks once.  The GIL is held.
class OutlineReader {
 public:
  // `view(shape, sizes, strides, offset or None, is_zero, is_read)`: a tensor in an array of this shape without its
  // slots, and these.  `is_kept(op, place, value)`: whether an int among an op's arguments is no slot.  `made(op)`: the
  // tensors that an op makes, in the order of their slots.
  OutlineReader(py::object view, py::object is_kept, py::object made)
      : view_(std::move(view)), is_kept_(std::move(is_kept)), made_(std::move(made)) {}
  // All of a program but its slots, as bytes, and a list of these.  Raises what `view` raises.
  py::tuple read(const py::object& program);

 private:
  friend class OutlineReading;
  struct View {
    int64_t number;  // equal ones have the same
    std::vector<int64_t> slots;
  };
  std::shared_ptr<const View> view_of(PyObject* shape, PyObject* sizes, PyObject* strides, PyObject* offset,
                                      bool is_zero, bool is_read);
  bool is_kept(PyObject* op, int64_t place, PyObject* value);
  int64_t number_of(const py::object& view);

  py::object view_, is_kept_, made_;
  std::unordered_map<std::string, std::shared_ptr<const View>> views_;
  py::dict numbers_;  // of views without slots
  int64_t count_ = 0;
  std::unordered_map<std::string, bool> kept_;
};

void bind_outline(py::module& m);

}  // namespace torchtpu
