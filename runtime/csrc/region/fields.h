// What reads Python's runtime.ir.program.Program: attributes, numbers and texts of Python objects.  The GIL is held.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

namespace torchtpu {

namespace py = pybind11;

// The attributes of what a program is made of, and its classes.
struct Fields {
  PyObject *name, *args, *results, *writes, *line, *settings, *value, *sizes, *strides, *offset, *dtype, *base, *kind,
      *index, *wrapped, *seed, *arg, *element, *replaces, *ops, *inputs, *outputs, *donated, *type, *itemsize, *floats,
      *ints;
  PyObject *operand, *lifted, *scalar, *random, *result, *device;
  Fields() {
    for (auto [field, text] : std::initializer_list<std::pair<PyObject**, const char*>>{
             {&name, "name"},         {&args, "args"},         {&results, "results"},   {&writes, "writes"},
             {&line, "line"},         {&settings, "settings"}, {&value, "value"},       {&sizes, "sizes"},
             {&strides, "strides"},   {&offset, "offset"},     {&dtype, "dtype"},       {&base, "base"},
             {&kind, "kind"},         {&index, "index"},       {&wrapped, "wrapped"},   {&seed, "seed"},
             {&arg, "arg"},           {&element, "element"},   {&replaces, "replaces"}, {&ops, "ops"},
             {&inputs, "inputs"},     {&outputs, "outputs"},   {&donated, "donated"},   {&type, "type"},
             {&itemsize, "itemsize"}, {&floats, "floats"},     {&ints, "ints"}}) {
      *field = PyUnicode_InternFromString(text);
    }
    auto m = py::module_::import("torchtpu.runtime.ir.program");
    auto keep = [](py::object found) { return found.release().ptr(); };
    operand = keep(m.attr("Operand"));
    lifted = keep(m.attr("Lifted"));
    scalar = keep(m.attr("Scalar"));
    random = keep(m.attr("Random"));
    result = keep(m.attr("Result"));
    device = keep(py::module_::import("torch").attr("device"));
  }
};

inline const Fields& fields() {
  static auto* found = new Fields();
  return *found;
}

inline py::object get(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (!found) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

inline bool is_a(PyObject* object, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type; }

inline int64_t as_int(PyObject* object) {
  int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// Whether an int has 64 bits at most.
inline bool is_small(PyObject* number) {
  int is_beyond = 0;
  PyLong_AsLongLongAndOverflow(number, &is_beyond);
  return !is_beyond;
}

// Appends a number as its bytes.
template <class T>
void put(std::string& text, T number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Appends a text that no other text begins with.
inline void put_text(std::string& text, PyObject* given) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(given, &size);
  if (data) {
    put(text, static_cast<int64_t>(size));
    text.append(data, size);
    return;
  }
  PyErr_Clear();  // lone surrogates
  auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(given, "utf-8", "surrogatepass"));
  if (!bytes) throw py::error_already_set();
  put(text, int64_t{-1});
  text += std::string(bytes);
}

}  // namespace torchtpu
